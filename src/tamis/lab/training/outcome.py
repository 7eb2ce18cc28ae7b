"""What a trained checkpoint does when it is loaded and served, and the curves of its training as a file."""

import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tamis.integrations.hf.layers import CacheKind
from tamis.lab.generation import load_model
from tamis.lab.training.measure import Selecting, attention_recall, right_answers
from tamis.lab.training.model import demo_of, save_model
from tamis.lab.training.stages import Point
from tamis.lab.training.task import CHANCE

RECALL_BAR, ANSWERS_BAR = 0.95, 0.99
RANDOM_BAR = 4 * CHANCE
"""A random selection of 64 among 4096 tokens holds the answer by luck once in 64 cases; with the luck of guessing, one
answer in 32 may be right. The bar leaves as much again, since there are only 96 questions."""


@dataclass(frozen=True)
class Answers:
    """The share of right answers in one way of serving."""

    tokens: int
    cache: CacheKind
    selecting: Selecting
    share: float

    @property
    def suffix(self) -> str:
        """What sets this way apart in a table."""
        return ", random selection" if self.selecting == "random" else ""


@dataclass(frozen=True)
class Outcome:
    """Measures of a checkpoint."""

    parameters: int
    recall_tokens: int
    recall: list[float]
    """By layer that has an indexer."""
    answers: list[Answers]

    def failures(self) -> list[str]:
        """One line for each bar that is missed."""
        found = [
            f"layer {layer}: recall {share:.1%} is below {RECALL_BAR:.0%}"
            for layer, share in enumerate(self.recall)
            if not share >= RECALL_BAR
        ]
        for one in self.answers:
            where = f"{one.tokens} tokens, {one.cache} cache{one.suffix}: {one.share:.1%} of answers right"
            if one.selecting == "indexer" and not one.share >= ANSWERS_BAR:
                found.append(f"{where}, less than {ANSWERS_BAR:.0%}")
            if one.selecting == "random" and not one.share <= RANDOM_BAR:
                found.append(f"{where}, more than {RANDOM_BAR:.1%}")
        return found

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def served_outcome(model: Any, folder: Path | None, *, quick: bool = False) -> Outcome:
    """Save a model, load the checkpoint as `tamis generate` would, and measure it."""
    with TemporaryDirectory() as scratch:
        place = Path(scratch) if folder is None else folder
        save_model(model, place)
        return measure_checkpoint(place, quick=quick)


def measure_checkpoint(folder: Path, *, quick: bool = False) -> Outcome:
    """Measure a checkpoint; a quick measure is on shorter prompts."""
    model, _ = load_model(folder, torch.device("cpu"))
    lengths = (1024,) if quick else (1024, 4096)
    caches: tuple[CacheKind, ...] = ("fp8",) if quick else ("bf16", "fp8")
    ways: list[tuple[int, CacheKind, Selecting]] = [(length, one, "indexer") for length in lengths for one in caches]
    ways.append((lengths[-1], "fp8", "random"))
    answers = [
        Answers(tokens, cache, selecting, right_answers(model, tokens=tokens, cache=cache, selecting=selecting))
        for tokens, cache, selecting in ways
    ]
    tokens = demo_of(model).recall_tokens
    recall = attention_recall(model, tokens=tokens)
    return Outcome(sum(p.numel() for p in model.parameters()), tokens, recall, answers)


def save_outcome(outcome: Outcome, seconds: float, cpu_seconds: float, machine: str, path: Path) -> None:
    """Write measures by name as CSV, for the documentation.

    `seconds` of training are by the clock, `cpu_seconds` are summed over threads: on a machine that does other work as
    well, the clock says little.
    """
    rows: list[tuple[str, Any]] = [("machine", machine), ("training_seconds", f"{seconds:.0f}")]
    rows.append(("training_cpu_seconds", f"{cpu_seconds:.0f}"))
    rows += [("parameters", outcome.parameters), ("recall_tokens", outcome.recall_tokens)]
    rows += [(f"recall_layer_{layer}", f"{share:.6g}") for layer, share in enumerate(outcome.recall)]
    rows += [(f"answers_{one.tokens}_{one.cache}_{one.selecting}", f"{one.share:.6g}") for one in outcome.answers]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("measure", "value"), *rows])


def save_curves(points: list[Point], path: Path) -> None:
    """Write what every step measured as CSV; what it did not measure stays empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Point._fields)
        for point in points:
            writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in point)
