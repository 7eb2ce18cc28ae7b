"""The figure of latencies: over the number of requests, and over the length of the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from tamis.lab.bench.jobs import SIZES
from tamis.lab.bench.record import Row
from tamis.lab.bench.report.data import compact, describe, even_shape, once
from tamis.lab.bench.report.figures import MARKERS, Palette, Panel, Tips, legend_below, legend_height, short

_Lines: TypeAlias = dict[str, list[tuple[int, Row]]]
"""The points of each line by its name: a number of requests or tokens, and the row measured there."""
NEAREST_TICKS = 1.5
"""A tick is labelled only if its number is at least this many times the number of the labelled tick before it."""
DASHES = (0, (3, 2))
MANY_POINTS = 32
"""Lines of more points have no markers, and linear axes, on which a step from one size to the next has the same width
everywhere."""


@dataclass(frozen=True)
class _Group:
    """The lines of one panel."""

    machine: str
    title: str
    axis: str
    lines: _Lines


def latency_panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each stage measured at two or more batch sizes, or at two or more contexts, with all else equal."""
    groups = _groups(rows)
    several = len({group.machine for group in groups}) > 1
    return [
        Panel(
            f"{group.machine}: {group.title}" if several else group.title,
            2.9 + legend_height(len(group.lines) + bool(_baselines(group)), _columns(group)),
            partial(_latency, group),
        )
        for group in groups
    ]


def _baselines(group: _Group) -> str:
    """The names of the baselines of a group."""
    compared = [row for points in group.lines.values() for _, row in points if row.peer_us is not None]
    return ", ".join(dict.fromkeys(short(row.peer) for row in compared))


def _columns(group: _Group) -> int:
    """The columns of the legend that there is room for."""
    return 2 if max(len(name) for name in (*group.lines, _baselines(group))) <= 16 else 1


def _latency(group: _Group, ax: Any, palette: Palette, tips: Tips) -> None:
    for number, (name, points) in enumerate(group.lines.items()):
        colour, marker = palette.series[number % len(palette.series)], MARKERS[number % len(MARKERS)]
        _line(ax, name, points, colour, marker if not _dense(group) else "", palette, tips)
    ax.set(xlabel=group.axis, ylabel="latency (µs)")
    if _dense(group):
        ax.set(xlim=(0, None), ylim=(0, None))
    else:
        ax.set(xscale="log", yscale="log")
        _ticks(ax, sorted({x for points in group.lines.values() for x, _ in points}))
        ax.margins(y=0.12)
    ax.grid(lw=0.6)
    handles, _ = ax.get_legend_handles_labels()
    name = _baselines(group)
    dashed = [Line2D([], [], color=palette.soft, lw=1.2, ls=DASHES, label=name)] if name else []
    legend_below(ax, _columns(group), [*handles, *dashed])


def _dense(group: _Group) -> bool:
    return max(len(points) for points in group.lines.values()) > MANY_POINTS


def _line(
    ax: Any, name: str, points: list[tuple[int, Row]], colour: str, marker: str, palette: Palette, tips: Tips
) -> None:
    at, own = [x for x, _ in points], [row for _, row in points]
    ax.plot(at, [row.median_us for row in own], color=colour, lw=1.7, marker=marker, ms=4, label=name, zorder=3)
    ax.fill_between(at, [row.p10 for row in own], [row.p90 for row in own], color=colour, alpha=0.2, lw=0)
    for x, row in points:
        told = f"{describe(row)}: {row.median_us:.1f} µs ({row.p10:.1f} to {row.p90:.1f})"
        against = "" if row.peer_us is None else f", {row.peer} {row.peer_us:.1f} µs"
        look = {"color": colour, "marker": marker or ".", "edgecolor": palette.card if marker else "none", "lw": 0.6}
        ax.scatter([x], [row.median_us], s=24 if marker else 6, zorder=4, gid=tips.add(told + against), **look)
    theirs = [(x, row.peer_us) for x, row in points if row.peer_us is not None]
    if theirs:
        ax.plot(*zip(*theirs, strict=True), color=colour, lw=1.2, ls=DASHES, zorder=2)


def _ticks(ax: Any, ticks: list[int]) -> None:
    """Label the measured numbers on the x axis, except where a label would overlap the one before it."""
    labels, before = [], 0.0
    for x in ticks:
        labels.append(compact(x) if x >= NEAREST_TICKS * before else "")
        before = x if labels[-1] else before
    ax.set_xticks(ticks, labels)
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.yaxis.minorticks_off()


def _groups(rows: Sequence[Row]) -> list[_Group]:
    batches: dict[tuple[str, ...], _Lines] = {}
    contexts: dict[tuple[str, ...], _Lines] = {}
    for row in once(rows):
        shape = even_shape(row)
        if shape is None:
            continue
        heads = f"{row.heads} heads" if row.heads else ""
        window = f"{row.window}+" if row.window else ""
        topk = f"top-k {window}{row.topk}" if row.topk else ""
        # A run over every batch size has a panel of its own, since one panel's lines are of one kind.
        key = (row.gpu, _joined(row.stage, row.layout, row.backend, "every size" if row.suite == SIZES else ""))
        at = f"{compact(shape.length)} context"
        several = f"{compact(shape.new)} new tokens" if shape.new > 1 else ""
        detail = _joined(topk, at if heads else "", several)
        lines = batches.setdefault((*key, detail, str(shape.new)), {})
        lines.setdefault(heads or at, []).append((shape.requests, row))
        line = _joined(f"{shape.requests} x {compact(shape.new)} new", heads)
        contexts.setdefault((*key, topk, ""), {}).setdefault(line, []).append((shape.length, row))
    groups = [
        _Group(machine, _joined(stage, detail), axis, _with_several_points(lines))
        for axis, found in (("requests", batches), ("context (tokens)", contexts))
        for (machine, stage, detail, _), lines in found.items()
    ]
    return [group for group in groups if group.lines]


def _with_several_points(lines: _Lines) -> _Lines:
    """The lines that have two or more different x, their points sorted by x, with few heads first."""
    by_heads = sorted(lines.items(), key=lambda line: line[1][0][1].heads or 0)
    ordered = {name: sorted(points, key=lambda p: p[0]) for name, points in by_heads}
    return {name: points for name, points in ordered.items() if points[0][0] < points[-1][0]}


def _joined(*words: str) -> str:
    return ", ".join(word for word in words if word)
