"""The way of attention's output back to hidden states, in FP8: heads rotated and quantised, then lowered by group."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.cache.layout import OUTPUT_SCALE_FLOOR
from tamis.ops.rows.triton_norm import rotate_row
from tamis.ops.rows.triton_rows import (
    decode_e4m3,
    has_native_e4m3,
    interpreted,
    launching_on,
    load_wide,
    power_of_two,
    store_rounded,
)
from tamis.ops.write.triton_kernels import quantise_tiles

E4M3 = torch.float8_e4m3fn
TURN_WARPS = 1
LOWER_WARPS, LOWER_STAGES = 4, 3
MOST_TOKENS = 64
"""Tokens of one program, the columns of its product; the rows are those of the weight, of which there are always many.
"""


@triton.jit(do_not_specialize=["table_rows"])
def turn_to_fp8(
    x, token_stride, head_stride, values, scales, heads, positions, cos_sin, table_rows,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr, FLOOR: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token."""
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    row = load_wide(x + token.to(tl.int64) * token_stride + head * head_stride + column, column < WIDTH)
    row = rotate_row(row, cos_sin, tl.load(positions + token), table_rows, WIDTH, ROTARY, INVERSE, BLOCK)
    tiles = tl.reshape(row, [1, BLOCK // TILE, TILE])
    codes, scale = quantise_tiles(tiles, "exponent", FLOOR)
    place = token.to(tl.int64) * heads + head
    tl.store(values + place * WIDTH + column, tl.reshape(codes, [BLOCK]), mask=column < WIDTH)
    tile = tl.arange(0, BLOCK // TILE)
    exponent = tl.reshape(scale, [BLOCK // TILE]).to(tl.int32, bitcast=True) >> 23
    tl.store(scales + place * (WIDTH // TILE) + tile, exponent.to(tl.uint8), mask=tile < WIDTH // TILE)


@triton.jit
def _operand(at, mask, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    found = tl.load(at, mask=mask, other=0.0)
    if at.dtype.element_ty == tl.uint8:
        found = decode_e4m3(found, NATIVE)
    return found.to(COMPUTE)


@triton.jit(do_not_specialize=["tokens"])
def lower_tile(
    x, scales, weight, weight_scales, out, tokens,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr, NATIVE_BF16: tl.constexpr, STAGES: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_O of a group's lowered columns for BLOCK_T tokens. Sums inside a tile are the matrix instruction's; those
    over tiles, which have their own scales, are float32."""
    TILES: tl.constexpr = WIDTH // TILE
    SCALE_ROWS: tl.constexpr = (RANK + TILE - 1) // TILE
    low = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    group = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, TILE)
    given = token.to(tl.int64) * GROUPS + group
    total = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        column = tile * TILE + lane
        at = weight + (group * RANK + low).to(tl.int64)[:, None] * WIDTH + column[None, :]
        left = _operand(at, (low < RANK)[:, None], COMPUTE, NATIVE)
        at = x + given[:, None] * WIDTH + column[None, :]
        right = _operand(at, (token < tokens)[:, None], COMPUTE, NATIVE)
        at = weight_scales + (group * SCALE_ROWS + low // TILE) * TILES + tile
        theirs = tl.load(at, mask=low < RANK, other=0.0)
        own = power_of_two(tl.load(scales + given * TILES + tile, mask=token < tokens, other=127), False)
        total += tl.dot(left, tl.trans(right), input_precision="ieee") * (theirs[:, None] * own[None, :])
    at = out + given[None, :] * RANK + low[:, None]
    store_rounded(at, total, (low < RANK)[:, None] & (token < tokens)[None, :], NATIVE_BF16)


def rotate_to_fp8(x: Tensor, positions: Tensor, cos_sin: Tensor, tile: int, inverse: bool) -> tuple[Tensor, Tensor]:
    """e4m3 heads [T, H, D] and their exponents [T, H, D / tile]."""
    tokens, heads, width = x.shape
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, heads, width // tile, dtype=torch.uint8, device=x.device)
    if values.numel():
        arguments = fp8_arguments(x, positions, cos_sin, tile, inverse, values, scales)
        with launching_on(x.device):
            turn_to_fp8[(tokens, heads)](**arguments, num_warps=TURN_WARPS)
    return values.view(E4M3), scales


def lower_groups(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Lowered groups [T, G, O]."""
    tokens, groups, rank = x.shape[0], weight.shape[0], weight.shape[1]
    out = torch.empty(tokens, groups, rank, dtype=dtype, device=x.device)
    if out.numel():
        arguments = lower_arguments(x, scales, weight, weight_scales, out, native=has_native_e4m3(x.device))
        grid = triton.cdiv(rank, arguments["BLOCK_O"]), groups, triton.cdiv(tokens, arguments["BLOCK_T"])
        with launching_on(x.device):
            lower_tile[grid](**arguments, num_warps=LOWER_WARPS)
    return out


def fp8_arguments(
    x: Tensor, positions: Tensor, cos_sin: Tensor, tile: int, inverse: bool, values: Tensor, scales: Tensor
) -> dict[str, Any]:
    """What `turn_to_fp8` is launched with."""
    x = x if x.stride(2) == 1 else x.contiguous()
    return {
        "x": x,
        "token_stride": x.stride(0),
        "head_stride": x.stride(1),
        "values": values,
        "scales": scales,
        "heads": x.shape[1],
        "positions": positions.contiguous(),
        "cos_sin": cos_sin.contiguous(),
        "table_rows": cos_sin.shape[0],
        "WIDTH": x.shape[2],
        "ROTARY": cos_sin.shape[1],
        "TILE": tile,
        "FLOOR": OUTPUT_SCALE_FLOOR,
        "INVERSE": inverse,
        "BLOCK": triton.next_power_of_2(x.shape[2]),
    }


def lower_arguments(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor, *, native: bool
) -> dict[str, Any]:
    """What `lower_tile` is launched with."""
    on_host = interpreted(lower_tile)
    stored = E4M3 if native else torch.uint8
    compute = tl.float32 if on_host else tl.float8e4nv if native else tl.float16
    return {
        "x": x.contiguous().view(stored),
        "scales": scales.contiguous(),
        "weight": weight.contiguous().view(stored),
        "weight_scales": weight_scales.contiguous(),
        "out": out,
        "tokens": x.shape[0],
        "GROUPS": weight.shape[0],
        "WIDTH": weight.shape[2],
        "RANK": weight.shape[1],
        "TILE": weight.shape[2] // scales.shape[2],
        "COMPUTE": compute,
        "NATIVE": native,
        "NATIVE_BF16": not on_host,
        "STAGES": LOWER_STAGES,
        "BLOCK_O": 64,
        "BLOCK_T": max(16, min(MOST_TOKENS, triton.next_power_of_2(max(1, x.shape[0])))),
    }
