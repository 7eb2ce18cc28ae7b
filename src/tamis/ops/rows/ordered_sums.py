"""Sums of gradients by row in one order, in CUDA C++: launches of `ordered_sums.cu`."""

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
COPIED = 16
"""Summands of pairs that a thread copies ahead of their use."""
PAIR_BYTES = 768 << 20
"""Memory for the contributions of some tokens."""
LISTED_PAIRS = 8 << 20
"""Pairs of token and row that are sorted by row at a time."""


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
        # A radix sort takes half as many passes over 16 bits as over 32.
        dtype = torch.int16 if len(self._counts) <= torch.iinfo(torch.int16).max else slots.dtype
        ordered, order = slots.to(dtype).sort(stable=True)
        bounds = torch.arange(len(self._counts) + 1, dtype=dtype, device=slots.device)
        offsets = torch.searchsorted(ordered, bounds)
        # Cursors are written, so they are a copy.
        self._listed = order, offsets[1:].contiguous(), offsets[:-1].clone()

    def add(self, first: int, last: int, pairs: Tensor, scales: Tensor) -> None:
        """Add the pairs from number `first` up to `last`, which lie at the beginning of fp16 `pairs`, with scales."""
        if self._listed is None or not len(self._counts):
            return
        order, ends, cursors = self._listed
        params = SumParams(
            pairs=pointer(pairs),
            scales=pointer(scales),
            order=pointer(order),
            ends=pointer(ends),
            cursors=pointer(cursors),
            counts=pointer(self._counts),
            total=pointer(self._total),
            block=pointer(self._block),
            first_pair=first,
            last_pair=last,
        )
        self._launch((len(self._counts), 1, 1), params)

    def result(self) -> Tensor:
        """The sums [rows, width]."""
        return self._total + self._block


class PairForm(NamedTuple):
    """How kernels store the contributions of pairs of token and row; see `row_gradients.cuh`."""

    width: int
    """Columns of a row."""
    values: int
    """How many of them have a scale for every 64; those after them have one for every 32."""
    parts: int
    """Summands of a pair."""

    @property
    def scales(self) -> int:
        """Scales of a summand."""
        return self.values // 64 + (self.width - self.values) // 32


Pairs = Callable[[int, int, Tensor, Tensor], None]
"""Stores the pairs of tokens from a first up to a last, and their scales, at the beginning of two tensors."""


def sum_in_order(sums: OrderedSums, form: PairForm, slots: Tensor, store: Pairs, sms: int) -> Tensor:
    """Sums by row [rows, width] of what `store` stores, some tokens at a time.

    Args:
        sums: where they are added up.
        form: how pairs are stored.
        slots: int32 [T, K], the row of every pair; the number of rows means skip.
        store: stores the pairs of some tokens.
        sms: SMs of the device. Tokens are taken in whole waves of CTAs, one on each SM.
    """
    tokens, columns = slots.shape
    numbers = columns * form.parts * form.width
    step = max(1, PAIR_BYTES // max(1, 2 * numbers))
    step = max(1, min(tokens, step // sms * sms or step))
    listed = max(1, LISTED_PAIRS // max(1, columns) // step) * step
    pairs = torch.empty(step * columns * form.parts, form.width, dtype=torch.float16, device=slots.device)
    scales = torch.empty(len(pairs), form.scales, dtype=torch.float32, device=slots.device)
    for first in range(0, tokens if columns else 0, listed):
        last = min(first + listed, tokens)
        sums.list_pairs(slots[first:last].flatten())
        for start in range(first, last, step):
            end = min(start + step, last)
            store(start, end, pairs, scales)
            sums.add((start - first) * columns, (end - first) * columns, pairs, scales)
    return sums.result()


def program(form: PairForm) -> Program:
    """The source for a form of pairs."""
    return Program.packaged(
        __package__,
        "ordered_sums.cu",
        WIDTH=form.width,
        VALUES=form.values,
        PARTS=form.parts,
        PAIRS=pairs_ahead(form),
        THREADS=threads(form.width),
        SHARED_BYTES=shared_bytes(form),
        PARAMS_BYTES=params_bytes(SumParams),
    )


def threads(width: int) -> int:
    """Threads of a CTA."""
    return round_up(width // COLUMNS, 32)


def pairs_ahead(form: PairForm) -> int:
    """Pairs that are copied ahead, a multiple of four."""
    return max(4, COPIED // form.parts // 4 * 4)


def shared_bytes(form: PairForm) -> int:
    """Shared memory of a CTA: a thread's numbers, and the scale of each summand."""
    return pairs_ahead(form) * form.parts * threads(form.width) * (2 * COLUMNS + 4)


@cache
def on_device(form: PairForm, device: int) -> Launch:
    """The kernel, ready to launch."""
    loaded = kernel(program(form), "ordered_sums", device)
    return Launch(loaded, SumParams, threads=threads(form.width), shared=shared_bytes(form))
