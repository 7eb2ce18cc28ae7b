"""The output projection in FP8, in Triton.

`rotate_to_fp8` runs one program per head. `lower_groups` is a GEMM per group, whose programs each compute BLOCK_O
lowered columns for BLOCK_T tokens. The rows of its product are those of the weight, of which there are always many;
tokens, of which there may be few, are its columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.cache.fields import OUTPUT_SCALE_FLOOR
from tamis.ops.output.operations import LowerGroups, RotateToFp8
from tamis.ops.rotate.triton_kernels import rotation_arguments
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
ROTATE_WARPS = 1
LOWER_WARPS, LOWER_STAGES = 4, 3
MOST_TOKENS = 64
"""The largest BLOCK_T."""


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["table_rows"])
def rotate_to_fp8_kernel(
    x, token_stride, head_stride, values, scales, heads, positions, cos_sin, table_rows,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, TILE: tl.constexpr, FLOOR: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate and quantise one head of one token."""
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    row = load_wide(x + token.to(tl.int64) * token_stride + head * head_stride + column, column < WIDTH)
    row = rotate_row(row, cos_sin, tl.load(positions + token), table_rows, WIDTH, ROTARY, INVERSE, BLOCK)
    tiles = tl.reshape(row, [1, BLOCK // TILE, TILE])
    codes, scale = quantise_tiles(tiles, "exponent", FLOOR)
    offset = token.to(tl.int64) * heads + head
    tl.store(values + offset * WIDTH + column, tl.reshape(codes, [BLOCK]), mask=column < WIDTH)
    tile = tl.arange(0, BLOCK // TILE)
    exponent = tl.reshape(scale, [BLOCK // TILE]).to(tl.int32, bitcast=True) >> 23
    tl.store(scales + offset * (WIDTH // TILE) + tile, exponent.to(tl.uint8), mask=tile < WIDTH // TILE)


@triton.jit
def _operand(at, mask, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """An operand of the GEMM in COMPUTE's type; e4m3 comes as bytes where the device cannot multiply it."""
    found = tl.load(at, mask=mask, other=0.0)
    if at.dtype.element_ty == tl.uint8:
        found = decode_e4m3(found, NATIVE)
    return found.to(COMPUTE)


@triton.jit(do_not_specialize=["tokens"])
def lower_groups_kernel(
    x, scales, weight, weight_scales, out, tokens,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
    NATIVE: tl.constexpr, NATIVE_BF16: tl.constexpr, STAGES: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_O lowered columns of one group for BLOCK_T tokens.

    The FP8 GEMM accumulates within a tile; tiles have their own scales, so they are accumulated in float32 here.
    """
    TILES: tl.constexpr = WIDTH // TILE
    SCALE_ROWS: tl.constexpr = (RANK + TILE - 1) // TILE
    rank = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    group = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, TILE)
    x_row = token.to(tl.int64) * GROUPS + group
    accumulator = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        column = tile * TILE + lane
        at = weight + (group * RANK + rank).to(tl.int64)[:, None] * WIDTH + column[None, :]
        left = _operand(at, (rank < RANK)[:, None], COMPUTE, NATIVE)
        at = x + x_row[:, None] * WIDTH + column[None, :]
        right = _operand(at, (token < tokens)[:, None], COMPUTE, NATIVE)
        at = weight_scales + (group * SCALE_ROWS + rank // TILE) * TILES + tile
        weight_scale = tl.load(at, mask=rank < RANK, other=0.0)
        x_scale = power_of_two(tl.load(scales + x_row * TILES + tile, mask=token < tokens, other=127), False)
        scale = weight_scale[:, None] * x_scale[None, :]
        accumulator += tl.dot(left, tl.trans(right), input_precision="ieee") * scale
    at = out + x_row[None, :] * RANK + rank[:, None]
    store_rounded(at, accumulator, (rank < RANK)[:, None] & (token < tokens)[None, :], NATIVE_BF16)


def rotate_to_fp8(call: RotateToFp8) -> tuple[Tensor, Tensor]:
    """As `reference.rotate_to_fp8`."""
    tokens, heads, width = call.x.shape
    device = call.x.device
    values = torch.empty(call.x.shape, dtype=torch.uint8, device=device)
    scales = torch.empty(tokens, heads, width // call.tile, dtype=torch.uint8, device=device)
    if values.numel():
        arguments = fp8_arguments(call, values, scales)
        with launching_on(device):
            rotate_to_fp8_kernel[(tokens, heads)](**arguments, num_warps=ROTATE_WARPS)
    return values.view(E4M3), scales


def lower_groups(call: LowerGroups) -> Tensor:
    """As `reference.lower_groups`."""
    tokens, groups, rank = call.x.shape[0], call.weight.shape[0], call.weight.shape[1]
    device = call.x.device
    out = torch.empty(tokens, groups, rank, dtype=call.dtype, device=device)
    if out.numel():
        arguments = lower_arguments(call, out, native=has_native_e4m3(device))
        grid = triton.cdiv(rank, arguments["BLOCK_O"]), groups, triton.cdiv(tokens, arguments["BLOCK_T"])
        with launching_on(device):
            lower_groups_kernel[grid](**arguments, num_warps=LOWER_WARPS)
    return out


def fp8_arguments(call: RotateToFp8, values: Tensor, scales: Tensor) -> dict[str, Any]:
    """Arguments of `rotate_to_fp8_kernel`."""
    return rotation_arguments(call.x, call.positions, call.cos_sin) | {
        "values": values,
        "scales": scales,
        "TILE": call.tile,
        "FLOOR": OUTPUT_SCALE_FLOOR,
        "INVERSE": call.inverse,
        "BLOCK": triton.next_power_of_2(call.x.shape[2]),
    }


def lower_arguments(call: LowerGroups, out: Tensor, *, native: bool) -> dict[str, Any]:
    """Arguments of `lower_groups_kernel`; `native` says whether the device multiplies e4m3."""
    on_host = interpreted(lower_groups_kernel)
    stored = E4M3 if native else torch.uint8
    tokens, weight = call.x.shape[0], call.weight
    return {
        "x": call.x.contiguous().view(stored),
        "scales": call.scales.contiguous(),
        "weight": weight.contiguous().view(stored),
        "weight_scales": call.weight_scales.contiguous(),
        "out": out,
        "tokens": tokens,
        "GROUPS": weight.shape[0],
        "WIDTH": weight.shape[2],
        "RANK": weight.shape[1],
        "TILE": weight.shape[2] // call.scales.shape[2],
        "COMPUTE": tl.float32 if on_host else tl.float8e4nv if native else tl.float16,
        "NATIVE": native,
        "NATIVE_BF16": not on_host,
        "STAGES": LOWER_STAGES,
        "BLOCK_O": 64,
        "BLOCK_T": max(16, min(MOST_TOKENS, triton.next_power_of_2(max(1, tokens)))),
    }
