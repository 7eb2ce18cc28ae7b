"""An `Inspection` as numbers per layer: plain data, ready for JSON and for tables."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tamis.lab.inspection.collect import Inspection
from tamis.lab.inspection.notes import PARTS, LayerNotes
from tamis.lab.inspection.statistics import DISTANCE_BINS, evenly_spaced, mean_overlap, selected_mask
from tamis.model.spec import LayerSpec

OVERLAP_QUERIES = 256
"""The most queries over which the overlap of layers is averaged."""
MASK_ELEMENTS = 16 << 20

_WITHOUT_SELECTION = {
    "window": "a window of {window} tokens",
    "plain": "a window of {window} tokens and every entry of {compress}",
}


def describe_layers(inspection: Inspection) -> list[dict[str, Any]]:
    """One record per layer of the model; measures are None where there is nothing to measure.

    Means are over the queries that see more candidates than top-k, if there are any, since the others select
    everything. `recall`, `top1` and `effective` are over the compared queries only.
    """
    noted = {notes.number: notes for notes in inspection.layers}
    return [_describe(number, spec, noted.get(number), inspection) for number, spec in enumerate(inspection.specs)]


def _describe(number: int, spec: LayerSpec | None, notes: LayerNotes | None, inspection: Inspection) -> dict[str, Any]:
    if spec is None:
        none = dict.fromkeys(("ratio", "topk", "window"))
        return {"layer": number, "kind": "linear", **none, "attends_to": "a state of all tokens (linear attention)"}
    base = {"layer": number, "kind": spec.kind, "ratio": spec.compress, "topk": spec.topk, "window": spec.window}
    if notes is None:
        return base | {"attends_to": _WITHOUT_SELECTION[spec.kind].format(window=spec.window, compress=spec.compress)}
    unit = "tokens" if spec.compress == 1 else f"entries of {spec.compress}"
    unit = unit if spec.kpool == 1 else f"groups of {spec.kpool} tokens"
    origin = inspection.source(notes)
    choosing = notes.choosing
    counted = choosing if choosing.any() else notes.visible > 0
    return base | {
        "attends_to": unit if spec.window is None else f"a window of {spec.window} tokens and {unit}",
        "shares": notes.source,
        "choosing": int(choosing.sum()),
        "compared": int((counted & ~np.isnan(notes.recall)).sum()),
        "selected": _mean(notes.selected[counted]),
        "recall": _mean(notes.recall[counted]),
        "recall_p10": _low(notes.recall[counted]),
        "top1": _mean(notes.top1[counted]),
        "effective": _mean(notes.effective[counted]),
        **{f"{part}_share": _mean(values[counted]) for part, values in zip(PARTS, notes.parts, strict=True)},
        "tied_queries": int((origin.tied > 0).sum()),
        "tied_candidates": int(origin.tied.sum()),
        "median_distance": median_bin(notes.distances),
        "distances": notes.distances.tolist(),
        "possible_distances": notes.possible.tolist(),
    }


def bin_name(number: int) -> str:
    """The distances in a bin of `distance_counts`, such as `8 to 15`."""
    return str(number) if number < 2 else f"{2 ** (number - 1)} to {2**number - 1}"


def median_bin(counts: np.ndarray) -> str | None:
    """The distances of the bin with the median; None if all counts are 0."""
    total = counts.sum()
    if not total:
        return None
    return bin_name(int(np.searchsorted(np.cumsum(counts), total / 2)))


def used_bins(layers: Sequence[LayerNotes]) -> int:
    """The number of bins needed for all layers."""
    some = np.any([notes.possible > 0 for notes in layers], axis=0)
    return int(DISTANCE_BINS - np.argmax(some[::-1])) if len(layers) and some.any() else 1


def layer_overlap(inspection: Inspection) -> dict[str, Any]:
    """Overlap of the layers' selections: intersection over union, mean over the kept queries with a choice to make.

    None for two layers of which one selects tokens and the other entries, and where no query has a choice.
    """
    layers = inspection.layers
    table: list[list[float | None]] = [[None] * len(layers) for _ in layers]
    queries = 0
    for ratio in {notes.ratio for notes in layers}:
        alike = [number for number, notes in enumerate(layers) if notes.ratio == ratio]
        widest = max(layers[number].topk for number in alike)
        rows = np.flatnonzero(layers[alike[0]].visible[inspection.extent.kept.numpy()] > widest)
        if not len(rows):
            continue
        rows = rows[evenly_spaced(len(rows), OVERLAP_QUERIES).numpy()]
        queries = max(queries, len(rows))
        sources = [inspection.source(layers[number]) for number in alike]
        candidates = sources[0].candidates
        total = np.zeros((len(alike), len(alike)))
        step = max(1, MASK_ELEMENTS // (len(alike) * candidates))
        for some in np.split(rows, range(step, len(rows), step)):
            masks = torch.stack([selected_mask(torch.from_numpy(notes.rows[some]), candidates) for notes in sources])
            total += mean_overlap(masks).numpy() * len(some)
        for row, left in enumerate(alike):
            for column, right in enumerate(alike):
                table[left][right] = float(total[row, column] / len(rows))
    return {"layers": [notes.number for notes in layers], "queries": queries, "iou": table}


def describe_query(inspection: Inspection, query: int, text: Callable[[int], str]) -> dict[str, Any]:
    """The selection of each layer for one of the kept queries, highest scores first.

    Args:
        inspection: the result of a run that kept the query.
        query: position of the query, from 0.
        text: gives the text of a token id.
    """
    row = int(np.searchsorted(inspection.extent.kept.numpy(), query))
    assert int(inspection.extent.kept[row]) == query
    layers = []
    for notes in inspection.layers:
        source = inspection.source(notes)
        candidates, scores = source.rows[row], source.scores[row]
        there = candidates >= 0
        candidates, scores = candidates[there], scores[there]
        order = np.argsort(-scores, kind="stable")
        chosen = [_candidate(inspection.tokens, int(candidates[n]), float(scores[n]), notes.ratio, text) for n in order]
        layers.append({"layer": notes.number, "selected": chosen})
    return {"query": query, "token": text(inspection.tokens[query]), "layers": layers}


def _candidate(
    tokens: Sequence[int], candidate: int, score: float, ratio: int, text: Callable[[int], str]
) -> dict[str, Any]:
    first = candidate * ratio
    shown = " ".join(text(token) for token in tokens[first : first + ratio])
    found: dict[str, Any] = {"position": first, "token": shown, "score": score}
    return found if ratio == 1 else {"entry": candidate} | found


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _low(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, 0.1)) if len(known) else None
