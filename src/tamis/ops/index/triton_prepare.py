"""Prepares index queries and keys in Triton: LayerNorm, rope, Hadamard rotation and quantisation in one launch each.

Every step is the reference's in the same order, without fused multiply-adds, so bytes and folded weights are equal to
the reference's. Only the LayerNorm sums in another order, so that a value near a rounding boundary may round the other
way. Keys of one call that name the same slot race, as in stage `write`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout
from tamis.ops.index.operations import QuantiseIndexQuery, WriteIndexKeys
from tamis.ops.rows.triton_norm import hadamard_rows, hadamard_steps, rotate_pairs
from tamis.ops.rows.triton_rows import (
    decode_bf16,
    interpreted,
    launching_on,
    load_wide,
    round_to_bf16,
    row_arguments,
    row_start,
    store_rounded,
)
from tamis.ops.write.triton_kernels import encode_tiles, quantise_tiles

BLOCK_VALUES = 1024
"""Values per program: eight per thread, which is one 16-byte load of 16-bit values."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
ROW_ARGUMENTS = (
    *("cache", "page_stride", "PAGE_SIZE", "VALUES_START", "VALUES_STRIDE", "SCALES_START", "SCALES_STRIDE"),
    *("MODE", "TILE"),
)
"""The `row_arguments` that `insert_keys` takes."""


@triton.jit
def _row_moments(x, inside, eps, WIDTH: tl.constexpr):
    """The mean and the reciprocal standard deviation of each row."""
    mean = tl.sum(x, axis=1) / WIDTH
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, axis=1) / WIDTH + eps)


@triton.jit
def _norm_columns(x, column, known, mean, inverse, weight, bias):
    """Columns of rows after the LayerNorm, or unchanged if there is no weight."""
    if weight is not None:
        x = (x - mean[:, None]) * inverse[:, None] * load_wide(weight + column, known)[None, :]
        if bias is not None:
            x += load_wide(bias + column, known)[None, :]
    return x


@triton.jit
def _rotate_halves(
    x, rows, mean, inverse, weight, bias, position, cos_sin, table_rows,
    START: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows [rows, BLOCK] whose ROTARY columns from START on are rotated in pairs (i, i + ROTARY/2). Rows whose position
    is not in the table stay unchanged. The two columns of a pair belong to different threads, so each thread reads the
    other column again, from L1."""
    HALF: tl.constexpr = ROTARY // 2
    column = tl.arange(0, BLOCK)
    rope_column = column - START
    in_rope = (rope_column >= 0) & (rope_column < ROTARY)
    second = rope_column >= HALF
    other = column + tl.where(second, -HALF, HALF)
    rotated = ((position >= 0) & (position < table_rows))[:, None] & in_rope[None, :]
    partner = load_wide(rows[:, None] + other[None, :], rotated)
    partner = _norm_columns(partner, other, in_rope, mean, inverse, weight, bias)
    angles = cos_sin + (position.to(tl.int64) * ROTARY)[:, None] + (rope_column - tl.where(second, HALF, 0))[None, :]
    cos = tl.load(angles, mask=rotated, other=1.0)
    sin = tl.load(angles + HALF, mask=rotated, other=0.0)
    return tl.where(rotated, x * cos + partner * tl.where(second[None, :], sin, -sin), x)


@triton.jit
def prepare_rows(
    rows, valid, weight, bias, eps, positions, token, cos_sin, table_rows,
    WIDTH: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, ROUND: tl.constexpr, NATIVE_BF16: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 rows [ROWS, BLOCK], ready to be quantised. `rows` points to their first values, and `token` is the index
    of each row's position."""
    column = tl.arange(0, BLOCK)
    known = column < WIDTH
    inside = valid[:, None] & known[None, :]
    x = load_wide(rows[:, None] + column[None, :], inside)
    mean = 0.0
    inverse = 1.0
    if weight is not None:
        mean, inverse = _row_moments(x, inside, eps, WIDTH)
    x = _norm_columns(x, column, known, mean, inverse, weight, bias)
    if ROTARY:
        position = tl.load(positions + token, mask=valid, other=-1)
        if INTERLEAVED:
            x = rotate_pairs(x, cos_sin, position, table_rows, START, ROTARY, False, ROWS, BLOCK)
        else:
            x = _rotate_halves(
                x, rows, mean, inverse, weight, bias, position, cos_sin, table_rows, START, ROTARY, BLOCK
            )
    if HADAMARD_STEPS:
        if ROUND:
            x = decode_bf16(round_to_bf16(x, NATIVE_BF16))
        x = hadamard_rows(x, HADAMARD_STEPS, ROWS, BLOCK)
    if ROUND:
        x = decode_bf16(round_to_bf16(x, NATIVE_BF16))
    return x


# do_not_specialize: Triton would otherwise recompile when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["count", "table_rows"])
def quantise_queries(
    q, token_stride, head_stride, weights, weights_token_stride, weights_head_stride, positions, cos_sin, table_rows,
    scale, values, folded, count,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, START: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, ROUND: tl.constexpr, MODE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    NATIVE_BF16: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise ROWS heads, of one token or of neighbouring ones; `count` is the number of heads of all tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < count
    token = row // HEADS
    head = row - token * HEADS
    x = prepare_rows(
        q + token.to(tl.int64) * token_stride + head * head_stride, valid, None, None, 0.0, positions, token,
        cos_sin, table_rows, WIDTH, START, ROTARY, INTERLEAVED, HADAMARD_STEPS, ROUND, NATIVE_BF16, ROWS, BLOCK,
    )  # fmt: skip
    codes, factor = quantise_tiles(tl.reshape(x, [ROWS, 1, BLOCK]), MODE, SCALE_FLOOR)
    column = tl.arange(0, BLOCK)
    at = values + (row.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(at, tl.reshape(codes, [ROWS, BLOCK]), mask=valid[:, None] & (column < WIDTH)[None, :])
    weight = load_wide(weights + token.to(tl.int64) * weights_token_stride + head * weights_head_stride, valid)
    tl.store(folded + row, weight * scale * tl.reshape(factor, [ROWS]), mask=valid)


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
    """Insert ROWS keys at their slots. Offsets and strides within the cache count its elements, as in `write_rows`."""
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


def quantise_index_query(call: QuantiseIndexQuery) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D] and float32 weights [T, H]; see `tamis.ops.quantise_index_query`."""
    device = call.q.device
    values = torch.empty(call.q.shape, dtype=torch.uint8, device=device)
    folded = torch.empty(call.weights.shape, dtype=torch.float32, device=device)
    if values.numel():
        arguments = query_arguments(call, values, folded)
        with launching_on(device):
            quantise_queries[(triton.cdiv(arguments["count"], arguments["ROWS"]),)](**arguments, **OPTIONS)
    return values.view(torch.float8_e4m3fn), folded


def write_index_keys(call: WriteIndexKeys) -> None:
    """Insert keys, no two of them at one slot; see `tamis.ops.write_index_keys`."""
    if len(call.slots) == 0:
        return
    arguments = key_arguments(call)
    with launching_on(call.keys.device):
        insert_keys[(triton.cdiv(arguments["count"], arguments["ROWS"]),)](**arguments, **OPTIONS)


def check_quantise_index_query(call: QuantiseIndexQuery) -> None:
    """Refuse rope columns that the kernel cannot rotate."""
    _check_pairs(call, call.q.shape[2])


def check_write_index_keys(call: WriteIndexKeys) -> None:
    """Refuse rope columns that the kernel cannot rotate."""
    _check_pairs(call, call.keys.shape[1])


def _check_pairs(call: QuantiseIndexQuery | WriteIndexKeys, width: int) -> None:
    recipe = call.recipe
    start = 0 if recipe.rope_first else width - recipe.rope_dim
    if call.positions is not None and recipe.rope_dim and recipe.interleaved and start % 2:
        expected = "with pairs from an even column on for the triton backend"
        raise checks.refuse("recipe", expected, f"{recipe} in rows of {width}", "pass backend='reference'")


def _shared_arguments(call: QuantiseIndexQuery | WriteIndexKeys, width: int, layout: Layout) -> dict[str, Any]:
    """The arguments of both kernels about rotations and rounding."""
    recipe = call.recipe
    # Without columns to rotate the kernels need neither positions nor table.
    positions, cos_sin = (call.positions, call.cos_sin) if recipe.rope_dim else (None, None)
    rotary = 0 if cos_sin is None else recipe.rope_dim
    block = triton.next_power_of_2(width)
    return {
        "positions": None if positions is None else positions.contiguous(),
        "cos_sin": None if cos_sin is None else cos_sin.contiguous(),
        "table_rows": 0 if cos_sin is None else cos_sin.shape[0],
        "WIDTH": width,
        "START": 0 if recipe.rope_first else width - rotary,
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


def query_arguments(call: QuantiseIndexQuery, values: Tensor, folded: Tensor) -> dict[str, Any]:
    """The arguments of `quantise_queries`, which writes uint8 [T, H, D] and float32 [T, H]."""
    weights = call.weights
    tokens, heads, width = call.q.shape
    q = call.q if call.q.stride(2) == 1 else call.q.contiguous()
    return _shared_arguments(call, width, call.layout) | {
        "q": q,
        "token_stride": q.stride(0),
        "head_stride": q.stride(1),
        "weights": weights,
        "weights_token_stride": weights.stride(0),
        "weights_head_stride": weights.stride(1),
        "scale": call.scale,
        "values": values,
        "folded": folded,
        "count": tokens * heads,
        "HEADS": heads,
    }


def key_arguments(call: WriteIndexKeys) -> dict[str, Any]:
    """The arguments of `insert_keys`."""
    cache, layout, weight, bias = call.cache, call.cache.layout, call.norm_weight, call.norm_bias
    keys = call.keys if call.keys.stride(1) == 1 else call.keys.contiguous()
    rows = row_arguments(cache)
    return _shared_arguments(call, layout.width, layout) | {
        **{name: rows[name] for name in ROW_ARGUMENTS},
        "keys": keys,
        "keys_stride": keys.stride(0),
        "slots": call.slots.contiguous(),
        "norm_weight": None if weight is None else weight.contiguous(),
        "norm_bias": None if bias is None else bias.contiguous(),
        "norm_eps": call.norm_eps,
        "cache_rows": cache.rows,
        "count": call.slots.shape[0],
        "SCALES": layout.scales.count if layout.scales is not None else 0,
    }
