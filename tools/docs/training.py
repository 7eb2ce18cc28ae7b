"""The curves and measures of `tamis train-demo`, from `benchmarks/results/training/`."""

import csv
from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import NamedTuple

from tools.docs.markdown import table
from tools.docs.results import RESULTS
from tools.docs.svg import Picture

FILE = RESULTS / "training" / "train_demo.csv"
MEASURES = RESULTS / "training" / "train_demo_measures.csv"
MEASURES_V4 = RESULTS / "training" / "train_demo_v4_measures.csv"
STAGES = {"dense": "dense", "warmup": "warm-up", "sparse": "sparse"}
KINDS = {"dense": "grey", "warmup": "amber", "sparse": "green"}
WIDTH, LEFT, RIGHT, TOP, HEIGHT, GAP = 760, 64, 18, 66, 120, 42


class Curve(NamedTuple):
    """One panel: a column of the file over the steps."""

    column: str
    title: str
    low: float
    high: float
    ticks: Sequence[float]
    logarithmic: bool
    label: str
    """The format of a tick's number."""


CURVES = (
    Curve("loss", "loss of the answers, nats", 1e-4, 10.0, (1e-4, 1e-2, 1.0), True, "{:g}"),
    Curve("kl", "divergence of the indexers from attention, nats", 1e-3, 10.0, (1e-3, 1e-1, 10.0), True, "{:g}"),
    Curve(
        "recall",
        "recall of dense attention's weight at 512 tokens, top-k 64",
        0.0,
        1.0,
        (0.0, 0.5, 1.0),
        False,
        "{:.0%}",
    ),
)

Row = dict[str, str]


def read() -> list[Row]:
    """The rows of the file, a row for each step."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def draw() -> str:
    """Loss, divergence and recall over the steps, one below the other; the stages as backgrounds."""
    rows = read()
    picture = Picture(
        WIDTH, TOP + len(CURVES) * (HEIGHT + GAP), "Loss, divergence and recall over the steps of training"
    )
    picture.text(16, 26, "tamis train-demo: loss, divergence and recall by step", "title")
    for number, curve in enumerate(CURVES):
        _panel(picture, curve, rows, TOP + number * (HEIGHT + GAP), names=number == 0)
    picture.text(WIDTH - RIGHT, TOP + len(CURVES) * (HEIGHT + GAP) - 10, f"{len(rows)} steps", "end small muted")
    return picture.render()


def measures(path: Path = MEASURES) -> str:
    """The measures of a checkpoint that is part of tamis, and where it was trained."""
    with path.open(newline="", encoding="utf-8") as file:
        found = {row["measure"]: row["value"] for row in csv.DictReader(file)}
    lines = []
    for name, value in found.items():
        kind, *parts = name.split("_")
        if name.startswith("recall_layer"):
            lines.append((f"recall at {found['recall_tokens']} tokens, layer {parts[-1]}", f"{float(value):.1%}"))
        elif kind == "answers":
            tokens, cache, selecting = parts
            suffix = ", random selection" if selecting == "random" else ""
            lines.append((f"right answers at {tokens} tokens, {cache} cache{suffix}", f"{float(value):.1%}"))
    said = f"Trained in {found['training_cpu_seconds']} s of CPU time, summed over threads ({found['machine']}):"
    return f"{said}\n\n{table(('served', 'share'), lines, 'lr')}"


def measures_v4() -> str:
    """The same for the V4-shaped model."""
    return measures(MEASURES_V4)


def _panel(picture: Picture, curve: Curve, rows: Sequence[Row], top: float, *, names: bool) -> None:
    width = WIDTH - LEFT - RIGHT
    step = width / len(rows)
    at = 0
    for stage, words in STAGES.items():
        count = sum(row["stage"] == stage for row in rows)
        picture.box(LEFT + at * step, top, count * step, HEIGHT, f"{KINDS[stage]} faint", round_=0)
        if names:
            picture.text(LEFT + (at + count / 2) * step, top - 24, words, "middle small strong")
        at += count
    picture.text(LEFT, top - 8, curve.title, "small muted")
    for tick in curve.ticks:
        y = _height(curve, tick, top)
        picture.line((LEFT - 4, y), (LEFT, y), kind="thin")
        picture.text(LEFT - 8, y + 4, curve.label.format(tick), "end small muted")
    points = [
        (LEFT + (number + 0.5) * step, _height(curve, float(row[curve.column]), top))
        for number, row in enumerate(rows)
        if row[curve.column]
    ]
    picture.line(*points)


def _height(curve: Curve, value: float, top: float) -> float:
    value = min(max(value, curve.low), curve.high)
    low, high = curve.low, curve.high
    share = log10(value / low) / log10(high / low) if curve.logarithmic else (value - low) / (high - low)
    return top + HEIGHT * (1 - share)
