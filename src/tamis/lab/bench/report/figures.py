"""How the figures of a report are drawn with matplotlib: panels, alone in the page and together in a PNG file.

In the page each panel is an SVG drawing of its own, so that the browser arranges them by the width of the window. The
colours in it are replaced by the page's CSS variables, so that it follows the page's light or dark scheme.
"""

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from tamis.lab.bench.record import Row
from tamis.lab.html import escape

WIDTH = 4.2
"""Width of a panel in inches."""
LEGEND_DROP = 0.54
"""Inches from the axes down to their legend: room for the labels of the ticks and the title of the axis."""
MARKERS = "os^Dv"


@dataclass(frozen=True)
class Palette:
    """Colours by purpose."""

    ink: str
    soft: str
    line: str
    card: str
    series: tuple[str, ...]


LIGHT = Palette("#1b2426", "#5c6b6f", "#dfe4e2", "#ffffff", ("#0d6e7c", "#c2571a", "#6d5aa8", "#4f7d2f", "#8a6d00"))
THEMED = Palette("#00000a", "#00000b", "#00000c", "#00000d", ("#00010a", "#00010b", "#00010c", "#00010d", "#00010e"))
"""Placeholder colours, each replaced by the CSS variable in `_VARIABLES`."""
_VARIABLES = dict(
    zip(
        (THEMED.ink, THEMED.soft, THEMED.line, THEMED.card, *THEMED.series),
        ("--ink", "--soft", "--line", "--card", "--accent", "--second", "--third", "--fourth", "--fifth"),
        strict=True,
    )
)


class Tips:
    """Texts that a browser shows when the pointer is over a mark of a figure."""

    def __init__(self) -> None:
        """Start without texts."""
        self._texts: list[str] = []

    def add(self, text: str) -> str:
        """Add a text and return the gid that its mark must be drawn with."""
        self._texts.append(text)
        return f"tip-{len(self._texts) - 1}"

    def insert(self, svg: str) -> str:
        """Put the texts into the marks' groups."""
        return re.sub(
            r'<g id="tip-(\d+)">', lambda at: f"{at.group()}<title>{escape(self._texts[int(at.group(1))])}</title>", svg
        )


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    height: float
    """In inches, with legend and labels."""
    paint: Callable[[Any, Palette, Tips], None]
    """Draws into matplotlib's axes."""


@dataclass(frozen=True)
class FigureKind:
    """One figure of a report."""

    name: str
    title: str
    note: str
    columns: int
    """Columns of panels in the PNG file."""
    panels: Callable[[Sequence[Row]], list[Panel]]
    """The panels of some rows; none where no row belongs in the figure."""


@dataclass(frozen=True)
class Drawing:
    """A panel as SVG, with the title that the page shows above it."""

    title: str
    svg: str


def draw_svg(kind: FigureKind, panels: Sequence[Panel]) -> list[Drawing]:
    """Each panel as SVG for the page, without its title."""
    drawings = []
    for number, panel in enumerate(panels):
        tips = Tips()
        with matplotlib.rc_context(_settings(kind, THEMED)):
            figure = Figure(figsize=(WIDTH, panel.height))
            _paint(figure.subplots(), panel, THEMED, tips)
            drawn = _saved(figure, "svg").decode("utf-8")
        drawings.append(Drawing(panel.title, _for_page(drawn, f"{kind.name}-{number}", panel.title, tips)))
    return drawings


def draw_png(kind: FigureKind, panels: Sequence[Panel]) -> bytes:
    """All panels in one PNG file, in light colours."""
    columns: list[list[Panel]] = [[] for _ in range(min(kind.columns, len(panels)))]
    titles = {panel.title: textwrap.wrap(panel.title, 36) for panel in panels}

    def heights(column: Sequence[Panel]) -> list[float]:
        return [panel.height + 0.2 + 0.16 * len(titles[panel.title]) for panel in column]

    for panel in panels:
        min(columns, key=lambda column: sum(heights(column))).append(panel)
    tallest = max(sum(heights(column)) for column in columns)
    with matplotlib.rc_context(_settings(kind, LIGHT)):
        figure = Figure(figsize=(WIDTH * len(columns), tallest))
        for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
            part.set_facecolor(LIGHT.card)
            ratios = heights(column)
            # A shorter column ends in an empty place, so that its panels are not stretched.
            missing = tallest - sum(ratios)
            axes = part.subplots(len(column) + 1, 1, height_ratios=[*ratios, max(missing, 1e-3)])
            axes[-1].set_axis_off()
            for ax, panel in zip(axes, column, strict=False):
                _paint(ax, panel, LIGHT, Tips())
                ax.set_title("\n".join(titles[panel.title]))
        return _saved(figure, "png")


def _settings(kind: FigureKind, palette: Palette) -> dict[str, Any]:
    return {
        "font.family": "sans-serif",
        "font.size": 9.5,
        "svg.fonttype": "none",
        "text.parse_math": False,  # dollars in a name do not mean a formula
        "svg.hashsalt": kind.name,
        "text.color": palette.ink,
        "axes.edgecolor": palette.line,
        "axes.labelcolor": palette.soft,
        "axes.titlecolor": palette.ink,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": palette.card,
        "figure.facecolor": palette.card,
        "hatch.linewidth": 1.6,
        "xtick.color": palette.soft,
        "ytick.color": palette.soft,
        "grid.color": palette.line,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "legend.labelcolor": palette.soft,
        "legend.borderpad": 0.0,
        "legend.borderaxespad": 0.0,
        "legend.columnspacing": 1.2,
    }


def _paint(ax: Any, panel: Panel, palette: Palette, tips: Tips) -> None:
    panel.paint(ax, palette, tips)
    ax.set_axisbelow(True)
    for name, axis in (("axis-x", ax.xaxis), ("axis-y", ax.yaxis)):
        axis.label.set_gid(name)


def _saved(figure: Figure, form: str) -> bytes:
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=140, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _for_page(svg: str, name: str, title: str, tips: Tips) -> str:
    """The SVG with the page's colours, and with ids that begin with `name`, so that they are unique on the page."""
    svg = svg[svg.index("<svg") :]
    # The page's policy forbids further style elements; its own style sheet has matplotlib's one rule.
    svg = re.sub(r"<style type=.text/css.>.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = tips.insert(svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def short(name: str) -> str:
    """A name that leaves room for the axes: the beginning of a long one."""
    return name if len(name) <= 40 else f"{name[:39]}…"


def legend_below(ax: Any, columns: int, handles: Sequence[Any] | None = None) -> None:
    """A legend under the axes, where it cannot hide what they show."""
    below = ax.transAxes + ScaledTranslation(0, -LEGEND_DROP, ax.get_figure().dpi_scale_trans)
    given = {} if handles is None else {"handles": handles}
    ax.legend(loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below, ncols=columns, **given)


def legend_height(entries: int, columns: int) -> float:
    """The inches that a legend of some entries takes."""
    return 0.19 * -(-entries // columns)
