"""Index queries and keys made ready in Triton: norm, rope, Hadamard rotation and FP8 in one launch each.

Every step is that of the reference in the same order, without fused multiply-adds, so bytes and folded weights are the
reference's. Only the LayerNorm sums in another order: there a value may fall to the other side of a rounding boundary.
Keys of one call that name the same slot race, as in stage `write`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.ops.rows.triton_norm import hadamard_rows, hadamard_steps, rotate_pairs
from tamis.ops.rows.triton_rows import (
    interpreted,
    launching_on,
    load_wide,
    round_to_bf16,
    row_arguments,
    row_start,
    store_rounded,
    widen_bf16,
)
from tamis.ops.write.triton_kernels import encode_tiles, quantise_tiles

BLOCK_VALUES = 1024
"""Values that one program handles: eight per thread, which is one wide load of 16-bit numbers."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _measure_rows(x, inside, eps, WIDTH: tl.constexpr):
    """The mean of each row and one over its standard deviation."""
    mean = tl.sum(x, axis=1) / WIDTH
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)


@triton.jit
def _norm_columns(x, column, known, mean, inverse, weight, bias):
    """Any columns of rows, normed if there is a weight."""
    if weight is not None:
        x = (x - mean[:, None]) * inverse[:, None] * load_wide(weight + column, known)[None, :]
        if bias is not None:
            x += load_wide(bias + column, known)[None, :]
    return x


@triton.jit
def _turn_halves(
    x, rows, mean, inverse, weight, bias, position, cos_sin, table_rows,
    START: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows [rows, BLOCK] with ROTARY columns from START on turned in pairs (i, i + ROTARY/2); unchanged where the table
    has no such position. Pairs lie far apart, in other threads: the other of each is read again, from the nearest
    cache."""
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK)
    place = column - START
    turned = (place >= 0) & (place < ROTARY)
    second = place >= HALF
    other = column + tl.where(second, -HALF, HALF)
    turning = ((position >= 0) & (position < table_rows))[:, None] & turned[None, :]
    opposite = load_wide(rows[:, None] + other[None, :], turning)
    opposite = _norm_columns(opposite, other, turned, mean, inverse, weight, bias)
    angles = cos_sin + (position.to(tl.int64) * ROTARY)[:, None] + (place - tl.where(second, HALF, 0))[None, :]
    cos = tl.load(angles, mask=turning, other=1.0)
    sin = tl.load(angles + HALF, mask=turning, other=0.0)
    return tl.where(turning, x * cos + opposite * tl.where(second[None, :], sin, -sin), x)


@triton.jit
def prepare_rows(
    rows, there, weight, bias, eps, positions, token, cos_sin, table_rows,
    WIDTH: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, ROUND: tl.constexpr, NATIVE_BF16: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """fp32 rows [ROWS, BLOCK] ready to be quantised, given where they begin and whose position is theirs."""
    column = tl.arange(0, BLOCK)
    known = column < WIDTH
    inside = there[:, None] & known[None, :]
    x = load_wide(rows[:, None] + column[None, :], inside)
    mean = 0.0
    inverse = 1.0
    if weight is not None:
        mean, inverse = _measure_rows(x, inside, eps, WIDTH)
    x = _norm_columns(x, column, known, mean, inverse, weight, bias)
    if ROTARY:
        position = tl.load(positions + token, mask=there, other=-1)
        if INTERLEAVED:
            x = rotate_pairs(x, cos_sin, position, table_rows, START, ROTARY, False, ROWS, BLOCK)
        else:
            x = _turn_halves(x, rows, mean, inverse, weight, bias, position, cos_sin, table_rows, START, ROTARY, BLOCK)
    if HADAMARD_STEPS:
        if ROUND:
            x = widen_bf16(round_to_bf16(x, NATIVE_BF16))
        x = hadamard_rows(x, HADAMARD_STEPS, ROWS, BLOCK)
    if ROUND:
        x = widen_bf16(round_to_bf16(x, NATIVE_BF16))
    return x


# Batches of any size share one kernel: where alignment does not matter, sizes are not looked at.
@triton.jit(do_not_specialize=["count", "table_rows"])
def quantise_queries(
    q, token_stride, head_stride, weights, weights_token_stride, weights_head_stride, positions, cos_sin, table_rows,
    scale, values, folded, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, ROUND: tl.constexpr, MODE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    NATIVE_BF16: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A few heads, of one token or of neighbours; `count` is that of all heads of all tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    token = row // HEADS
    head = row - token * HEADS
    x = prepare_rows(
        q + token.to(tl.int64) * token_stride + head * head_stride, there, None, None, 0.0, positions, token,
        cos_sin, table_rows, WIDTH, START, ROTARY, INTERLEAVED, HADAMARD_STEPS, ROUND, NATIVE_BF16, ROWS, BLOCK,
    )  # fmt: skip
    codes, factor = quantise_tiles(tl.reshape(x, [ROWS, 1, BLOCK]), MODE, SCALE_FLOOR)
    column = tl.arange(0, BLOCK)
    at = values + (row.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(at, tl.reshape(codes, [ROWS, BLOCK]), mask=there[:, None] & (column < WIDTH)[None, :])
    weight = load_wide(weights + token.to(tl.int64) * weights_token_stride + head * weights_head_stride, there)
    tl.store(folded + row, weight * scale * tl.reshape(factor, [ROWS]), mask=there)


@triton.jit(do_not_specialize=["count", "table_rows", "cache_rows"])
def insert_keys(
    keys, keys_stride, slots, norm_weight, norm_bias, norm_eps, positions, cos_sin, table_rows, cache, page_stride,
    cache_rows, count,
    WIDTH: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, ROUND: tl.constexpr, PAGE_SIZE: tl.constexpr, MODE: tl.constexpr,
    TILE: tl.constexpr, VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr,
    SCALES_START: tl.constexpr, SCALES_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr, NATIVE_BF16: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A few keys to their slots. Distances inside the cache are in its elements, as in `write_rows`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < count, other=-1)
    wanted = (slot >= 0) & (slot < cache_rows)
    slot = tl.where(wanted, slot, 0).to(tl.int32)
    x = prepare_rows(
        keys + row.to(tl.int64) * keys_stride, wanted, norm_weight, norm_bias, norm_eps, positions, row, cos_sin,
        table_rows, WIDTH, START, ROTARY, INTERLEAVED, HADAMARD_STEPS, ROUND, NATIVE_BF16, ROWS, BLOCK,
    )  # fmt: skip
    values_at = row_start(slot, page_stride, VALUES_STRIDE, PAGE_SIZE, False) + VALUES_START
    if MODE == "none":
        column = tl.arange(0, BLOCK)
        inside = wanted[:, None] & (column < WIDTH)[None, :]
        store_rounded(cache + values_at[:, None] + column[None, :], x, inside, NATIVE_BF16)
    else:
        scales_at = row_start(slot, page_stride, SCALES_STRIDE, PAGE_SIZE, False) + SCALES_START
        TILES_BLOCK: tl.constexpr = BLOCK // TILE if MODE == "packed" else 1
        tiles = tl.reshape(x, [ROWS, TILES_BLOCK, BLOCK // TILES_BLOCK])
        encode_tiles(
            tiles, wanted, cache, values_at, scales_at, MODE, WIDTH, TILE, SCALES, SCALE_FLOOR, TILES_BLOCK,
            BLOCK // TILES_BLOCK,
        )  # fmt: skip


def quantise_index_query(
    q: Tensor,
    weights: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    recipe: IndexRecipe,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D], encoded like rows of `layout`, and float32 weights [T, H] with both scales folded in."""
    values = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    folded = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    if values.numel():
        arguments = query_arguments(q, weights, positions, cos_sin, recipe, layout, scale, values, folded)
        with launching_on(q.device):
            quantise_queries[(triton.cdiv(arguments["count"], arguments["ROWS"]),)](**arguments, **OPTIONS)
    return values.view(torch.float8_e4m3fn), folded


def write_index_keys(
    keys: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    recipe: IndexRecipe,
) -> None:
    """Keys [T, D] into the cache, no two of them into one slot; see `tamis.ops.write_index_keys`."""
    if len(slots) == 0:
        return
    norm = (norm_weight, norm_bias, norm_eps)
    arguments = key_arguments(keys, cache, slots, *norm, positions, cos_sin, recipe)
    with launching_on(keys.device):
        insert_keys[(triton.cdiv(len(slots), arguments["ROWS"]),)](**arguments, **OPTIONS)


def check_recipe(recipe: IndexRecipe, width: int, rotates: bool) -> None:
    """Refuse pairs that these kernels cannot turn."""
    start = 0 if recipe.rope_first else width - recipe.rope_dim
    if rotates and recipe.rope_dim and recipe.interleaved and start % 2:
        expected = "with pairs from an even column on for the triton backend"
        raise checks.refuse("recipe", expected, f"{recipe} in rows of {width}", "pass backend='reference'")


def _shared_arguments(
    width: int, positions: Tensor | None, cos_sin: Tensor | None, recipe: IndexRecipe, layout: Layout
) -> dict[str, Any]:
    """What both kernels are told about rotations and rounding."""
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    start = 0 if recipe.rope_first else width - rotary
    block = triton.next_power_of_2(width)
    return {
        "positions": None if positions is None else positions.contiguous(),
        "cos_sin": None if cos_sin is None else cos_sin.contiguous(),
        "table_rows": 0 if cos_sin is None else cos_sin.shape[0],
        "WIDTH": width,
        "START": start,
        "ROTARY": rotary,
        "INTERLEAVED": recipe.interleaved,
        "HADAMARD_STEPS": hadamard_steps(block) if recipe.hadamard else 0,
        "ROUND": layout.rounding == "bf16",
        "MODE": layout.scale_mode,
        "SCALE_FLOOR": layout.scale_floor,
        "NATIVE_BF16": not interpreted(insert_keys),
        "ROWS": max(1, BLOCK_VALUES // block),
        "BLOCK": block,
    }


def query_arguments(
    q: Tensor,
    weights: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    recipe: IndexRecipe,
    layout: Layout,
    scale: float,
    values: Tensor,
    folded: Tensor,
) -> dict[str, Any]:
    """What `quantise_queries` is launched with."""
    tokens, heads, width = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    return _shared_arguments(width, positions, cos_sin, recipe, layout) | {
        "q": q,
        "token_stride": q.stride(0),
        "head_stride": q.stride(1),
        "weights": weights,
        "weights_token_stride": weights.stride(0),
        "weights_head_stride": weights.stride(1),
        "scale": scale,
        "values": values,
        "folded": folded,
        "count": tokens * heads,
        "HEADS": heads,
    }


def key_arguments(
    keys: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    recipe: IndexRecipe,
) -> dict[str, Any]:
    """What `insert_keys` is launched with."""
    layout = cache.layout
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    places = ("cache", "page_stride", "PAGE_SIZE", "VALUES_START", "VALUES_STRIDE", "SCALES_START", "SCALES_STRIDE")
    found = row_arguments(cache)
    return _shared_arguments(layout.width, positions, cos_sin, recipe, layout) | {
        **{name: found[name] for name in (*places, "MODE", "TILE")},
        "keys": keys,
        "keys_stride": keys.stride(0),
        "slots": slots.contiguous(),
        "norm_weight": None if norm_weight is None else norm_weight.contiguous(),
        "norm_bias": None if norm_bias is None else norm_bias.contiguous(),
        "norm_eps": norm_eps,
        "cache_rows": cache.rows,
        "count": slots.shape[0],
        "SCALES": layout.scales.count if layout.scales is not None else 0,
    }
