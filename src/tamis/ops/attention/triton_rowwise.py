"""Portable sparse attention in Triton: the kernel for rows of any format.

A row is read and dequantised once and used twice, as key and as value.
"""

import triton
import triton.language as tl

from tamis.ops.attention.triton_device import (
    dot,
    dot_wide,
    find_span,
    finish_heads,
    load_columns,
    load_floats,
    load_query,
    online_softmax,
    round_in_two,
    to_slots,
)
from tamis.ops.rows.triton_rows import decode_e2m1, decode_e4m3, power_of_two, row_start, store_rounded


@triton.jit
def _load_rows(
    values, scales, slot, valid, values_page_stride, scales_page_stride,
    MODE: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_N: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr, TILE: tl.constexpr, VALUES_ROW: tl.constexpr, SCALES_ROW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, FLAT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The latent part [BLOCK_N, BLOCK_L] of rows, dequantised except for a per-tensor scale; zeros where not valid."""
    PACKED: tl.constexpr = (MODE == "packed") or (MODE == "packed_e4m3")
    column = tl.arange(0, BLOCK_L)
    mask = valid[:, None] & (column < LATENT)[None, :] if LATENT < BLOCK_L else valid[:, None]
    value_row = row_start(slot, values_page_stride, VALUES_ROW, PAGE_SIZE, FLAT)
    at = values + value_row[:, None] + column[None, :]
    if MODE == "plain":
        rows = load_floats(at, mask, INTERPRETED).to(COMPUTE)
    else:
        tile = tl.arange(0, BLOCK_L // TILE)
        if PACKED:
            pair = tl.arange(0, TILE // 2)
            there = valid[:, None, None] & (tile < LATENT // TILE)[None, :, None]
            pairs = values + value_row[:, None, None] + tile[None, :, None] * (TILE // 2) + pair[None, None, :]
            rows = tl.reshape(decode_e2m1(tl.load(pairs, mask=there, other=0)).to(tl.float32), [BLOCK_N, BLOCK_L])
        else:
            rows = decode_e4m3(tl.load(at, mask=mask, other=0), NATIVE).to(tl.float32)
        if MODE != "tensor":
            scale_row = row_start(slot, scales_page_stride, SCALES_ROW, PAGE_SIZE, FLAT)
            at_scale = scales + scale_row[:, None] + tile[None, :]
            known = valid[:, None] & (tile < LATENT // TILE)[None, :] if LATENT < BLOCK_L else valid[:, None]
            if MODE == "exponent":
                factor = tl.exp2(tl.load(at_scale, mask=known, other=127).to(tl.float32) - 127.0)
            elif MODE == "packed":
                factor = power_of_two(tl.load(at_scale, mask=known, other=127), True)
            elif MODE == "packed_e4m3":
                factor = decode_e4m3(tl.load(at_scale, mask=known, other=0), NATIVE).to(tl.float32)
            else:
                factor = tl.load(at_scale, mask=known, other=0.0)
            rows = tl.reshape(rows, [BLOCK_N, BLOCK_L // TILE, TILE]) * factor[:, :, None]
            rows = tl.reshape(rows, [BLOCK_N, BLOCK_L])
        rows = rows.to(COMPUTE)
    return rows


@triton.jit
def _load_tail(at, mask, CODES: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The tail of rows, from e4m3 codes or from 16-bit or 32-bit numbers; zeros where masked."""
    if CODES:
        rows = decode_e4m3(tl.load(at, mask=mask, other=0), NATIVE).to(tl.float32)
    else:
        rows = load_floats(at, mask, INTERPRETED)
    return rows.to(COMPUTE)


@triton.jit
def attend_rows_kernel(
    q, q_token_stride, q_head_stride, values, values_page_stride, scales, scales_page_stride, tail, tail_page_stride,
    slots, slots_token_stride, slots_column_stride, lengths, request_ids, block_table, table_stride, table_width,
    requests, rows, out, lse, max_logits, out_split_stride, out_token_stride, out_head_stride, sink, tokens, scale,
    scale_factor, cache_scale, cache_scale_factor, heads, columns, split_columns,
    MODE: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr, TERMS: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES_ROW: tl.constexpr, SCALES_ROW: tl.constexpr, TAIL_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FLAT: tl.constexpr, HEAD_BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One split of one token for BLOCK_H heads: output normalised by its own sum (and the sink), lse, largest logit."""
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    here = head < heads
    latent_column = tl.arange(0, BLOCK_L)
    tail_column = tl.arange(0, BLOCK_T)
    TAIL_IN_ROW: tl.constexpr = (MODE == "plain") or (MODE == "tensor")
    TAIL_VALUES: tl.constexpr = (TAIL > 0) and (VALUE_DIM > LATENT)

    query = q + token * q_token_stride + head[:, None] * q_head_stride
    known_latent = here[:, None] & (latent_column < LATENT)[None, :]
    q_latent, q_latent_rest = round_in_two(
        load_query(query + latent_column[None, :], known_latent, NATIVE, INTERPRETED), COMPUTE
    )
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    if TAIL > 0:
        known_tail = here[:, None] & (tail_column < TAIL)[None, :]
        q_tail, q_tail_rest = round_in_two(
            load_query(query + LATENT + tail_column[None, :], known_tail, NATIVE, INTERPRETED), COMPUTE
        )
    if TAIL_VALUES:
        tail_acc = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)

    logit_scale = scale * 1.4426950408889634  # log2(e): exponentials and logarithms are to base 2
    if scale_factor is not None:
        logit_scale *= tl.load(scale_factor)
    if MODE == "tensor":
        value_scale = cache_scale
        if cache_scale_factor is not None:
            value_scale = tl.load(cache_scale_factor)
        logit_scale *= value_scale

    begin, end, table_row = find_span(
        token, split, lengths, columns, split_columns, request_ids, requests, table_stride
    )
    slots += token * slots_token_stride
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        found = load_columns(slots, slots_column_stride, first + lane, end)
        slot = to_slots(found, block_table, table_row, table_width, rows, PAGE_SIZE)
        valid = slot >= 0
        slot = tl.where(valid, slot, 0)
        keys = _load_rows(
            values, scales, slot, valid, values_page_stride, scales_page_stride, MODE, NATIVE, COMPUTE, BLOCK_N, LATENT,
            BLOCK_L, TILE, VALUES_ROW, SCALES_ROW, PAGE_SIZE, FLAT, INTERPRETED,
        )  # fmt: skip
        logits = dot(q_latent, tl.trans(keys), None, COMPUTE)
        if TERMS == 2:
            logits = dot(q_latent_rest, tl.trans(keys), logits, COMPUTE)
        if TAIL > 0:
            if TAIL_IN_ROW:
                tail_row = LATENT + row_start(slot, values_page_stride, VALUES_ROW, PAGE_SIZE, FLAT)
                at = values + tail_row[:, None] + tail_column[None, :]
            else:
                tail_row = row_start(slot, tail_page_stride, TAIL_ROW, PAGE_SIZE, FLAT)
                at = tail + tail_row[:, None] + tail_column[None, :]
            known = valid[:, None] & (tail_column < TAIL)[None, :] if TAIL < BLOCK_T else valid[:, None]
            tail_keys = _load_tail(at, known, MODE == "tensor", NATIVE, COMPUTE, INTERPRETED)
            logits = dot(q_tail, tl.trans(tail_keys), logits, COMPUTE)
            if TERMS == 2:
                logits = dot(q_tail_rest, tl.trans(tail_keys), logits, COMPUTE)
        weights, rescale, running_max, total = online_softmax(logits * logit_scale, valid, running_max, total)
        acc = dot_wide(weights, keys, acc * rescale[:, None], TERMS, COMPUTE)
        if TAIL_VALUES:
            tail_acc = dot_wide(weights, tail_keys, tail_acc * rescale[:, None], TERMS, COMPUTE)

    offset = (split.to(tl.int64) * tokens + token) * heads + head
    inverse = finish_heads(running_max, total, sink, head, here, lse, max_logits, offset)
    if MODE == "tensor":
        inverse *= value_scale
    target = out + split.to(tl.int64) * out_split_stride + token * out_token_stride + head[:, None] * out_head_stride
    mask = here[:, None] & ((latent_column < LATENT) & (latent_column < VALUE_DIM))[None, :]
    store_rounded(target + latent_column[None, :], acc * inverse[:, None], mask, not INTERPRETED)
    if TAIL_VALUES:
        mask = here[:, None] & ((tail_column < TAIL) & (LATENT + tail_column < VALUE_DIM))[None, :]
        store_rounded(target + LATENT + tail_column[None, :], tail_acc * inverse[:, None], mask, not INTERPRETED)
