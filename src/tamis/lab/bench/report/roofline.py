"""The figure of rooflines: achieved rates under a machine's limits, and each measurement's share of its own limit."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from tamis.lab.bench.record import Row
from tamis.lab.bench.report.data import describe, find_limits, once, speed
from tamis.lab.bench.report.figures import MARKERS, Palette, Panel, Tips, legend_below, legend_height, short


def roofline_panels(rows: Sequence[Row]) -> list[Panel]:
    """Two panels per machine."""
    machines: dict[str, list[Row]] = {}
    for row in rows:
        machines.setdefault(row.gpu, []).append(row)
    panels = []
    for machine, all_of_it in machines.items():
        own = once(row for row in all_of_it if row.roofline_us > 0)
        computing = [row for row in own if row.flops]
        if computing:
            panels.append(_achieved(machine, own, computing))
        if own:
            stages = list(dict.fromkeys(row.stage for row in own))
            panels.append(
                Panel(
                    f"{machine}: share of the roofline's speed",
                    0.3 * len(stages) + 0.9,
                    partial(_shares, own, stages),
                )
            )
    return panels


def _achieved(machine: str, own: list[Row], computing: list[Row]) -> Panel:
    entries = len({row.stage for row in computing}) + 2
    return Panel(
        f"{machine}: achieved rates and limits",
        3.4 + legend_height(entries, 1),
        partial(_roof, own, computing),
    )


def _roof(rows: list[Row], computing: list[Row], ax: Any, palette: Palette, tips: Tips) -> None:
    limits = find_limits(rows)
    bandwidth, peak = limits.bytes_per_second, limits.flops_per_second
    assert bandwidth is not None
    intensity = [row.flops / row.bytes for row in computing]
    span = (min(intensity) / 3, max(intensity) * 3)
    _limit_line(ax, span, bandwidth, peak, "bf16", {"color": palette.ink, "lw": 1.5})
    if peak and any(speed(row) > 1 for row in computing):
        _limit_line(ax, span, bandwidth, 2 * peak, "FP8", {"color": palette.soft, "lw": 1.3, "ls": (0, (4, 2))})
    _points(ax, computing, palette, tips)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte (FLOP/B)", ylabel="achieved rate (TFLOP/s)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.minorticks_off()
    ax.grid(lw=0.6)
    legend_below(ax, 1)


def _limit_line(
    ax: Any, span: tuple[float, float], bandwidth: float, peak: float | None, dtype: str, style: dict[str, Any]
) -> None:
    """Draw the line that rises with the bandwidth and is flat at the peak, where the peak is known."""
    low, high = span
    knee = high if peak is None else min(high, peak / bandwidth)
    ends = [low, knee, high]
    rate = f"{bandwidth / 1e12:.3g} TB/s" if bandwidth >= 1e11 else f"{bandwidth / 1e9:.3g} GB/s"
    name = f"limit: {rate}" if peak is None else f"{dtype} limit: {rate}, then {peak / 1e12:,.0f} TFLOP/s"
    ax.plot(ends, [min(x * bandwidth, peak or x * bandwidth) / 1e12 for x in ends], zorder=1, label=name, **style)


def _points(ax: Any, computing: list[Row], palette: Palette, tips: Tips) -> None:
    """Draw each measurement at its operations per byte and the rate that it achieved."""
    stages = list(dict.fromkeys(row.stage for row in computing))
    shown: set[str] = set()
    for row in computing:
        x, y = row.flops / row.bytes, row.flops / row.median_us / 1e6
        gid = tips.add(f"{describe(row)}: {row.median_us:.1f} µs, {y:.3g} TFLOP/s, {row.of_roofline:.0%} of its limit")
        name = "" if row.stage in shown else f"measured: {short(row.stage)}"  # one entry per stage in the legend
        shown.add(row.stage)
        kind = stages.index(row.stage)
        ax.scatter(
            [x],
            [y],
            s=26,
            color=palette.series[kind % len(palette.series)],
            marker=MARKERS[kind % len(MARKERS)],
            edgecolor=palette.card,
            lw=0.7,
            label=name,
            gid=gid,
            zorder=3,
        )


def _shares(rows: list[Row], stages: list[str], ax: Any, palette: Palette, tips: Tips) -> None:
    count, drawn = Counter(row.stage for row in rows), Counter[str]()
    for row in rows:
        share, same = row.of_roofline, count[row.stage]
        # Points of one stage are spread vertically, so that none hides another.
        offset = (drawn[row.stage] - (same - 1) / 2) * min(0.09, 0.6 / same)
        drawn[row.stage] += 1
        gid = tips.add(f"{describe(row)}: {row.median_us:.1f} µs, limit {row.roofline_us:.1f} µs, {share:.0%}")
        where = stages.index(row.stage) + offset
        ax.scatter([100 * share], [where], s=22, color=palette.series[0], edgecolor=palette.card, lw=0.6, gid=gid)
    ax.axvline(100, color=palette.ink, lw=1.5)
    ax.set(xlim=(0, 105), xlabel="share of the roofline's speed (%)", ylabel="stage")
    ax.set(yticks=range(len(stages)), yticklabels=[short(stage) for stage in stages])
    ax.set_ylim(len(stages) - 0.5, -0.5)
    ax.grid(axis="x", lw=0.6)
    ax.tick_params(axis="y", length=0)
