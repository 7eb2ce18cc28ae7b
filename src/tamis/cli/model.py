"""Options, loading and prompts of a Hugging Face model, for the commands that run one."""

import argparse
from typing import TYPE_CHECKING, Any

from tamis.cli import hub
from tamis.cli import options as shared
from tamis.cli.memory import out_of_memory
from tamis.cli.progress import waiting
from tamis.cli.text import one_line
from tamis.cli.values import whole
from tamis.integrations.hf.names import MODELS

if TYPE_CHECKING:
    import torch

    from tamis.lab.training.task import Question


TRAINED = {"trained": "v32", "trained-v4": "v4"}
"""Names of the trained models, and of their demonstrations."""


def model_titles() -> str:
    """The models that can be loaded, as texts enumerate them."""
    *others, last = (known.title for known in MODELS.values())
    return f"{', '.join(others)} or {last}"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model, its cache and its backend."""
    parser.add_argument(
        "--checkpoint",
        metavar="DIR|ID",
        help="checkpoint to load: a local directory, or an id on the Hugging Face Hub, of which only safetensors, "
        "configs and tokenizers are downloaded and nothing is run (default: a tiny model, see --model)",
    )
    add_revision(parser)
    names = tuple(known.short for known in MODELS.values())
    parser.add_argument(
        "--model",
        choices=(*TRAINED, *names),
        metavar="NAME",
        default="trained",
        help=f"without a checkpoint: {' or '.join(TRAINED)}, the tiny models that tamis train-demo made, which recall "
        f"values of keys, or a tiny model with random weights: {', '.join(names)} (default: trained)",
    )
    parser.add_argument(
        "--cache", choices=("fp8", "bf16", "fp32"), default="fp8", help="format of the cached rows (default: fp8)"
    )
    shared.add_backend(parser)
    shared.add_device(parser)
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="random seed for weights and prompts (default: 0)"
    )


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Add the option for the revision of a model on the Hub."""
    parser.add_argument(
        "--revision", metavar="REV", help="branch, tag or commit on the Hub (default: main); the commit is printed"
    )


def check_model_options(options: argparse.Namespace) -> None:
    """Refuse a checkpoint that is not there, before torch is loaded."""
    if options.checkpoint is not None:
        hub.check_local("--checkpoint", options.checkpoint, options.revision)
    elif options.revision is not None:
        raise ValueError("--revision must be given with --checkpoint, got alone; name a model on the Hub")


def load_model(options: argparse.Namespace, device: "torch.device") -> tuple[Any, Any, hub.Source | None]:
    """The model, its tokenizer or None, and where it came from; None for a tiny model."""
    with waiting("loading the model"):
        try:
            import tamis.integrations.transformers  # noqa: F401  (it says what to install)
        except ImportError as error:
            raise ValueError(str(error)) from error
        from tamis.lab import generation

        if is_trained(options):
            from tamis.lab.training.model import DEMOS, shipped_checkpoint

            return *generation.load_model(shipped_checkpoint(DEMOS[TRAINED[options.model]]), device), None
        if options.checkpoint is None:
            return generation.make_model(options.model, device, options.seed), None, None
    with waiting(f"fetching {options.checkpoint}" if hub.is_hub_id(options.checkpoint) else "loading the model"):
        source = hub.fetch("--checkpoint", options.checkpoint, options.revision, weights=True)
    with waiting("loading the model"):
        try:
            return *generation.load_model(source.folder, device), source
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken file may cause any error; a panic in Rust code is not an Exception
            if str(error).startswith("--checkpoint") or out_of_memory(error):
                raise
            said = str(error) or type(error).__name__
            raise ValueError(f"--checkpoint {options.checkpoint} cannot be loaded: {said}") from error


def is_trained(options: argparse.Namespace) -> bool:
    """Whether the model is one of the trained ones that are part of tamis."""
    return options.checkpoint is None and options.model in TRAINED


def check_words(options: argparse.Namespace, text: str | None) -> None:
    """Refuse words that a trained model does not have: its tokenizer would read all of them as one of its own."""
    if text is None or not is_trained(options):
        return
    from tamis.lab.training.task import KEYS, VALUES, WORDS, vocabulary

    known = frozenset(vocabulary())
    unknown = next((word for word in text.split() if word not in known), None)
    if unknown is not None:
        option = "--prompt" if options.prompt is not None else "--prompt-file"
        words = f"<s>, </s>, k0 to k{KEYS - 1}, v0 to v{VALUES - 1} and w0 to w{WORDS - 1}"
        shown = one_line(unknown[:40])
        raise ValueError(
            f"{option} must be of the words {words} for the tiny trained model, got {shown!r}; "
            "name a model that knows text with --checkpoint"
        )


def synthetic_question(options: argparse.Namespace, default: int) -> "Question | None":
    """A trained model's prompt unless one was given: a question whose answer stands far back. None for others."""
    if not is_trained(options) or options.prompt is not None or options.prompt_ids is not None:
        return None
    from tamis import checks
    from tamis.lab.training.model import DEMOS
    from tamis.lab.training.task import make_question, shortest

    demo = DEMOS[TRAINED[options.model]]
    count = default if options.prompt_tokens is None else options.prompt_tokens
    if count < shortest(demo.room):
        remedy = f"the trained model's prompts hold keys and values; use --prompt-ids or --model {demo.name}"
        raise checks.refuse("--prompt-tokens", f"at least {shortest(demo.room)}", count, remedy)
    return make_question(options.seed, count, demo.room)
