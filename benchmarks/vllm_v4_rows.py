"""Stores DeepSeek-V4's compressed entries as plain rows where vLLM's kernel for them cannot be compiled.

vLLM writes entries of 512 numbers, in bf16 or in e4m3 under one scale, with a kernel that needs CUTLASS' Python
package. This does the same with torch, for every engine that is compared. It waits for nothing and allocates by sizes
that the host knows, so that it can be captured in a graph.
"""

from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0


def store_plain_rows(
    *,
    state_cache: Tensor,
    num_actual: int,
    token_to_req_indices: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    block_size: int,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    k_cache_metadata: Any,
    head_dim: int,
    rope_head_dim: int,
    compress_ratio: int,
    overlap: bool,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    store_full_fp8: bool,
    fp8_scale: Tensor | None,
    **_: Any,
) -> None:
    """Compress, normalise, rotate and store the entries that this step completes.

    The arguments are those of vLLM's `compress_norm_rope_store_cutedsl` with `store_full_kv`. Of a slot that is -1
    nothing is stored; the first row of page 0, which vLLM uses for nothing, may be written again as it was.
    """
    count = min(num_actual, len(positions), len(token_to_req_indices), len(k_cache_metadata.slot_mapping))
    if count == 0:
        return
    positions, targets = positions[:count], k_cache_metadata.slot_mapping[:count]
    complete = (slot_mapping[:count] >= 0) & (targets >= 0) & ((positions + 1) % compress_ratio == 0)
    # Each request completes at most one entry more than its tokens have room for.
    most = min(count, count // compress_ratio + min(count, len(block_table)))
    chosen = torch.argsort((~complete).byte(), stable=True)[:most]
    complete = complete[chosen]
    # What padding holds may point anywhere.
    positions, targets, requests = (
        torch.where(complete, values[chosen], 0) for values in (positions, targets, token_to_req_indices[:count])
    )
    tables = block_table[requests.long()]
    values, scores = _states(state_cache, tables, positions, block_size, compress_ratio, overlap, head_dim)
    rows = (values * scores.softmax(1)).sum(1)
    rows = rows * (rows.square().mean(1, keepdim=True) + rms_norm_eps).rsqrt() * rms_norm_weight.float()
    first = positions // compress_ratio * compress_ratio
    rows = _rotated(rows, cos_sin_cache[first].float(), rope_head_dim).bfloat16()
    if store_full_fp8:
        inverse = 1.0 if fp8_scale is None else fp8_scale.reciprocal()
        rows = (rows.float() * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    pages, page_size = kv_cache.view(torch.uint8), kv_cache.shape[1]
    at = (targets // page_size, targets % page_size)
    pages[at] = torch.where(complete.unsqueeze(1), rows.view(torch.uint8), pages[at])


def _states(
    states: Tensor, tables: Tensor, positions: Tensor, block_size: int, ratio: int, overlap: bool, width: int
) -> tuple[Tensor, Tensor]:
    """Values and scores [entries, tokens of an entry, width]. An entry that overlaps the one before it reads the first
    half of those tokens' states, and the second half of its own."""
    number = torch.arange((1 + overlap) * ratio, device=positions.device)
    at = positions.unsqueeze(1) - len(number) + 1 + number
    seen = at >= 0
    at = at.clamp(min=0)
    pages = tables.gather(1, at // block_size).long()
    found = states[pages, at % block_size]
    columns = torch.where(number < ratio, 0, width).unsqueeze(1) + torch.arange(width, device=positions.device)
    columns = columns.expand(len(at), -1, -1)
    values, scores = (part.gather(2, columns) for part in found.chunk(2, 2))
    missing = ~seen.unsqueeze(2)
    return values.masked_fill(missing, 0.0), scores.masked_fill(missing, -torch.inf)


def _rotated(rows: Tensor, cos_sin: Tensor, rope: int) -> Tensor:
    """Rows whose last numbers are rotated in pairs."""
    cos, sin = cos_sin.chunk(2, 1)
    latent, pairs = rows[:, :-rope], rows[:, -rope:].unflatten(1, (rope // 2, 2))
    even, odd = pairs.unbind(2)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), 2)
    return torch.cat((latent, turned.flatten(1)), 1)
