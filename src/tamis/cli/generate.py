"""`tamis generate`: generate text or tokens with a Hugging Face checkpoint or a tiny random model."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tamis.cli.machine import check_backend, describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.model import add_model_options, load_model, numbers
from tamis.cli.parser import OK, Subcommands, add_command
from tamis.cli.progress import Progress
from tamis.cli.text import printable

if TYPE_CHECKING:
    from tamis.lab.generation import Generated

DETAILS = """\
Loads a DeepSeek-V3.2, GLM-MoE-DSA or DeepSeek-V4 checkpoint with Hugging Face transformers, lets tamis do its attention
(true sparse attention over paged caches), and streams the generated text to stdout; progress goes to stderr. Without
--checkpoint it makes a tiny random model of the family given with --model, which generates meaningless token ids.

Needs transformers: pip install 'tamis[transformers]'."""

EXAMPLES = """\
tamis generate --max-new-tokens 16
tamis generate --model v4 --prompt-ids 1,2,3 --cache bf16 --json
tamis generate --checkpoint ./model --prompt 'A sieve is' --max-new-tokens 64"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "generate",
        run,
        summary="Generate from a checkpoint, or a tiny random model, with attention through tamis",
        details=DETAILS,
        example=EXAMPLES,
    )
    add_model_options(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; needs a checkpoint with a tokenizer")
    prompt.add_argument("--prompt-ids", metavar="N,N,...", help="prompt to continue, as token ids")
    prompt.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="length of the random prompt to continue (default: 256)"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="number of tokens to generate (default: 64)"
    )


def run(options: argparse.Namespace) -> int:
    """Generate, and stream the tokens or print the JSON object."""
    let_waiting_threads_sleep()
    from tamis import checks

    checks.integer("--max-new-tokens", options.max_new_tokens, low=1)
    device = pick_device(options.device)
    check_backend(options.backend, device)
    ids = None if options.prompt_ids is None else numbers("--prompt-ids", options.prompt_ids)
    model, tokenizer = load_model(options, device)
    from tamis.lab import generation

    prompt = generation.prompt_ids(
        model, tokenizer, text=options.prompt, ids=ids, count=options.prompt_tokens, seed=options.seed
    )
    machine = describe_machine(device)
    if not options.json:
        print(machine_line(machine), file=sys.stderr)
    with Progress("tokens", "reading the prompt") as progress:

        def report(piece: str, count: int) -> None:
            # On a terminal the tokens themselves show the progress, and a progress line would break up the text.
            if options.json or not sys.stdout.isatty():
                progress.update(count, options.max_new_tokens)
            else:
                progress.close()
            if not options.json:
                print(printable(piece, keep="\n\t"), end="", flush=True)

        result = generation.generate(
            model,
            tokenizer,
            prompt,
            cache=options.cache,
            backend=options.backend,
            max_new_tokens=options.max_new_tokens,
            report=report,
        )
    if options.json:
        print(json.dumps(_as_data(model, result, options, machine), indent=2))
    else:
        print()
        print(_summary(result, options.cache), file=sys.stderr)
    return OK


def _summary(result: "Generated", cache: str) -> str:
    speed = result.tokens_per_second
    return (
        f"{len(result.prompt)} tokens of prompt in {result.prefill_seconds:.2f} s, "
        f"{len(result.tokens)} new ones in {result.decode_seconds:.2f} s"
        f"{'' if speed is None else f' ({speed:.1f} tokens/s)'}, {cache} pages"
    )


def _as_data(model: Any, result: "Generated", options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "machine": machine,
        "model": type(model).__name__,
        "checkpoint": None if options.checkpoint is None else str(options.checkpoint),
        "cache": options.cache,
        "prompt": result.prompt,
        "generated": result.tokens,
        "text": result.text,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "tokens_per_second": result.tokens_per_second,
    }
