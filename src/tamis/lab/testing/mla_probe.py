"""Measures the error of a running `SparseMLA` layer from selection and quantisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.lab.testing.probe import LayerSums, Probe, RequestSpan, picked_columns, row_slices
from tamis.model.spec import LayerSpec

_WORKING_ELEMENTS = 4 * 2**20
"""The most logits held at once."""


class MLAProbe(Probe[Tensor]):
    """Keeps the exact rows of every request and compares each layer's output with attention over them."""

    def __init__(self, spec: LayerSpec, layers: int) -> None:
        """Start with no rows."""
        super().__init__(layers)
        self.spec = spec

    def compare(
        self, layer: int, spans: Sequence[RequestSpan], q: Tensor, rows: Tensor, positions: Tensor, out: Tensor
    ) -> None:
        """Add one layer's step.

        Args:
            layer: number of the layer.
            spans: the step's requests, in the order of the rows.
            q: queries [T, H, D] that the layer was given.
            rows: the tokens' cache rows [T, D] before quantisation.
            positions: int32 [T, K], the positions that the layer attended to.
            out: output [T, H, V] of the layer.
        """
        with self._timed(out.device):
            for span, at in row_slices(spans):
                history = self._remember(layer, span, rows[at].float())
                self._sums[layer].add(self._compare_span(q[at].float(), history, span.start, positions[at], out[at]))

    def _remember(self, layer: int, span: RequestSpan, rows: Tensor) -> Tensor:
        key = (layer, span.request)
        if key not in self._history:
            self._history[key] = rows.new_empty(span.length, rows.shape[1], dtype=rows.dtype)
        self._history[key][span.start : span.end] = rows
        return self._history[key][: span.end]

    def _compare_span(self, q: Tensor, history: Tensor, start: int, positions: Tensor, out: Tensor) -> LayerSums:
        total = LayerSums()
        step = max(1, _WORKING_ELEMENTS // (self.spec.heads * len(history)))
        for begin in range(0, len(q), step):
            part = slice(begin, begin + step)
            total.add(self._rows(q[part], history, start + begin, positions[part], out[part].float()))
        return total

    def _rows(self, q: Tensor, history: Tensor, start: int, positions: Tensor, out: Tensor) -> LayerSums:
        tokens, context = len(q), len(history)
        visible = torch.arange(start, start + tokens, dtype=torch.int64, device=q.device) + 1
        hidden = torch.arange(context, dtype=torch.int64, device=q.device) >= visible.unsqueeze(1)
        chosen = picked_columns(positions, context).unsqueeze(1)
        values = history[:, : self.spec.value_dim]
        logits = (q @ history.T * self.spec.scale).masked_fill(hidden.unsqueeze(1), -torch.inf)
        weights = logits.softmax(-1)
        exact = logits.masked_fill(~chosen, -torch.inf).softmax(-1) @ values
        covered = (weights * chosen).sum(-1)
        return LayerSums.of(out, weights @ values, exact, covered, visible > positions.shape[1])
