"""Tables of `tamis bench door`, from `benchmarks/results/h200_door.csv`."""

import csv
from collections import Counter
from collections.abc import Sequence
from statistics import median

from tamis.step.batch import parse_shape
from tools.docs.markdown import sortable, table
from tools.docs.results import RESULTS, Row, digits, origin, shape_words, speedup

FILE = RESULTS / "h200_door.csv"
KEY = ("gpu", "door", "shape", "heads", "topk", "window", "layout", "version")
"""The columns that identify a measurement. Of rows that agree in all of them, the newest is shown."""
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
NOTHING = "`tamis bench door` has no rows under `benchmarks/results/` yet."


def headline() -> str:
    """Speedups of the drop-ins over the fastest build of FlashMLA, with host times, for README."""
    if not FILE.exists():
        return NOTHING
    rows = read()
    parts = [f"Baseline: {', '.join(sorted({row['build'] for row in rows if row['build']}))}. {origin(rows)}"]
    parts += [found for found in (_decodes(rows), _others(rows)) if found]
    return "\n\n".join(parts)


def everything() -> str:
    """All rows, under a heading; nothing if there are none."""
    if not FILE.exists():
        return ""
    rows = read()
    ratio = "speedup vs. FlashMLA"
    header = ("shape", "format", "heads", "top-k", "function", "version", "graph", ratio, "eager", "host", "kernels")
    lines = [
        (
            shape_words(row["shape"]),
            f"`{row['layout']}`",
            row["heads"] or "-",
            _topk(row) or "-",
            f"`{row['door']}`",
            row["build"] or row["version"],
            _us(row["graph_us"]),
            speedup(row["ratio"]),
            *(_us(row[name]) for name in ("eager_us", "host_us")),
            _count(row),
            f"{float(row['error']):.1e}" if row["error"] else row["note"] or "-",
        )
        for row in rows
    ]
    text = sortable(table((*header, "error"), lines, "llrrllrrrrrr"))
    about = "Times in microseconds per call; *kernels*: kernels + copies that a call puts on the device."
    return f"## `tamis bench door`\n\n{origin(rows)} {about}\n\n{text}"


def read() -> list[Row]:
    """The newest row of each measurement."""
    newest: dict[tuple[str, ...], Row] = {}
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[column] for column in KEY)
            if key not in newest or row["time"] >= newest[key]["time"]:
                newest[key] = row
    return list(newest.values())


def _decodes(rows: Sequence[Row]) -> str:
    """A line per format, top-k and head count with several numbers of requests; a column per number."""
    ours = [row for row in compared(rows) if row in in_series(rows)]
    batches = sorted({requests(row) for row in ours})
    lines = []
    for kind in dict.fromkeys(_kind(row) for row in ours):
        same = {requests(row): row for row in ours if _kind(row) == kind}
        cells = [speedup(same[b]["ratio"]) if b in same else "" for b in batches]
        lines.append((_words(next(iter(same.values()))), *cells, _host(list(same.values()), rows)))
    if not lines:
        return ""
    header = (f"`{DECODE}`, speedup by requests", *(str(b) for b in batches), "host, us: tamis / FlashMLA")
    return table(header, lines, "l" + "r" * len(batches) + "r")


def _others(rows: Sequence[Row]) -> str:
    """A line per prefill, and per decode that was measured with one number of requests."""
    series = in_series(rows)
    lines = [
        (
            f"{_words(row)}, {shape_words(row['shape'])}",
            f"`{row['door']}`",
            _us(row["graph_us"]),
            _us(_fastest(row, rows)["graph_us"]),
            speedup(row["ratio"]),
            _host([row], rows),
        )
        for row in compared(rows)
        if row not in series
    ]
    if not lines:
        return ""
    header = ("other shapes", "function", "tamis, us", "FlashMLA, us", "speedup", "host, us: tamis / FlashMLA")
    return table(header, lines, "llrrrr")


def compared(rows: Sequence[Row]) -> list[Row]:
    """The drop-ins' rows that have a ratio."""
    return [row for row in rows if row["ratio"] and row["door"] in (DECODE, PREFILL)]


def in_series(rows: Sequence[Row]) -> list[Row]:
    """The decodes of a format, top-k and head count that were measured with several numbers of requests."""
    decodes = [row for row in compared(rows) if not is_prompt(row)]
    count = Counter(_kind(row) for row in decodes)
    return [row for row in decodes if count[_kind(row)] > 1]


def _host(ours: Sequence[Row], rows: Sequence[Row]) -> str:
    """The median host times of some rows of ours, and of the fastest build of FlashMLA on the same cells."""
    mine = median(float(row["host_us"]) for row in ours)
    theirs = median(float(_fastest(row, rows)["host_us"]) for row in ours)
    return f"{mine:.0f} / {theirs:.0f}"


def _fastest(row: Row, rows: Sequence[Row]) -> Row:
    """The row of the peer with the shortest replay on the same cell."""
    same = ("gpu", "shape", "heads", "topk", "window", "layout")
    peers = [one for one in rows if one["build"] and one["graph_us"] and all(one[c] == row[c] for c in same)]
    return min(peers, key=lambda one: float(one["graph_us"]))


def requests(row: Row) -> int:
    """How many requests the call serves."""
    return len(parse_shape(row["shape"])[0])


def is_prompt(row: Row) -> bool:
    """Whether a request has more than one new token."""
    return max(parse_shape(row["shape"])[0]) > 1


def _kind(row: Row) -> tuple[str, ...]:
    return (row["layout"], row["topk"], row["window"], row["heads"])


def _topk(row: Row) -> str:
    return f"{row['window']} + {row['topk']}" if row["window"] not in ("", "0") else row["topk"]


def _words(row: Row) -> str:
    formats = {"v32-fp8": "V3.2, FP8", "v32-bf16": "V3.2, bf16", "v4-fp8": "V4, FP8"}
    return f"{formats.get(row['layout'], row['layout'])}, top-k {_topk(row)}, {row['heads']} heads"


def _count(row: Row) -> str:
    return f"{row['kernels']} + {row['copies']}" if row["kernels"] else "-"


def _us(text: str) -> str:
    return digits(text) if text else "-"
