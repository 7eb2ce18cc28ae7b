"""Sums of gradients by row in one order, on Hopper: launches of `ordered_sums.cu`."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.arithmetic import round_up
from tamis.cuda.compiler import Program
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import Long, Pointer, params_bytes, pointer

COLUMNS = 8
"""Columns of a thread."""


class SumParams(NamedTuple):
    """The parameters of `ordered_sums.cu`."""

    pairs: Pointer
    scales: Pointer
    order: Pointer
    ends: Pointer
    cursors: Pointer
    counts: Pointer
    total: Pointer
    block: Pointer
    first_pair: Long
    last_pair: Long


Launcher = Callable[[tuple[int, int, int], SumParams], None]


class OrderedSums:
    """Sums by row of pairs that arrive in chunks, in the order of tokens and columns."""

    def __init__(self, rows: Tensor, launch: Launcher) -> None:
        """Start at zero, for float32 sums of the shape of `rows`."""
        self._launch = launch
        self._total = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        self._block = torch.zeros_like(self._total)
        self._counts = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
        self._listed: tuple[Tensor, Tensor, Tensor] | None = None

    def list_pairs(self, slots: Tensor) -> None:
        """List the pairs of int32 slots [n], whose numbers are those of the slots; the number of rows means skip."""
        ordered, order = slots.sort(stable=True)
        bounds = torch.arange(len(self._counts) + 1, dtype=slots.dtype, device=slots.device)
        offsets = torch.searchsorted(ordered, bounds)
        # Cursors are written, so they are a copy.
        self._listed = order, offsets[1:].contiguous(), offsets[:-1].clone()

    def add(self, first: int, last: int, pairs: Tensor, scales: Tensor) -> None:
        """Add the pairs from number `first` up to `last`, which lie at the beginning of fp16 `pairs`, with scales."""
        if self._listed is None or not len(self._counts):
            return
        held = (pairs, scales, *self._listed, self._counts, self._total, self._block)
        self._launch((len(self._counts), 1, 1), SumParams(*(pointer(x) for x in held), first, last))

    def result(self) -> Tensor:
        """The sums [rows, width]."""
        return self._total + self._block


def program(width: int, parts: int) -> Program:
    """The source for rows of a width and pairs of a number of summands."""
    return Program.packaged(
        __package__,
        "ordered_sums.cu",
        WIDTH=width,
        PARTS=parts,
        THREADS=threads(width),
        PARAMS_BYTES=params_bytes(SumParams),
    )


def threads(width: int) -> int:
    """Threads of a CTA."""
    return round_up(width // COLUMNS, 32)


@cache
def on_device(width: int, parts: int, device: int) -> Launch:
    """The kernel, ready to launch."""
    loaded = kernel(program(width, parts), "ordered_sums", device)
    return Launch(loaded, SumParams, threads=threads(width))
