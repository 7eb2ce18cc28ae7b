"""Rows as they would be read back from a cache, in plain torch, for training."""

import torch
from torch import Tensor

from tamis.cache.codec import decode_rows, write_rows
from tamis.cache.fields import Rounding
from tamis.cache.paged import PagedCache
from tamis.ops.index.rotation import rotate_rows
from tamis.ops.write.row_operations import FakeQuantise


def fake_quantise(call: FakeQuantise) -> Tensor:
    """Rotate, write to a cache of one page, and read back: the bytes of the cache decide, not a copy of their rule."""
    x, layout = call.x.detach(), call.layout
    rows = x.float() if x.dtype == torch.float64 else x
    # Packed queries are rounded once, after all rotations (`pack_index_query`); everything else after each.
    rounding: Rounding = "none" if layout.packed and x.dim() == 3 else layout.rounding
    rows = rotate_rows(rows, call.positions, call.cos_sin, call.recipe, rounding)
    rows = rows.reshape(-1, layout.width)
    if len(rows) == 0:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    cache = PagedCache(layout, 1, len(rows), device=x.device, scale=call.scale)
    slots = torch.arange(len(rows), dtype=torch.int64, device=x.device)
    write_rows(rows, cache, slots)
    return decode_rows(cache, slots).view(x.shape).to(x.dtype)
