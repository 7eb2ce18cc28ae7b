"""RMSNorm and rotation in Triton: one launch per operation, one program per row or head.

`rotate_and_write` gives each token a program per query head, one for its raw row and one per index head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads, WriteRotated
from tamis.ops.rows.triton_norm import (
    check_rows,
    hadamard_row,
    hadamard_steps,
    insert_arguments,
    insert_row,
    norm_row,
    rotate_row,
)
from tamis.ops.rows.triton_rows import interpreted, launching_on, load_wide, store_rounded

NUM_WARPS = 1
"""A head of 512 columns is 16 values per thread of one warp, whose sums need no shared memory."""


@triton.jit
def norm_rows_kernel(x, stride, weight, out, eps, WIDTH: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    normed = norm_row(load_wide(x + row * stride + column, inside), weight, eps, WIDTH, BLOCK)
    store_rounded(out + row * WIDTH + column, normed, inside, NATIVE_BF16)


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["table_rows"])
def rotate_heads_kernel(
    x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr, NATIVE_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one token."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    _rotate_head(
        token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps, WIDTH, ROTARY,
        NORM, INVERSE, 0, NATIVE_BF16, BLOCK,
    )  # fmt: skip


@triton.jit
def _rotate_head(
    token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = load_wide(x + token.to(tl.int64) * token_stride + head * head_stride + column, inside)
    if NORM:
        row = norm_row(row, None, eps, WIDTH, BLOCK)
    row = rotate_row(row, cos_sin, tl.load(positions + token), table_rows, WIDTH, ROTARY, INVERSE, BLOCK)
    row = hadamard_row(row, out, HADAMARD_STEPS, NATIVE_BF16, BLOCK)
    store_rounded(out + (token.to(tl.int64) * heads + head) * WIDTH + column, row, inside, NATIVE_BF16)


@triton.jit(do_not_specialize=["table_rows", "count", "cache_rows"])
def rotate_and_write_kernel(
    x, token_stride, head_stride, out, heads, index, index_token_stride, index_head_stride, index_out, index_heads,
    kv, kv_stride, slots, count, positions, cos_sin, table_rows, norm_weight, eps,
    cache, page_stride, scale, cache_rows,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, INDEX_WIDTH: tl.constexpr, INDEX_BLOCK: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr, NORM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs 0 to heads - 1 of a token run its query heads, program `heads` its raw row, the rest its index heads."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if head < heads:
        _rotate_head(
            token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps, WIDTH, ROTARY,
            NORM, False, 0, NATIVE_BF16, BLOCK,
        )  # fmt: skip
    elif head > heads:
        if INDEX_WIDTH:
            _rotate_head(
                token, head - heads - 1, index, index_token_stride, index_head_stride, index_out, index_heads,
                positions, cos_sin, table_rows, eps, INDEX_WIDTH, ROTARY, False, False, HADAMARD_STEPS,
                NATIVE_BF16, INDEX_BLOCK,
            )  # fmt: skip
    else:
        slot = tl.load(slots + token, mask=token < count, other=-1)
        if (slot >= 0) & (slot < cache_rows):
            column = tl.arange(0, BLOCK)
            row = load_wide(kv + token.to(tl.int64) * kv_stride + column, column < WIDTH)
            row = norm_row(row, norm_weight, eps, WIDTH, BLOCK)
            row = rotate_row(row, cos_sin, tl.load(positions + token), table_rows, WIDTH, ROTARY, False, BLOCK)
            insert_row(
                row, slot.to(tl.int32), cache, page_stride, scale, PAGE_SIZE, MODE, LATENT, ROPE, TILE, VALUES_START,
                VALUES_STRIDE, SCALES, SCALES_START, SCALES_STRIDE, TAIL_START, TAIL_STRIDE, SCALE_FLOOR,
                SCALE_IN_MEMORY, NATIVE_BF16, BLOCK, TILE_BLOCK,
            )  # fmt: skip


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["table_rows", "cache_rows"])
def write_rotated_kernel(
    rows, stride, slots, positions, cos_sin, table_rows, norm_weight, eps, cache, page_stride, scale, cache_rows,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, HADAMARD_STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and write one row."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if (slot >= 0) & (slot < cache_rows):
        column = tl.arange(0, BLOCK)
        row = load_wide(rows + token.to(tl.int64) * stride + column, column < WIDTH)
        if norm_weight is not None:
            row = norm_row(row, norm_weight, eps, WIDTH, BLOCK)
        position = tl.load(positions + token)
        # Integer division rounds towards zero here, so a negative position would become 0.
        first = tl.where(position >= 0, position // SPAN * SPAN, -1)
        row = rotate_row(row, cos_sin, first, table_rows, WIDTH, ROTARY, False, BLOCK)
        row = hadamard_row(row, cache, HADAMARD_STEPS, NATIVE_BF16, BLOCK)
        insert_row(
            row, slot.to(tl.int32), cache, page_stride, scale, PAGE_SIZE, MODE, LATENT, ROPE, TILE, VALUES_START,
            VALUES_STRIDE, SCALES, SCALES_START, SCALES_STRIDE, TAIL_START, TAIL_STRIDE, SCALE_FLOOR, SCALE_IN_MEMORY,
            NATIVE_BF16, BLOCK, TILE_BLOCK,
        )  # fmt: skip


def norm_rows(call: NormRows) -> Tensor:
    """As `reference.norm_rows`."""
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    arguments = norm_arguments(call, out)
    with launching_on(out.device):
        norm_rows_kernel[(out.shape[0],)](**arguments, **norm_options(arguments))
    return out


def rotate_heads(call: RotateHeads) -> Tensor:
    """As `reference.rotate_heads`."""
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    with launching_on(out.device):
        rotate_heads_kernel[out.shape[:2]](**head_arguments(call, out), num_warps=NUM_WARPS)
    return out


def check_rotate_and_write(call: RotateAndWrite) -> None:
    """Refuse a cache whose rows the kernel cannot write."""
    check_rows(call.cache)


def rotate_and_write(call: RotateAndWrite) -> tuple[Tensor, Tensor]:
    """As `reference.rotate_and_write`. No two rows may go to one slot: the order of the writes is not defined."""
    q, index_q = call.q, call.index_q
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if index_q is None:
        index_out = torch.empty(0, dtype=q.dtype, device=q.device)
    else:
        index_out = torch.empty_like(index_q, memory_format=torch.contiguous_format)
    if len(q) == 0:
        return out, index_out
    arguments = head_and_row_arguments(call, out, index_out)
    with launching_on(q.device):
        grid = (len(q), q.shape[1] + 1 + arguments["index_heads"])
        rotate_and_write_kernel[grid](**arguments, num_warps=NUM_WARPS)
    return out, index_out


def check_write_rotated(call: WriteRotated) -> None:
    """Refuse a cache whose rows the kernel cannot write."""
    check_rows(call.cache)


def write_rotated(call: WriteRotated) -> None:
    """As `reference.write_rotated`. No two rows may go to one slot: the order of the writes is not defined."""
    if len(call.slots):
        with launching_on(call.rows.device):
            write_rotated_kernel[(len(call.slots),)](**row_write_arguments(call), num_warps=NUM_WARPS)


def row_write_arguments(call: WriteRotated) -> dict[str, Any]:
    """Arguments of `write_rotated_kernel`."""
    rows = call.rows if call.rows.stride(1) == 1 else call.rows.contiguous()
    return insert_arguments(call.cache) | {
        "rows": rows,
        "stride": rows.stride(0),
        "slots": call.slots.contiguous(),
        "positions": call.positions.contiguous(),
        "cos_sin": call.cos_sin.contiguous(),
        "table_rows": call.cos_sin.shape[0],
        "norm_weight": None if call.norm_weight is None else call.norm_weight.contiguous(),
        "eps": call.eps,
        "cache_rows": call.cache.rows,
        "SPAN": call.span,
        "WIDTH": rows.shape[1],
        "ROTARY": call.cos_sin.shape[1],
        "HADAMARD_STEPS": hadamard_steps(rows.shape[1]) if call.hadamard else 0,
        "NATIVE_BF16": not interpreted(write_rotated_kernel),
    }


def norm_arguments(call: NormRows, out: Tensor) -> dict[str, Any]:
    """Arguments of `norm_rows_kernel`."""
    x = call.x if call.x.stride(1) == 1 else call.x.contiguous()
    return {
        "x": x,
        "stride": x.stride(0),
        "weight": call.weight.contiguous(),
        "out": out,
        "eps": call.eps,
        "WIDTH": x.shape[1],
        "NATIVE_BF16": not interpreted(norm_rows_kernel),
        "BLOCK": triton.next_power_of_2(x.shape[1]),
    }


def norm_options(arguments: dict[str, Any]) -> dict[str, int]:
    """Warps of `norm_rows_kernel`: 8 values per thread, at most 8 warps."""
    return {"num_warps": max(1, min(8, arguments["BLOCK"] // 256))}


def head_arguments(call: RotateHeads, out: Tensor) -> dict[str, Any]:
    """Arguments of `rotate_heads_kernel`."""
    return rotation_arguments(call.x, call.positions, call.cos_sin) | {
        "out": out,
        "eps": call.eps or 0.0,
        "NORM": call.eps is not None,
        "INVERSE": call.inverse,
        "NATIVE_BF16": not interpreted(rotate_heads_kernel),
        "BLOCK": max(2, triton.next_power_of_2(call.x.shape[2])),
    }


def head_and_row_arguments(call: RotateAndWrite, out: Tensor, index_out: Tensor) -> dict[str, Any]:
    """Arguments of `rotate_and_write_kernel`."""
    kv = call.kv if call.kv.stride(1) == 1 else call.kv.contiguous()
    return (
        insert_arguments(call.cache)
        | rotation_arguments(call.q, call.positions, call.cos_sin)
        | _index_arguments(call.index_q, index_out, call.index_hadamard)
        | {
            "out": out,
            "kv": kv,
            "kv_stride": kv.stride(0),
            "slots": call.slots.contiguous(),
            "count": call.slots.shape[0],
            "norm_weight": call.norm_weight.contiguous(),
            "eps": call.eps,
            "cache_rows": call.cache.rows,
            "NORM": call.norm_q,
            "NATIVE_BF16": not interpreted(rotate_and_write_kernel),
        }
    )


def rotation_arguments(x: Tensor, positions: Tensor, cos_sin: Tensor) -> dict[str, Any]:
    """The arguments about heads and rotation of every kernel that rotates heads [T, H, D]."""
    if x.stride(2) != 1:
        x = x.contiguous()
    return {
        "x": x,
        "token_stride": x.stride(0),
        "head_stride": x.stride(1),
        "heads": x.shape[1],
        "positions": positions.contiguous(),
        "cos_sin": cos_sin.contiguous(),
        "table_rows": cos_sin.shape[0],
        "WIDTH": x.shape[2],
        "ROTARY": cos_sin.shape[1],
    }


def _index_arguments(index_q: Tensor | None, index_out: Tensor, with_hadamard: bool) -> dict[str, Any]:
    """The arguments about index queries; the pointers are None if there are none."""
    if index_q is not None and index_q.stride(2) != 1:
        index_q = index_q.contiguous()
    heads, width = (0, 0) if index_q is None else index_q.shape[1:]
    return {
        "index": index_q,
        "index_token_stride": 0 if index_q is None else index_q.stride(0),
        "index_head_stride": 0 if index_q is None else index_q.stride(1),
        "index_out": None if index_q is None else index_out,
        "index_heads": heads,
        "INDEX_WIDTH": width,
        "INDEX_BLOCK": max(2, triton.next_power_of_2(max(1, width))),
        "HADAMARD_STEPS": hadamard_steps(width) if with_hadamard and width else 0,
    }
