"""Bars of speedups: up from 1 for wins, down from 1 for losses, on a logarithmic axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from tools.docs.svg import Picture

STEP, GROUP_GAP, PANEL_GAP = 26, 20, 46
"""Pixels: from one bar to the next, between groups of bars, and between panels, where the next axis is labelled."""
AXIS, TOP, FOOT = 44, 34, 52
"""Pixels of a panel: left of its bars, above its scale, and below it."""
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Group:
    """Bars that differ in one thing: a label and a speedup each."""

    words: str
    bars: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Panel:
    """Groups of bars under one title; `unit` says what the labels of the bars count."""

    title: str
    unit: str
    groups: Sequence[Group]

    @property
    def width(self) -> float:
        """Pixels, with the labels of the axis."""
        bars = sum(len(group.bars) for group in self.groups)
        return AXIS + STEP * bars + GROUP_GAP * len(self.groups)


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis: a win by a factor is as long as a loss by the same factor."""

    low: float
    high: float
    height: float

    @classmethod
    def around(cls, speedups: Sequence[float], pixels: float) -> "Scale":
        """The scale from one tick below the smallest speedup to one above the largest; 1 is always in it."""
        low = max(tick for tick in TICKS if tick < min(1.0, *speedups))
        high = min(tick for tick in TICKS if tick > max(1.0, *speedups))
        return cls(low, high, pixels)

    def ticks(self) -> list[float]:
        """The values that are labelled."""
        return [tick for tick in TICKS if self.low <= tick <= self.high]

    def below_top(self, speedup: float) -> float:
        """Pixels from the upper end of the axis."""
        return self.height * log(self.high / speedup) / log(self.high / self.low)


def draw_rows(title: str, notes: Sequence[str], rows: Sequence[Sequence[Panel]], height: float = 150) -> str:
    """A picture of rows of panels, all on one scale, under a title with lines of notes and a legend."""
    every = [speedup for row in rows for panel in row for group in panel.groups for _, speedup in group.bars]
    scale = Scale.around(every, height)
    width = max(sum(panel.width for panel in row) + PANEL_GAP * (len(row) - 1) for row in rows) + 24
    head = 62 + 17 * len(notes)
    p = Picture(width, head + len(rows) * (TOP + height + FOOT) + 8, title)
    p.text(16, 28, title, "title")
    for number, words in enumerate(notes):
        p.text(16, 48 + 17 * number, words, "small muted")
    for left, kind, words in ((16, "win", "above 1: tamis is faster"), (196, "loss", "below 1: tamis is slower")):
        p.box(left, head - 20, 11, 11, kind, round_=2)
        p.text(left + 17, head - 10, words, "small")
    for number, row in enumerate(rows):
        x, top = 8.0, head + number * (TOP + height + FOOT) + TOP
        for panel in row:
            _panel(p, panel, scale, x, top)
            x += panel.width + PANEL_GAP
    return p.render()


def _panel(p: Picture, panel: Panel, scale: Scale, left: float, top: float) -> None:
    p.text(left + 8, top - 14, panel.title, "strong")
    end = left + panel.width
    for tick in scale.ticks():
        y = top + scale.below_top(tick)
        p.line((left + AXIS - 6, y), (end, y), kind="line" if tick == 1 else "thin faint")
        p.text(left + AXIS - 10, y + 4, f"{tick:g}", "small muted end")
    x, foot = left + AXIS + GROUP_GAP / 2, top + scale.height
    p.text(left + 8, foot + 18, panel.unit, "small muted")
    for group in panel.groups:
        middle = x + STEP * len(group.bars) / 2
        for label, speedup in group.bars:
            _bar(p, scale, x, top, speedup)
            p.text(x + STEP / 2, foot + 18, label, "small middle muted")
            x += STEP
        p.text(middle, foot + 36, group.words, "small middle")
        x += GROUP_GAP


def _bar(p: Picture, scale: Scale, x: float, top: float, speedup: float) -> None:
    """A bar between 1 and the speedup, with its number at the far end."""
    one, tip = top + scale.below_top(1), top + scale.below_top(speedup)
    kind, words = ("win", tip - 5) if speedup >= 1 else ("loss", tip + 12)
    p.box(x + 4, min(one, tip), STEP - 8, max(1.5, abs(one - tip)), kind, round_=1)
    p.text(x + STEP / 2, words, f"{speedup:.2f}", "tiny middle" if speedup >= 1 else "tiny middle strong")
