"""The table of what is slower than its baseline, from the newest rows under `benchmarks/results/`."""

from collections.abc import Iterable, Sequence

from tamis.step.batch import parse_shape
from tools.docs import results
from tools.docs.markdown import table
from tools.docs.results import Row

STAGES = {
    "attend": "attention",
    "scores": "indexer scores",
    "topk": "exact top-k",
    "topk-ties": "exact top-k among equal scores",
    "index": "scores and top-k in one call",
}
FORMATS = {"v32-fp8": "V3.2 FP8 rows", "v32-bf16": "bf16 rows", "v4-fp8": "V4 FP8 rows", "index-fp8": "FP8 keys"}
CALL = ("stage", "shape", "heads", "topk", "window", "layout")
"""The columns that say what was computed; the same call may be in several files."""


def slower() -> str:
    """A line for each stage, format and number of heads with a loss: the shapes, the baseline and the speedups."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in losses(row for name in results.names() for row in results.read(name)):
        groups.setdefault((row["stage"], row["layout"], row["heads"], baseline(row)), []).append(row)
    lines = [
        (
            _words(rows),
            span([float(row["ratio"]) for row in rows]),
            peer,
            ", ".join(map(_shape, sorted(rows, key=_requests))),
        )
        for (*_, peer), rows in groups.items()
    ]
    return table(("on one H200", "speedup", "baseline", "shapes"), lines, "lrll") if lines else "Nothing."


def losses(rows: Iterable[Row]) -> list[Row]:
    """The calls that the default backend loses to the fastest of its peers, in their newest run."""
    return [row for row in compared(rows) if float(row["ratio"]) < 1]


def compared(rows: Iterable[Row]) -> list[Row]:
    """Every call of the default backend in its newest run, against the fastest of its peers."""
    calls: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["ratio"]:
            calls.setdefault(tuple(row[column] for column in CALL), []).append(row)
    found = []
    for same in calls.values():
        newest = max(same, key=lambda row: (-results.PREFERENCE.index(row["backend"]), row["time"]))
        run = [row for row in same if (row["backend"], row["commit"]) == (newest["backend"], newest["commit"])]
        found.append(min(run, key=lambda row: float(row["ratio"])))
    return found


def _words(rows: Sequence[Row]) -> str:
    """`attention, bf16 rows, 128 heads`."""
    row = rows[0]
    parts = [STAGES.get(row["stage"], row["stage"]), FORMATS.get(row["layout"], "")]
    return ", ".join(part for part in (*parts, f"{row['heads']} heads" if row["heads"] else "") if part)


def baseline(row: Row) -> str:
    """What was timed against: vLLM's top-k needs scores, which are DeepGEMM's where a call makes both."""
    return ("DeepGEMM + " if row["stage"] == "index" else "") + results.PEERS[row["peer"]]


def _requests(row: Row) -> tuple[int, int]:
    new, _ = parse_shape(row["shape"])
    return len(new), new[0]


def _shape(row: Row) -> str:
    """`64 x 2 of 16K`: requests, new tokens, tokens in all."""
    new, lengths = parse_shape(row["shape"])
    return f"{len(new)} x {new[0]} of {lengths[0] // 1024}K"


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [float(row["ratio"]) for row in rows]


def span(ratios: Sequence[float]) -> str:
    """`0.97 to 0.99`; one number if both round to it."""
    return " to ".join(dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}")))
