"""Rows and queries for the tests of few heads, on the host and on a device."""

import torch

from tamis import PagedCache
from tamis.arithmetic import ceil_div
from tamis.cache.layout import named, v32_fp8
from tamis.lab.testing import oracle

SCALE = 0.05
KINDS = [("exact", torch.bfloat16), ("exact", torch.float16), ("bf16", torch.bfloat16)]  # of rows and queries


def filled(
    rows: int, page_size: int = 16, *, mode: str = "pow2", gap: int = 0, spread: float = 0.0, rope: int = 64
) -> PagedCache:
    """Random rows; `gap` bytes of NaN between pages; `spread`: tiles differ by up to this power of two."""
    layout = named("v32-bf16", rope=rope) if mode == "bf16" else v32_fp8(scale_mode=mode, rope=rope)
    pages, size = ceil_div(rows, page_size), page_size * layout.row_bytes
    raw = torch.full((pages, size + gap), 0xFF, dtype=torch.uint8).view(layout.element)
    cache = PagedCache.wrap(raw[:, : size // raw.itemsize].unflatten(1, (page_size, -1)), layout)
    kv = torch.randn(cache.rows, 512 + rope)
    kv[:, :512] *= torch.exp2((torch.rand(cache.rows, 4) * 2 - 1) * spread).repeat_interleave(128, 1)
    oracle.write(kv, cache, torch.arange(cache.rows))
    return cache
