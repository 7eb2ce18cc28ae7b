"""An `Inspection` as one HTML file: a heat map of selections to zoom into, charts, and the model's parameters."""

from collections.abc import Callable, Mapping
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from tamis._version import __version__
from tamis.lab.html import document, escape
from tamis.lab.inspection.collect import Inspection
from tamis.lab.inspection.needle import describe_needle, needle_sentence
from tamis.lab.inspection.notes import LayerNotes
from tamis.lab.inspection.packing import pack_layer
from tamis.lab.inspection.summary import bin_name, describe_layers, layer_overlap, used_bins

POSITION_BINS = 80
RANDOM_NOTE = "Random weights: these selections say nothing about a trained model."


def render_page(
    inspection: Inspection,
    *,
    title: str,
    text: Callable[[int], str],
    parameters: Mapping[str, Any],
    random_weights: bool = False,
) -> str:
    """The page's HTML.

    Args:
        inspection: the selections to show.
        title: such as the model's name.
        text: gives the text of a token id.
        parameters: the model's parameters by name.
        random_weights: whether the model was never trained; the title and a note at the top then say so.
    """
    title = f"{title}, random weights" if random_weights else title
    needle = describe_needle(inspection)
    layers = describe_layers(inspection)
    overlap = layer_overlap(inspection)
    blobs: dict[str, str] = {}
    described = []
    for notes in inspection.layers:
        about, blobs[f"layer-{notes.number}"] = pack_layer(notes, inspection.source(notes))
        described.append(layers[notes.number] | about | {"positions": _by_position(notes)})
    bins = used_bins(inspection.layers)
    shown = inspection.extent.kept[inspection.extent.shown]
    data = {
        "tokens": [text(token) for token in inspection.tokens],
        "kept": None if len(shown) == len(inspection.tokens) else shown.tolist(),
        "layers": described,
        "bins": [bin_name(number) for number in range(bins)],
        "overlap": overlap | {"empty": _without_overlap(inspection, overlap)},
        "needle": None if needle is None else needle["position"],
    }
    body = Template(_asset("page.html")).substitute(
        title=escape(title),
        subtitle=escape(_subtitle(inspection)),
        warning=f'<p class="warning" role="note">{escape(RANDOM_NOTE)}</p>' if random_weights else "",
        tiles=_tiles(layers),
        needle="" if needle is None else _needle(needle, text(inspection.tokens[needle["position"]])),
        unit_note=escape(_unit_note(inspection)),
        measured=escape(_measured(inspection)),
        overlap_note=escape(_overlap_note(overlap)),
        parts=_PARTS_CARD if any(layer.get("window_share") is not None for layer in layers) else "",
        rows="".join(_row(layer) for layer in layers),
        parameters="".join(f"<dl><dt>{escape(name)}</dt><dd>{escape(v)}</dd></dl>" for name, v in parameters.items()),
        version=escape(__version__),
    )
    script = "\n".join(_asset(name) for name in ("heatmap.js", "charts.js", "page.js"))
    title = f"{title} · tamis inspect"
    return document(title, body, style=_asset("page.css"), script=script, data=data, blobs=blobs)


_PARTS_CARD = """<section class="card"><h3>Window, entries and sink</h3><p>Where the weight of dense attention goes in
each layer, mean over heads and queries. The layer attends to the window and to the selected entries.</p>
<div id="chart-parts"></div></section>"""


def _asset(name: str) -> str:
    return files("tamis.lab.inspection").joinpath(name).read_text(encoding="utf-8")


def _subtitle(inspection: Inspection) -> str:
    selecting = len(inspection.layers)
    of_all = f"{selecting} of {len(inspection.specs)} layers select"
    return f"{len(inspection.tokens):,} tokens, {of_all}, {inspection.cache} pages"


def _unit_note(inspection: Inspection) -> str:
    ratios = sorted({notes.ratio for notes in inspection.layers})
    if not inspection.layers:
        return "No layer of this model selects anything."
    text = "Cells above the diagonal are in the future (causally masked)."
    if ratios != [1]:
        text = f"Layers select compressed entries; each is drawn as wide as the {ratios[-1]} tokens it stands for."
    shown, total = len(inspection.extent.shown), len(inspection.tokens)
    if shown < total:
        text += (
            f" The selections of {shown:,} of {total:,} queries are shown exactly; between them the map shows means."
        )
    return text


def _overlap_note(overlap: Mapping[str, Any]) -> str:
    several = overlap["queries"] and len(overlap["layers"]) > 1
    return f"Mean over {overlap['queries']} queries." if several else ""


def _without_overlap(inspection: Inspection, overlap: Mapping[str, Any]) -> str:
    """Why there is no overlap to draw; empty if there is."""
    if not inspection.layers:
        return "Empty because no layer of this model selects."
    if len(inspection.layers) == 1:
        reason = f"Empty because only layer {inspection.layers[0].number} selects, and an overlap needs two selections."
        others = len(inspection.specs) - 1
        fixed = "attends to a window, or to a window and every entry"
        return f"{reason} Each of the other {others} layers {fixed}." if others else reason
    if not overlap["queries"]:
        return (
            "Empty because no query has more candidates than top-k, so that every layer selects everything. "
            "Use a longer prompt."
        )
    return ""


def _needle(described: Mapping[str, Any], token: str) -> str:
    """The section about the needle: a sentence, and a row for each layer that selects."""
    names = ("Selected", "Rank", "Score", "Dense weight", "Later queries that select it")
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in names)
    rows = "".join(_needle_row(layer) for layer in described["layers"])
    sentence = f'{escape(needle_sentence(dict(described)))} Its token is <span class="token">{escape(token)}</span>.'
    return f"""<h2 id="needle-title">The needle</h2>
<p id="needle">{sentence}</p>
<p class="note">Rank, score and dense attention's weight are those of the last query; the last column is over all
queries that see the needle and more candidates than top-k.</p>
<div class="card scroll" tabindex="0" role="region" aria-labelledby="needle-title"><table id="needle-layers"><thead><tr>
<th scope="col">Layer</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"""


def _needle_row(layer: Mapping[str, Any]) -> str:
    rank = f"{layer['rank']:,} of {layer['candidates']:,}, top-k {layer['topk']:,}" if layer["visible"] else "-"
    chosen = "yes" if layer["selected"] else "no" if layer["visible"] else "not visible"
    later = "-"
    if layer["later_selected"] is not None:
        later = f"{_percent(layer['later_selected'])} of {layer['later_queries']:,}"
    cells = (
        chosen,
        rank,
        "-" if layer["score"] is None else f"{layer['score']:.3g}",
        _percent(layer["weight"]),
        later,
    )
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
    return f"<tr><td>{layer['layer']}</td>{numbers}</tr>"


def _measured(inspection: Inspection) -> str:
    compared, total = len(inspection.extent.compared), len(inspection.tokens)
    share = "every query" if compared == total else f"{compared:,} of {total:,} queries"
    choosing = sum(int(notes.choosing.sum()) for notes in inspection.layers)
    text = f"Dense attention was computed for {share}, from the same cached rows, over every visible candidate."
    if choosing:
        return text + " Means are over queries with more candidates than top-k."
    return text + " No query has more candidates than top-k, so everything is selected: use a longer prompt."


def _tiles(layers: list[dict[str, Any]]) -> str:
    chosen = [layer for layer in layers if "recall" in layer]
    tied = sum(layer["tied_queries"] for layer in chosen if layer["shares"] is None)
    choosing = sum(layer["choosing"] for layer in chosen if layer["shares"] is None)
    tiles = [
        (_percent(_across(chosen, "recall")), "Recall", "of dense attention's weight is on selected candidates"),
        (_percent(_across(chosen, "top1")), "Top-1 hit", "of heads have their heaviest candidate selected"),
        (
            _number(_across(chosen, "effective")),
            "Effective top-k",
            "perplexity of the attention weights over the selected candidates",
        ),
        (
            f"{tied:,}",
            "Ties at cutoff",
            f"of {choosing:,} queries had a tie at the k-th score, so position broke the tie",
        ),
    ]
    window = _across(chosen, "window_share")
    if window is not None:
        tiles.append((_percent(window), "Window", "of all attention stays within the sliding window"))
    return "".join(
        f'<div class="card tile"><span class="value">{escape(value)}</span><span class="name">{escape(name)}</span>'
        f'<span class="why">{escape(why)}</span></div>'
        for value, name, why in tiles
    )


def _across(layers: list[dict[str, Any]], name: str) -> float | None:
    known = [layer[name] for layer in layers if layer[name] is not None]
    return float(np.mean(known)) if known else None


def _row(layer: dict[str, Any]) -> str:
    if "recall" not in layer:
        rest = '<td colspan="8"></td>'
        return f'<tr class="flat"><td>{layer["layer"]}</td><td>{escape(layer["attends_to"])}</td>{rest}</tr>'
    shares = "" if layer["shares"] is None else f", selected by layer {layer['shares']}"
    cells = (
        f"{layer['topk']:,}",
        _number(layer["selected"]),
        _percent(layer["recall"]),
        _percent(layer["recall_p10"]),
        _percent(layer["top1"]),
        _number(layer["effective"]),
        f"{layer['tied_queries']:,}",
        layer["median_distance"] or "-",
    )
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
    name = layer["layer"]
    what = escape(layer["attends_to"] + shares)
    return f'<tr data-layer="{name}"><td>{name}</td><td>{what}</td>{numbers}</tr>'


def _by_position(notes: LayerNotes) -> dict[str, list[float | None]]:
    """Means over consecutive ranges of the prompt; None where no query of a range was compared."""
    tokens = notes.extent.tokens
    count = min(POSITION_BINS, tokens)
    where = np.arange(tokens) * count // tokens
    found: dict[str, list[float | None]] = {}
    for name in ("recall", "top1"):
        values = getattr(notes, name)
        known = ~np.isnan(values)
        total = np.bincount(where[known], values[known], minlength=count)
        number = np.bincount(where[known], minlength=count)
        found[name] = [round(float(t / n), 4) if n else None for t, n in zip(total, number, strict=True)]
    return found


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
