"""Norm and rotation of heads and rows, in plain torch."""

import torch
from torch import Tensor

from tamis.arithmetic import float32_products
from tamis.cache.codec import divide, exponent_above, to_e4m3, write_rows
from tamis.cache.layout import E4M3_MAX, OUTPUT_SCALE_FLOOR
from tamis.cache.paged import PagedCache
from tamis.model.rope import hadamard, rms_norm, rotate


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
    index_hadamard: bool,
) -> tuple[Tensor, Tensor | None]:
    """Rows into the cache; the queries [T, H, D] and the indexer's. See `tamis.ops.rotate_and_write`."""
    count = len(slots)
    rows = rms_norm(kv[:count].float(), norm_weight.float(), eps)
    insert(rotate_tail(rows, positions[:count], cos_sin), cache, slots)
    turned = None if index_q is None else rotate_heads(index_q, positions, cos_sin, None, False)
    if turned is not None and index_hadamard:
        turned = hadamard(turned).to(turned.dtype)
    return rotate_heads(q, positions, cos_sin, eps, False), turned


def rotate_to_fp8(x: Tensor, positions: Tensor, cos_sin: Tensor, tile: int, inverse: bool) -> tuple[Tensor, Tensor]:
    """e4m3 heads [T, H, D] and exponents [T, H, D / tile]; see `tamis.ops.rotate_to_fp8`."""
    turned = rotate_tail(x.float(), positions.unsqueeze(1), cos_sin, inverse)
    tiles = turned.unflatten(-1, (-1, tile))
    amax = tiles.abs().nan_to_num_(0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
    exponent = exponent_above(divide(amax, E4M3_MAX).clamp_min(OUTPUT_SCALE_FLOOR))
    values = to_e4m3(torch.ldexp(tiles, -exponent.unsqueeze(-1))).flatten(-2)
    return values.view(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


def lower_groups(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Lowered groups [T, G, O]; see `tamis.ops.lower_groups`."""
    tile = x.shape[2] // scales.shape[2]
    own = torch.exp2(scales.float() - 127).repeat_interleave(tile, dim=2)
    theirs = weight_scales.repeat_interleave(tile, dim=1)[:, : weight.shape[1]].repeat_interleave(tile, dim=2)
    wide = float32_products(x.device)
    factors = ((x.float() * own).to(wide), (weight.float() * theirs).to(wide))
    return torch.einsum("tgk,gok->tgo", *factors).to(dtype)


def rotate_tail(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """Float32 rows with their last columns rotated; negative positions leave them as they are."""
    rotary = cos_sin.shape[1]
    front, tail = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    known = positions.long().clamp(-1, len(cos_sin) - 1)
    turned = rotate(tail, cos_sin[known.clamp_min(0)], interleaved=True, inverse=inverse)
    return torch.cat((front, torch.where((known >= 0).unsqueeze(-1), turned, tail)), dim=-1)


def insert(rows: Tensor, cache: PagedCache, slots: Tensor, turned: bool = False) -> None:
    """Float32 rows rounded once, to bf16 before FP8, and written; if they are to be turned by the Hadamard matrix, that
    comes after, and they are rounded again."""
    stored = torch.bfloat16 if cache.layout.quantised else cache.layout.element
    rounded = rows.to(stored)
    write_rows(hadamard(rounded).to(stored) if turned else rounded, cache, slots)
