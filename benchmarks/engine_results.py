"""What the engine benchmarks make of their results: medians with spread, comparisons of tokens, conditions, tables.

A result is what one engine's process wrote: `tokens`, `logprobs` and `margins` per prompt, `seconds` per turn, and
whatever its script adds. None stands for an engine that failed.
"""

import csv
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]

TURNS = 10
"""The fewest turns that a throughput may be judged by."""


@dataclass(frozen=True)
class Spread:
    """The distribution of an engine's times. The best time says little: hosts are slow at random."""

    turns: int
    lowest: float
    lower_quartile: float
    median: float
    upper_quartile: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(1, *[values[0]] * 5)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(len(values), min(values), lower, median, upper, max(values))

    def columns(self, unit: str) -> dict[str, str]:
        numbers = {
            "median": self.median,
            "lowest": self.lowest,
            "lower_quartile": self.lower_quartile,
            "upper_quartile": self.upper_quartile,
            "highest": self.highest,
        }
        return {"turns": str(self.turns)} | {f"{unit}_{name}": f"{value:.5g}" for name, value in numbers.items()}

    def __str__(self) -> str:
        quartiles = f"quartiles {self.lower_quartile:.4g} to {self.upper_quartile:.4g}"
        return f"{self.median:.4g} ({quartiles}, all {self.lowest:.4g} to {self.highest:.4g}, {self.turns} turns)"


@dataclass(frozen=True)
class Condition:
    """A condition that must hold, and the measured value."""

    name: str
    found: float | None
    bound: float
    at_least: bool = True

    @property
    def passed(self) -> bool:
        if self.found is None:
            return False
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        found = "nothing, an engine failed" if self.found is None else f"{self.found:.4g}"
        sign = ">=" if self.at_least else "<="
        return f"{'PASS' if self.passed else 'FAIL'} {self.name}: {found} ({sign} {self.bound:g})"


def verdict(conditions: Iterable[Condition]) -> int:
    """Print every condition; the exit status of a script that has to meet them."""
    found = list(conditions)
    print(*found, sep="\n", flush=True)
    return 0 if all(condition.passed for condition in found) else 1


def speed_ratio(own: Result | None, peer: Result | None, key: str = "seconds") -> float | None:
    """Throughput of `own` over that of `peer`, by the medians of their turns."""
    if own is None or peer is None:
        return None
    return Spread.of(peer[key]).median / Spread.of(own[key]).median


def turns_taken(results: Iterable[Result | None], key: str = "seconds") -> float | None:
    """The fewest turns that any engine took."""
    counts = [None if result is None else len(result[key]) for result in results]
    known = [count for count in counts if count is not None]
    return float(min(known)) if known and len(known) == len(counts) else None


def equal_share(left: Result | None, right: Result | None, left_key: str = "tokens") -> float | None:
    """The share of positions at which two runs chose the same token."""
    if left is None or right is None:
        return None
    rows = zip(left[left_key], right["tokens"], strict=True)
    pairs = [pair for a, b in rows for pair in zip(a, b, strict=True)]
    return float(sum(a == b for a, b in pairs)) / len(pairs)


def logprob_difference(left: Result | None, right: Result | None) -> float | None:
    """Mean absolute difference of the chosen tokens' logprobs, up to each prompt's first different token."""
    if left is None or right is None:
        return None
    differences = []
    for a, b, p, q in zip(left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        differences += [abs(x - y) for x, y in zip(p[:first], q[:first], strict=True)]
    return float(sum(differences)) / len(differences) if differences else None


def first_differences(left: Result, right: Result) -> str:
    """Per prompt the first position where two runs differ, and the left run's margin: a small one means rounding."""
    found = []
    for a, b, margins in zip(left["tokens"], right["tokens"], left["margins"], strict=True):
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        found.append("none" if first is None else f"{first} (margin {margins[first]:.3f})")
    return ", ".join(found)


def engine_rows(
    results: Mapping[str, Result],
    engines: Mapping[str, Mapping[str, Any]],
    tokens: int,
    compared: Callable[[str, Result], Mapping[str, float | None]],
    about: Mapping[str, str],
) -> list[dict[str, Any]]:
    """The rows of a table with one per engine that succeeded.

    Args:
        results: by name of the engine.
        engines: the columns that describe each engine.
        tokens: how many tokens a turn generates.
        compared: the columns that compare an engine, given its name and its result, with others.
        about: columns that all rows share.
    """
    found = []
    for name, result in results.items():
        spread = Spread.of(result["seconds"])
        found.append(
            {"engine": name, **engines[name], "tokens_per_s_median": f"{tokens / spread.median:.2f}"}
            | spread.columns("seconds")
            | {"start_s": f"{result['start_seconds']:.1f}"}
            | {column: text(value) for column, value in compared(name, result).items()}
            | dict(about)
        )
    return found


def write_rows(path: Path, rows: Sequence[Mapping[str, str]], echo: bool = True) -> None:
    """Write rows that all have the same columns, and print them unless told otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if rows:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        if echo:
            print(path.read_text(), flush=True)


def text(value: float | None) -> str:
    """A number of a table, or nothing where an engine failed."""
    return "" if value is None else f"{value:.5f}"
