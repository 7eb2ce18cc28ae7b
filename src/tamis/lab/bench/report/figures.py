"""The figures of a report, drawn with matplotlib: roofline, peers, latency.

Each figure is drawn twice: as a PNG file in light colours, and as SVG for the page. The SVG's colours are replaced by
the page's CSS variables, so that the figure follows the page's light or dark scheme.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, TypeAlias

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from tamis.lab.bench.record import Row
from tamis.lab.bench.report.data import compact, describe, even_shape, find_limits, once, speed
from tamis.lab.html import escape

WIDTH = 11.0
"""Width of every figure in inches."""


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
        ("--ink", "--soft", "--line", "--card", "--accent", "--second", "--third", "--fourth", "--soft"),
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

    def insert(self, svg: str, name: str) -> str:
        """Put the texts into the marks' groups; the figure's name makes their ids unique on the page."""
        for number, text in enumerate(self._texts):
            svg = svg.replace(f'<g id="tip-{number}">', f'<g id="{name}-{number}"><title>{escape(text)}</title>')
        return svg


@dataclass(frozen=True)
class FigureKind:
    """One figure of a report."""

    name: str
    title: str
    note: str
    make: Callable[[Sequence[Row], Palette, Tips], Figure | None]
    """Draws the figure; returns None where no row belongs in it."""


def draw(kind: FigureKind, rows: Sequence[Row], palette: Palette, form: Literal["svg", "png"]) -> bytes | None:
    """The figure as the bytes of an SVG or PNG file, or None where no row belongs in it."""
    settings: dict[str, Any] = {
        "font.family": "sans-serif",
        "font.size": 10,
        "svg.fonttype": "none",
        "text.parse_math": False,  # dollars in a name do not mean a formula
        "svg.hashsalt": kind.name,
        "text.color": palette.ink,
        "axes.edgecolor": palette.line,
        "axes.labelcolor": palette.soft,
        "axes.titlecolor": palette.ink,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": palette.card,
        "figure.facecolor": palette.card,
        "xtick.color": palette.soft,
        "ytick.color": palette.soft,
        "grid.color": palette.line,
        "legend.frameon": False,
        "legend.labelcolor": palette.soft,
    }
    tips = Tips()
    with matplotlib.rc_context(settings):
        figure = kind.make(rows, palette, tips)
        if figure is None:
            return None
        FigureCanvasAgg(figure)
        figure.set_layout_engine("constrained")
        out = io.BytesIO()
        figure.savefig(out, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue() if form == "png" else _for_page(out.getvalue().decode("utf-8"), kind, tips).encode("utf-8")


def _for_page(svg: str, kind: FigureKind, tips: Tips) -> str:
    svg = svg[svg.index("<svg") :]
    # The page's policy forbids further style elements; its own style sheet has matplotlib's one rule.
    svg = re.sub(r"<style type=.text/css.>.*?</style>", "", svg, flags=re.S)
    svg = tips.insert(svg, kind.name)
    # The ids of clip paths and markers must differ between the figures of one page.
    for name in set(re.findall(r'id="([^"]+)"', svg)):
        if not name.startswith(kind.name):
            svg = svg.replace(f'id="{name}"', f'id="{kind.name}-{name}"').replace(f"#{name})", f"#{kind.name}-{name})")
            svg = svg.replace(f'href="#{name}"', f'href="#{kind.name}-{name}"')
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(kind.title)}" ', 1)


def _machines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.gpu, []).append(row)
    return found


def _colours(names: Sequence[str], palette: Palette) -> dict[str, str]:
    return {name: palette.series[number % len(palette.series)] for number, name in enumerate(dict.fromkeys(names))}


def roofline(rows: Sequence[Row], palette: Palette, tips: Tips) -> Figure | None:
    """One row of panels per machine: achieved rates under the roofline, and each measurement's share of its limit."""
    machines = {name: once(r for r in own if r.roofline_us > 0) for name, own in _machines(rows).items()}
    machines = {name: own for name, own in machines.items() if own}
    if not machines:
        return None
    figure = Figure(figsize=(WIDTH, 4.9 * len(machines)))
    axes = figure.subplots(len(machines), 2, squeeze=False, width_ratios=(1.25, 1))
    for (name, own), (left, right) in zip(machines.items(), axes, strict=True):
        _roof(left, name, own, palette, tips)
        _shares(right, own, palette, tips)
    return figure


def _roof(ax: Any, machine: str, rows: list[Row], palette: Palette, tips: Tips) -> None:
    computing = [row for row in rows if row.flops]
    limits = find_limits(rows)
    ax.set_title(machine)
    if not computing or limits.bytes_per_second is None:
        ax.text(0.5, 0.5, "no row here computes", ha="center", transform=ax.transAxes, color=palette.soft)
        ax.set_axis_off()
        return
    intensity = [row.flops / row.bytes for row in computing]
    low, high = min(intensity) / 3, max(intensity) * 3
    bandwidth, peak = limits.bytes_per_second, limits.flops_per_second
    _limit_line(ax, (low, high), bandwidth, peak, "bf16", {"color": palette.ink, "lw": 1.5}, palette)
    if peak and any(speed(row) > 1 for row in computing):
        _limit_line(ax, (low, high), bandwidth, 2 * peak, "FP8", {"color": palette.soft, "lw": 1}, palette)
    label = f"{bandwidth / 1e12:.3g} TB/s" if bandwidth >= 1e11 else f"{bandwidth / 1e9:.3g} GB/s"
    ax.annotate(label, (low, low * bandwidth / 1e12), (14, 2), textcoords="offset points", color=palette.soft)
    _points(ax, computing, palette, tips)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    ax.grid(lw=0.6)
    ax.set_axisbelow(True)
    ax.legend(loc="lower right", scatteryoffsets=[0.5])


def _limit_line(
    ax: Any,
    span: tuple[float, float],
    bandwidth: float,
    peak: float | None,
    dtype: str,
    style: dict[str, Any],
    palette: Palette,
) -> None:
    """Draw the line that rises with the bandwidth and is flat at the peak, where the peak is known."""
    low, high = span
    knee = high if peak is None else min(high, peak / bandwidth)
    ends = [low, knee, high]
    ax.plot(ends, [min(x * bandwidth, peak or x * bandwidth) / 1e12 for x in ends], zorder=1, **style)
    if peak is not None and knee < high:
        text = f"{peak / 1e12:,.0f} TFLOP/s {dtype}"
        ax.annotate(text, (high, peak / 1e12), (0, 5), textcoords="offset points", ha="right", color=palette.soft)


def _points(ax: Any, computing: list[Row], palette: Palette, tips: Tips) -> None:
    """Draw each measurement at its operations per byte and the rate that it achieved."""
    colours = _colours([row.stage for row in computing], palette)
    shown: set[str] = set()
    for row in computing:
        x, y = row.flops / row.bytes, row.flops / row.median_us / 1e6
        gid = tips.add(f"{describe(row)}: {row.median_us:.1f} us, {y:.3g} TFLOP/s, {row.of_roofline:.0%} of its limit")
        name = "" if row.stage in shown else row.stage  # one entry per stage in the legend
        shown.add(row.stage)
        ax.scatter(
            [x], [y], s=34, color=colours[row.stage], edgecolor=palette.card, lw=0.7, label=name, gid=gid, zorder=3
        )


def _shares(ax: Any, rows: list[Row], palette: Palette, tips: Tips) -> None:
    stages = list(dict.fromkeys(row.stage for row in rows))
    for row in rows:
        share = row.of_roofline
        where = stages.index(row.stage)
        same = [other for other in rows if other.stage == row.stage]
        # Points of one stage are spread vertically, so that none hides another.
        offset = (same.index(row) - (len(same) - 1) / 2) * min(0.09, 0.6 / max(1, len(same)))
        gid = tips.add(f"{describe(row)}: {row.median_us:.1f} us, limit {row.roofline_us:.1f} us, {share:.0%}")
        ax.scatter(
            [100 * share], [where + offset], s=26, color=palette.series[0], edgecolor=palette.card, lw=0.6, gid=gid
        )
    ax.axvline(100, color=palette.ink, lw=1.5)
    ax.set_title("Share of the limit")
    ax.set(xlim=(0, 105), xlabel="% of the roofline's speed", yticks=range(len(stages)), yticklabels=stages)
    ax.set_ylim(len(stages) - 0.5, -0.5)
    ax.grid(axis="x", lw=0.6)
    ax.tick_params(axis="y", length=0)


def peers(rows: Sequence[Row], palette: Palette, tips: Tips) -> Figure | None:
    """The peer's time over ours, one bar per measurement."""
    compared = [row for row in rows if row.ratio is not None]
    if not compared:
        return None
    groups: dict[str, list[Row]] = {}
    for row in compared:
        groups.setdefault(f"{row.stage}, {row.layout}, {row.backend} against {row.peer}", []).append(row)
    sides: tuple[list[str], list[str]] = ([], [])
    heights = [0.0, 0.0]
    for name, own in sorted(groups.items(), key=lambda item: -len(item[1])):
        side = heights.index(min(heights))
        sides[side].append(name)
        heights[side] += len(own) + 2.6
    figure = Figure(figsize=(WIDTH, 0.205 * max(heights) + 0.4))
    top = max(2.0, max(row.ratio or 0 for row in compared) * 1.12)
    columns = [side for side in sides if side]
    for part, names in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        part.set_facecolor(palette.card)
        ratios = [len(groups[name]) + 2.0 for name in names]
        axes = part.subplots(len(names), 1, squeeze=False, height_ratios=ratios)
        for ax, name in zip(axes[:, 0], names, strict=True):
            _ratio_bars(ax, name, groups[name], top, palette, tips)
    return figure


def _ratio_bars(ax: Any, name: str, rows: list[Row], top: float, palette: Palette, tips: Tips) -> None:
    ordered = sorted(rows, key=lambda row: (_batch(row), row.heads or 0))
    for place, row in enumerate(ordered):
        ratio = row.ratio or 0.0
        text = f"{describe(row)}: {row.median_us:.1f} us against {row.peer_us or 0:.1f} us of {row.peer}"
        colour = palette.series[0] if ratio >= 1 else palette.series[1]
        ax.barh([place], [ratio], height=0.72, color=colour).patches[0].set_gid(tips.add(text))
        ax.text(top * 0.012, place, f"{ratio:.2f}", va="center", fontsize=8, color=palette.card)
    ax.axvline(1, color=palette.ink, lw=1.2)
    ax.set_title(name, fontsize=9.5)
    labels = [f"{row.shape}  {row.heads}h" if row.heads else row.shape for row in ordered]
    ax.set_yticks(range(len(ordered)), labels, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)
    ax.set(xlim=(0, top), ylim=(len(ordered) - 0.4, -0.6))
    ax.grid(axis="x", lw=0.6)
    ax.set_axisbelow(True)


def _batch(row: Row) -> tuple[int, int]:
    shape = even_shape(row)
    return (shape.requests, shape.length) if shape else (0, 0)


@dataclass(frozen=True)
class _Panel:
    machine: str
    title: str
    axis: str
    lines: "_Lines"


_Lines: TypeAlias = dict[str, list[tuple[int, Row]]]
"""The points of each line by its name: a number of requests or tokens, and the row measured there."""
NEAREST_TICKS = 1.3
"""A tick is labelled only if its number is at least this many times the number of the tick before it."""


def latency(rows: Sequence[Row], palette: Palette, tips: Tips) -> Figure | None:
    """Latency over the number of requests, and over the length of the context."""
    panels = _panels(rows)
    if not panels:
        return None
    columns = min(3, len(panels))
    down = ceil(len(panels) / columns)
    figure = Figure(figsize=(WIDTH, 3.5 * down))
    several = len({panel.machine for panel in panels}) > 1
    axes = figure.subplots(down, columns, squeeze=False).flatten()
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, panel in zip(axes, panels, strict=False):
        for number, (name, points) in enumerate(panel.lines.items()):
            _latency_line(ax, name, points, palette.series[number % len(palette.series)], palette, tips)
        ax.set(xscale="log", yscale="log", xlabel=panel.axis, ylabel="us")
        _latency_ticks(ax, sorted({x for points in panel.lines.values() for x, _ in points}))
        ax.margins(y=0.25)
        ax.set_title(f"{panel.machine}\n{panel.title}" if several else panel.title, fontsize=9.5)
        ax.grid(lw=0.6)
        ax.legend(fontsize=8)
    return figure


def _latency_line(ax: Any, name: str, points: list[tuple[int, Row]], colour: str, palette: Palette, tips: Tips) -> None:
    at, own = [x for x, _ in points], [row for _, row in points]
    ax.plot(at, [row.median_us for row in own], color=colour, lw=1.7, label=name, zorder=3)
    ax.fill_between(at, [row.p10 for row in own], [row.p90 for row in own], color=colour, alpha=0.2, lw=0)
    for x, row in points:
        gid = tips.add(f"{describe(row)}: {row.median_us:.1f} us ({row.p10:.1f} to {row.p90:.1f})")
        ax.scatter([x], [row.median_us], s=22, color=colour, edgecolor=palette.card, lw=0.6, zorder=4, gid=gid)
    theirs = [(x, row.peer_us) for x, row in points if row.peer_us is not None]
    if theirs:
        ax.plot(*zip(*theirs, strict=True), color=colour, lw=1.2, ls=(0, (3, 2)), zorder=2)


def _latency_ticks(ax: Any, ticks: list[int]) -> None:
    """Label the measured numbers on the x axis, except where a label would overlap the one before it."""
    near = [x < NEAREST_TICKS * before for before, x in zip([0, *ticks], ticks, strict=False)]
    ax.set_xticks(ticks, ["" if hidden else compact(x) for x, hidden in zip(ticks, near, strict=True)])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.yaxis.minorticks_off()


def _panels(rows: Sequence[Row]) -> list[_Panel]:
    """A panel for each stage measured at two or more batch sizes, or at two or more contexts, with all else equal."""
    batches: dict[tuple[str, ...], _Lines] = {}
    contexts: dict[tuple[str, ...], _Lines] = {}
    for row in once(rows):
        shape = even_shape(row)
        if shape is None:
            continue
        heads = f"{row.heads} heads" if row.heads else ""
        window = f"{row.window}+" if row.window else ""
        topk = f"top-k {window}{row.topk}" if row.topk else ""
        key = (row.gpu, f"{row.stage}, {row.layout}, {row.backend}")
        at = f"{compact(shape.length)} context"
        several = f"{compact(shape.new)} new tokens" if shape.new > 1 else ""
        detail = _joined(topk, at if heads else "", several)
        lines = batches.setdefault((*key, detail, str(shape.new)), {})
        lines.setdefault(heads or at, []).append((shape.requests, row))
        line = _joined(f"{shape.requests} x {compact(shape.new)} new", heads)
        contexts.setdefault((*key, topk, ""), {}).setdefault(line, []).append((shape.length, row))
    panels = [
        _Panel(machine, _joined(stage, detail), axis, _with_several_points(lines))
        for axis, found in (("requests", batches), ("tokens of context", contexts))
        for (machine, stage, detail, _), lines in found.items()
    ]
    return [panel for panel in panels if panel.lines]


def _with_several_points(lines: _Lines) -> _Lines:
    """The lines that have two or more different x, their points sorted by x."""
    ordered = {name: sorted(points, key=lambda p: p[0]) for name, points in lines.items()}
    return {name: points for name, points in ordered.items() if points[0][0] < points[-1][0]}


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)


FIGURES = (
    FigureKind(
        "roofline",
        "Roofline",
        "Each point is a measurement; the lines are the limits of memory bandwidth and arithmetic. Stages that only "
        "move data are not on the left; the right shows every measurement's share of its own limit.",
        roofline,
    ),
    FigureKind(
        "peers",
        "Speedup over peers",
        "Speedup over each peer: its time over ours, interleaved in one process on the same inputs. Above 1, tamis is "
        "faster.",
        peers,
    ),
    FigureKind(
        "latency",
        "Latency against batch and context",
        "Medians, with the 10th to 90th percentile. The dashed line is the peer's median.",
        latency,
    ),
)
