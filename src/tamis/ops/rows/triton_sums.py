"""Ordered sums by row in Triton: the deterministic way to add up what many tokens contribute to one row.

A kernel stores the contribution of every pair of token and column, and a stable sort of the pairs by row lists each
row's contributions in the order of tokens and columns. One program then adds up a row's list, in the order that
`torch_rows.RowSums` defines: in blocks of `BLOCK`, one after the other, and then the blocks. What a chunk of tokens
leaves of a block is continued by the next chunk, so the sums do not depend on the chunks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.rows.triton_rows import launching_on

BLOCK = 256
"""Contributions to one row that are added one after the other."""
UNROLLED = 8
"""Contributions whose loads are issued together: additions wait for each other, loads need not."""


@triton.jit
def sum_rows_kernel(
    pairs, order, offsets, counts, total, block,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add the listed pairs [., WIDTH] of one row to its sums, for BLOCK_D columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < WIDTH
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if begin < end:
        done = tl.load(counts + row)
        at = row * WIDTH + column
        whole = tl.load(total + at, mask=inside, other=0.0)
        partial = tl.load(block + at, mask=inside, other=0.0)
        for first in range(begin, end, UNROLLED):
            for step in tl.static_range(UNROLLED):
                here = first + step < end
                pair = tl.load(order + first + step, mask=here, other=0)
                value = tl.load(pairs + pair * WIDTH + column, mask=inside & here, other=0.0)
                partial = tl.where(here, partial + value, partial)
                done += here.to(tl.int64)
                full = here & (done % BLOCK == 0)
                whole = tl.where(full, whole + partial, whole)
                partial = tl.where(full, 0.0, partial)
        tl.store(total + at, whole, mask=inside)
        tl.store(block + at, partial, mask=inside)


class RowSums:
    """Sums by row of pairs that arrive in chunks, in the order of tokens and columns."""

    def __init__(self, rows: Tensor) -> None:
        """Start at zero, for float32 sums of the shape of `rows`."""
        count, width = rows.shape
        self._total = torch.zeros(count, width, dtype=torch.float32, device=rows.device)
        self._block = torch.zeros_like(self._total)
        self._counts = torch.zeros(count, dtype=torch.int64, device=rows.device)

    def add(self, slots: Tensor, pairs: Tensor) -> None:
        """Add pairs float32 [n, width], contiguous, to the rows of their slots int32 [n]; a slot that is the number of
        rows means skip, and its pair is not read."""
        count = len(self._counts)
        ordered, order = slots.sort(stable=True)
        rows = torch.arange(count + 1, dtype=slots.dtype, device=slots.device)
        offsets = torch.searchsorted(ordered, rows)
        arguments = self.arguments(pairs, order, offsets)
        if count and pairs.numel():
            with launching_on(pairs.device):
                sum_rows_kernel[(count, triton.cdiv(arguments["WIDTH"], arguments["BLOCK_D"]))](
                    **arguments, **sum_options(arguments)
                )
        self._counts += offsets[1:] - offsets[:-1]

    def arguments(self, pairs: Tensor, order: Tensor, offsets: Tensor) -> dict[str, Any]:
        """Arguments of `sum_rows_kernel`."""
        width = self._total.shape[1]
        return {
            "pairs": pairs,
            "order": order,
            "offsets": offsets,
            "counts": self._counts,
            "total": self._total,
            "block": self._block,
            "WIDTH": width,
            "BLOCK_D": min(1024, triton.next_power_of_2(width)),
            "BLOCK": BLOCK,
            "UNROLLED": UNROLLED,
        }

    def result(self) -> Tensor:
        """The sums [rows, width]."""
        return self._total + self._block


def sum_options(arguments: dict[str, Any]) -> dict[str, int]:
    """Warps of `sum_rows_kernel`: four columns per thread."""
    return {"num_warps": max(1, min(8, arguments["BLOCK_D"] // 128))}
