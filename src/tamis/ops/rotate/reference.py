"""Norm and rotation of heads and rows, in plain torch."""

import torch
from torch import Tensor

from tamis.cache import PagedCache
from tamis.ops.write.reference import write_kv
from tamis.rope import rms_norm, rotate


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [T, N]; see `tamis.ops.norm_rows`."""
    return rms_norm(x.float(), weight.float(), eps).to(x.dtype)


def rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool) -> Tensor:
    """Heads [T, H, D]; see `tamis.ops.rotate_heads`."""
    wide = x.float() if eps is None else rms_norm(x.float(), None, eps)
    return rotate_tail(wide, positions.unsqueeze(1), cos_sin, inverse).to(x.dtype)


def rotate_and_write(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float,
    index_q: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Rows into the cache; the queries [T, H, D] and the indexer's. See `tamis.ops.rotate_and_write`."""
    count = len(slots)
    rows = rms_norm(kv[:count].float(), norm_weight.float(), eps)
    insert(rotate_tail(rows, positions[:count], cos_sin), cache, slots)
    turned = None if index_q is None else rotate_heads(index_q, positions, cos_sin, None, False)
    return rotate_heads(q, positions, cos_sin, eps, False), turned


def rotate_tail(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Float32 rows with their last columns rotated; negative positions leave them as they are."""
    rotary = cos_sin.shape[1]
    front, tail = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    known = positions.long().clamp(-1, len(cos_sin) - 1)
    turned = rotate(tail, cos_sin[known.clamp_min(0)], interleaved=True, inverse=inverse)
    return torch.cat((front, torch.where((known >= 0).unsqueeze(-1), turned, tail)), dim=-1)


def insert(rows: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """Float32 rows rounded once, to bf16 before FP8, and written."""
    stored = torch.bfloat16 if cache.layout.quantised else cache.layout.element
    write_kv(rows.to(stored), cache, slots)
