"""The picture of speedups over FlashMLA, from the rows of `tamis bench door` and `tamis bench prefill`."""

from collections.abc import Sequence

from tamis.step.batch import parse_shape
from tools.docs import doors
from tools.docs.bars import Group, Panel, draw_rows
from tools.docs.markdown import table
from tools.docs.results import Row, read, speedup

FORMATS = {"v32-bf16": "bf16", "v32-fp8": "FP8"}
GATHER = ("h200_prefill", "flashmla-gather", "FP8, gather")
"""The file, the peer and the name of what vLLM does with prompts over FP8 rows from 32 heads on. `tamis bench door` has
no such rows."""
PROMPT = parse_shape("1q4ks8k")
"""The shape of the prompts in the plot."""

PROMPTS = {
    "bf16": "bf16 rows, against FlashMLA's prefill",
    "FP8": "FP8 pages, against FlashMLA over the same pages",
    GATHER[2]: "FP8 pages, against a gather into bf16 rows and FlashMLA's prefill",
}
"""The groups of prompts in words."""


def draw() -> str:
    """Decodes by heads and number of requests, prompts by heads: one bar per measurement."""
    rows = doors.compared(doors.read())
    builds = ", ".join(sorted({row["against"] for row in rows}))
    notes = [
        f"Time of FlashMLA's fastest build ({builds}) divided by that of tamis. One H200, replayed CUDA graphs.",
        "Decode: one new token per request, of 16384. Prompt: 4096 new tokens of 8192, top-k 2048.",
    ]
    if gathered := _gathered(rows):
        others = ", ".join(sorted({row["peer_build"] for row in gathered})).replace("vllm", "vLLM")
        notes.append(f"{GATHER[2]}: against a gather of FP8 rows into bf16 rows, followed by FlashMLA ({others}).")
    return draw_rows("Speedup over FlashMLA by heads and requests", notes, _panels(rows))


def losses() -> str:
    """How many bars are below 1, and which."""
    panels = [panel for row in _panels(doors.compared(doors.read())) for panel in row]
    bars = [(panel, group, label, ratio) for panel in panels for group in panel.groups for label, ratio in group.bars]
    slower = [
        f"{panel.title}, {group.words}, {label} {panel.unit} ({ratio:.2f})"
        for panel, group, label, ratio in bars
        if ratio < 1
    ]
    counts = f"Of the {len(bars)} measurements in the plot, tamis is faster in {len(bars) - len(slower)}"
    if not slower:
        return f"In all {len(bars)} measurements of the plot, tamis is faster."
    return f"{counts} and slower in {len(slower)}: {'; '.join(slower)}."


def prompts() -> str:
    """Prompts by heads, in the formats and against the baselines of the plot."""
    groups = _prompts(doors.compared(doors.read())).groups
    heads = sorted({label for group in groups for label, _ in group.bars}, key=int)
    lines = [
        (PROMPTS[group.words], *(speedup(str(found[label])) if label in found else "-" for label in heads))
        for group in groups
        for found in [dict(group.bars)]
    ]
    header = ("prompt of 4096 tokens of 8192, top-k 2048: speedup", *(f"{label} heads" for label in heads))
    return table(header, lines, "l" + "r" * len(heads))


def _panels(rows: Sequence[Row]) -> list[list[Panel]]:
    decodes = doors.in_series(rows)
    v4 = [_decodes(f"V4 decode, FP8, window 128 + top-k {topk}", decodes, "v4-fp8", topk) for topk in ("512", "1024")]
    return [[_decodes("V3.2 decode, FP8, top-k 2048", decodes, "v32-fp8", "2048"), _prompts(rows)], v4]


def _decodes(title: str, decodes: Sequence[Row], layout: str, topk: str) -> Panel:
    """A group per head count, a bar per number of requests."""
    same = [row for row in decodes if (row["layout"], row["topk"]) == (layout, topk)]
    groups = [
        Group(f"{heads} heads", [_bar(row, str(doors.requests(row))) for row in same if int(row["heads"]) == heads])
        for heads in sorted({int(row["heads"]) for row in same})
    ]
    return Panel(title, "requests", groups)


def _prompts(rows: Sequence[Row]) -> Panel:
    """A group per format, a bar per head count; last, against the gather that vLLM does instead."""
    prompts = [row for row in rows if doors.is_prompt(row) and parse_shape(row["shape"]) == PROMPT]
    groups = {words: [row for row in prompts if row["layout"] == layout] for layout, words in FORMATS.items()}
    groups[GATHER[2]] = _gathered(rows)
    bars = [Group(words, [_bar(row, row["heads"]) for row in some]) for words, some in groups.items() if some]
    return Panel("V3.2 prompt", "heads", bars)


def _gathered(rows: Sequence[Row]) -> list[Row]:
    """The rows against a gather and FlashMLA; none if there are no prompts among `rows`."""
    file, peer, _ = GATHER
    if not any(doors.is_prompt(row) for row in rows):
        return []
    return [row for row in read(file) if row["peer"] == peer and parse_shape(row["shape"]) == PROMPT]


def _bar(row: Row, label: str) -> tuple[str, float]:
    return label, float(row["ratio"])
