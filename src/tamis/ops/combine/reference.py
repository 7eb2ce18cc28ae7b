"""Merging partial attention outputs by their lse, in plain torch."""

import torch
from torch import Tensor


def combine_parts(parts: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor) -> Tensor:
    """Merge parts [S, T, H, V] into `out` [T, H, V]; the merged lse [T, H]. A part with an lse of -inf counts nothing,
    whatever its output holds."""
    empty = lses == -torch.inf
    peak = lses.amax(0)
    weights = torch.exp(lses - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weights.sum(0)
    merged = (parts.masked_fill(empty.unsqueeze(-1), 0.0) * weights.unsqueeze(-1)).sum(0)
    merged /= total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    lse = torch.where(total > 0, peak + total.log(), peak)
    if sink is not None:
        # 1 / (1 + exp(sink - lse)); an empty row is zero with any sink, including -inf - -inf.
        share = torch.sigmoid(lse - sink.to(lse.dtype))
        merged *= torch.where(lse == -torch.inf, 0.0, share).unsqueeze(-1)
    out.copy_(merged)
    return lse
