"""Norm and rotation in Triton: one launch, one program per token and head, and one more per token that is written."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.rotate.triton_output import lower_groups, rotate_to_fp8
from tamis.ops.rows.triton_norm import check_rows as check_rows  # offered by this module
from tamis.ops.rows.triton_norm import (
    hadamard_row,
    hadamard_steps,
    insert_arguments,
    insert_row,
    norm_row,
    rotate_row,
)
from tamis.ops.rows.triton_rows import interpreted, launching_on, load_wide, store_rounded

__all__ = ["lower_groups", "norm_rows", "rotate_and_write", "rotate_heads", "rotate_to_fp8"]
NUM_WARPS = 1
"""A head of 512 has 16 values for each of a warp's threads, and its sums need no other warp."""


@triton.jit
def norm_rows_kernel(x, stride, weight, out, eps, WIDTH: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    normed = norm_row(load_wide(x + row * stride + column, inside), weight, eps, WIDTH, BLOCK)
    store_rounded(out + row * WIDTH + column, normed, inside, NATIVE_BF16)


@triton.jit(do_not_specialize=["table_rows"])
def turn_heads(
    x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr, NATIVE_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    _turn_head(
        token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps, WIDTH, ROTARY,
        NORM, INVERSE, 0, NATIVE_BF16, BLOCK,
    )  # fmt: skip


@triton.jit
def _turn_head(
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
def turn_and_insert(
    x, token_stride, head_stride, out, heads, index, index_token_stride, index_head_stride, index_out, index_heads,
    kv, kv_stride, slots, count, positions, cos_sin, table_rows, norm_weight, eps,
    cache, page_stride, scale, cache_rows,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, INDEX_WIDTH: tl.constexpr, INDEX_BLOCK: tl.constexpr,
    HADAMARD_STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token, or, after the last head, the token's row, or one of the indexer's heads."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if head < heads:
        _turn_head(
            token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps, WIDTH, ROTARY,
            True, False, 0, NATIVE_BF16, BLOCK,
        )  # fmt: skip
    elif head > heads:
        if INDEX_WIDTH:
            _turn_head(
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


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [T, N]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    arguments = norm_arguments(x, weight, eps, out)
    with launching_on(x.device):
        norm_rows_kernel[(x.shape[0],)](**arguments, **norm_options(arguments))
    return out


def rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool) -> Tensor:
    """Heads [T, H, D]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    with launching_on(x.device):
        turn_heads[x.shape[:2]](**head_arguments(x, positions, cos_sin, eps, inverse, out), num_warps=NUM_WARPS)
    return out


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
    """Rows into the cache, no two of them into one slot; the queries [T, H, D] and the indexer's."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    index_out = None if index_q is None else torch.empty_like(index_q, memory_format=torch.contiguous_format)
    if len(q) == 0:
        return out, index_out
    index = (index_q, index_out, index_hadamard)
    arguments = head_and_row_arguments(q, kv, cache, slots, positions, cos_sin, norm_weight, eps, out, *index)
    with launching_on(q.device):
        turn_and_insert[(len(q), q.shape[1] + 1 + arguments["index_heads"])](**arguments, num_warps=NUM_WARPS)
    return out, index_out


def norm_arguments(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> dict[str, Any]:
    if x.stride(1) != 1:
        x = x.contiguous()
    return {
        "x": x,
        "stride": x.stride(0),
        "weight": weight.contiguous(),
        "out": out,
        "eps": eps,
        "WIDTH": x.shape[1],
        "NATIVE_BF16": not interpreted(norm_rows_kernel),
        "BLOCK": triton.next_power_of_2(x.shape[1]),
    }


def norm_options(arguments: dict[str, Any]) -> dict[str, int]:
    return {"num_warps": max(1, min(8, arguments["BLOCK"] // 256))}


def _shared(x: Tensor, positions: Tensor, cos_sin: Tensor, out: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What both kernels are launched with, and x with columns that lie side by side."""
    if x.stride(2) != 1:
        x = x.contiguous()
    return x, {
        "x": x,
        "token_stride": x.stride(0),
        "head_stride": x.stride(1),
        "out": out,
        "heads": x.shape[1],
        "positions": positions.contiguous(),
        "cos_sin": cos_sin.contiguous(),
        "table_rows": cos_sin.shape[0],
        "WIDTH": x.shape[2],
        "ROTARY": cos_sin.shape[1],
        "NATIVE_BF16": not interpreted(turn_heads),
    }


def head_arguments(
    x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool, out: Tensor
) -> dict[str, Any]:
    x, shared = _shared(x, positions, cos_sin, out)
    return shared | {
        "eps": eps or 0.0,
        "NORM": eps is not None,
        "INVERSE": inverse,
        "BLOCK": max(2, triton.next_power_of_2(x.shape[2])),
    }


def head_and_row_arguments(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor,
    index_q: Tensor | None,
    index_out: Tensor | None,
    index_hadamard: bool,
) -> dict[str, Any]:
    q, shared = _shared(q, positions, cos_sin, out)
    if kv.stride(1) != 1:
        kv = kv.contiguous()
    if index_q is not None and index_q.stride(2) != 1:
        index_q = index_q.contiguous()
    width = 0 if index_q is None else index_q.shape[2]
    return (
        insert_arguments(cache)
        | shared
        | {
            "index": index_q,
            "index_token_stride": 0 if index_q is None else index_q.stride(0),
            "index_head_stride": 0 if index_q is None else index_q.stride(1),
            "index_out": index_out,
            "index_heads": 0 if index_q is None else index_q.shape[1],
            "INDEX_WIDTH": width,
            "INDEX_BLOCK": max(2, triton.next_power_of_2(max(1, width))),
            "HADAMARD_STEPS": hadamard_steps(width) if index_hadamard and width else 0,
        }
        | {
            "kv": kv,
            "kv_stride": kv.stride(0),
            "slots": slots.contiguous(),
            "count": slots.shape[0],
            "norm_weight": norm_weight.contiguous(),
            "eps": eps,
            "cache_rows": cache.rows,
        }
    )
