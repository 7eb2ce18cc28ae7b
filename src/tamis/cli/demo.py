"""`tamis demo`: serve a tiny model with continuous batching over paged caches; report memory, rows read and errors."""

import argparse
from math import floor
from typing import TYPE_CHECKING, Any

from tamis.cli.data import print_json
from tamis.cli.machine import describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.options import DEVICES
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.progress import Progress
from tamis.cli.table import render_table
from tamis.cli.values import LARGEST, positive, whole

if TYPE_CHECKING:
    from tamis.lab.demo.outcome import Served
    from tamis.lab.demo.shape import ModelShape, V4Shape, Workload

DETAILS = """\
A DeepSeek-V3.2-shaped layer stack with random weights (full-size 512+64 latent rows, 128-wide index keys) serves
requests of different lengths that arrive one after the other: chunked prefill, mixed steps, decode steps. Beside it,
dense attention and attention over the same selection with exact rows are computed for comparison.

With --model v4 the stack is DeepSeek-V4-shaped: a layer with a window of 128 raw tokens only, then in turn layers that
add entries compressed from overlapping spans of 4 tokens, selected by an indexer, and all entries of spans of 128.
Dense attention then is over the window and every entry.

Exits with 1 if the error caused by the cache format exceeds its bound."""

CACHES = ("v32-fp8", "v32-bf16", "v32-fp32", "v4-fp8", "v4-bf16", "v4-fp32")
"""The formats of `tamis.lab.demo.shape`, which is too heavy to import for a help text; a test compares the two."""
V4_GROUPS = 2
"""Groups of heads of the V4 model's output."""

EXAMPLES = """\
tamis demo --requests 4 --topk 64 --cache v32-fp8
tamis demo --model v4 --requests 4 --new-tokens 8
tamis demo --json"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "demo",
        run,
        summary="Serve a tiny model over paged FP8 caches and compare it with dense attention",
        details=DETAILS,
        example=EXAMPLES,
    )

    parser.add_argument(
        "--model", choices=("v32", "v4"), default="v32", help="architecture of the layers (default: v32)"
    )

    def number(name: str, default: int, text: str, low: int = 1, high: int = LARGEST) -> None:
        kind = whole(low, high)
        parser.add_argument(name, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")

    number("--requests", 8, "number of requests, 1 to 4096", high=4096)
    number("--max-prompt", 1600, "longest prompt; the others are spread evenly below it")
    number("--new-tokens", 24, "tokens that each request generates")
    number("--layers", 3, "layers of the model, 1 to 64", high=64)
    number("--heads", 8, "query heads, 1 to 128", high=128)
    number("--topk", 128, "positions (with v4: entries) that the indexer selects per token")
    number("--token-budget", 256, "most tokens per step; longer prompts are prefilled in chunks")
    parser.add_argument("--page-size", type=whole(1), metavar="N", help="tokens per page (default: 64; 256 with v4)")
    parser.add_argument(
        "--cache",
        choices=CACHES,
        metavar="FORMAT",
        help=f"format of the cached rows, one of {', '.join(CACHES)} (default: the model's fp8); index keys are FP8, "
        "or fp32 with fp32 rows",
    )
    parser.add_argument(
        "--mode",
        choices=("auto", "mixed", "separate"),
        default="auto",
        help="one call for all tokens, or prefills gathered into a 16-bit workspace (default: auto, what is faster)",
    )
    parser.add_argument(
        "--yarn-factor",
        type=positive,
        default=1.0,
        metavar="X",
        help="YaRN factor of the rotary embedding (default: 1)",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to run (default: cpu)")
    number("--seed", 0, "random seed for weights and prompts; the same seed generates the same tokens", low=0)
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with dense attention")


def run(options: argparse.Namespace) -> int:
    """Serve, compare, and print the tables or the JSON object."""
    cache: Any = options.cache or f"{options.model}-fp8"
    _check_options(options, cache)
    let_waiting_threads_sleep()
    device = pick_device(options.device)
    from tamis.lab.demo.outcome import as_data, failed_checks
    from tamis.lab.demo.serve import serve
    from tamis.lab.demo.shape import Workload

    shape, page_size = _shape(options), options.page_size
    if page_size is None:
        page_size = 256 if options.model == "v4" else 64
    workload = Workload(
        requests=options.requests,
        max_prompt=options.max_prompt,
        new_tokens=options.new_tokens,
        token_budget=options.token_budget,
        page_size=page_size,
        cache=cache,
        mode=options.mode,
        device=device.type,
        seed=options.seed,
        check=not options.no_check,
    )
    with Progress("tokens", "making the model") as progress:
        served = serve(shape, workload, progress.update)
    machine = describe_machine(device)
    failures = failed_checks(served, workload)
    if options.json:
        print_json("demo", not failures, {"machine": machine, **as_data(shape, workload, served)})
    else:
        _print_report(machine, shape, workload, served, failures)
    return FAILED if failures else OK


def _check_options(options: argparse.Namespace, cache: str) -> None:
    """Refuse options that do not go together, before torch is loaded."""
    model = options.model
    if not cache.startswith(f"{model}-"):
        own = ", ".join(name for name in CACHES if name.startswith(f"{model}-"))
        raise ValueError(f"--cache must be one of {own} for --model {model}; got {cache!r}.")
    if options.mode == "separate" and not cache.endswith("fp8"):
        raise ValueError(f"--mode separate only applies to FP8 caches; drop it or use --cache {model}-fp8.")
    if options.token_budget < options.requests:
        expected = f"at least the number of requests ({options.requests})"
        remedy = "every running request decodes one token per step"
        raise ValueError(f"--token-budget must be {expected}, got {options.token_budget}; {remedy}")
    if model == "v4" and options.heads % V4_GROUPS:
        raise ValueError(f"--heads must be a multiple of {V4_GROUPS} for --model v4, got {options.heads}")
    span = 1 if model != "v4" or options.layers == 1 else 4 if options.layers == 2 else 128
    if options.page_size is not None and options.page_size % span:
        # A page of entries holds whole spans of tokens.
        raise ValueError(f"--page-size must be a multiple of {span} for these layers of v4, got {options.page_size}")


def _shape(options: argparse.Namespace) -> "ModelShape | V4Shape":
    from tamis.lab.demo.shape import ModelShape, V4Shape

    numbers = {"layers": options.layers, "heads": options.heads, "topk": options.topk}
    kind = V4Shape if options.model == "v4" else ModelShape
    return kind(**numbers, yarn_factor=options.yarn_factor)


def _print_report(
    machine: dict[str, Any], shape: "ModelShape | V4Shape", workload: "Workload", served: "Served", failures: list[str]
) -> None:
    from tamis.lab.demo.shape import ERROR_BOUNDS

    print(machine_line(machine))
    print(f"model: {shape.layers} layers, {shape.heads} heads, top-k {shape.topk}, {served.mode} mode\n")
    print(_serving_table(workload, served), end="\n\n")
    print(_cache_table(served), end="\n\n")
    if served.errors is not None:
        print(_error_table(served), end="\n\n")
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print(_conclusion(workload, served, ERROR_BOUNDS[workload.cache]))


def _serving_table(workload: "Workload", served: "Served") -> str:
    lengths = workload.prompt_lengths
    steps = served.steps
    share = served.tokens_attended / served.tokens_in_context
    rows = [
        ("requests", f"{workload.requests}, prompts of {lengths[0]} to {lengths[-1]} tokens"),
        (
            "steps",
            f"{sum(steps.values())}: {steps['prefill']} prefill, {steps['mixed']} mixed, {steps['decode']} decode",
        ),
        ("tokens", f"{served.tokens}: {served.prefill_tokens} prefill, {served.decode_tokens} decode"),
        ("KV rows read", f"{served.tokens_attended:,} of {served.tokens_in_context:,} in context ({share:.1%})"),
        ("pages", f"{served.peak_pages} of {served.pages} used at most, {served.free_pages} free at the end"),
        ("time", f"{served.seconds:.1f} s serving, {served.check_seconds:.1f} s comparing"),
        ("speed", f"{served.tokens / served.seconds:.0f} tokens/s, prefill and decode"),
    ]
    return render_table(("serving", ""), rows)


def _cache_table(served: "Served") -> str:
    rows = [(s.what, s.layout, f"{s.stored:g}", f"{s.bf16:g}", f"{s.ratio:.2f}") for s in served.sizes]
    header = ("cache, per token and layer", "format", "bytes", "bytes in bf16", "ratio")
    return render_table(header, rows, "llrrr")


def _error_table(served: "Served") -> str:
    rows = [
        (
            layer,
            f"{e.dense_error:.2e}",
            f"{e.quantisation_error:.2e}",
            f"{e.mass_covered:.1%}",
            "-" if e.mass_covered_selecting is None else f"{e.mass_covered_selecting:.1%}",
        )
        for layer, e in enumerate(served.errors or [])
    ]
    header = (
        "layer",
        "error against\ndense attention",
        "error against the same\nselection, exact rows",
        "dense attention\ncovered",
        "the same, where\ncontext > top-k",
    )
    return render_table(header, rows, "lrrrr")


def _conclusion(workload: "Workload", served: "Served", bound: float) -> str:
    start = f"Served {workload.requests}/{workload.requests} requests; all cache pages were freed"
    if served.errors is None:
        return f"{start}. Accuracy was not checked (--no-check)."
    share = served.tokens_attended / served.tokens_in_context
    # Rounded down for "at least"; 1e-3 makes up for float32 sums that fall just short of a whole percent.
    covered = floor(100 * min(e.mass_covered for e in served.errors) + 1e-3)
    worst = max(e.quantisation_error for e in served.errors)
    read = f"Attention read {share:.0%} of the context, which holds at least {covered}% of dense attention's weight"
    if workload.cache.startswith("v4"):
        read = f"Attention read {share:.0%} as many rows as tokens in context, with at least {covered}% of its weight"
    return (
        f"{start}.\n{read} in every layer;\nstoring rows as {served.latent.name} costs a relative error of {worst:.1e} "
        f"or less (bound: {bound:.0e})."
    )
