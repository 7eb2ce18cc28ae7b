"""What sparse attention over quantised pages costs in accuracy, measured beside the running model.

The comparison shares no code with the library: it keeps every row in float32 and computes attention over all of it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tamis.lab.demo.model import AttentionInputs
from tamis.lab.demo.requests import Piece
from tamis.model.spec import LayerSpec

_WORKING_ELEMENTS = 4 * 2**20
"""Logits held at once."""


@dataclass
class LayerSums:
    """Sums over all tokens and heads of one layer."""

    dense_error: float = 0.0
    dense_norm: float = 0.0
    exact_error: float = 0.0
    exact_norm: float = 0.0
    covered: float = 0.0
    rows: float = 0.0
    covered_selecting: float = 0.0
    rows_selecting: float = 0.0

    def add(self, other: "LayerSums") -> None:
        """Add another's sums to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(frozen=True)
class LayerErrors:
    """One layer's errors, over all tokens of a run."""

    dense_error: float
    """Relative error of the output against attention over every position with exact rows."""
    quantisation_error: float
    """Relative error against attention over the same selected positions with exact rows."""
    mass_covered: float
    """Share of dense attention's weights that falls on selected positions, mean over tokens and heads."""
    mass_covered_selecting: float | None
    """The same over tokens with more context than top-k, where the indexer has a choice to make; None without any."""


class Probe:
    """Keeps exact rows of every request and compares each layer's output with what they give."""

    def __init__(self, spec: LayerSpec, layers: int) -> None:
        """Start with no rows."""
        self.spec = spec
        self.seconds = 0.0
        """Time spent here, which is not the library's."""
        self._sums = [LayerSums() for _ in range(layers)]
        self._history: dict[tuple[int, int], Tensor] = {}

    def compare(
        self,
        layer: int,
        pieces: Sequence[Piece],
        inputs: AttentionInputs,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """Add one layer's step.

        Args:
            layer: its number.
            pieces: of the step, in the order of the rows.
            inputs: what the attention was given.
            positions: int32 [T, K] that it attended to.
            out: its output [T, H, V].
        """
        self._wait(out.device)
        began = time.perf_counter()
        first = 0
        for piece in pieces:
            span = slice(first, first + len(piece.tokens))
            history = self._remember(layer, piece, inputs.rows[span].float())
            self._sums[layer].add(self._piece(inputs.q[span].float(), history, piece.start, positions[span], out[span]))
            first = span.stop
        self._wait(out.device)
        self.seconds += time.perf_counter() - began

    def forget(self, request: int) -> None:
        """Drop a finished request's rows."""
        for layer in range(len(self._sums)):
            self._history.pop((layer, request), None)

    def errors(self) -> list[LayerErrors]:
        """Per layer, over everything compared so far."""
        return [
            LayerErrors(
                (s.dense_error / s.dense_norm) ** 0.5,
                (s.exact_error / s.exact_norm) ** 0.5,
                s.covered / s.rows,
                s.covered_selecting / s.rows_selecting if s.rows_selecting else None,
            )
            for s in self._sums
        ]

    def _remember(self, layer: int, piece: Piece, rows: Tensor) -> Tensor:
        key = (layer, piece.request.name)
        if key not in self._history:
            self._history[key] = rows.new_empty(piece.request.cache_length, rows.shape[1], dtype=rows.dtype)
        self._history[key][piece.start : piece.end] = rows
        return self._history[key][: piece.end]

    def _piece(self, q: Tensor, history: Tensor, start: int, positions: Tensor, out: Tensor) -> LayerSums:
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
        # One more column takes the padding of the selection.
        chosen = torch.zeros(tokens, context + 1, dtype=torch.bool, device=q.device)
        chosen.scatter_(1, torch.where(positions >= 0, positions, context).long(), True)
        chosen = chosen[:, :context]
        values = history[:, : self.spec.value_dim]
        logits = (q @ history.T * self.spec.scale).masked_fill(hidden.unsqueeze(1), -torch.inf)
        weights = logits.softmax(-1)
        dense = weights @ values
        exact = logits.masked_fill(~chosen.unsqueeze(1), -torch.inf).softmax(-1) @ values
        covered = (weights * chosen.unsqueeze(1)).sum(-1).sum(-1)
        selecting = visible > positions.shape[1]
        heads = self.spec.heads
        return LayerSums(
            dense_error=float((out - dense).square().sum()),
            dense_norm=float(dense.square().sum()),
            exact_error=float((out - exact).square().sum()),
            exact_norm=float(exact.square().sum()),
            covered=float(covered.sum()),
            rows=tokens * heads,
            covered_selecting=float(covered[selecting].sum()),
            rows_selecting=int(selecting.sum()) * heads,
        )

    def _wait(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
