"""Portable sparse attention in Triton: the kernel. One program per query token, block of heads and split of columns.

A row is read and dequantised once and used twice, as key and as value. Products run on bf16 (float32 for float32
queries or rows, and for 16-bit formats that bf16 cannot hold), softmax and sums in float32; bf16 has float32's range,
so no scale of a cache can overflow or flush.
"""

import triton
import triton.language as tl

from tamis.ops.triton_rows import decode_e4m3, load_wide, row_start


@triton.jit
def _find_slots(
    slots, column_stride, column, end, table, table_width, rows, PAGE_SIZE: tl.constexpr, TRANSLATE: tl.constexpr
):
    """The slots in these columns of one token, -1 where one does not count."""
    slot = tl.load(slots + column * column_stride, mask=column < end, other=-1)
    if TRANSLATE:
        page = slot // PAGE_SIZE
        known = (slot >= 0) & (page < table_width)
        page_id = tl.load(table + page, mask=known, other=-1)
        # Compared before the multiplication: a garbage page id must not wrap around into a valid slot.
        known &= (page_id >= 0) & (page_id <= rows // PAGE_SIZE)
        slot = tl.where(known, page_id * PAGE_SIZE + slot % PAGE_SIZE, -1)
    return tl.where(slot < rows, slot, -1)


@triton.jit
def _load_floats(at, mask, INTERPRETED: tl.constexpr):
    """Numbers as they are stored. The interpreter gets bf16 as float32, since it cannot compute with bf16; a device
    gets it untouched, so that the load can run ahead into shared memory."""
    if INTERPRETED:
        found = load_wide(at, mask)
    else:
        found = tl.load(at, mask=mask, other=0.0)
    return found


@triton.jit
def _load_rows(
    values,
    scales,
    slot,
    valid,
    values_page_stride,
    scales_page_stride,
    MODE: tl.constexpr,
    NATIVE: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    TILE: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FLAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The latent part [BLOCK_N, BLOCK_L] of rows, dequantised (but for a per-tensor scale); zeros where not valid."""
    column = tl.arange(0, BLOCK_L)
    mask = valid[:, None] & (column < LATENT)[None, :] if LATENT < BLOCK_L else valid[:, None]
    at = values + row_start(slot, values_page_stride, VALUES_ROW, PAGE_SIZE, FLAT)[:, None] + column[None, :]
    if MODE == "plain":
        rows = _load_floats(at, mask, INTERPRETED).to(COMPUTE)
    else:
        rows = decode_e4m3(tl.load(at, mask=mask, other=0), NATIVE).to(tl.float32)
        if MODE == "tile" or MODE == "exponent":
            tile = tl.arange(0, BLOCK_L // TILE)
            scale_row = row_start(slot, scales_page_stride, SCALES_ROW, PAGE_SIZE, FLAT)
            at_scale = scales + scale_row[:, None] + tile[None, :]
            known = valid[:, None] & (tile < LATENT // TILE)[None, :] if LATENT < BLOCK_L else valid[:, None]
            if MODE == "exponent":
                factor = tl.exp2(tl.load(at_scale, mask=known, other=127).to(tl.float32) - 127.0)
            else:
                factor = tl.load(at_scale, mask=known, other=0.0)
            rows = tl.reshape(rows, [BLOCK_N, BLOCK_L // TILE, TILE]) * factor[:, :, None]
            rows = tl.reshape(rows, [BLOCK_N, BLOCK_L])
        rows = rows.to(COMPUTE)
    return rows


@triton.jit
def _load_query(at, mask, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values of a query of any dtype; e4m3 arrives as bytes."""
    if at.dtype.element_ty == tl.uint8:
        wide = decode_e4m3(tl.load(at, mask=mask, other=0), NATIVE).to(tl.float32)
    else:
        wide = _load_floats(at, mask, INTERPRETED).to(tl.float32)
    return wide


@triton.jit
def _load_tail(at, mask, CODES: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr, INTERPRETED: tl.constexpr):
    if CODES:
        rows = decode_e4m3(tl.load(at, mask=mask, other=0), NATIVE).to(tl.float32)
    else:
        rows = _load_floats(at, mask, INTERPRETED)
    return rows.to(COMPUTE)


@triton.jit
def _dot(a, b, acc, COMPUTE: tl.constexpr):
    if COMPUTE == tl.float32:  # noqa: SIM300 (a constexpr knows how to compare itself, a dtype does not)
        product = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc=acc)
    return product


@triton.jit
def _dot_wide(x, y, acc, PARTS: tl.constexpr, COMPUTE: tl.constexpr):
    """acc + x @ y for float32 x: x is rounded to the compute dtype, and with PARTS 2 the rest multiplied as well."""
    high = x.to(COMPUTE)
    acc = _dot(high, y, acc, COMPUTE)
    if PARTS == 2:
        acc = _dot((x - high.to(tl.float32)).to(COMPUTE), y, acc, COMPUTE)
    return acc


@triton.jit
def attend_kernel(
    q,
    q_token_stride,
    q_head_stride,
    values,
    values_page_stride,
    scales,
    scales_page_stride,
    tail,
    tail_page_stride,
    slots,
    slots_token_stride,
    slots_column_stride,
    lengths,
    request_ids,
    block_table,
    table_stride,
    table_width,
    requests,
    rows,
    out,
    lse,
    max_logits,
    part_stride,
    scale,
    scale_factor,
    cache_scale,
    cache_scale_factor,
    heads,
    columns,
    split_columns,
    MODE: tl.constexpr,
    NATIVE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PARTS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    TILE: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    TAIL_ROW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FLAT: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One split of one token for BLOCK_H heads: output normalised by its own sum, natural-log lse, largest logit."""
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    here = head < heads
    latent_column = tl.arange(0, BLOCK_L)
    tail_column = tl.arange(0, BLOCK_T)
    TAIL_IN_ROW: tl.constexpr = (MODE == "plain") or (MODE == "tensor")
    TAIL_VALUES: tl.constexpr = (TAIL > 0) and (VALUE_DIM > LATENT)

    query = q + token * q_token_stride + head[:, None] * q_head_stride
    q_wide = _load_query(
        query + latent_column[None, :], here[:, None] & (latent_column < LATENT)[None, :], NATIVE, INTERPRETED
    )
    q_latent = q_wide.to(COMPUTE)
    if PARTS == 2:
        q_latent_rest = (q_wide - q_latent.to(tl.float32)).to(COMPUTE)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    if TAIL > 0:
        mask = here[:, None] & (tail_column < TAIL)[None, :]
        q_wide = _load_query(query + LATENT + tail_column[None, :], mask, NATIVE, INTERPRETED)
        q_tail = q_wide.to(COMPUTE)
        if PARTS == 2:
            q_tail_rest = (q_wide - q_tail.to(tl.float32)).to(COMPUTE)
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

    end = columns
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + token))
    begin = split * split_columns
    end = tl.minimum(begin + split_columns, end)
    slots += token * slots_token_stride
    TRANSLATE: tl.constexpr = block_table is not None
    table = block_table
    if TRANSLATE:
        request = tl.load(request_ids + token).to(tl.int64)
        listed = (request >= 0) & (request < requests)
        end = tl.where(listed, end, begin)
        table = block_table + tl.where(listed, request, 0) * table_stride
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        slot = _find_slots(
            slots, slots_column_stride, first + lane, end, table, table_width, rows, PAGE_SIZE, TRANSLATE
        )
        valid = slot >= 0
        slot = tl.where(valid, slot, 0)
        keys = _load_rows(
            values,
            scales,
            slot,
            valid,
            values_page_stride,
            scales_page_stride,
            MODE,
            NATIVE,
            COMPUTE,
            BLOCK_N,
            LATENT,
            BLOCK_L,
            TILE,
            VALUES_ROW,
            SCALES_ROW,
            PAGE_SIZE,
            FLAT,
            INTERPRETED,
        )
        logits = _dot(q_latent, tl.trans(keys), None, COMPUTE)
        if PARTS == 2:
            logits = _dot(q_latent_rest, tl.trans(keys), logits, COMPUTE)
        if TAIL > 0:
            if TAIL_IN_ROW:
                tail_row = LATENT + row_start(slot, values_page_stride, VALUES_ROW, PAGE_SIZE, FLAT)
                at = values + tail_row[:, None] + tail_column[None, :]
            else:
                tail_row = row_start(slot, tail_page_stride, TAIL_ROW, PAGE_SIZE, FLAT)
                at = tail + tail_row[:, None] + tail_column[None, :]
            known = valid[:, None] & (tail_column < TAIL)[None, :] if TAIL < BLOCK_T else valid[:, None]
            tail_keys = _load_tail(at, known, MODE == "tensor", NATIVE, COMPUTE, INTERPRETED)
            logits = _dot(q_tail, tl.trans(tail_keys), logits, COMPUTE)
            if PARTS == 2:
                logits = _dot(q_tail_rest, tl.trans(tail_keys), logits, COMPUTE)
        logits = tl.where(valid[None, :], logits * logit_scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        # While nothing is valid, subtract 0 instead of -inf: the weights are then exp2(-inf) = 0 and not NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(logits - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
        acc = _dot_wide(weights, keys, acc * shrink[:, None], PARTS, COMPUTE)
        if TAIL_VALUES:
            tail_acc = _dot_wide(weights, tail_keys, tail_acc * shrink[:, None], PARTS, COMPUTE)

    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    if MODE == "tensor":
        inverse *= value_scale
    place = split.to(tl.int64) * part_stride + token * heads + head
    target = out + (place * VALUE_DIM)[:, None]
    mask = here[:, None] & ((latent_column < LATENT) & (latent_column < VALUE_DIM))[None, :]
    tl.store(target + latent_column[None, :], acc * inverse[:, None], mask=mask)
    if TAIL_VALUES:
        mask = here[:, None] & ((tail_column < TAIL) & (LATENT + tail_column < VALUE_DIM))[None, :]
        tl.store(target + LATENT + tail_column[None, :], tail_acc * inverse[:, None], mask=mask)
    empty = total == 0
    log_total = tl.log2(tl.where(empty, 1.0, total))
    tl.store(lse + place, tl.where(empty, float("-inf"), (peak + log_total) * 0.6931471805599453), mask=here)
    tl.store(max_logits + place, tl.where(empty, float("-inf"), peak * 0.6931471805599453), mask=here)
