"""Norm and rotation in Triton: one launch, one program per token and head, and one more per token that is written."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.cache import PagedCache
from tamis.layout import named, plain_fp8
from tamis.ops.triton_norm import insert_arguments, insert_row, norm_row, rotate_row
from tamis.ops.triton_rows import interpreted, launching_on, load_wide, store_rounded

if TYPE_CHECKING:
    from tamis.testing.offline import OfflineCase

NUM_WARPS = 1
"""A head of 512 has 16 values for each of a warp's threads, and its sums need no other warp."""


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
        NORM, INVERSE, NATIVE_BF16, BLOCK,
    )  # fmt: skip


@triton.jit
def _turn_head(
    token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, INVERSE: tl.constexpr, NATIVE_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    row = load_wide(x + token.to(tl.int64) * token_stride + head * head_stride + column, inside)
    if NORM:
        row = norm_row(row, None, eps, WIDTH, BLOCK)
    row = rotate_row(row, cos_sin, tl.load(positions + token), table_rows, WIDTH, ROTARY, INVERSE, BLOCK)
    store_rounded(out + (token.to(tl.int64) * heads + head) * WIDTH + column, row, inside, NATIVE_BF16)


@triton.jit(do_not_specialize=["table_rows", "count", "cache_rows"])
def turn_and_insert(
    x, token_stride, head_stride, out, heads, kv, kv_stride, slots, count, positions, cos_sin, table_rows, norm_weight,
    eps, cache, page_stride, scale, cache_rows, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token, or, after the last head, the token's row."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    if head < heads:
        _turn_head(
            token, head, x, token_stride, head_stride, out, heads, positions, cos_sin, table_rows, eps, WIDTH, ROTARY,
            True, False, NATIVE_BF16, BLOCK,
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


def rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool) -> Tensor:
    """Heads [T, H, D]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    with launching_on(x.device):
        turn_heads[x.shape[:2]](**_heads(x, positions, cos_sin, eps, inverse, out), num_warps=NUM_WARPS)
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
) -> Tensor:
    """Rows into the cache, no two of them into one slot; the queries [T, H, D]."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if len(q) == 0:
        return out
    arguments = _heads_and_rows(q, kv, cache, slots, positions, cos_sin, norm_weight, eps, out)
    with launching_on(q.device):
        turn_and_insert[(q.shape[0], q.shape[1] + 1)](**arguments, num_warps=NUM_WARPS)
    return out


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


def _heads(
    x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool, out: Tensor
) -> dict[str, Any]:
    x, shared = _shared(x, positions, cos_sin, out)
    return shared | {
        "eps": eps or 0.0,
        "NORM": eps is not None,
        "INVERSE": inverse,
        "BLOCK": max(2, triton.next_power_of_2(x.shape[2])),
    }


def _heads_and_rows(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float,
    out: Tensor,
) -> dict[str, Any]:
    q, shared = _shared(q, positions, cos_sin, out)
    if kv.stride(1) != 1:
        kv = kv.contiguous()
    return (
        insert_arguments(cache)
        | shared
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


def offline_cases() -> Iterator["OfflineCase"]:
    """Launches that `tamis.testing.offline` compiles."""
    from tamis.testing.offline import OfflineCase

    options = {"num_warps": NUM_WARPS}
    positions, table = torch.zeros(2, dtype=torch.int32), torch.empty(9, 64)
    for heads, width, dtype in ((64, 512, torch.bfloat16), (64, 128, torch.bfloat16), (3, 512, torch.float32)):
        x = torch.empty(2, heads, width, dtype=dtype)
        for eps, inverse in ((1e-6, False), (None, True)):
            label = f"rotate {heads}x{width} {dtype}{' inverse' * inverse}{' normed' * (eps is not None)}"
            arguments = _heads(x, positions, table, eps, inverse, x)
            yield OfflineCase.of_launch(turn_heads, arguments, options, label.replace("torch.", ""))
    for layout in (named("v4-fp8"), named("v4-bf16"), named("v4-fp32"), plain_fp8(latent=448)):
        q = torch.empty(2, 64, layout.width, dtype=torch.bfloat16)
        cache, slots, weight = PagedCache(layout, 2, 64), torch.arange(2), torch.empty(layout.width)
        arguments = _heads_and_rows(q, q[:, 0], cache, slots, positions, table, weight, 1e-6, q)
        yield OfflineCase.of_launch(turn_and_insert, arguments, options, f"rotate and write {layout.name}")
