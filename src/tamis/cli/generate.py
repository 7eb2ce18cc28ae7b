"""`tamis generate`: generate text or tokens with a Hugging Face checkpoint or a tiny model."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from tamis._extras import install_command
from tamis.cli.data import print_json
from tamis.cli.machine import check_backend, describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.model import (
    add_model_options,
    check_model_options,
    check_words,
    load_model,
    model_titles,
    synthetic_question,
)
from tamis.cli.parser import OK, Subcommands, add_command
from tamis.cli.progress import Progress
from tamis.cli.text import printable
from tamis.cli.values import whole, wholes

if TYPE_CHECKING:
    from tamis.cli.hub import Source
    from tamis.lab.generation import Generated
    from tamis.lab.training.task import Question

QUESTION_TOKENS = 1024
"""Length of the trained model's prompt."""

DETAILS = f"""\
Loads a checkpoint of {model_titles()}
with Hugging Face transformers, lets tamis do its attention (true sparse attention over paged caches), and streams the
generated text to stdout; progress goes to stderr. Without --checkpoint it takes the tiny model that `tamis train-demo`
made: its prompt states values of keys among words without meaning and ends with one of the keys, and the model answers
with the value. With another --model it makes a tiny random model, which generates meaningless token ids.

Needs transformers: {install_command("transformers")}."""

EXAMPLES = """\
tamis generate --prompt-tokens 2048
tamis generate --model v4 --prompt-ids 1,2,3 --cache bf16 --json
tamis generate --checkpoint ./model --prompt 'A sieve is' --max-new-tokens 64
tamis generate --checkpoint deepseek-ai/DeepSeek-V3.2 --prompt 'A sieve is'"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "generate",
        run,
        summary="Generate from a checkpoint, or a tiny model, with attention through tamis",
        details=DETAILS,
        example=EXAMPLES,
    )
    add_model_options(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue; needs a checkpoint with a tokenizer, or the words of a trained model",
    )
    prompt.add_argument("--prompt-ids", type=wholes(0), metavar="N,...", help="prompt to continue, as token ids")
    prompt.add_argument(
        "--prompt-tokens",
        type=whole(1),
        metavar="N",
        help="length of the synthetic prompt to continue (default: 256; the trained model: 1024)",
    )
    parser.add_argument(
        "--max-new-tokens", type=whole(1), default=64, metavar="N", help="number of tokens to generate (default: 64)"
    )


def run(options: argparse.Namespace) -> int:
    """Generate, and stream the tokens or print the JSON object."""
    check_model_options(options)
    let_waiting_threads_sleep()
    device = pick_device(options.device)
    check_backend(options.backend, device)
    model, tokenizer, source = load_model(options, device)
    from tamis.lab import generation

    check_words(options, options.prompt)
    question = synthetic_question(options, QUESTION_TOKENS)
    ids = options.prompt_ids if question is None else question.prompt
    prompt = generation.prompt_ids(
        model, tokenizer, text=options.prompt, ids=ids, count=options.prompt_tokens, seed=options.seed
    )
    machine = describe_machine(device)
    if not options.json:
        print(machine_line(machine), file=sys.stderr)
        if source is not None:
            print(f"checkpoint: {printable(source)}", file=sys.stderr)
        if question is not None:
            print(_asked(question, tokenizer), file=sys.stderr)
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
        print_json("generate", True, _as_data(model, result, options, machine, source, question))
    else:
        print()
        print(_summary(result, options.cache), file=sys.stderr)
    return OK


def _asked(question: "Question", tokenizer: Any) -> str:
    """What the prompt asks, and where its answer stands."""
    key, value = (tokenizer.decode([token]) for token in (question.prompt[-1], question.answer))
    back = len(question.prompt) - 1 - question.needle
    return f"the prompt asks for {key}; its value is {value}, {back} tokens back (position {question.needle})"


def _summary(result: "Generated", cache: str) -> str:
    speed = result.tokens_per_second
    count = len(result.prompt)
    return (
        f"{count} token{'' if count == 1 else 's'} of prompt in {result.prefill_seconds:.2f} s, "
        f"{len(result.tokens)} new ones in {result.decode_seconds:.2f} s"
        f"{'' if speed is None else f' ({speed:.1f} tokens/s)'}, {cache} pages"
    )


def _as_data(
    model: Any,
    result: "Generated",
    options: argparse.Namespace,
    machine: dict[str, Any],
    source: "Source | None",
    question: "Question | None",
) -> dict[str, Any]:
    return {
        "machine": machine,
        "model": type(model).__name__,
        "checkpoint": None if source is None else source.given,
        "revision": None if source is None else source.revision,
        "cache": options.cache,
        "prompt": result.prompt,
        "needle": None if question is None else question.needle,
        "answer": None if question is None else question.answer,
        "generated": result.tokens,
        "text": result.text,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "tokens_per_second": result.tokens_per_second,
    }
