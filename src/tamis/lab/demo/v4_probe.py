"""What compressed, selected and quantised pages cost in accuracy, measured beside the running V4 model.

The comparison shares no code with the library: it keeps every row in float32, pools entries from what it keeps, and
computes attention over all of them with masks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.lab.demo.probe import LayerErrors, LayerSums
from tamis.lab.demo.requests import Piece
from tamis.layers.v4_weights import V4Weights
from tamis.model.spec import LayerSpec


@dataclass(eq=False)
class _History:
    """What one request's tokens are in one layer, in float32."""

    rows: Tensor
    """[length, D]: raw, normed and rotated."""
    values: Tensor
    """[length, C], of the compressor."""
    scores: Tensor
    entries: Tensor
    """[length // ratio, D]"""


class V4Probe:
    """Keeps exact rows and entries of every request and compares each layer's output with what they give."""

    def __init__(self, specs: Sequence[LayerSpec], weights: Sequence[V4Weights], cos_sin: Sequence[Tensor]) -> None:
        """Start with no rows."""
        self.specs, self.weights, self.cos_sin = specs, weights, cos_sin
        self.seconds = 0.0
        """Time spent here, which is not the library's."""
        self._sums = [LayerSums() for _ in specs]
        self._history: dict[tuple[int, int], _History] = {}

    def compare(
        self, layer: int, pieces: Sequence[Piece], given: Tensor, select: Callable[[], Tensor | None], out: Tensor
    ) -> None:
        """Add one layer's step.

        Args:
            layer: its number.
            pieces: of the step, in the order of the rows.
            given: the layer's input [T, hidden].
            select: returns the entries int32 [T, K] it attended to, or None if those were all.
            out: its output [T, hidden].
        """
        self._wait(out.device)
        began = time.perf_counter()
        chosen = select()
        first = 0
        for piece in pieces:
            span = slice(first, first + len(piece.tokens))
            history = self._remember(layer, piece, given[span].float())
            part = None if chosen is None else chosen[span]
            self._sums[layer].add(self._piece(layer, given[span].float(), history, piece, part, out[span].float()))
            first = span.stop
        self._wait(out.device)
        self.seconds += time.perf_counter() - began

    def forget(self, request: int) -> None:
        """Drop a finished request's rows."""
        for layer in range(len(self.specs)):
            self._history.pop((layer, request), None)

    def errors(self) -> list[LayerErrors]:
        """Per layer, over everything compared so far; "dense" is attention over the window and every entry."""
        return [
            LayerErrors(
                (s.dense_error / s.dense_norm) ** 0.5,
                (s.exact_error / s.exact_norm) ** 0.5,
                s.covered / s.rows,
                s.covered_selecting / s.rows_selecting if s.rows_selecting else None,
            )
            for s in self._sums
        ]

    def _remember(self, layer: int, piece: Piece, x: Tensor) -> _History:
        spec, weights = self.specs[layer], self.weights[layer]
        length, ratio = piece.request.cache_length, spec.compress
        compressor = weights.compressor
        channels = 0 if compressor is None else compressor.values.shape[0]
        key = (layer, piece.request.name)
        if key not in self._history:
            sizes = ((length, spec.head_dim), (length, channels), (length, channels), (length // ratio, spec.head_dim))
            self._history[key] = _History(*(x.new_empty(size, dtype=x.dtype) for size in sizes))
        history, new = self._history[key], slice(piece.start, piece.end)
        positions = torch.arange(piece.start, piece.end, dtype=torch.int64, device=x.device)
        raw = _normed(x @ weights.kv.float().T) * weights.kv_norm.float()
        history.rows[new] = _turned(raw, self.cos_sin[layer][positions])
        if compressor is not None:
            history.values[new] = x @ compressor.values.float().T
            history.scores[new] = x @ compressor.scores.float().T + compressor.bias.float()[positions % ratio]
            for entry in range(piece.start // ratio, piece.end // ratio):
                pooled = _normed(_pooled(history, entry, ratio, spec.head_dim)) * compressor.norm.float()
                history.entries[entry] = _turned(pooled, self.cos_sin[layer][entry * ratio])
        return history

    def _piece(
        self, layer: int, x: Tensor, history: _History, piece: Piece, chosen: Tensor | None, out: Tensor
    ) -> LayerSums:
        spec, weights = self.specs[layer], self.weights[layer]
        assert spec.window is not None
        positions = torch.arange(piece.start, piece.end, dtype=torch.int64, device=x.device)
        angles = self.cos_sin[layer][positions].unsqueeze(1)
        low = _normed(x @ weights.q_a.float().T) * weights.q_norm.float()
        q = _turned(_normed((low @ weights.q_b.float().T).unflatten(1, (spec.heads, -1))), angles)
        first = max(0, piece.start + 1 - spec.window)
        raw = history.rows[first : piece.end]
        at = torch.arange(first, piece.end, dtype=torch.int64, device=x.device)
        near = (at <= positions[:, None]) & (at > positions[:, None] - spec.window)
        count = 0 if spec.kind == "window" else piece.end // spec.compress
        visible = (positions + 1) // spec.compress if count else torch.zeros_like(positions)
        seen = torch.arange(count, dtype=torch.int64, device=x.device) < visible[:, None]
        keys, every = torch.cat((raw, history.entries[:count])), torch.cat((near, seen), dim=1)
        picked = every
        if chosen is not None:
            # One more column takes the padding of the selection.
            wanted = torch.zeros(len(x), count + 1, dtype=torch.bool, device=x.device)
            wanted.scatter_(1, torch.where(chosen >= 0, chosen, count).long(), True)
            picked = torch.cat((near, seen & wanted[:, :count]), dim=1)
        logits = q @ keys.T * spec.scale
        dense, shares = self._attend(layer, logits, every, keys, angles)
        exact, _ = self._attend(layer, logits, picked, keys, angles)
        covered = (shares * picked.unsqueeze(1)).sum(-1) / shares.sum(-1)
        selecting = visible > (chosen.shape[1] if chosen is not None else count)
        return LayerSums(
            dense_error=float((out - dense).square().sum()),
            dense_norm=float(dense.square().sum()),
            exact_error=float((out - exact).square().sum()),
            exact_norm=float(exact.square().sum()),
            covered=float(covered.sum()),
            rows=len(x) * spec.heads,
            covered_selecting=float(covered[selecting].sum()),
            rows_selecting=int(selecting.sum()) * spec.heads,
        )

    def _attend(
        self, layer: int, logits: Tensor, picked: Tensor, keys: Tensor, angles: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer's output over the picked keys, and each key's share of the attention."""
        weights = self.weights[layer]
        hidden = logits.masked_fill(~picked.unsqueeze(1), -torch.inf)
        sinks = weights.sink.view(1, -1, 1).expand(len(logits), -1, 1)
        shares = torch.cat((hidden, sinks), dim=-1).softmax(-1)[..., :-1]
        heads = _turned(shares @ keys, angles, inverse=True)
        grouped = heads.flatten(1).unflatten(1, (weights.o_a.shape[0], -1))
        return torch.einsum("tgi,goi->tgo", grouped, weights.o_a.float()).flatten(1) @ weights.o_b.float().T, shares

    def _wait(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _turned(x: Tensor, angles: Tensor, *, inverse: bool = False) -> Tensor:
    """x with its last columns multiplied, as complex numbers, by those of the table."""
    cos, sin = angles.chunk(2, dim=-1)
    factor = torch.complex(cos, -sin if inverse else sin)
    tail = torch.view_as_complex(x[..., -angles.shape[-1] :].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., : -angles.shape[-1]], torch.view_as_real(tail * factor).flatten(-2)), dim=-1)


def _pooled(history: _History, entry: int, ratio: int, width: int) -> Tensor:
    """An entry before its norm: the second half of the channels of its own tokens, the first of those before."""
    own = slice(entry * ratio, entry * ratio + ratio)
    values, scores = history.values[own, -width:], history.scores[own, -width:]
    if history.values.shape[1] > width and entry:
        before = slice(own.start - ratio, own.start)
        values = torch.cat((history.values[before, :width], values))
        scores = torch.cat((history.scores[before, :width], scores))
    return (scores.softmax(0) * values).sum(0)
