"""`tamis train-demo`: train a tiny model and its indexers through tamis, and measure what they learned."""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis._extras import install_command
from tamis.cli.data import print_json
from tamis.cli.machine import describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.progress import Progress, waiting
from tamis.cli.table import render_table
from tamis.cli.text import printable
from tamis.cli.values import whole

if TYPE_CHECKING:
    from tamis.lab.training.outcome import Outcome

DETAILS = f"""\
Trains a DeepSeek-V3.2-shaped model (two layers, 0.8M parameters, top-k 64) on a CPU to recall the value of a key that
was stated far back in the prompt, or a V4-shaped one (0.9M, a window of 32 and 16 entries of four tokens), in three
stages:

- dense: the model learns the task with transformers' own attention; the indexers do not take part
- warm-up: the indexers learn from dense attention, everything else is frozen
- sparse: attention is over what the indexers select; the model and they learn together

Then the checkpoint is loaded again and served over paged caches: the share of dense attention's weight that is selected
at eight times top-k, and the share of right answers, with the indexers' selection and with a random one. The checkpoint
that is the default of `tamis generate` and `tamis inspect`, and that of their `--model trained-v4`, were made by this
command.

Exits with 1 if the model did not learn the task. Needs transformers: {install_command("transformers")}."""

EXAMPLES = """\
tamis train-demo --out recall
tamis train-demo --model v4 --out recall-v4
tamis train-demo --quick --json"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "train-demo",
        run,
        summary="Train a tiny model and its indexers on a recall task, on a CPU in minutes",
        details=DETAILS,
        example=EXAMPLES,
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write checkpoint, curves and measures (CSV) to this folder (default: nowhere)",
    )
    parser.add_argument(
        "--model",
        choices=("v32", "v4"),
        default="v32",
        help="shape of the model: DeepSeek-V3.2's, or V4's with a window and compressed entries (default: v32)",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="random seed for weights and prompts (default: 0)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="run a few steps of each stage, too few to learn the task; nothing fails"
    )


def run(options: argparse.Namespace) -> int:
    """Train, save, measure, and print the tables or the JSON object."""
    out: Path | None = options.out
    _check_folder(out, options.force)
    let_waiting_threads_sleep()
    device = pick_device("cpu")
    try:
        import tamis.integrations.transformers  # noqa: F401  (it says what to install)
    except ImportError as error:
        raise ValueError(str(error)) from error
    from tamis.lab.training.model import DEMOS
    from tamis.lab.training.outcome import save_curves, save_outcome, served_outcome
    from tamis.lab.training.stages import stages_of, train

    began, cpu_began = time.monotonic(), time.process_time()
    with Progress("steps", "making the model") as progress:
        demo = DEMOS[options.model]
        model, points = train(options.seed, stages_of(demo, quick=options.quick), progress.update, demo)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
    machine = describe_machine(device)
    with waiting("measuring"):
        outcome = served_outcome(model, out, quick=options.quick)
        if out is not None:
            save_curves(points, out / "curves.csv")
            save_outcome(outcome, seconds, cpu_seconds, machine_line(machine), out / "measures.csv")
    failures = [] if options.quick else outcome.failures()
    if options.json:
        data = {
            "machine": machine,
            "model": options.model,
            "seed": options.seed,
            "quick": options.quick,
            "seconds": seconds,
        }
        data |= {"cpu_seconds": cpu_seconds}
        data |= {"out": None if out is None else str(out), "curves": [point._asdict() for point in points]}
        print_json("train-demo", not failures, data | outcome.as_data() | {"failures": failures})
    else:
        print(machine_line(machine))
        print(f"\n{_stages_table(points)}\n\n{_outcome_table(outcome)}\n")
        for failure in failures:
            print(f"FAILED: {failure}")
        place = "nothing was written (--out)" if out is None else f"checkpoint: {printable(out)}"
        print(
            f"{outcome.parameters:,} parameters, {seconds:.0f} s of training ({cpu_seconds:.0f} s of CPU time); {place}"
        )
    return FAILED if failures else OK


def _check_folder(out: Path | None, force: bool) -> None:
    """Refuse a place that cannot be written to, before the minutes of training."""
    if out is None:
        return
    if (out.exists() and not out.is_dir()) or not out.resolve().parent.is_dir():
        raise ValueError(f"--out must be a folder, or a new one in an existing folder, got {out}; choose another place")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ValueError(f"--out must be a new or empty folder, got {out} with files in it; --force overwrites them")
    out.mkdir(exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out must be a folder that can be written to, got {out}; choose another place")


def _stages_table(points: list[Any]) -> str:
    rows = []
    for stage in dict.fromkeys(point.stage for point in points):
        own = [point for point in points if point.stage == stage]
        last = own[-1]
        recall = next((point.recall for point in reversed(own) if point.recall is not None), None)
        rows.append(
            (
                stage,
                str(len(own)),
                str(last.tokens),
                f"{own[0].loss:.3f} to {last.loss:.3f}",
                "-" if last.kl is None else f"{own[0].kl:.3f} to {last.kl:.3f}",
                f"{last.accuracy:.1%}",
                "-" if recall is None else f"{recall:.1%}",
            )
        )
    return render_table(("stage", "steps", "tokens", "loss", "KL", "right answers", "recall"), rows, "lrrrrrr")


def _outcome_table(outcome: "Outcome") -> str:
    rows = [
        (f"recall at {outcome.recall_tokens} tokens, layer {layer}", f"{share:.1%}")
        for layer, share in enumerate(outcome.recall)
    ]
    rows += [
        (f"right answers at {one.tokens} tokens, {one.cache} cache{one.suffix}", f"{one.share:.1%}")
        for one in outcome.answers
    ]
    return render_table(("served", "share"), rows, "lr")
