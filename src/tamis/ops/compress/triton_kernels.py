"""Pools spans of tokens into entries, or into latents, in Triton: one launch, one program per token.

A program writes its token's state row. If the token completes a span, it also pools the span with an online softmax
over blocks of ROWS tokens: tokens of the same step are read from the step's own values and scores, since other programs
may not have written their state yet; tokens of earlier steps are read from the state pages. Both hold the same numbers
if `state_slots` and the block table agree.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.compress.operations import CompressKv, PoolKv
from tamis.ops.rows.triton_norm import (
    check_rows,
    hadamard_row,
    hadamard_steps,
    insert_arguments,
    insert_row,
    norm_row,
    rotate_row,
)
from tamis.ops.rows.triton_rows import interpreted, launching_on, load_wide, row_start, store_rounded

SPAN_VALUES = 8192
"""Values in a block of ROWS tokens, and as many scores. Larger blocks mean fewer round trips to memory per span."""
MOST_WARPS = 16


@triton.jit
def _in_step(
    row, token, position, request, positions, state_slots, request_ids, state_rows, SPAN: tl.constexpr,
):  # fmt: skip
    """Which rows of the span that ends at `token` belong to tokens of this step, whose state this launch writes."""
    other = token - (SPAN - 1) + row
    at = position - (SPAN - 1) + row
    here = (row < SPAN) & (other >= 0) & (at >= 0)
    # The three loads are independent, so they wait for memory together.
    found = tl.load(positions + other, mask=here, other=-1)
    owner = tl.load(request_ids + other, mask=here, other=-1)
    slot = tl.load(state_slots + other, mask=here, other=-1)
    return here & (found == at) & (owner == request) & (slot >= 0) & (slot < state_rows)


@triton.jit
def _pool(
    token, position, request, values, values_stride, scores, scores_stride, positions, state_slots, request_ids,
    block_table, table_stride, requests, table_width, bias, state, state_page_stride, state_pages,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, SERIES: tl.constexpr, STATE_PAGE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool the span that ends at `token` by a softmax per channel: [BLOCK], zeros if the span has no row."""
    SPAN: tl.constexpr = RATIO * SERIES
    CHANNELS: tl.constexpr = WIDTH * SERIES
    column = tl.arange(0, BLOCK)
    inside = (column < WIDTH)[None, :]
    known = (request >= 0) & (request < requests)
    running_max = tl.full([BLOCK], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    accumulator = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SPAN, ROWS):
        row = first + tl.arange(0, ROWS)
        at = position - (SPAN - 1) + row
        fresh = _in_step(
            row, token, position, request, positions, state_slots, request_ids, state_pages * STATE_PAGE, SPAN
        )
        page = at // STATE_PAGE
        stored = known & (row < SPAN) & (at >= 0) & (page < table_width)
        page_id = tl.load(block_table + request.to(tl.int64) * table_stride + page, mask=stored, other=-1)
        stored = stored & (fresh == 0) & (page_id >= 0) & (page_id < state_pages)
        # SERIES is 2 where spans overlap: rows of the span before are pooled from the first set of channels.
        channel = column[None, :] + (row // RATIO * WIDTH)[:, None]
        offset = page_id.to(tl.int64) * state_page_stride + (at - page * STATE_PAGE).to(tl.int64) * (2 * CHANNELS)
        from_pages = state + offset[:, None] + channel
        in_pages = stored[:, None] & inside
        other = (token - (SPAN - 1) + row).to(tl.int64)[:, None]
        in_step = fresh[:, None] & inside
        score = tl.load(from_pages + CHANNELS, mask=in_pages, other=float("-inf"))
        biased = load_wide(scores + other * scores_stride + channel, in_step)
        if bias is not None:
            biased += load_wide(bias + (row % RATIO * CHANNELS)[:, None] + channel, in_step)
        score = tl.where(in_step, biased, score)
        value = tl.load(from_pages, mask=in_pages, other=0.0)
        value += load_wide(values + other * values_stride + channel, in_step)
        new_max = tl.maximum(running_max, tl.max(score, axis=0))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp(score - finite_max[None, :])
        rescale = tl.exp(running_max - finite_max)
        weight_sum = weight_sum * rescale + tl.sum(weight, axis=0)
        accumulator = accumulator * rescale + tl.sum(weight * value, axis=0)
        running_max = new_max
    return tl.where(weight_sum == 0.0, 0.0, accumulator / weight_sum)


@triton.jit
def _store_state(
    token, values, values_stride, scores, scores_stride, positions, state_slots, bias, state, state_page_stride,
    state_pages, RATIO: tl.constexpr, WIDTH: tl.constexpr, SERIES: tl.constexpr, STATE_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the state row of a token, and return its position, or -1 for padding."""
    position = tl.load(positions + token)
    # A 64-bit position beyond 32 bits must not wrap into a valid one.
    position = tl.where((position < 0) | (position > 2147483647), -1, position).to(tl.int32)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    state_slot = tl.load(state_slots + token)
    if (position >= 0) & (state_slot >= 0) & (state_slot < state_pages * STATE_PAGE):
        at = row_start(state_slot.to(tl.int32), state_page_stride, 2 * WIDTH * SERIES, STATE_PAGE, False)
        for series in tl.static_range(SERIES):
            channel = series * WIDTH + column
            value = load_wide(values + token.to(tl.int64) * values_stride + channel, inside)
            score = load_wide(scores + token.to(tl.int64) * scores_stride + channel, inside)
            if bias is not None:
                score += load_wide(bias + position % RATIO * (WIDTH * SERIES) + channel, inside)
            tl.store(state + at + channel, value, mask=inside)
            tl.store(state + at + WIDTH * SERIES + channel, score, mask=inside)
    return position


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["requests", "table_width", "table_rows", "state_pages", "cache_rows"])
def compress_kv_kernel(
    values, values_stride, scores, scores_stride, positions, state_slots, request_ids, block_table, table_stride,
    requests, table_width, slots, bias, norm_weight, cos_sin, table_rows, eps,
    state, state_page_stride, state_pages, cache, page_stride, scale, cache_rows,
    RATIO: tl.constexpr, SERIES: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, STATE_PAGE: tl.constexpr,
    ROWS: tl.constexpr, HADAMARD_STEPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one token's state row and, if it ends a span, the entry of that span."""
    token = tl.program_id(0)
    position = _store_state(
        token, values, values_stride, scores, scores_stride, positions, state_slots, bias, state, state_page_stride,
        state_pages, RATIO, WIDTH, SERIES, STATE_PAGE, BLOCK,
    )  # fmt: skip
    slot = tl.load(slots + token)
    if (position >= 0) & ((position + 1) % RATIO == 0) & (slot >= 0) & (slot < cache_rows):
        request = tl.load(request_ids + token)
        entry = _pool(
            token, position, request, values, values_stride, scores, scores_stride, positions, state_slots,
            request_ids, block_table, table_stride, requests, table_width, bias, state, state_page_stride, state_pages,
            RATIO, WIDTH, SERIES, STATE_PAGE, ROWS, BLOCK,
        )  # fmt: skip
        if norm_weight is not None:
            entry = norm_row(entry, norm_weight, eps, WIDTH, BLOCK)
        if cos_sin is not None:
            entry = rotate_row(entry, cos_sin, position + 1 - RATIO, table_rows, WIDTH, ROTARY, False, BLOCK)
        entry = hadamard_row(entry, cache, HADAMARD_STEPS, NATIVE_BF16, BLOCK)
        insert_row(
            entry, slot.to(tl.int32), cache, page_stride, scale, PAGE_SIZE, MODE, LATENT, ROPE, TILE, VALUES_START,
            VALUES_STRIDE, SCALES, SCALES_START, SCALES_STRIDE, TAIL_START, TAIL_STRIDE, SCALE_FLOOR, SCALE_IN_MEMORY,
            NATIVE_BF16, BLOCK, TILE_BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "table_width", "state_pages"])
def pool_kv_kernel(
    values, values_stride, scores, scores_stride, positions, state_slots, request_ids, block_table, table_stride,
    requests, table_width, norm_weight, eps, state, state_page_stride, state_pages, latents,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, STATE_PAGE: tl.constexpr, ROWS: tl.constexpr, NATIVE_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one token's state row and its latent: that of the span that it ends, or zeros."""
    token = tl.program_id(0)
    position = _store_state(
        token, values, values_stride, scores, scores_stride, positions, state_slots, None, state, state_page_stride,
        state_pages, RATIO, WIDTH, 1, STATE_PAGE, BLOCK,
    )  # fmt: skip
    latent = tl.zeros([BLOCK], tl.float32)
    if (position >= 0) & ((position + 1) % RATIO == 0):
        request = tl.load(request_ids + token)
        pooled = _pool(
            token, position, request, values, values_stride, scores, scores_stride, positions, state_slots,
            request_ids, block_table, table_stride, requests, table_width, None, state, state_page_stride, state_pages,
            RATIO, WIDTH, 1, STATE_PAGE, ROWS, BLOCK,
        )  # fmt: skip
        latent = norm_row(pooled, norm_weight, eps, WIDTH, BLOCK)
    column = tl.arange(0, BLOCK)
    store_rounded(latents + token.to(tl.int64) * WIDTH + column, latent, column < WIDTH, NATIVE_BF16)


def pool_kv(call: PoolKv) -> Tensor:
    """As `reference.pool_kv`. No two tokens may name the same slot: the order of the writes is not defined."""
    latents = torch.empty(call.values.shape, dtype=call.dtype, device=call.values.device)
    if len(latents):
        arguments = pool_arguments(call, latents)
        with launching_on(latents.device):
            pool_kv_kernel[(len(latents),)](**arguments, **launch_options(arguments))
    return latents


def check_compress_kv(call: CompressKv) -> None:
    """Refuse a cache whose rows the kernel cannot write."""
    check_rows(call.cache)


def compress_kv(call: CompressKv) -> None:
    """As `reference.compress_kv`. No two tokens may name the same slot: the order of the writes is not defined."""
    if len(call.values) == 0:
        return
    arguments = launch_arguments(call)
    with launching_on(call.values.device):
        compress_kv_kernel[(len(call.values),)](**arguments, **launch_options(arguments))


def launch_arguments(call: CompressKv) -> dict[str, Any]:
    """Arguments of `compress_kv_kernel`."""
    cache, rows = call.cache, insert_arguments(call.cache)
    ratio, series = call.bias.shape[0], call.values.shape[1] // cache.layout.width
    return (
        rows
        | _token_arguments(call)
        | {
            "slots": call.slots.contiguous(),
            "bias": call.bias.contiguous(),
            "cos_sin": None if call.cos_sin is None else call.cos_sin.contiguous(),
            "table_rows": 0 if call.cos_sin is None else call.cos_sin.shape[0],
            "cache_rows": cache.rows,
            "RATIO": ratio,
            "SERIES": series,
            "WIDTH": cache.layout.width,
            "ROTARY": 0 if call.cos_sin is None else call.cos_sin.shape[1],
            "ROWS": min(triton.next_power_of_2(ratio * series), max(1, SPAN_VALUES // rows["BLOCK"])),
            "HADAMARD_STEPS": hadamard_steps(cache.layout.width) if call.hadamard else 0,
            "NATIVE_BF16": not interpreted(compress_kv_kernel),
        }
    )


def pool_arguments(call: PoolKv, latents: Tensor) -> dict[str, Any]:
    """Arguments of `pool_kv_kernel`."""
    width = call.values.shape[1]
    block = max(2, triton.next_power_of_2(width))
    return _token_arguments(call) | {
        "latents": latents,
        "RATIO": call.ratio,
        "WIDTH": width,
        "ROWS": min(triton.next_power_of_2(call.ratio), max(1, SPAN_VALUES // block)),
        "NATIVE_BF16": not interpreted(pool_kv_kernel),
        "BLOCK": block,
    }


def _token_arguments(call: CompressKv | PoolKv) -> dict[str, Any]:
    """The arguments about tokens and their state, which both kernels have."""
    state, inputs = call.state, (call.values, call.scores, call.block_table)
    values, scores, block_table = (t if t.stride(1) == 1 else t.contiguous() for t in inputs)
    return {
        "values": values,
        "values_stride": values.stride(0),
        "scores": scores,
        "scores_stride": scores.stride(0),
        "positions": call.positions.contiguous(),
        "state_slots": call.state_slots.contiguous(),
        "request_ids": call.request_ids.contiguous(),
        "block_table": block_table,
        "table_stride": block_table.stride(0),
        "requests": block_table.shape[0],
        "table_width": block_table.shape[1],
        "norm_weight": None if call.norm_weight is None else call.norm_weight.contiguous(),
        "eps": call.eps,
        "state": state.storage,
        "state_page_stride": state.page_stride // state.storage.element_size(),
        "state_pages": state.pages,
        "STATE_PAGE": state.page_size,
    }


def launch_options(arguments: dict[str, Any]) -> dict[str, int]:
    """Warps of either kernel: 16 values of a block per thread."""
    return {"num_warps": max(1, min(MOST_WARPS, arguments["ROWS"] * arguments["BLOCK"] // 512))}
