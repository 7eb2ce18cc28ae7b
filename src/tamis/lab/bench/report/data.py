"""Result rows for a report: read from files, reduced to the newest, with the roofline limits that they imply."""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

from tamis import checks
from tamis.lab.bench.door.record import DOOR_COLUMNS
from tamis.lab.bench.record import COLUMNS, Row
from tamis.lab.bench.roofline import MEASURED
from tamis.lab.bench.training import TRAIN_COLUMNS
from tamis.step.batch import parse_shape

STEP_COLUMNS = (
    "version",
    "torch",
    "machine",
    "threads",
    "requests",
    "heads",
    "topk",
    "context",
    "by_hand_ms",
    "tamis_ms",
)
"""The columns of `benchmarks/cpu_step.py`, which measures a whole step on a CPU."""
MEASUREMENT = (
    *("gpu", "backend", "suite", "stage", "shape", "heads", "topk", "window", "layout"),
    *("page_size", "method"),
)
"""The columns that identify a measurement. Of rows that agree in all of them and in the peer, only the newest is
shown."""
NEEDED = set(COLUMNS) - {"host_us", "peer_host_us"}
"""The columns that every file of `tamis bench --csv` has; the others are younger than the oldest files."""
COMPUTE_BOUND = 0.99
"""A row is limited by arithmetic if its bytes take less than this share of the roofline's time."""


@dataclass(frozen=True)
class Limits:
    """The highest rates of a machine; None where the rows do not imply one."""

    bytes_per_second: float | None
    flops_per_second: float | None
    """The bf16 rate; the FP8 rate is twice as high."""


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Rows of CSV files that `tamis bench --csv` or `benchmarks/cpu_step.py` wrote; none of `tamis bench door`."""
    rows: list[Row] = []
    for path in paths:
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                header = reader.fieldnames or []
                if any(set(columns) <= set(header) for columns in (DOOR_COLUMNS, TRAIN_COLUMNS)):
                    continue  # rows of `tamis bench door` and `train` have other times, and no roofline
                read = _step if set(STEP_COLUMNS) <= set(header) else _row if set(header) >= NEEDED else None
                if read is None:
                    expected = "a file that tamis bench --csv wrote"
                    raise checks.refuse("--from", expected, f"{path} with other columns", "choose another")
                rows += [read(cells) for cells in reader]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--from {path} cannot be read: {error}") from error
        except (ValueError, TypeError, OverflowError, ZeroDivisionError, csv.Error) as error:
            if str(error).startswith("--from"):
                raise
            raise ValueError(f"--from {path} has a row that is no measurement: {error}") from error
    return rows


def _row(cells: dict[str, str]) -> Row:
    row = Row(**{field.name: _value(field, cells[field.name]) for field in fields(Row) if field.name in cells})
    for name in ("median_us", "p10", "p90", "peer_us", "ratio"):
        value = getattr(row, name)
        if value is not None and not 0 < value < inf:
            raise ValueError(f"{name} is {value}, and a time or a ratio of times is above 0")
    for name in ("bytes", "flops", "roofline_us", "error"):
        if not 0 <= getattr(row, name) < inf:
            raise ValueError(f"{name} is {getattr(row, name)}, and nothing can have less than 0 or no end")
    parse_shape(row.shape)
    return row


def _value(field: Any, text: str | None) -> Any:
    """A cell converted to the type of its column; None for an empty cell of an optional column."""
    if text is None:
        raise ValueError(f"the row ends before {field.name}")
    kind = field.type
    if kind is str:
        return text
    if text == "" and (field.default is not MISSING or "None" in str(kind)):
        return None
    return float(text) if kind is float or "float" in str(kind) else int(text)


def _step(cells: dict[str, str]) -> Row:
    """A whole decode step. It has no roofline, since its bytes are not counted."""
    requests, context = int(cells["requests"]), int(cells["context"])
    ours, theirs = float(cells["tamis_ms"]) * 1e3, float(cells["by_hand_ms"]) * 1e3
    return Row(
        time="",
        gpu=f"{cells['machine']} CPU, {cells['threads']} threads",
        driver="",
        torch=cells["torch"],
        triton="",
        tamis=cells["version"],
        commit="",
        backend="reference",
        suite="cpu step",
        stage="step",
        shape=f"{requests}q1s{context}",
        heads=int(cells["heads"]),
        topk=int(cells["topk"]),
        window=0,
        layout="v32-fp8",
        page_size=64,
        method="calls",
        repeats=1,
        sets=1,
        median_us=ours,
        p10=ours,
        p90=ours,
        bytes=0,
        flops=0,
        roofline_us=0.0,
        error=0.0,
        peer="torch",
        peer_us=theirs,
        ratio=theirs / ours,
    )


def latest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each measurement and peer, in order of first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(getattr(row, column) for column in (*MEASUREMENT, "peer"))
        if key not in found or row.time >= found[key].time:
            found[key] = row
    return list(found.values())


def most_measured_first(rows: Sequence[Row]) -> list[Row]:
    """The rows grouped by machine, the machine with the most rows first; the order is kept within a machine."""
    count = Counter(row.gpu for row in rows)
    return sorted(rows, key=lambda row: (-count[row.gpu], row.gpu))


def once(rows: Iterable[Row]) -> list[Row]:
    """One row per measurement, where rows differ only in the peer."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, column) for column in MEASUREMENT), row)
    return list(found.values())


def speed(row: Row) -> int:
    """The peak rate of the stage's products relative to bf16: 2 for FP8."""
    return 2 if row.stage in ("scores", "index") else 1


def find_limits(rows: Sequence[Row]) -> Limits:
    """The limits that the rooflines of one machine's rows imply.

    A roofline is the larger of two times, so the highest rate implied by any row is the limit itself. Where no row is
    limited by arithmetic, the peak is looked up by the GPU's name.
    """
    timed = [row for row in rows if row.roofline_us > 0]
    if not timed:
        return Limits(None, None)
    moving = max(row.bytes / row.roofline_us * 1e6 for row in timed)
    computing = [
        row.flops / row.roofline_us * 1e6 / speed(row)
        for row in timed
        if row.flops and row.bytes / moving * 1e6 < COMPUTE_BOUND * row.roofline_us
    ]
    known = [peak for part, (_, peak) in MEASURED.items() if part in timed[0].gpu]
    return Limits(moving, max(computing) if computing else known[0] if known else None)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


@dataclass(frozen=True)
class Shape:
    """A batch whose requests all have the same length and number of new tokens, as in the suites."""

    requests: int
    new: int
    length: int


def even_shape(row: Row) -> Shape | None:
    """The row's batch; None if its requests differ."""
    new, lengths = parse_shape(row.shape)
    if len(set(new)) > 1 or len(set(lengths)) > 1:
        return None
    return Shape(len(new), new[0], lengths[0])


def describe(row: Row) -> str:
    """One line that identifies a measurement."""
    parts = [row.stage, row.shape]
    parts += [f"{row.heads} heads"] if row.heads else []
    parts += [f"top-k {row.topk}"] if row.topk else []
    return ", ".join([*parts, row.layout, row.backend])


def compact(tokens: int) -> str:
    """A number such as 16K."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
