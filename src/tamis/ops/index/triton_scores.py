"""Index scores in Triton: the kernel and its launch. One program scores a span of keys for a few neighbouring tokens.

Keys are the rows of the matrix product and the heads of all tokens its columns, so that the sum over heads stays inside
a thread but for a last exchange, and tokens of one request share each read of a key. A score goes through the same
operations in the same order wherever its key lies in a tile and whichever tokens share the program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import triton
import triton.language as tl

from tamis.arithmetic import ceil_div
from tamis.ops.rows.triton_rows import decode_e2m1, decode_e4m3, load_wide, power_of_two


@triton.jit
def _load_rows(at, mask, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rows for the product. Types that it takes as they are stay untouched, so that the load can run ahead into shared
    memory; the interpreter cannot compute with bf16."""
    if INTERPRETED and at.dtype.element_ty != tl.uint8:
        rows = load_wide(at, mask)
    elif mask is None:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=mask, other=0.0)
    if at.dtype.element_ty == tl.uint8:
        rows = decode_e4m3(rows, NATIVE)
    return rows.to(COMPUTE)


@triton.jit
def _load_packed(
    keys, scales, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Rows [keys, BLOCK_D] for the product, from e2m1 pairs and an exponent byte per TILE values: numbers with one
    mantissa bit, which COMPUTE holds as they are."""
    tile, pair = tl.arange(0, BLOCK_D // TILE), tl.arange(0, TILE // 2)
    column = (tile * (TILE // 2))[None, :, None] + pair[None, None, :]
    found = tl.load(keys[:, None, None] + column, mask=(tile < DIM // TILE)[None, :, None], other=0)
    exponent = tl.load(scales[:, None] + tile[None, :], mask=(tile < DIM // TILE)[None, :], other=127)
    values = decode_e2m1(found).to(tl.float32) * power_of_two(exponent, True)[:, :, None]
    return tl.reshape(values.to(COMPUTE), [keys.shape[0], BLOCK_D])


@triton.jit
def _load_queries(
    q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token, tokens,
    first_head, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The heads of a few tokens as columns [BLOCK_D, BLOCK_Q * BLOCK_H], and their weights."""
    column = tl.arange(0, BLOCK_Q * BLOCK_H)
    token, head = first_token + column // BLOCK_H, first_head + column % BLOCK_H
    there = (token < tokens) & (head < HEADS)
    dim = tl.arange(0, BLOCK_D)
    at = q + (token.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    rows = _load_rows(at, there[:, None] & (dim < DIM)[None, :], COMPUTE, NATIVE, INTERPRETED)
    at = weights + token.to(tl.int64) * weights_token_stride + head * weights_head_stride
    return tl.trans(rows), load_wide(at, there)


@triton.jit
def _sum_heads(logits, weight, first_head, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Weighted sums [keys, BLOCK_Q] of rectified logits [keys, BLOCK_Q * BLOCK_H]."""
    terms = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    if HEADS % BLOCK_H:
        # A padded head times an infinite key is NaN.
        head = first_head + tl.arange(0, BLOCK_Q * BLOCK_H) % BLOCK_H
        terms = tl.where((head < HEADS)[None, :], terms, 0.0)
    return tl.sum(tl.reshape(terms, [logits.shape[0], BLOCK_Q, BLOCK_H]), 2)


@triton.jit
def _find_pages(table, page_id_stride, n, table_width, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of BLOCK_N positions from n on, or the one page that holds them all."""
    if PAGE_SIZE % BLOCK_N == 0:
        index = n // PAGE_SIZE
    else:
        index = (n + tl.arange(0, BLOCK_N)) // PAGE_SIZE
    return tl.load(table + tl.minimum(index, table_width - 1).to(tl.int64) * page_id_stride)


@triton.jit
def _write_nothing(row, here, begin, end, BLOCK_N: tl.constexpr):
    """-inf from `begin` to `end` in the rows of some tokens."""
    for n in range(begin, end, BLOCK_N):
        position = n + tl.arange(0, BLOCK_N)
        tl.store(row[None, :] + position[:, None], float("-inf"), mask=here[None, :] & (position < end)[:, None])


# Batches of any size share one kernel: where alignment does not matter, sizes are not looked at.
@triton.jit(do_not_specialize=["tokens", "requests", "table_width", "pages", "width", "held", "span", "table_stride"])
def score_keys(
    q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, keys, keys_page_stride,
    scales, scales_page_stride, pages, request_ids, block_table, table_stride, page_id_stride, requests, table_width,
    starts, ends, out, out_stride, tokens, width, held, span,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    FILL: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Scores of the keys span * n .. span * (n + 1) for BLOCK_Q tokens, -inf for keys that a token does not see.

    Without FILL nothing is written behind a token's end. Keys come from pages, of which a table lists `held` positions,
    or without a block table from one list of which a token sees starts .. ends. With a TILE they are e2m1 pairs. Of a
    group of tokens, those of one request are scored by the program whose second number is the place of the first.
    """
    PAGED: tl.constexpr = block_table is not None
    IN_ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    # Neighbouring programs score the same keys, which then come from the cache of the device.
    groups = tl.cdiv(tokens, BLOCK_Q)
    first_token = tl.program_id(0) % groups * BLOCK_Q
    first = tl.program_id(0) // groups * span
    last = tl.minimum(first + span, width)
    token = first_token + tl.arange(0, BLOCK_Q)
    here = token < tokens
    listed = True
    table = block_table
    if PAGED:
        leader = tl.program_id(1)
        request = tl.load(request_ids + tl.minimum(first_token + leader, tokens - 1))
        here &= tl.load(request_ids + token, mask=here, other=0) == request
        if tl.min(tl.where(here, token, tokens), 0) != first_token + leader:
            return
        listed = (request >= 0) & (request < requests)
        table = block_table + tl.where(listed, request, 0).to(tl.int64) * table_stride
    end = tl.load(ends + token, mask=here, other=0)
    row = out + token.to(tl.int64) * out_stride
    stop = tl.minimum(tl.max(end, 0), last)
    limit = last if FILL else stop
    stop = tl.where(listed, tl.minimum(stop, held), first)
    end = tl.minimum(end, held)  # a length that nobody has looked at may count keys behind the table
    begin = first
    if starts is not None:
        start = tl.load(starts + token, mask=here, other=2147483647)
        begin += tl.maximum(tl.minimum(tl.min(start, 0), last) - first, 0) // BLOCK_N * BLOCK_N
    key = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    inside = (dim < DIM)[None, :] if DIM < BLOCK_D or INTERPRETED else None
    if begin < stop:
        if HEAD_BLOCKS == 1:
            query, weight = _load_queries(
                q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token,
                tokens, 0, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_Q, COMPUTE, NATIVE, INTERPRETED,
            )  # fmt: skip
        if PAGED:
            # One step ahead: a load that waits for a load cannot run far ahead itself.
            next_page = _find_pages(table, page_id_stride, begin, table_width, PAGE_SIZE, BLOCK_N)
        for n in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            position = n + key
            if PAGED:
                page = next_page
                next_page = _find_pages(table, page_id_stride, n + BLOCK_N, table_width, PAGE_SIZE, BLOCK_N)
                known = (page >= 0) & (page < pages)
                # Rows of absent pages are read from the first page and their scores dropped.
                page = tl.where(known, page, 0).to(tl.int64)
                in_page = n % PAGE_SIZE + key if IN_ONE_PAGE else position % PAGE_SIZE
                key_row = page * keys_page_stride + in_page * KEYS_ROW
                scale_row = page * scales_page_stride + in_page * SCALES_ROW
            else:
                listed_row = tl.minimum(position, width - 1).to(tl.int64)
                key_row = listed_row * KEYS_ROW
                scale_row = listed_row * SCALES_ROW
            if TILE:
                rows = _load_packed(keys + key_row, scales + scale_row, DIM, BLOCK_D, TILE, COMPUTE)
            else:
                if scales is not None:
                    scale = tl.load(scales + scale_row)
                rows = _load_rows(keys + key_row[:, None] + dim[None, :], inside, COMPUTE, NATIVE, INTERPRETED)
            score = tl.zeros([BLOCK_N, BLOCK_Q], tl.float32)
            for block in tl.static_range(HEAD_BLOCKS):
                if HEAD_BLOCKS > 1:
                    query, weight = _load_queries(
                        q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride,
                        first_token, tokens, block * BLOCK_H, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_Q, COMPUTE, NATIVE,
                        INTERPRETED,
                    )  # fmt: skip
                logits = tl.dot(rows, query, input_precision="ieee")
                summed = _sum_heads(logits, weight, block * BLOCK_H, HEADS, BLOCK_H, BLOCK_Q)
                score = summed if block == 0 else score + summed
            if scales is not None and TILE == 0:
                score *= scale[:, None]
            seen = position[:, None] < end[None, :]
            if starts is not None:
                seen &= position[:, None] >= start[None, :]
            if PAGED:
                seen &= known if IN_ONE_PAGE else known[:, None]
            score = tl.where(seen, score, float("-inf"))
            tl.store(row[None, :] + position[:, None], score, mask=here[None, :] & (position < last)[:, None])
    # What there are no keys for: behind the longest length or the table, of an unknown request, before the first start.
    _write_nothing(row, here, begin + tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_N) * BLOCK_N, limit, BLOCK_N)
    if starts is not None:
        _write_nothing(row, here, first, tl.minimum(begin, limit), BLOCK_N)


@dataclass(frozen=True)
class ScoreLaunch:
    """How `score_keys` is laid out."""

    block_q: int
    """Tokens per program."""
    block_n: int
    """Keys per step."""
    span: int
    """Keys per program."""
    warps: int
    stages: int
    registers: int | None = None
    """Most registers per thread, where the compiler would take more than pays."""


PROGRAMS_PER_CORE = 5
"""As many programs of one token share an H200's multiprocessor."""
START_STEPS = 1.5
"""What a program costs beside its loop, in steps of it."""


def choose_score_launch(
    shape: Sequence[int],
    cores: int,
    heads: int,
    block_h: int,
    *,
    shared: bool,
    exact: bool,
    native: bool,
    key_bytes: int,
) -> ScoreLaunch:
    """Blocks for a result of that shape.

    Args:
        shape: tokens and columns of the result.
        cores: multiprocessors of the device.
        heads: of each token.
        block_h: how many of them a block holds.
        shared: whether neighbouring tokens mostly see the same keys.
        exact: whether products run in float32.
        native: whether products run on e4m3 itself.
        key_bytes: of a stored key without its scale. Of the widest, one block at a time is copied ahead: three do not
            fit 99 KB of shared memory beside the queries, nor two the 64 KB of some of AMD's GPUs.
    """
    tokens, width = shape
    simple = heads <= block_h and not exact
    block_n, most = 32 if exact else 64, 2 if key_bytes > 256 else 4
    # The logits of two tokens fit the registers up to 64 heads.
    if shared and simple and block_h <= 64:
        steps = min(32, max(4, width * tokens // 2 // (8 * cores) // block_n))
        return ScoreLaunch(2, block_n, steps * block_n, 4, min(3, most), registers=128 if native else None)
    steps = choose_steps(tokens, triton.cdiv(width, block_n), PROGRAMS_PER_CORE * cores)
    return ScoreLaunch(1, block_n, steps * block_n, 4, most if simple else 1)


@lru_cache(1024)
def choose_steps(tokens: int, blocks: int, places: int) -> int:
    """Blocks of keys per program that finish soonest: rounds of programs on the device, times what each works through.
    Spans of any length are possible, so the last round need not be a short one."""

    def cost(steps: int) -> float:
        return ceil_div(tokens * ceil_div(blocks, steps), places) * (steps + START_STEPS)

    return min(range(4, 65), key=cost)
