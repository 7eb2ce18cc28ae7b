"""Portable sparse attention in Triton: the kernel for few heads over rows of four scaled tiles.

The four warps of a program split a row by its columns: warp g multiplies tile g of the queries with tile g of the keys,
and later accumulates tile g of the values. So a warp holds a quarter of the queries. A tile's scale, which all columns
of a warp share, is applied to logits and weights instead of to every value. Rows therefore stay in e4m3, and scales of
any size and precision cost no accuracy.

Rows are read as 32-bit words of four bytes. As keys they are converted to fp16, for which the hardware has an
instruction; a power of two per head brings queries into fp16's range. As values they are converted to bf16, whose range
covers weights times scales. This conversion is made of shifts: if the compiler saw 8-bit types here, it would choose
the layout of the product with the values to suit them, and load them byte by byte.
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
from tamis.ops.rows.triton_rows import decode_bf16, decode_e4m3, row_start, store_rounded

GROUPS = tl.constexpr(4)
"""Tiles of a row, and warps of a program."""

_UNBIAS = tl.constexpr(2.0**120)
"""e4m3 bits shifted to the position of bf16's bits are the number times 2**-120: the exponent biases differ by 120."""


@triton.jit
def _once():
    """An opaque 1. `for _ in range(_once())` around an operand stops Triton from recomputing it once per layout, and
    from choosing the layout of the product by the operand's 8-bit ancestors; the loop itself compiles away."""
    return tl.maximum(tl.program_id(2), 1)


@triton.jit
def _bytes_in_order(first, second, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """[GROUPS, BLOCK_N, TILE] from the pairs 0, 1 and 2, 3 of each word."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 1, 2, 4, 3)), [GROUPS, BLOCK_N, TILE])


@triton.jit
def _unpack_keys(words, BLOCK_N: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr):
    """fp16 numbers [GROUPS, BLOCK_N, TILE] of e4m3 bytes, four to a word."""
    first = tl.join((words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8))
    second = tl.join(((words >> 16) & 0xFF).to(tl.uint8), ((words >> 24) & 0xFF).to(tl.uint8))
    return decode_e4m3(_bytes_in_order(first, second, BLOCK_N, TILE), NATIVE)


@triton.jit
def _unpack_values(words, BLOCK_N: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr):
    """bf16 numbers of e4m3 bytes, by shifts. A NaN code becomes 480 here, which is harmless: the same row has already
    made the logits NaN."""
    even = ((words & 0x00800080) << 8) | ((words & 0x007F007F) << 4)
    shifted = words >> 8
    odd = ((shifted & 0x00800080) << 8) | ((shifted & 0x007F007F) << 4)
    first = tl.join((even & 0xFFFF).to(tl.uint16), (odd & 0xFFFF).to(tl.uint16))
    second = tl.join((even >> 16).to(tl.uint16), (odd >> 16).to(tl.uint16))
    bits = _bytes_in_order(first, second, BLOCK_N, TILE)
    if INTERPRETED:
        numbers = decode_bf16(bits)
    else:
        numbers = bits.to(tl.bfloat16, bitcast=True)
    return numbers * _UNBIAS


@triton.jit
def _power_below(x):
    """The largest power of two that is not above x, but at least 2**-112, so that 2**-14 times it can be inverted."""
    exponent = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 15), 253)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sum_groups(x, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum over the first axis. Triton's own reduction across warps would have shared-memory bank conflicts."""
    halves = tl.reshape(tl.permute(x, (1, 2, 0)), [BLOCK_H, BLOCK_N, 2, 2])
    left, right = tl.split(halves)
    first, second = tl.split(left + right)
    return first + second


@triton.jit
def attend_groups_kernel(
    q, q_token_stride, q_head_stride, values, values_page_stride, scales, scales_page_stride, tail, tail_page_stride,
    slots, slots_token_stride, slots_column_stride, lengths, request_ids, block_table, table_stride, table_width,
    requests, rows, out, lse, max_logits, out_split_stride, out_token_stride, out_head_stride, sink, tokens, scale,
    scale_factor, heads, columns, split_columns,
    NATIVE: tl.constexpr, COMPUTE: tl.constexpr, TERMS: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES_ROW: tl.constexpr, SCALES_ROW: tl.constexpr,
    TAIL_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr, FLAT: tl.constexpr, HEAD_BLOCKS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One split of one token for BLOCK_H heads: output normalised by its own sum (and the sink), lse, largest logit.

    `values` points to 32-bit words of four codes each, and its strides count words.
    """
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    here = head < heads
    group = tl.arange(0, GROUPS)[:, None, None]
    TAIL_GROUP: tl.constexpr = BLOCK_T // GROUPS
    tile_column = group * TILE + tl.arange(0, TILE)[None, None, :]
    tile_word = group * (TILE // 4) + tl.arange(0, TILE // 4)[None, None, :]
    tail_column = group * TAIL_GROUP + tl.arange(0, TAIL_GROUP)[None, None, :]

    query = q + token * q_token_stride + head[None, :, None] * q_head_stride
    q_wide = load_query(query + tile_column, here[None, :, None], NATIVE, INTERPRETED)
    # The largest number of each head is scaled to between 2**14 and 2**15. Numbers that fp16 then flushes to zero are
    # too small beside it to matter.
    size = _power_below(tl.max(tl.max(tl.abs(q_wide), 2), 0)) * 0.00006103515625
    q_tiles = (q_wide * (1.0 / size)[None, :, None]).to(tl.float16)
    if TAIL > 0:
        q_mask = here[None, :, None] & (tail_column < TAIL)
        q_wide = load_query(query + GROUPS * TILE + tail_column, q_mask, NATIVE, INTERPRETED)
        q_tail, q_tail_rest = round_in_two(q_wide * (1.0 / size)[None, :, None], COMPUTE)
    logit_scale = scale * 1.4426950408889634  # log2(e): exponentials and logarithms are to base 2
    if scale_factor is not None:
        logit_scale *= tl.load(scale_factor)

    begin, end, table_row = find_span(
        token, split, lengths, columns, split_columns, request_ids, requests, table_stride
    )
    slots += token * slots_token_stride
    acc = tl.zeros([GROUPS, BLOCK_H, TILE], tl.float32)
    running_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    # Slots are fetched one block ahead, since the loads of rows depend on them. Triton 3.6 cannot compile the same for
    # positions.
    AHEAD: tl.constexpr = block_table is None
    if AHEAD:
        upcoming = load_columns(slots, slots_column_stride, begin + lane, end)
    for first in tl.range(begin, end, BLOCK_N, num_stages=1):
        if AHEAD:
            found = upcoming
            upcoming = load_columns(slots, slots_column_stride, first + BLOCK_N + lane, end)
        else:
            found = load_columns(slots, slots_column_stride, first + lane, end)
        slot = to_slots(found, block_table, table_row, table_width, rows, PAGE_SIZE)
        valid = slot >= 0
        slot = tl.where(valid, slot, 0)
        known = valid[None, :, None]
        words_row = row_start(slot, values_page_stride, VALUES_ROW, PAGE_SIZE, FLAT)
        words = tl.load(values + words_row[None, :, None] + tile_word, mask=known, other=0)
        scale_row = row_start(slot, scales_page_stride, SCALES_ROW, PAGE_SIZE, FLAT)
        at_scale = scales + scale_row[None, :] + tl.arange(0, GROUPS)[:, None]
        factor = tl.load(at_scale, mask=valid[None, :], other=0.0)
        keys = tl.permute(_unpack_keys(words, BLOCK_N, TILE, NATIVE), (0, 2, 1))
        logits = dot(q_tiles, keys, None, COMPUTE) * factor[:, None, :]
        if TAIL > 0:
            tail_row = row_start(slot, tail_page_stride, TAIL_ROW, PAGE_SIZE, FLAT)
            at_tail = tail + tail_row[None, :, None] + tail_column
            tail_mask = known & (tail_column < TAIL) if TAIL < BLOCK_T else known
            tail_keys = tl.permute(load_floats(at_tail, tail_mask, INTERPRETED), (0, 2, 1))
            logits = dot(q_tail, tail_keys, logits, COMPUTE)
            if TERMS == 2:
                logits = dot(q_tail_rest, tail_keys, logits, COMPUTE)
        summed = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        for _ in tl.range(0, _once(), num_stages=1):
            summed = _sum_groups(logits, BLOCK_H, BLOCK_N) * (size * logit_scale)[:, None]
        weights, rescale, running_max, total = online_softmax(summed, valid, running_max, total)
        scaled = weights[None, :, :] * factor[:, None, :]
        values_wide = tl.zeros([GROUPS, BLOCK_N, TILE], COMPUTE)
        for _ in tl.range(0, _once(), num_stages=1):
            values_wide = _unpack_values(words, BLOCK_N, TILE, INTERPRETED)
        acc = dot_wide(scaled, values_wide, acc * rescale[None, :, None], TERMS, COMPUTE)

    offset = (split.to(tl.int64) * tokens + token) * heads + head
    inverse = finish_heads(running_max, total, sink, head, here, lse, max_logits, offset)
    target = out + split.to(tl.int64) * out_split_stride + token * out_token_stride
    target += head[None, :, None] * out_head_stride + tile_column
    mask = here[None, :, None] & (tile_column < VALUE_DIM)
    store_rounded(target, acc * inverse[None, :, None], mask, not INTERPRETED)
