"""The table of all comparisons at a glance: how much faster or slower than its baseline each kind of call is."""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from tamis.lab.bench.record import FLASH_MLA
from tamis.step.batch import parse_shape
from tools.docs import doors, engines, results, slower
from tools.docs.markdown import table
from tools.docs.results import Row, speedup

FEW = 32
"""The most heads that FlashMLA pads to twice as many or more."""
DRAFTS = 16
"""The most new tokens of a request that decodes; prompts have more."""
DECODES = {
    "v32-fp8": "decode over FP8 rows",
    "v32-bf16": "decode over bf16 rows",
    "v4-fp8": "V4 decode over FP8 rows",
}
PROMPTS = {
    "v32-fp8": "prompt over FP8 rows",
    "v32-bf16": "prompt over bf16 rows",
    "v4-bf16": "prompt over bf16 rows",
}
ENGINES = "throughput of engines with tiny models, which the host bounds"


class Kind(NamedTuple):
    """Calls that share a line of the table."""

    what: str
    ratios: list[float]
    baselines: set[str]
    heads: set[int]
    """The head counts of attention; empty for other stages."""


def glance() -> str:
    """A line for each kind of call, from the largest median to the smallest."""
    found = sorted(everything(), key=lambda kind: -median(kind.ratios))
    header = ("on one H200", "speedup, median", "slower in", "range", "baseline")
    return table(header, [_line(kind) for kind in found], "lrrrl")


def score() -> str:
    """How many comparisons are won, and which kinds of calls have losses."""
    found = everything()
    ratios = [ratio for kind in found for ratio in kind.ratios]
    lost = sorted((min(kind.ratios), _words(kind)) for kind in found if min(kind.ratios) < 1)
    won = len([ratio for ratio in ratios if ratio >= 1])
    counts = (
        f"In **{won} of {len(ratios)}** comparisons on one H200, tamis is as fast as the fastest baseline or faster."
    )
    if not lost:
        return counts
    slowest = "; ".join(f"{words} (**{ratio:.2f}**)" for ratio, words in reversed(lost))
    return f"{counts} It is slower in some calls of these kinds (with the lowest speedup of each): {slowest}."


def everything() -> list[Kind]:
    """Every comparison with a baseline: of stages, of the functions that a program calls, and of engines."""
    stages = slower.compared(row for name in results.names() for row in results.read(name))
    calls = [{**row, "stage": "attend", "peer": FLASH_MLA[0]} for row in doors.compared(doors.read())]
    return [
        *kinds([*stages, *calls]),
        Kind(ENGINES, [race.throughput for race in engines.races()], {"the engine's own"}, set()),
    ]


def kinds(rows: Iterable[Row]) -> list[Kind]:
    """Rows with a ratio, by what they measured."""
    found: dict[tuple[str, str], Kind] = {}
    for row in rows:
        what, heads = _what(row), int(row["heads"]) if row["stage"] == "attend" else 0
        # Over V3.2's FP8 rows there are enough decodes to show 64 and more heads apart.
        group = "few" if heads <= FEW else "64" if heads == 64 and what == DECODES["v32-fp8"] else "many"
        kind = found.setdefault((what, group), Kind(what, [], set(), set()))
        kind.ratios.append(float(row["ratio"]))
        kind.baselines.add(slower.baseline(row).removeprefix("gather + "))
        if heads:
            kind.heads.add(heads)
    return list(found.values())


def _what(row: Row) -> str:
    """`decode over FP8 rows`, `indexer scores of prompts`; a top-k gets rows of scores, whatever they are of."""
    stage = row["stage"]
    prompt = max(parse_shape(row["shape"])[0]) > DRAFTS
    if stage == "attend":
        return (PROMPTS if prompt else DECODES)[row["layout"]]
    what = slower.STAGES.get(stage, stage)
    return what if stage.startswith("topk") else f"{what}, {'prompts' if prompt else 'decodes'}"


def _line(kind: Kind) -> tuple[str, ...]:
    lost = len([ratio for ratio in kind.ratios if ratio < 1])
    count = f"**{lost} of {len(kind.ratios)}**" if lost else f"0 of {len(kind.ratios)}"
    names = " or ".join(sorted(kind.baselines, reverse=True))
    return _words(kind), speedup(str(median(kind.ratios))), count, slower.span(kind.ratios), names


def _words(kind: Kind) -> str:
    """`decode over FP8 rows, 8 to 32 heads`."""
    heads = [str(count) for count in sorted(kind.heads)]
    if not heads:
        return kind.what
    return f"{kind.what}, {' and '.join(heads) if len(heads) < 3 else f'{heads[0]} to {heads[-1]}'} heads"
