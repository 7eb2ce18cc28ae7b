"""Merges partial attention outputs by their lse, in plain torch."""

import torch
from torch import Tensor

from tamis.ops.combine.operations import CombineParts


def combine_parts(call: CombineParts) -> Tensor:
    """Merge the splits into the output; return the merged lse [T, H].

    A split with an lse of -inf does not count, whatever its output holds.
    """
    parts, lses, sink = call.parts, call.lses, call.sink
    empty = lses == -torch.inf
    largest = lses.amax(0)
    weights = torch.exp(lses - largest.masked_fill(largest == -torch.inf, 0.0))
    total = weights.sum(0)
    merged = (parts.masked_fill(empty.unsqueeze(-1), 0.0) * weights.unsqueeze(-1)).sum(0)
    merged /= total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    lse = torch.where(total > 0, largest + total.log(), largest)
    if sink is not None:
        # 1 / (1 + exp(sink - lse)); an empty row is zero with any sink, including -inf - -inf.
        share = torch.sigmoid(lse - sink.to(lse.dtype))
        merged *= torch.where(lse == -torch.inf, 0.0, share).unsqueeze(-1)
    call.out.copy_(merged)
    return lse.contiguous()
