"""Measures the error of running V4 layers from compression, selection and quantisation.

The probe keeps every row in float32, pools entries from the rows, and computes attention over both with masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.lab.testing.probe import LayerSums, Probe, RequestSpan, picked_columns, row_slices
from tamis.layers.v4_weights import V4Weights
from tamis.model.spec import LayerSpec


@dataclass(eq=False)
class _History:
    """The float32 tensors of one request in one layer."""

    rows: Tensor
    """[length, D]: raw rows, normed and rotated."""
    values: Tensor
    """[length, C]: values of the compressor."""
    scores: Tensor
    entries: Tensor
    """[length // ratio, D]"""


class V4Probe(Probe[_History]):
    """Keeps exact rows and entries of every request and compares each layer's output with attention over them."""

    def __init__(self, specs: Sequence[LayerSpec], weights: Sequence[V4Weights], cos_sin: Sequence[Tensor]) -> None:
        """Start with no rows."""
        super().__init__(len(specs))
        self.specs, self.weights, self.cos_sin = specs, weights, cos_sin

    def compare(
        self, layer: int, spans: Sequence[RequestSpan], given: Tensor, select: Callable[[], Tensor | None], out: Tensor
    ) -> None:
        """Add one layer's step.

        Args:
            layer: number of the layer.
            spans: the step's requests, in the order of the rows.
            given: the layer's input [T, hidden].
            select: returns the entries int32 [T, K] that the layer attended to, or None for all entries.
            out: output [T, hidden] of the layer.
        """
        with self._timed(out.device):
            chosen = select()
            for span, at in row_slices(spans):
                x = given[at].float()
                history = self._remember(layer, span, x)
                part = None if chosen is None else chosen[at]
                self._sums[layer].add(self._compare_span(layer, x, history, span, part, out[at].float()))

    def _remember(self, layer: int, span: RequestSpan, x: Tensor) -> _History:
        spec, weights = self.specs[layer], self.weights[layer]
        length, ratio = span.length, spec.compress
        compressor = weights.compressor
        channels = 0 if compressor is None else compressor.values.shape[0]
        key = (layer, span.request)
        if key not in self._history:
            sizes = ((length, spec.head_dim), (length, channels), (length, channels), (length // ratio, spec.head_dim))
            self._history[key] = _History(*(x.new_empty(size, dtype=x.dtype) for size in sizes))
        history, new = self._history[key], slice(span.start, span.end)
        positions = torch.arange(span.start, span.end, dtype=torch.int64, device=x.device)
        raw = _normed(x @ weights.kv.float().T) * weights.kv_norm.float()
        history.rows[new] = _rotated(raw, self.cos_sin[layer][positions])
        if compressor is not None:
            history.values[new] = x @ compressor.values.float().T
            history.scores[new] = x @ compressor.scores.float().T + compressor.bias.float()[positions % ratio]
            for entry in range(span.start // ratio, span.end // ratio):
                pooled = _normed(_pooled(history, entry, ratio, spec.head_dim)) * compressor.norm.float()
                history.entries[entry] = _rotated(pooled, self.cos_sin[layer][entry * ratio])
        return history

    def _compare_span(
        self, layer: int, x: Tensor, history: _History, span: RequestSpan, chosen: Tensor | None, out: Tensor
    ) -> LayerSums:
        spec, weights = self.specs[layer], self.weights[layer]
        assert spec.window is not None
        positions = torch.arange(span.start, span.end, dtype=torch.int64, device=x.device)
        angles = self.cos_sin[layer][positions].unsqueeze(1)
        low = _normed(x @ weights.q_a.float().T) * weights.q_norm.float()
        q = _rotated(_normed((low @ weights.q_b.float().T).unflatten(1, (spec.heads, -1))), angles)
        first = max(0, span.start + 1 - spec.window)
        raw = history.rows[first : span.end]
        at = torch.arange(first, span.end, dtype=torch.int64, device=x.device)
        near = (at <= positions[:, None]) & (at > positions[:, None] - spec.window)
        count = 0 if spec.kind == "window" else span.end // spec.compress
        visible = (positions + 1) // spec.compress if count else torch.zeros_like(positions)
        seen = torch.arange(count, dtype=torch.int64, device=x.device) < visible[:, None]
        keys, every = torch.cat((raw, history.entries[:count])), torch.cat((near, seen), dim=1)
        picked = every
        if chosen is not None:
            picked = torch.cat((near, seen & picked_columns(chosen, count)), dim=1)
        logits = q @ keys.T * spec.scale
        dense, shares = self._attend(layer, logits, every, keys, angles)
        exact, _ = self._attend(layer, logits, picked, keys, angles)
        covered = (shares * picked.unsqueeze(1)).sum(-1) / shares.sum(-1)
        selecting = visible > (chosen.shape[1] if chosen is not None else count)
        return LayerSums.of(out, dense, exact, covered, selecting)

    def _attend(
        self, layer: int, logits: Tensor, picked: Tensor, keys: Tensor, angles: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's output over the picked keys, and each key's share of the attention."""
        weights = self.weights[layer]
        hidden = logits.masked_fill(~picked.unsqueeze(1), -torch.inf)
        sinks = weights.sink.view(1, -1, 1).expand(len(logits), -1, 1)
        shares = torch.cat((hidden, sinks), dim=-1).softmax(-1)[..., :-1]
        heads = _rotated(shares @ keys, angles, inverse=True)
        grouped = heads.flatten(1).unflatten(1, (weights.o_a.shape[0], -1))
        return torch.einsum("tgi,goi->tgo", grouped, weights.o_a.float()).flatten(1) @ weights.o_b.float().T, shares


def _normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _rotated(x: Tensor, angles: Tensor, *, inverse: bool = False) -> Tensor:
    """x with its last columns, as complex numbers, multiplied by those of the table."""
    cos, sin = angles.chunk(2, dim=-1)
    factor = torch.complex(cos, -sin if inverse else sin)
    tail = torch.view_as_complex(x[..., -angles.shape[-1] :].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., : -angles.shape[-1]], torch.view_as_real(tail * factor).flatten(-2)), dim=-1)


def _pooled(history: _History, entry: int, ratio: int, width: int) -> Tensor:
    """An entry before its norm: pooled from the second half of the channels of its tokens, and the first half of those
    before."""
    own = slice(entry * ratio, entry * ratio + ratio)
    values, scores = history.values[own, -width:], history.scores[own, -width:]
    if history.values.shape[1] > width and entry:
        before = slice(own.start - ratio, own.start)
        values = torch.cat((history.values[before, :width], values))
        scores = torch.cat((history.scores[before, :width], scores))
    return (scores.softmax(0) * values).sum(0)
