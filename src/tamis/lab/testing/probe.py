"""Measures a running layer's error against exact attention over rows that the probe keeps in float32.

A probe shares no code with the library. `MLAProbe` is for layers that select tokens, `V4Probe` for V4 layers.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

H = TypeVar("H")


@dataclass(frozen=True)
class RequestSpan:
    """The tokens of one request that run in one step."""

    request: int
    start: int
    """Position of the first token in its request."""
    end: int
    """Position after the last token."""
    length: int
    """The number of tokens that the request will have at its end."""


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

    @classmethod
    def of(cls, out: Tensor, dense: Tensor, exact: Tensor, covered: Tensor, selecting: Tensor) -> "LayerSums":
        """The sums of some tokens.

        Args:
            out: output [T, ...] of the layer.
            dense: attention over every visible row.
            exact: attention over the selected rows.
            covered: [T, H], the share of dense attention's weights that the selected rows have.
            selecting: bool [T], tokens with more visible rows than are selected.
        """
        return cls(
            dense_error=float((out - dense).square().sum()),
            dense_norm=float(dense.square().sum()),
            exact_error=float((out - exact).square().sum()),
            exact_norm=float(exact.square().sum()),
            covered=float(covered.sum()),
            rows=covered.numel(),
            covered_selecting=float(covered[selecting].sum()),
            rows_selecting=int(selecting.sum()) * covered.shape[1],
        )

    def add(self, other: "LayerSums") -> None:
        """Add other sums to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(frozen=True)
class LayerErrors:
    """One layer's errors, over all tokens of a run."""

    dense_error: float
    """Relative error of the output against attention over every visible row, unquantised."""
    quantisation_error: float
    """Relative error against attention over the same selected rows, unquantised."""
    mass_covered: float
    """Share of dense attention's weights that falls on selected rows, mean over tokens and heads."""
    mass_covered_selecting: float | None
    """The same over tokens with more context than top-k, where the indexer has a choice to make; None without any."""


class Probe(Generic[H]):
    """Keeps a history of every request in each layer, and sums of errors per layer."""

    def __init__(self, layers: int) -> None:
        """Start without requests."""
        self.seconds = 0.0
        """Time spent in the probe, which callers subtract."""
        self._sums = [LayerSums() for _ in range(layers)]
        self._history: dict[tuple[int, int], H] = {}

    def forget(self, request: int) -> None:
        """Drop a finished request's rows."""
        for layer in range(len(self._sums)):
            self._history.pop((layer, request), None)

    def errors(self) -> list[LayerErrors]:
        """Errors per layer over all steps so far."""
        return [
            LayerErrors(
                (s.dense_error / s.dense_norm) ** 0.5,
                (s.exact_error / s.exact_norm) ** 0.5,
                s.covered / s.rows,
                s.covered_selecting / s.rows_selecting if s.rows_selecting else None,
            )
            for s in self._sums
        ]

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        """Add the time of the block to the probe's, without that of work already queued on the device."""
        _wait(device)
        began = time.perf_counter()
        yield
        _wait(device)
        self.seconds += time.perf_counter() - began


def row_slices(spans: Sequence[RequestSpan]) -> Iterator[tuple[RequestSpan, slice]]:
    """Each span with the slice of the step's rows that are its tokens."""
    first = 0
    for span in spans:
        yield span, slice(first, first + span.end - span.start)
        first += span.end - span.start


def picked_columns(selected: Tensor, columns: int) -> Tensor:
    """bool [T, columns]: the columns in an int [T, K] selection, -1 padded."""
    # An additional column receives the padding.
    wanted = torch.zeros(len(selected), columns + 1, dtype=torch.bool, device=selected.device)
    wanted.scatter_(1, torch.where(selected >= 0, selected, columns).long(), True)
    return wanted[:, :columns]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
