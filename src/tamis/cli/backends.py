"""`tamis backends`: which implementation runs a layer on this machine, and why the others do not."""

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tamis.cli import options as shared
from tamis.cli.data import print_json
from tamis.cli.machine import describe_machine, machine_line, pick_device
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.table import render_table
from tamis.cli.values import whole

if TYPE_CHECKING:
    from tamis.backends import Need
    from tamis.choice import StageKernels, TrainingKernels

EXAMPLES = """\
tamis backends --heads 128 --layout v32-fp8 --page-size 64
tamis backends --heads 8 --layout v4-fp8 --dtype fp16 --json"""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Verdict:
    """Whether one backend would run the layer, and why not."""

    name: str
    state: str
    """chosen, possible (another one is preferred), rejected, or broken (of another package, and cannot be used)."""
    reasons: list[str]
    """Every reason for a rejection; what is broken."""
    summary: str
    stages: tuple[str, ...]
    kernels: list["StageKernels"]
    """The kernels of each stage; empty for a rejected backend."""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "backends",
        run,
        summary="Show which implementation would run a layer on this machine, and every reason against the others",
        details="Exits with 1 if none can.",
        example=EXAMPLES,
    )
    shared.add_device(parser)
    parser.add_argument(
        "--heads", type=whole(1, 128), default=128, metavar="N", help="query heads on one rank (default: 128)"
    )
    parser.add_argument(
        "--layout",
        type=shared.layout,
        default="v32-fp8",
        metavar="NAME",
        help=f"latent cache format, one of {', '.join(shared.LATENT_LAYOUTS)} (default: v32-fp8)",
    )
    parser.add_argument("--page-size", type=whole(1), default=64, metavar="N", help="tokens per page (default: 64)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="query dtype (default: bf16)")
    parser.add_argument(
        "--topk", type=whole(1), default=2048, metavar="N", help="selected positions per token (default: 2048)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the table or the JSON object."""
    device = pick_device(options.device)
    machine = describe_machine(device)
    need = _need(options)
    verdicts = judge(need)
    prefills = explain_prefills(need, verdicts)
    training = explain_training(need)
    ok = any(v.state == "chosen" for v in verdicts)
    if options.json:
        layer = {"heads": need.spec.heads, "layout": need.layout.name, "page_size": need.page_size}
        layer |= {"dtype": options.dtype, "topk": options.topk}
        found = {"machine": machine, "layer": layer, "backends": [asdict(v) for v in verdicts], "prefills": prefills}
        found["training"] = [asdict(kernels) for kernels in training]
        print_json("backends", ok, found)
    else:
        print(machine_line(machine))
        print(
            f"layer: {options.heads} heads, top-k {options.topk}, {options.dtype} queries, "
            f"{need.layout.name} pages of {options.page_size}\n"
        )
        rows = [(v.name, v.state, v.summary, "\n".join(v.reasons) or "-") for v in verdicts]
        print(render_table(("backend", "state", "what it is", "reasons against it"), rows))
        for verdict in verdicts:
            if verdict.state == "chosen":
                print(f"\n{verdict.name} runs")
                print("\n".join(f"  {kernels}" for kernels in verdict.kernels))
                print(f"  prefills: {prefills}")
        print("\ntraining (tamis.train)")
        print("\n".join(f"  {kernels}" for kernels in training))
    return OK if ok else FAILED


def judge(need: "Need") -> list[Verdict]:
    """A verdict on every backend, in order of preference. Unlike `choose`, this does not raise if none fits."""
    from tamis.backends import registered
    from tamis.choice import stage_kernels

    known, broken = registered()
    verdicts: list[Verdict] = []
    for backend in known:
        reasons = backend.refusals(need)
        taken = any(v.state == "chosen" for v in verdicts)
        state = "rejected" if reasons else "possible" if taken else "chosen"
        kernels = [] if reasons else stage_kernels(backend, need)
        verdicts.append(Verdict(backend.name, state, reasons, backend.summary, backend.stages, kernels))
    return [*verdicts, *(Verdict(one.label, "broken", [one.reason], "-", (), []) for one in broken)]


def explain_training(need: "Need") -> list["TrainingKernels"]:
    """What each backend runs of `tamis.train` on the layer's device, and why it does not run the rest."""
    from tamis.choice import training_kernels

    return training_kernels(need.device, need.capability)


def explain_prefills(need: "Need", verdicts: list[Verdict]) -> str | None:
    """What a planner does with prefills by default; None if no backend runs the layer."""
    from tamis.backends import registered
    from tamis.step import gathering

    # Verdicts on broken backends come last.
    known = registered().backends
    chosen = next((backend for backend, v in zip(known, verdicts, strict=False) if v.state == "chosen"), None)
    if chosen is None:
        return None
    # A V4Planner gathers only where it is asked to.
    quantised = need.layout.quantised and not need.layout.name.startswith("v4")
    return gathering.explain_prefills(quantised, need.spec.heads, need.spec.topk, chosen.direct_prefills)


def _need(options: argparse.Namespace) -> "Need":
    import torch

    from tamis.backends import Need, compute_capability
    from tamis.cache.layout import named
    from tamis.model.spec import LayerSpec

    layout = named(options.layout)
    # A V4 row is key and value as a whole; in V3.2 the rope dimensions are key only.
    v4 = options.layout.startswith("v4")
    value_dim = layout.width if v4 else layout.latent
    spec = LayerSpec(options.heads, layout.latent, layout.rope, value_dim, topk=options.topk, sink=v4)
    device = pick_device(options.device)
    return Need(
        spec, device, compute_capability(device), getattr(torch, DTYPES[options.dtype]), layout, options.page_size
    )
