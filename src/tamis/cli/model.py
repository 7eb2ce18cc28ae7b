"""Options and loading of a Hugging Face model, for the commands that run one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.cli.machine import DEVICES
from tamis.cli.memory import out_of_memory
from tamis.cli.progress import waiting

if TYPE_CHECKING:
    import torch


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model, its cache and its backend."""
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="local checkpoint to load (default: a tiny random model)"
    )
    parser.add_argument(
        "--model", choices=("v32", "glm", "v4"), default="v32", help="architecture of the random model (default: v32)"
    )
    parser.add_argument(
        "--cache", choices=("fp8", "bf16", "fp32"), default="fp8", help="format of the cached rows (default: fp8)"
    )
    parser.add_argument(
        "--backend", default="auto", metavar="NAME", help="backend to use; see `tamis backends` (default: auto)"
    )
    parser.add_argument("--device", choices=DEVICES, help="default: the GPU if there is one")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed for weights and prompts (default: 0)"
    )


def load_model(options: argparse.Namespace, device: "torch.device") -> tuple[Any, Any]:
    """The model, and its tokenizer or None."""
    with waiting("loading the model"):
        try:
            import tamis.integrations.transformers  # noqa: F401  (it says what to install)
        except ImportError as error:
            raise ValueError(str(error)) from error
        from tamis.lab import generation

        if options.checkpoint is None:
            return generation.make_model(options.model, device, options.seed), None
        try:
            return generation.load_model(options.checkpoint, device)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken file may cause any error; a panic in Rust code is not an Exception
            if str(error).startswith("--checkpoint") or out_of_memory(error):
                raise
            said = str(error) or type(error).__name__
            raise ValueError(f"--checkpoint {options.checkpoint} cannot be loaded: {said}") from error


def numbers(option: str, text: str) -> list[int]:
    """The numbers of an option such as `1,2,3`."""
    from tamis import checks

    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise checks.refuse(option, "numbers joined by commas", repr(text), "such as 1,2,3") from None
