"""The figure of speedups: the baseline's time over ours, one bar per measurement."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from tamis.lab.bench.record import Row
from tamis.lab.bench.report.data import compact, describe, even_shape
from tamis.lab.bench.report.figures import Palette, Panel, Tips, legend_below, legend_height, short

SLOWER = "////"
"""The pattern of bars below 1, which colour alone would not tell apart."""
LARGE = 24
"""Groups of more bars are split by the number of new tokens."""
_Part: TypeAlias = tuple[str, Callable[[Row], str]]
"""A part of a bar's label: its name, and what it tells of a row."""


def speedup_panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each stage, layout, backend and baseline, the largest first."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.ratio is not None:
            name = f"{row.stage}, {row.layout}, {row.backend} against {row.peer}"
            groups.setdefault((row.peer, name), []).append(row)
    for (peer, name), own in list(groups.items()):
        if len(own) > LARGE:
            del groups[peer, name]
            for row in own:
                several = "" if _new(row) == "1" else "s"
                groups.setdefault((peer, f"{name}, {_new(row)} new token{several} per request"), []).append(row)
    return [
        Panel(
            title,
            0.185 * (len(own) + 1) + 0.8 + legend_height(2, 2),
            partial(_bars, peer, own),
        )
        for (peer, title), own in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _bars(peer: str, rows: list[Row], ax: Any, palette: Palette, tips: Tips) -> None:
    ordered = sorted(rows, key=lambda row: (_batch(row), row.heads or 0, row.topk or 0))
    top = max([2.0, *((row.ratio or 0) * 1.18 for row in rows)])
    looks = ((palette.series[0], ""), (palette.series[1], SLOWER))
    for place, row in enumerate(ordered):
        ratio = row.ratio or 0.0
        text = f"{describe(row)}: {row.median_us:.1f} µs against {row.peer_us or 0:.1f} µs of {row.peer}"
        colour, hatch = looks[ratio < 1]
        bars = ax.barh([place], [ratio], height=0.72, color=colour, ec=palette.card, lw=0, hatch=hatch)
        bars.patches[0].set_gid(tips.add(text))
        # On the colour of the card, so that the line at 1 does not cross the number.
        behind = {"facecolor": palette.card, "edgecolor": "none", "boxstyle": "square,pad=0.1"}
        at = (ratio + top * 0.015, place)
        ax.text(*at, f"{ratio:.2f}", va="center", fontsize=8.5, color=palette.ink, bbox=behind, zorder=4)
    ax.plot([1, 1], [-0.5, len(ordered) - 0.5], color=palette.ink, lw=1.2)
    names, title = bar_labels(ordered)
    ax.set_yticks(range(len(ordered)), names, fontsize=8.5)
    ax.tick_params(axis="y", length=0)
    ax.set(xlim=(0, top), ylim=(len(ordered) - 0.4, -1.6), xlabel=f"speedup over {short(peer)} (x)")
    # The title of the axis heads the column of labels: upright it would be longer than a few bars are high.
    ax.set_ylabel(title, rotation=0, ha="left", va="center", fontsize=8.5, in_layout=False)
    ax.yaxis.set_label_coords(
        0.01, -1.1, transform=blended_transform_factory(ax.get_figure().transSubfigure, ax.transData)
    )
    ax.grid(axis="x", lw=0.6)
    told = zip(looks, ("tamis faster", "tamis slower"), strict=True)
    legend_below(ax, 2, [Patch(fc=colour, ec=palette.card, lw=0, hatch=h, label=name) for (colour, h), name in told])


def bar_labels(rows: Sequence[Row]) -> tuple[list[str], str]:
    """A label for each bar, and what the labels' parts are: whatever tells two rows apart is in them, such as top-k."""
    parts: list[_Part] = [("requests x context", _batch_name)]
    parts += [("new tokens (n)", lambda row: f"n={_new(row)}")] if len({_new(row) for row in rows}) > 1 else []
    parts += [("heads (h)", lambda row: f"{row.heads} h" if row.heads else "")] if any(r.heads for r in rows) else []
    more: tuple[_Part, ...] = (
        ("top-k (k)", lambda row: f"k={row.topk}" if row.topk else ""),
        ("page size", lambda row: f"page {row.page_size}"),
        ("suite", lambda row: row.suite),
        ("method", lambda row: row.method),
        ("machine", lambda row: row.gpu),
    )
    for name, tell in more:
        if len({_label(parts, row) for row in rows}) < len(rows) and len({tell(row) for row in rows}) > 1:
            parts.append((name, tell))
    return [short(_label(parts, row)) for row in rows], ", ".join(name for name, _ in parts)


def _label(parts: Sequence[_Part], row: Row) -> str:
    return ", ".join(word for word in (tell(row) for _, tell in parts) if word)


def _new(row: Row) -> str:
    shape = even_shape(row)
    return "mixed" if shape is None else compact(shape.new)


def _batch_name(row: Row) -> str:
    shape = even_shape(row)
    return row.shape if shape is None else f"{shape.requests} x {compact(shape.length)}"


def _batch(row: Row) -> tuple[int, int]:
    shape = even_shape(row)
    return (shape.requests, shape.length) if shape else (0, 0)
