"""Bars of speedups: up from 1 for wins, down from 1 for losses, on a logarithmic axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from tools.docs.svg import Picture

GROUP_GAP, PANEL_GAP = 20, 46
"""Pixels between groups of bars, and between panels, where the next axis is labelled."""
AXIS, TOP, FOOT = 44, 34, 52
"""Pixels of a panel: left of its bars, above its scale, and below it, with one line of labels."""
LINE = 15
"""Pixels from one line of labels to the next."""
HEIGHT = 150.0
"""Pixels of a panel from the lowest to the highest speedup."""
TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 10.0, 20.0)


@dataclass(frozen=True)
class Group:
    """Bars that belong together: a label, of one line or two, and a speedup each."""

    words: str
    bars: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Panel:
    """Groups of bars under one title; `unit` says what the labels of the bars count, a line each."""

    title: str
    unit: str
    groups: Sequence[Group]
    step: float = 27
    """Pixels from one bar to the next."""

    @property
    def width(self) -> float:
        """Pixels, with the labels of the axis."""
        bars = sum(len(group.bars) for group in self.groups)
        return AXIS + self.step * bars + GROUP_GAP * len(self.groups)


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
        """The values that are labelled: 1, and from there up and down those whose labels do not touch."""
        kept = [1.0]
        for tick in sorted(TICKS, key=lambda tick: abs(log(tick))):
            room = min(abs(self.below_top(tick) - self.below_top(other)) for other in kept)
            if self.low <= tick <= self.high and room >= 12:
                kept.append(tick)
        return kept

    def below_top(self, speedup: float) -> float:
        """Pixels from the upper end of the axis."""
        return self.height * log(self.high / speedup) / log(self.high / self.low)


def draw_rows(title: str, notes: Sequence[str], rows: Sequence[Sequence[Panel]]) -> str:
    """A picture of rows of panels, all on one scale, under a title with lines of notes and a legend."""
    every = [speedup for row in rows for panel in row for group in panel.groups for _, speedup in group.bars]
    scale = Scale.around(every, HEIGHT)
    width = max(sum(panel.width for panel in row) + PANEL_GAP * (len(row) - 1) for row in rows) + 24
    head = 62 + 17 * len(notes)
    lines = max(panel.unit.count("\n") for row in rows for panel in row)
    down = TOP + HEIGHT + FOOT + LINE * lines
    p = Picture(width, head + len(rows) * down + 8, title)
    p.text(16, 28, title, "title")
    for number, words in enumerate(notes):
        p.text(16, 48 + 17 * number, words, "small muted")
    for left, kind, words in ((16, "win", "above 1: tamis is faster"), (196, "loss", "below 1: tamis is slower")):
        p.box(left, head - 20, 11, 11, kind, round_=2)
        p.text(left + 17, head - 10, words, "small")
    for number, row in enumerate(rows):
        x, top = 8.0, head + number * down + TOP
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
    _lines(p, left + 8, foot + 18, panel.unit, "small muted")
    under = foot + 36 + LINE * panel.unit.count("\n")
    for group in panel.groups:
        middle = x + panel.step * len(group.bars) / 2
        for label, speedup in group.bars:
            _bar(p, scale, x + panel.step / 2, top, speedup)
            _lines(p, x + panel.step / 2, foot + 18, label, "small middle muted")
            x += panel.step
        p.text(middle, under, group.words, "small middle")
        x += GROUP_GAP


def _lines(p: Picture, x: float, y: float, words: str, kind: str) -> None:
    for number, line in enumerate(words.split("\n")):
        p.text(x, y + LINE * number, line, kind)


def _bar(p: Picture, scale: Scale, middle: float, top: float, speedup: float) -> None:
    """A bar between 1 and the speedup, with its number at the far end."""
    one, tip = top + scale.below_top(1), top + scale.below_top(speedup)
    kind, words = ("win", tip - 5) if speedup >= 1 else ("loss", tip + 12)
    p.box(middle - 9.5, min(one, tip), 19, max(1.5, abs(one - tip)), kind, round_=1)
    p.text(middle, words, f"{speedup:.2f}", "tiny middle" if speedup >= 1 else "tiny middle strong")
