"""`NeedleNotes`: how one layer treats a marked position of the prompt, for every query that comes after it."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tamis.lab.inspection.collect import Inspection
    from tamis.lab.inspection.notes import LayerNotes


class NeedleNotes:
    """The record of one candidate of one layer: the token at the marked position, or the entry that holds it."""

    def __init__(self, position: int, ratio: int, tokens: int) -> None:
        """Start empty, for a position of a prompt of `tokens` tokens whose candidates stand for `ratio` tokens each."""
        self.position, self.candidate = position, position // ratio
        self.visible = np.zeros(tokens, bool)
        """Queries that see the candidate. An entry is seen once all of its tokens have been read."""
        self.selected = np.zeros(tokens, bool)
        self.rank = np.zeros(tokens, np.int32)
        """1 for the highest score of a query; ties count in favour of lower positions. 0 where nothing is seen."""
        self.score = np.full(tokens, np.nan, np.float32)
        self.weight = np.full(tokens, np.nan, np.float32)
        """Dense attention's weight on the candidate, mean over heads, for the compared queries."""

    def add_selection(
        self, own: Tensor, visible: Tensor, positions: Tensor, scores: Tensor | None, factor: float
    ) -> None:
        """Add some queries; the arguments are those of `LayerNotes.add_selection`, and the factor of its scores."""
        at = own.cpu().numpy()
        self.visible[at] = (visible > self.candidate).cpu().numpy()
        self.selected[at] = (positions == self.candidate).any(1).cpu().numpy()
        if scores is None or scores.shape[1] <= self.candidate:
            return
        mine = scores[:, self.candidate : self.candidate + 1]
        column = torch.arange(scores.shape[1], dtype=torch.int64, device=scores.device)
        ahead = (scores > mine) | ((scores == mine) & (column < self.candidate))
        there = column < visible.unsqueeze(1)
        rank = (ahead & there).sum(1) + 1
        self.rank[at] = np.where(self.visible[at], rank.cpu().numpy(), 0)
        self.score[at] = np.where(self.visible[at], mine[:, 0].mul(factor).cpu().numpy(), np.nan)

    def add_weights(self, own: Tensor, weights: Tensor) -> None:
        """Add dense attention's weights float32 [n, S] of some queries."""
        if self.candidate < weights.shape[1]:
            at = own.cpu().numpy()
            found = weights[:, self.candidate].cpu().numpy()
            self.weight[at] = np.where(self.visible[at], found, np.nan)


def describe_needle(inspection: "Inspection") -> dict[str, Any] | None:
    """How each layer treats the needle, or None if the inspection has none.

    `position` is the needle's; `selected_by` are the layers that select it for the last query, the one that the model
    answers from. Each layer's record has, for the last query, `visible`, `selected`, `rank` among `candidates`, `score`
    and dense attention's `weight`; and over all queries that see the needle and more candidates than top-k, their
    number `later_queries` and the share `later_selected` that select it.
    """
    if inspection.needle is None:
        return None
    layers = [_describe(notes, inspection.source(notes)) for notes in inspection.layers]
    chosen = [layer["layer"] for layer in layers if layer["selected"]]
    return {"position": inspection.needle, "selected_by": chosen, "layers": layers}


def _describe(notes: "LayerNotes", source: "LayerNotes") -> dict[str, Any]:
    own, scored, last = notes.needle, source.needle, -1
    assert own is not None
    assert scored is not None
    later = own.visible & notes.choosing
    seen = bool(own.visible[last])
    return {
        "layer": notes.number,
        "visible": seen,
        "selected": bool(own.selected[last]),
        "rank": int(scored.rank[last]) if seen else None,
        "candidates": int(notes.visible[last]),
        "topk": notes.topk,
        "score": float(scored.score[last]) if seen else None,
        "weight": None if np.isnan(own.weight[last]) else float(own.weight[last]),
        "later_queries": int(later.sum()),
        "later_selected": float(own.selected[later].mean()) if later.any() else None,
    }


def needle_sentence(described: dict[str, Any]) -> str:
    """One sentence that says which layers select the needle for the last query."""
    layers, chosen = described["layers"], described["selected_by"]
    subject = f"The needle at position {described['position']:,}"
    if not layers:
        return f"{subject} cannot be selected: no layer of this model selects."
    if not chosen:
        return f"{subject} is selected by no layer for the last query."
    *first, end = [str(number) for number in chosen]
    which = f"layers {', '.join(first)} and {end}" if first else f"layer {end}"
    return f"{subject} is selected by {which} for the last query ({len(chosen)} of {len(layers)} that select)."
