"""The report's page: figures, and all rows as a table."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tamis._version import __version__
from tamis.lab.bench.record import Row
from tamis.lab.bench.report.data import find_limits, geometric_mean, once
from tamis.lab.bench.report.figures import Drawing, FigureKind
from tamis.lab.html import document, escape

_STYLE = """\
:root { --fifth: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --fifth: #d8b94a; } }
.panels { columns: 3 310px; column-gap: 28px; }
.panels figure { break-inside: avoid; margin: 0 0 22px; }
.panels figcaption { font-size: 13.5px; font-weight: 600; line-height: 1.35; margin-bottom: 6px; }
#roofline .panels { columns: 2 310px; max-width: 900px; }
.figure svg { width: 100%; height: auto; display: block; }
.figure svg text { font-size: inherit; fill: inherit; }
.figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
.behind { color: var(--second); }
"""
_Tile: TypeAlias = tuple[str, str, str]
"""The value that a tile shows, its name, and a line below them."""


def render_page(rows: Sequence[Row], drawings: Mapping[FigureKind, Sequence[Drawing]], *, superseded: int) -> str:
    """The report as one HTML file.

    Args:
        rows: the measurements, all of which are shown.
        drawings: the panels of the figures.
        superseded: how many rows were left out because a newer row has the same measurement.
    """
    machines = list(dict.fromkeys(row.gpu for row in rows))
    figures = "".join(
        f'<h2>{escape(kind.title)}</h2><p class="note">{escape(kind.note)}</p>'
        f'<div class="card figure" id="{kind.name}"><div class="panels">{_panels(panels)}</div></div>'
        for kind, panels in drawings.items()
    )
    body = f"""\
<div class="wrap">
<header>
<p class="brand">tamis bench</p>
<h1>{escape(" and ".join(machines))}</h1>
<p class="sub">{escape(_versions(rows))}</p>
</header>
<main>
<div class="tiles">{_tiles(rows)}</div>
{figures}
<h2 id="rows-title">All measurements</h2>
<p class="note" id="counts">{escape(_counts(rows, superseded))} A shape such as 32q1s16k is 32 requests with 1 new token
each and a context of 16K tokens. Roofline is the least time that the machine's limits allow. Errors are relative to
float64, on the inputs that were timed.</p>
<div class="card scroll" tabindex="0" role="region" aria-labelledby="rows-title"><table id="rows">
<thead><tr>{_header()}</tr></thead>
<tbody>{"".join(_line(row) for row in rows)}</tbody></table></div>
</main>
<footer>Made by tamis {escape(__version__)}. This file needs no network.</footer>
</div>"""
    return document(f"{', '.join(machines)} · tamis bench", body, style=_STYLE, styled=True)


def _panels(panels: Sequence[Drawing]) -> str:
    return "".join(f"<figure><figcaption>{escape(one.title)}</figcaption>{one.svg}</figure>" for one in panels)


def _counts(rows: Sequence[Row], superseded: int) -> str:
    """A line that says how many rows were read, shown and superseded, and in how many tamis is slower."""
    read = len(rows) + superseded
    told = f"Rows: {read} read, {len(rows)} shown"
    if superseded:
        told += f", {superseded} superseded by newer rows of the same measurement (same machine, backend and baseline)"
    behind = sum(row.ratio is not None and row.ratio < 1 for row in rows)
    compared = sum(row.ratio is not None for row in rows)
    return f"{told}. tamis is slower in {behind} of {compared} comparisons with baselines." if compared else f"{told}."


def _versions(rows: Sequence[Row]) -> str:
    def told(name: str, values: Sequence[str]) -> str:
        return f"{name} {', '.join(dict.fromkeys(value for value in values if value))}"

    parts = [told("tamis", [row.tamis for row in rows]), told("torch", [row.torch for row in rows])]
    if any(row.driver for row in rows):
        parts.append(told("driver", [row.driver for row in rows]))
    commits = [row.commit[:10] + ("+changes" if "+" in row.commit else "") for row in rows if row.commit]
    parts += [told("commit", commits)] if commits else []
    days = sorted({row.time[:10] for row in rows if row.time})
    parts += [days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"] if days else []
    return ", ".join(parts)


def _tiles(rows: Sequence[Row]) -> str:
    tiles = [*_measurement_tiles(once(rows)), *_machine_tiles(rows), *_peer_tiles(rows)]
    return "".join(
        f'<div class="card tile"><span class="value">{escape(value)}</span><span class="name">{escape(name)}</span>'
        f'<span class="why">{escape(why)}</span></div>'
        for value, name, why in tiles
    )


def _measurement_tiles(ours: Sequence[Row]) -> list[_Tile]:
    tiles = [(f"{len(ours)}", "Measurements", f"of {len({row.stage for row in ours})} stages")]
    shares = [row.of_roofline for row in ours if row.roofline_us > 0]
    if shares:
        best = max(shares)
        tiles.append((f"{best:.0%}", "Best % of roofline", f"geometric mean {geometric_mean(shares):.0%}"))
    return tiles


def _machine_tiles(rows: Sequence[Row]) -> list[_Tile]:
    tiles = []
    for machine in dict.fromkeys(row.gpu for row in rows):
        limits = find_limits([row for row in rows if row.gpu == machine])
        if limits.bytes_per_second is not None:
            peak = limits.flops_per_second
            rate = f"{limits.bytes_per_second / 1e12:.3g} TB/s"
            tiles.append((rate, "Peak memory bandwidth", f"{peak / 1e12:,.0f} TFLOP/s in bf16" if peak else machine))
    return tiles


def _peer_tiles(rows: Sequence[Row]) -> list[_Tile]:
    tiles = []
    for peer in dict.fromkeys(row.peer for row in rows if row.ratio is not None):
        ratios = [row.ratio for row in rows if row.peer == peer and row.ratio is not None]
        ahead = sum(ratio >= 1 for ratio in ratios)
        why = f"geometric mean over all rows; tamis is faster in {ahead} of {len(ratios)}"
        tiles.append((f"{geometric_mean(ratios):.2f}x", f"Speedup over {peer}", why))
    return tiles


def _header() -> str:
    texts = ("Stage", "Backend", "Shape", "Layout", "Baseline")
    names = (
        *("Stage", "Backend", "Shape", "Heads", "Top-k", "Layout", "Median (µs)", "p10 to p90 (µs)", "Roofline (µs)"),
        *("% of roofline", "Baseline", "Its median (µs)", "Speedup", "Error"),
    )
    return "".join(f'<th scope="col" class="{"" if name in texts else "n"}">{name}</th>' for name in names)


def _line(row: Row) -> str:
    topk = "" if row.topk is None else f"{row.window}+{row.topk}" if row.window else str(row.topk)
    cells = (
        (row.stage, ""),
        (row.backend, ""),
        (row.shape, ""),
        ("" if row.heads is None else row.heads, "n"),
        (topk, "n"),
        (row.layout, ""),
        (f"{row.median_us:,.1f}", "n"),
        (f"{row.p10:,.1f} to {row.p90:,.1f}", "n"),
        (f"{row.roofline_us:,.1f}" if row.roofline_us else "", "n"),
        (f"{row.of_roofline:.0%}" if row.roofline_us else "", "n"),
        (row.peer, ""),
        ("" if row.peer_us is None else f"{row.peer_us:,.1f}", "n"),
        ("" if row.ratio is None else f"{row.ratio:.2f}", "n behind" if (row.ratio or 1) < 1 else "n"),
        (f"{row.error:.1e}" if row.error else "0", "n"),
    )
    return "<tr>" + "".join(f'<td class="{kind}">{escape(text)}</td>' for text, kind in cells) + "</tr>"
