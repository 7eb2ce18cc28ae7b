"""Sums by row as the CUDA C++ kernels add them up, in no particular order; see `RowSums` in row_gradients.cuh."""

import torch
from torch import Tensor


def natural_columns(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums [rows, width] in a dtype, with their columns in their own order.

    Of every 32 columns, number 16 i + 4 j + 2 k + l of the kernels is 16 i + 8 k + 2 j + l.
    """
    found = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    rows, groups = len(sums), sums.shape[1] // 32
    found.view(rows, groups, 2, 2, 4, 2).copy_(sums.view(rows, groups, 2, 4, 2, 2).transpose(3, 4))
    return found
