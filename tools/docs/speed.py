"""The picture of speedups over FlashMLA, from the rows of `tamis bench door` and `tamis bench prefill`."""

from collections.abc import Sequence

from tamis.step.batch import parse_shape
from tools.docs import doors
from tools.docs.bars import Group, Panel, draw_rows
from tools.docs.results import Row, read

FORMATS = {"v32-bf16": "bf16", "v32-fp8": "FP8"}
GATHERED = ("h200_prefill", "flashmla-gather")
"""The file and the peer of what vLLM does with prompts over FP8 rows from 32 heads on; `tamis bench door` lacks it."""


def draw() -> str:
    """Decodes by heads and number of requests, prompts by heads: one bar per measurement."""
    rows = doors.compared(doors.read())
    decodes, gathered = doors.in_series(rows), _gathered(rows)
    builds, others = (
        ", ".join(sorted({row[name] for row in some})) for name, some in (("against", rows), ("peer_build", gathered))
    )
    notes = [
        f"Time of FlashMLA's fastest build ({builds}) divided by that of tamis. One H200, replayed CUDA graphs.",
        "Decode: one new token per request, of 16384. Prompt: 4096 new tokens of 8192, top-k 2048.",
        f"FP8, gather: against vLLM's gather of FP8 rows into bf16 rows, followed by FlashMLA ({others}).",
    ]
    first = [_decodes("V3.2 decode, FP8, top-k 2048", decodes, "v32-fp8", "2048"), _prompts(rows, gathered)]
    second = [
        _decodes(f"V4 decode, FP8, window 128 + top-k {topk}", decodes, "v4-fp8", topk) for topk in ("512", "1024")
    ]
    return draw_rows("Speedup over FlashMLA by heads and requests", notes, [first, second])


def _decodes(title: str, decodes: Sequence[Row], layout: str, topk: str) -> Panel:
    """A group per head count, a bar per number of requests."""
    same = [row for row in decodes if (row["layout"], row["topk"]) == (layout, topk)]
    heads = sorted({int(row["heads"]) for row in same})
    groups = [
        Group(
            f"{count} heads",
            [(str(doors.requests(row)), float(row["ratio"])) for row in same if row["heads"] == str(count)],
        )
        for count in heads
    ]
    return Panel(title, "requests", groups)


def _prompts(rows: Sequence[Row], gathered: Sequence[Row]) -> Panel:
    """A group per format, a bar per head count; last, against the gather that vLLM does instead."""
    prompts = [row for row in rows if doors.is_prompt(row)]
    groups = {words: [row for row in prompts if row["layout"] == layout] for layout, words in FORMATS.items()}
    groups["FP8, gather"] = list(gathered)
    bars = [Group(words, [(row["heads"], float(row["ratio"])) for row in some]) for words, some in groups.items()]
    return Panel("V3.2 prompt", "heads", bars)


def _gathered(rows: Sequence[Row]) -> list[Row]:
    """The rows against vLLM's gather, of the shapes of the prompts among `rows`."""
    shapes = [parse_shape(row["shape"]) for row in rows if doors.is_prompt(row)]
    file, peer = GATHERED
    return [row for row in read(file) if row["peer"] == peer and parse_shape(row["shape"]) in shapes]
