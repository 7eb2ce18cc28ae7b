"""Merging partial attention outputs by their lse, in plain torch."""

import torch
from torch import Tensor


def combine_parts(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merged output [T, H, V] and lse [T, H]; a part with an lse of -inf counts nothing, whatever its output holds."""
    empty = lse == -torch.inf
    peak = lse.amax(0)
    weights = torch.exp(lse - peak.masked_fill(peak == -torch.inf, 0.0))
    total = weights.sum(0)
    merged = (out.masked_fill(empty.unsqueeze(-1), 0.0) * weights.unsqueeze(-1)).sum(0)
    merged /= total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    lse = torch.where(total > 0, peak + total.log(), peak)
    if sink is not None:
        # 1 / (1 + exp(sink - lse)); an empty row is zero with any sink, including -inf - -inf.
        share = torch.sigmoid(lse - sink.to(lse.dtype))
        merged *= torch.where(lse == -torch.inf, 0.0, share).unsqueeze(-1)
    return merged, lse
