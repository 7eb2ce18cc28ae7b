"""Rows that tokens have selected, products token by token, and ordered sums by row, in plain torch.

The definitions of training (`gradients.py` of the stages) share these. In the deterministic mode a token's bits depend
on the token alone: every product is one matrix product of a fixed shape whose operands start on 64 bytes, where a
product of the whole batch would choose its order of summation by the size of the batch.
"""

import torch
from torch import Tensor

from tamis.arithmetic import round_up
from tamis.cache.selection import Rows

BLOCK = 256
"""Contributions to one row that are added one after the other. The sums of such blocks are added in order."""


class Gatherer:
    """Reads the rows of a selection, some tokens at a time."""

    def __init__(self, selection: Rows, dtype: torch.dtype, *, trim: bool = False) -> None:
        """Copy the rows once, in the dtype of products.

        Args:
            selection: rows and slots.
            dtype: of the rows that are read.
            trim: whether columns past the last one that any of the tokens uses are left out.
        """
        self._selection, self._trim = selection, trim
        count, width = selection.rows.shape
        # The last row stands for skipped columns. Zeros keep NaN of rows that nobody chose out of every product.
        self._table = torch.zeros(count + 1, padded(width, dtype), dtype=dtype, device=selection.rows.device)
        self._table[:count, :width] = selection.rows.detach()

    def __call__(self, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens start..end: rows [t, K, width], padded with zeros to whole 64 bytes; row numbers int64 [t, K], that
        of the last row plus one where a column is skipped; and which columns count, bool [t, K]."""
        count = len(self._table) - 1
        slots = self._selection.slots[start:end].long()
        valid = (slots >= 0) & (slots < count)
        if self._selection.lengths is not None:
            column = torch.arange(slots.shape[1], dtype=torch.int64, device=slots.device)
            valid &= column < self._selection.lengths[start:end].unsqueeze(1)
        slots = torch.where(valid, slots, count)
        if self._trim:
            used = valid.any(0).nonzero()
            last = int(used[-1]) + 1 if len(used) else 0
            slots, valid = slots[:, :last], valid[:, :last]
        return self._table.index_select(0, slots.reshape(-1)).view(*slots.shape, self._table.shape[1]), slots, valid


def padded(width: int, dtype: torch.dtype) -> int:
    """A width rounded up to whole 64 bytes."""
    return round_up(width, 64 // dtype.itemsize)


def widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype whose last axis is padded with zeros to whole 64 bytes."""
    width = values.shape[-1]
    wide = torch.zeros(*values.shape[:-1], padded(width, dtype), dtype=dtype, device=values.device)
    wide[..., :width] = values.detach()
    return wide


def multiply(left: Tensor, right: Tensor, *, alone: bool) -> Tensor:
    """Products [t, m, n] of [t, m, k] and [t, k, n]; with `alone`, each by itself."""
    if not alone:
        return torch.bmm(left, right)
    left, right = _aligned(left), _aligned(right)
    found = torch.empty(len(left), left.shape[1], right.shape[2], dtype=left.dtype, device=left.device)
    for token in range(len(left)):
        torch.mm(left[token], right[token], out=found[token])
    return found


def _aligned(matrices: Tensor) -> Tensor:
    """Matrices [t, m, n] that all start on 64 bytes: with another alignment a product may sum in another order."""
    if matrices.data_ptr() % 64 == 0 and matrices.stride(0) * matrices.element_size() % 64 == 0:
        return matrices
    turned = matrices.stride(2) != 1
    rows = widened(matrices.transpose(1, 2) if turned else matrices, matrices.dtype)
    return rows[..., : matrices.shape[1]].transpose(1, 2) if turned else rows[..., : matrices.shape[2]]


class RowSums:
    """Sums by row of contributions that arrive in chunks, in the order of tokens and columns.

    The deterministic sum of a row adds its contributions in blocks of `BLOCK`, one after the other, and then the blocks
    in order. It depends on the row's own contributions and their order, and on nothing else: not on the chunks, and not
    on other requests in the batch.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype, *, deterministic: bool) -> None:
        """Start at zero, for sums of the shape of `rows`."""
        self._rows, self._deterministic = len(rows), deterministic
        # The last row takes what is skipped.
        self._total = torch.zeros(len(rows) + 1, rows.shape[1], dtype=dtype, device=rows.device)
        if deterministic:
            self._block = torch.zeros_like(self._total)
            self._count = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)

    def add(self, slots: Tensor, values: Tensor) -> None:
        """Add values [n, width or more] to the rows of their slots int64 [n]; a slot that is the number of rows means
        skip."""
        values = values[:, : self._total.shape[1]].to(self._total.dtype)
        if not self._deterministic:
            self._total.index_add_(0, slots, values)
            return
        ordered, order = slots.sort(stable=True)
        order = order[: int((ordered < self._rows).sum())]
        rows, counts = ordered[: len(order)].unique_consecutive(return_counts=True)
        if len(rows) == 0:
            return
        first = counts.cumsum(0) - counts
        filled = self._count[rows] % BLOCK
        # A row's list is cut where its block is full, also by contributions of earlier chunks.
        pieces = (filled + counts + BLOCK - 1) // BLOCK
        owner = torch.arange(len(rows), dtype=torch.int64, device=rows.device).repeat_interleave(pieces)
        number = torch.arange(len(owner), dtype=torch.int64, device=rows.device)
        number -= (pieces.cumsum(0) - pieces)[owner]
        begin = first[owner] + (number * BLOCK - filled[owner]).clamp_min(0)
        end = torch.minimum((first + counts)[owner], first[owner] + (number + 1) * BLOCK - filled[owner])
        # Longest first, so that those that still have something to add are always the leading ones.
        lengths, places = (end - begin).sort(descending=True, stable=True)
        begin, number, owner = begin[places], number[places], rows[owner[places]]
        sums = self._block[owner].masked_fill_((number > 0).unsqueeze(1), 0.0)
        for step in range(int(lengths[0])):
            active = int((lengths > step).sum())
            sums[:active] += values[order[begin[:active] + step]]
        self._count[rows] += counts
        self._block[rows] = 0.0
        for step in range(int(pieces.max())):
            here = (number == step).nonzero().squeeze(1)
            full = (filled + counts)[torch.searchsorted(rows, owner[here])] >= (step + 1) * BLOCK
            self._total[owner[here[full]]] += sums[here[full]]
            self._block[owner[here[~full]]] = sums[here[~full]]

    def result(self) -> Tensor:
        """The sums [rows, width]."""
        if self._deterministic:
            self._total += self._block
        return self._total[: self._rows]
