"""The pictures and the table of times of `docs/selecting.md`."""

from collections.abc import Sequence

import torch

from tamis.ops import topk_positions
from tamis.step.batch import parse_shape
from tools.docs.bars import Group, Panel, draw_rows
from tools.docs.markdown import table
from tools.docs.results import Row, digits, origin, read
from tools.docs.svg import Picture

SCORES = [3.0, 7.0, 5.0, 9.0, 5.0, 1.0, 5.0, 8.0, 0.0, 5.0, 6.0, 2.0, 4.0, 9.0]
SEEN, K = 12, 6
LEFT, CELL, FOOT, UNIT = 156, 48, 164, 12
"""Pixels: the left edge of position 0, the width of a position, where bars stand, and the height of a score of 1."""

FILE = "h200_select"
PARTS = {
    "scores": ("scores", "deepgemm", "vs. DeepGEMM"),
    "top-k": ("topk", "vllm", "vs. vLLM"),
    "top-k, mostly equal": ("topk-ties", "vllm", "vs. vLLM"),
    "one call": ("index", "vllm", "vs. both"),
}
"""For each time of a line: the stage, the peer, and the heading of the ratio."""
PLOTTED = (
    ("scores", "deepgemm", "scores, against DeepGEMM"),
    ("topk", "vllm", "top-k, against vLLM"),
    ("index", "vllm", "both in one call, against DeepGEMM + vLLM"),
)
"""For each panel of the plot: the stage, the peer, and its title."""


def draw() -> str:
    """Scores, the k-th highest, winners and ties, and ascending positions, as `topk_positions` selects them."""
    scores = torch.tensor([SCORES], dtype=torch.float32)
    chosen = topk_positions(scores, torch.tensor([SEEN], dtype=torch.int32), K, backend="reference")[0].tolist()
    bar = sorted(SCORES[:SEEN], reverse=True)[K - 1]
    p = Picture(LEFT + CELL * len(SCORES) + 24, 376, "From scores to selected positions")
    _bars(p, bar, chosen)
    _marks(p, bar, chosen)
    p.text(24, 329, "result")
    p.text(24, 347, "ascending", "small muted")
    spread = CELL * SEEN / K
    for column, position in enumerate(chosen):
        x = LEFT + spread * column + spread / 2
        p.line((LEFT + CELL * (position + 0.5), 251), (x, 306), kind="thin")
        kind = "blue" if SCORES[position] > bar else "amber"
        p.labelled(x - CELL / 2, 308, CELL, 36, str(position), kind, "code")
    return p.render()


def _bars(p: Picture, bar: float, chosen: Sequence[int]) -> None:
    p.text(24, 42, "scores")
    p.text(24, 60, f"top-k of {K}", "small muted")
    for position, score in enumerate(SCORES):
        x, height = LEFT + CELL * position, max(2.0, UNIT * score)
        p.box(x + 8, FOOT - height, CELL - 16, height, _kind(position, bar, chosen), round_=2)
        p.text(x + CELL / 2, FOOT - height - 6, f"{score:g}", "middle code small")
        p.text(x + CELL / 2, FOOT + 18, str(position), "middle code small muted")
    y, end = FOOT - UNIT * bar, LEFT + CELL * SEEN
    p.line((LEFT, y), (end, y), kind="line")
    p.text(24, y - 2, f"threshold: {bar:g}")
    p.text(24, y + 16, f"the {K}th highest score", "small muted")
    p.text(24, FOOT + 18, "position", "small muted")
    p.line((end, 32), (end, 262), kind="thin")
    p.text(end + 8, 42, "not seen", "small muted")


def _marks(p: Picture, bar: float, chosen: Sequence[int]) -> None:
    p.text(24, 229, "winners and ties")
    for position, score in enumerate(SCORES[:SEEN]):
        words = "win" if score > bar else "tie" if score == bar else ""
        p.labelled(LEFT + CELL * position, 214, CELL, 36, words, _kind(position, bar, chosen), "small")
    won, tied = (sum(test(score) for score in SCORES[:SEEN]) for test in (bar.__lt__, bar.__eq__))
    p.text(24, 247, f"{won} win, and {K - won} of {tied} ties", "small muted")


def _kind(position: int, bar: float, chosen: Sequence[int]) -> str:
    if position >= SEEN:
        return "grey"
    if position not in chosen:
        return "rose" if SCORES[position] == bar else "box"
    return "blue" if SCORES[position] > bar else "amber"


def costs() -> str:
    """One line per shape of `tamis bench select`: times of each stage and how many times as long the peers take."""
    rows = read(FILE)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    header = ["tokens x keys"]
    for name, (_, _, words) in PARTS.items():
        header += [name, words]
    lines = [(_tokens(shape), *_times(rows, shape)) for shape in shapes]
    header += ["of roofline", "host"]
    text = f"{origin(rows)}\n\n" + table(header, lines, "l" + "r" * (len(header) - 1))
    calls = [row["ratio"] for row in rows if (row["stage"], row["peer"]) == ("index", "vllm") and row["ratio"]]
    if not calls:
        return text
    low, high = min(map(float, calls)), max(map(float, calls))
    return f"{text}\n\nOne call runs at {low:.2f} to {high:.2f} times the speed of both baselines together."


def draw_speed() -> str:
    """Speedups over DeepGEMM and vLLM: a panel per stage that was measured, prompts and decodes apart."""
    rows = read(FILE)
    panels = []
    for stage, peer, words in PLOTTED:
        bars: dict[str, list[tuple[str, float]]] = {"prompt": [], "decode": []}
        for row in rows:
            if (row["stage"], row["peer"]) == (stage, peer) and row["ratio"]:
                new, lengths = parse_shape(row["shape"])
                kind = "decode" if max(new) == 1 else "prompt"
                bars[kind].append((f"{sum(new)}\n{lengths[0] // 1024}K", float(row["ratio"])))
        groups = [Group(kind, some) for kind, some in bars.items() if some]
        panels += [Panel(words, "tokens\nkeys", groups, step=40)] if groups else []
    notes = [
        "Time of the baseline divided by that of tamis. One H200, replayed CUDA graphs.",
        "64 index heads, FP8 keys, top-k 2048. A prompt is one request; decodes have one token per request.",
    ]
    return draw_rows("Selecting: speedup over DeepGEMM and vLLM", notes, [panels])


def _times(rows: Sequence[Row], shape: str) -> list[str]:
    """The cells of a line; share of the roofline and host time are those of the one call."""
    cells, last = [], None
    for stage, peer, _ in PARTS.values():
        mine = [row for row in rows if (row["shape"], row["stage"]) == (shape, stage)]
        against = [row for row in mine if row["peer"] == peer and row["ratio"]]
        cells += [f"{digits(mine[0]['median_us'])} us" if mine else "-"]
        cells += [f"{float(against[0]['ratio']):.2f}" if against else "-"]
        last = mine[0] if mine else None
    if last is None:
        return [*cells, "-", "-"]
    share = 100 * float(last["roofline_us"]) / float(last["median_us"])
    return [*cells, f"{share:.0f}%", f"{digits(last['host_us'])} us" if last["host_us"] else "-"]


def _tokens(shape: str) -> str:
    """`1q4ks64k` -> `4096 x 64K`; decodes are named so."""
    new, lengths = parse_shape(shape)
    keys = f"{lengths[0] // 1024}K"
    return f"{len(new)} decodes x {keys}" if max(new) == 1 else f"{sum(new)} x {keys}"
