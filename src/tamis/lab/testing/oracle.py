"""Slow, simple versions of the stages in float64 on the host, which share no code with the stages.

Only `layout.py`, which defines the byte offsets, is shared. FP8 is converted with a table, bytes are written field by
field, and attention is computed one token at a time.
"""

import math
from collections.abc import Sequence
from functools import cache as remember

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.model.recipe import IndexRecipe

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]
NAN_CODE = 0x7F


@remember
def e4m3_table() -> NDArray[np.float64]:
    """The value of each of the 256 codes: sign, 4 exponent bits with a bias of 7, 3 mantissa bits, no infinities."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(code & 0x80, -size, size)
    values[[0x7F, 0xFF]] = np.nan
    return values


def round_to_e4m3(x: Array) -> Bytes:
    """Codes of float32 numbers: to the nearest, to the even code if two are equally near, saturating at 448."""
    grid = e4m3_table()[:NAN_CODE]
    size = np.minimum(np.abs(x.astype(np.float64)), grid[-1])
    below = np.searchsorted(grid, np.nan_to_num(size), side="right") - 1
    above = np.minimum(below + 1, len(grid) - 1)
    middle = (grid[below] + grid[above]) / 2
    code = np.where(size > middle, above, np.where(size == middle, below + (below & 1), below))
    code = np.where(np.isnan(x), NAN_CODE, np.minimum(code, len(grid) - 1) | (np.signbit(x) << 7))
    return code.astype(np.uint8)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def round_to_e2m1(x: Array) -> Bytes:
    """Codes of float32 numbers, packed in pairs: to the nearest, to the even code if two are equally near."""
    x = np.where(np.isnan(x), np.float32(6), x)
    size = np.minimum(np.abs(x.astype(np.float64)), 6.0)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    code = (size[..., None] > middles).sum(-1)
    code += (code < 7) & (code & 1 == 1) & (size == middles[np.minimum(code, 6)])
    code |= np.signbit(x) << 3
    pairs: Bytes = (code[..., 0::2] | code[..., 1::2] << 4).astype(np.uint8)
    return pairs


def tile_factors(tiles: Array, layout: Layout) -> tuple[Array, Tensor]:
    """The float32 divisor of each tile of [N, tiles, tile], and the scale that a row stores for it."""
    largest = np.nan_to_num(np.abs(tiles), nan=0.0, posinf=float(np.finfo(np.float32).max)).max(-1)
    smallest = np.maximum(largest / np.float32(layout.largest), np.float32(layout.scale_floor))
    if layout.scale_mode == "exact":
        return smallest, torch.from_numpy(smallest)
    if layout.scale_mode == "e4m3":
        codes = round_to_e4m3(smallest)
        stored = np.where(np.isnan(tiles).any(-1), np.uint8(NAN_CODE), codes)
        return e4m3_table()[codes].astype(np.float32), torch.from_numpy(stored)
    mantissa, exponent = np.frexp(smallest)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    factor = np.ldexp(np.float32(1), exponent).astype(np.float32)
    if layout.scale_mode == "pow2":
        return factor, torch.from_numpy(factor)
    stored = np.clip(exponent + 127, 0, 255)
    if layout.packed:
        stored = np.where(np.isnan(tiles).any(-1), 255, stored)
    return factor, torch.from_numpy(stored.astype(np.uint8))


def encode(kv: Tensor, layout: Layout, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The contents of the fields values, scales and tail for rows [N, width]."""
    if layout.scale_mode == "none":
        return kv.to(layout.element), None, None
    if layout.scale_mode == "tensor":
        return _quotients(kv.float().numpy(), np.float32(float(scale))), None, None
    latent = kv[:, : layout.latent]
    latent = latent.bfloat16().float() if layout.rounding == "bf16" else latent.float()
    tiles = latent.reshape(len(kv), layout.latent // layout.tile, layout.tile).numpy()
    factors, stored = tile_factors(tiles, layout)
    if layout.packed:
        codes = torch.from_numpy(round_to_e2m1(np.divide(tiles, factors[..., None], dtype=np.float32)))
    else:
        codes = _quotients(tiles, factors[..., None])
    codes = codes.reshape(len(kv), layout.values.count)
    assert layout.scales is not None
    padded = torch.zeros(len(kv), layout.scales.count, dtype=stored.dtype, device="cpu")
    padded[:, : stored.shape[1]] = stored
    tail = kv[:, layout.latent :].to(layout.tail.dtype) if layout.tail is not None else None
    return codes, padded, tail


def _quotients(x: Array, divisor: Array | np.float32) -> Tensor:
    """Codes of x / divisor, divided in float32 with one rounding."""
    return torch.from_numpy(round_to_e4m3(np.divide(x, divisor, dtype=np.float32)))


def write(kv: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """Write rows into a cache on the host; slots outside it are skipped, and the last row for a slot wins."""
    row_of = {slot: row for row, slot in enumerate(slots.tolist()) if 0 <= slot < cache.rows}
    slot = torch.tensor(list(row_of), dtype=torch.int64, device="cpu")
    row = torch.tensor(list(row_of.values()), dtype=torch.int64, device="cpu")
    fields = (cache.layout.values, cache.layout.scales, cache.layout.tail)
    for field, data in zip(fields, encode(kv, cache.layout, cache.scale), strict=True):
        if field is not None and data is not None:
            cache.field(field)[slot // cache.page_size, slot % cache.page_size] = data[row]


def rows_of(cache: PagedCache, slots: Tensor) -> Tensor:
    """float64 rows [N, width] of slots [N] inside the cache, which may be on any device."""
    layout = cache.layout
    page, row = slots.long() // cache.page_size, slots.long() % cache.page_size

    def stored(field: str) -> Tensor:
        return cache.field(getattr(layout, field))[page.to(cache.device), row.to(cache.device)].cpu()

    raw = stored("values")
    if layout.scale_mode == "none":
        return raw.double()
    values = _e2m1_pairs(raw) if layout.packed else torch.from_numpy(e4m3_table()[raw.numpy()])
    if layout.scale_mode == "tensor":
        return values * float(np.float32(float(cache.scale)))
    scales = stored("scales")[:, : layout.latent // layout.tile]
    scales = torch.from_numpy(e4m3_table()[scales.numpy()]) if layout.scale_mode == "e4m3" else scales.double()
    if layout.scale_mode == "exponent":
        scales = torch.exp2(scales - 127).masked_fill((scales == 255) & layout.packed, torch.nan)
    latent = values.view(len(slots), layout.latent // layout.tile, layout.tile) * scales.unsqueeze(-1)
    tail = (
        stored("tail").double()
        if layout.tail is not None
        else torch.zeros(len(slots), 0, dtype=torch.float64, device="cpu")
    )
    return torch.cat((latent.reshape(len(slots), layout.latent), tail), dim=1)


def _e2m1_pairs(raw: Tensor) -> Tensor:
    codes = np.stack((raw.numpy() & 15, raw.numpy() >> 4), axis=-1).reshape(len(raw), 2 * raw.shape[1])
    return torch.from_numpy(np.concatenate((E2M1, -E2M1))[codes])


def slot_of(position: int, table: Sequence[int], page_size: int, rows_per_page: int | None = None) -> int:
    """The slot of one position of a request; -1 if it has none."""
    if position < 0 or position // page_size >= len(table) or table[position // page_size] < 0:
        return -1
    slot = table[position // page_size] * (rows_per_page or page_size) + position % page_size
    return slot if slot < 2**31 else -1


def selected_slots(selection: Selection, token: int) -> list[int]:
    """The slots that one token attends to, in column order, duplicates included."""
    slots: list[int] = selection.slots[token].tolist()
    if selection.request_ids is not None and selection.block_table is not None:
        table = selection.block_table[int(selection.request_ids[token])].tolist()
        slots = [slot_of(position, table, selection.cache.page_size) for position in slots]
    if selection.lengths is not None:
        slots = slots[: int(selection.lengths[token])]
    return [slot for slot in slots if 0 <= slot < selection.cache.rows]


def selected_rows(selections: Sequence[Selection], token: int) -> Tensor:
    """float64 rows [N, width] that one token attends to, over all selections."""
    slots = [torch.tensor(selected_slots(s, token), dtype=torch.int64, device="cpu") for s in selections]
    return torch.cat([rows_of(s.cache, at) for s, at in zip(selections, slots, strict=True)])


def attend(
    q: Tensor, selections: Sequence[Selection], *, scale: float, value_dim: int, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [T, H, V] and natural-log lse [T, H] of a query on the host, in float64."""
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, value_dim, dtype=torch.float64, device="cpu")
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device="cpu")
    for t in range(tokens):
        rows = selected_rows(selections, t)
        if len(rows) == 0:
            continue
        logits = q[t].double() @ rows.T * scale
        lse[t] = torch.logsumexp(logits, 1)
        out[t] = torch.softmax(logits, 1) @ rows[:, :value_dim]
        if sink is not None:
            out[t] /= (1 + torch.exp(sink.double() - lse[t])).unsqueeze(1)
    return out, lse


def combine(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merged output [T, H, V] and lse [T, H] of splits [S, T, H, ...], one head at a time."""
    parts, tokens, heads, width = out.shape
    merged = torch.zeros(tokens, heads, width, dtype=torch.float64, device="cpu")
    total = torch.full((tokens, heads), -torch.inf, dtype=torch.float64, device="cpu")
    for t in range(tokens):
        for h in range(heads):
            kept = [s for s in range(parts) if lse[s, t, h] > -math.inf]
            if not kept:
                continue
            total[t, h] = torch.logsumexp(lse[kept, t, h].double(), 0)
            weights = torch.exp(lse[kept, t, h].double() - total[t, h])
            merged[t, h] = weights @ out[kept, t, h].double()
            if sink is not None:
                merged[t, h] /= 1 + torch.exp(sink[h].double() - total[t, h])
    return merged, total


def index_scores(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    absolute: bool = False,
) -> Tensor:
    """float64 scores [T, longest context], -inf at positions that a token does not see.

    With `absolute`, queries and keys are replaced by their absolute values.
    """
    longest = block_table.shape[1] * cache.page_size
    scores = torch.full((len(q), longest), -torch.inf, dtype=torch.float64, device="cpu")
    for t in range(len(q)):
        table = block_table[int(request_ids[t])].tolist()
        slots = [slot_of(position, table, cache.page_size) for position in range(int(lengths[t]))]
        seen = [position for position, slot in enumerate(slots) if 0 <= slot < cache.rows]
        keys = rows_of(cache, torch.tensor([slots[position] for position in seen], dtype=torch.int64, device="cpu"))
        query = q[t].double()
        logits = query.abs() @ keys.abs().T if absolute else torch.relu(query @ keys.T)
        scores[t, torch.tensor(seen, dtype=torch.int64, device="cpu")] = weights[t].double() @ logits
    return scores


def index_keys(keys: Tensor, weight: Tensor, bias: Tensor, cos_sin: Tensor, recipe: IndexRecipe) -> Tensor:
    """float64 keys after LayerNorm (eps 1e-6), rope pair by pair, and Hadamard rotation by its matrix."""
    wide = keys.double()
    centred = wide - wide.mean(1, keepdim=True)
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double() + bias.double()
    return index_rows(normed, cos_sin, recipe)


def index_rows(rows: Tensor, cos_sin: Tensor, recipe: IndexRecipe) -> Tensor:
    """float64 rows after rope pair by pair, and Hadamard rotation by its matrix."""
    wide = rows.double()
    rotated, half = wide.clone(), recipe.rope_dim // 2
    start = 0 if recipe.rope_first else rows.shape[1] - recipe.rope_dim
    for pair in range(half):
        first = start + (2 * pair if recipe.interleaved else pair)
        second = first + (1 if recipe.interleaved else half)
        cos, sin = cos_sin[:, pair].double(), cos_sin[:, half + pair].double()
        rotated[:, first] = wide[:, first] * cos - wide[:, second] * sin
        rotated[:, second] = wide[:, second] * cos + wide[:, first] * sin
    if not recipe.hadamard:
        return rotated
    return rotated @ hadamard_matrix(rows.shape[1])


def hadamard_matrix(dim: int) -> Tensor:
    """The orthonormal Hadamard matrix float64 [dim, dim], by Sylvester's construction."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(dim)
