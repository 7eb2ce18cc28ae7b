"""Index scores in Triton: the kernel and its launch shape.

A program scores a span of keys for BLOCK_Q neighbouring tokens, BLOCK_N keys per step. Keys are the rows (M) of the
matrix product, and the heads of all its tokens are the columns (N). So the sum over heads is a sum within a thread
except for a last shuffle, and tokens of one request share every read of a key. A score goes through the same operations
in the same order wherever its key lies in a block and whichever tokens share the program.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tamis.arithmetic import ceil_div
from tamis.ops.rows.triton_rows import decode_e2m1, decode_e4m3, load_wide, power_of_two

E4M3 = torch.float8_e4m3fn


@triton.jit
def load_rows(at, mask, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rows for the product. A type that the product takes is not converted, so that the load can be pipelined into
    shared memory. The interpreter cannot compute in bf16."""
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
def load_packed(
    keys, scales, DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Rows [keys, BLOCK_D] for the product, from e2m1 pairs and an exponent byte per TILE values. The values have one
    mantissa bit, so COMPUTE holds them exactly."""
    tile, pair = tl.arange(0, BLOCK_D // TILE), tl.arange(0, TILE // 2)
    column = (tile * (TILE // 2))[None, :, None] + pair[None, None, :]
    codes = tl.load(keys[:, None, None] + column, mask=(tile < DIM // TILE)[None, :, None], other=0)
    exponent = tl.load(scales[:, None] + tile[None, :], mask=(tile < DIM // TILE)[None, :], other=127)
    values = decode_e2m1(codes).to(tl.float32) * power_of_two(exponent, True)[:, :, None]
    return tl.reshape(values.to(COMPUTE), [keys.shape[0], BLOCK_D])


@triton.jit
def load_queries(
    q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token, tokens,
    first_head, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of BLOCK_Q tokens as columns [BLOCK_D, BLOCK_Q * BLOCK_H], and their weights."""
    column = tl.arange(0, BLOCK_Q * BLOCK_H)
    token, head = first_token + column // BLOCK_H, first_head + column % BLOCK_H
    valid = (token < tokens) & (head < HEADS)
    dim = tl.arange(0, BLOCK_D)
    at = q + (token.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    rows = load_rows(at, valid[:, None] & (dim < DIM)[None, :], COMPUTE, NATIVE, INTERPRETED)
    at = weights + token.to(tl.int64) * weights_token_stride + head * weights_head_stride
    return tl.trans(rows), load_wide(at, valid)


@triton.jit
def sum_heads(logits, weight, first_head, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Weighted sums [keys, BLOCK_Q] over the heads of relu(logits), which are [keys, BLOCK_Q * BLOCK_H]."""
    terms = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    if HEADS % BLOCK_H:
        # The product of a padded head (zeros) and an infinite key is NaN.
        head = first_head + tl.arange(0, BLOCK_Q * BLOCK_H) % BLOCK_H
        terms = tl.where((head < HEADS)[None, :], terms, 0.0)
    return tl.sum(tl.reshape(terms, [logits.shape[0], BLOCK_Q, BLOCK_H]), 2)


@triton.jit
def sum_head_blocks(
    rows, q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token, tokens,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    COMPUTE: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Sums [keys, BLOCK_Q] over more heads than one block holds; the queries are read again for every step."""
    score = tl.zeros([rows.shape[0], BLOCK_Q], tl.float32)
    for block in tl.static_range((HEADS + BLOCK_H - 1) // BLOCK_H):
        query, weight = load_queries(
            q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token, tokens,
            block * BLOCK_H, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_Q, COMPUTE, NATIVE, INTERPRETED,
        )  # fmt: skip
        logits = tl.dot(rows, query, input_precision="ieee")
        summed = sum_heads(logits, weight, block * BLOCK_H, HEADS, BLOCK_H, BLOCK_Q)
        score = summed if block == 0 else score + summed
    return score


@triton.jit
def _find_pages(table, page_id_stride, n, table_width, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of each of BLOCK_N positions from n on, or the one page that holds them all."""
    if PAGE_SIZE % BLOCK_N == 0:
        index = n // PAGE_SIZE
    else:
        index = (n + tl.arange(0, BLOCK_N)) // PAGE_SIZE
    return tl.load(table + tl.minimum(index, table_width - 1).to(tl.int64) * page_id_stride)


@triton.jit
def _paged_offsets(
    page, position, n, pages, keys_page_stride, scales_page_stride,
    KEYS_ROW: tl.constexpr, SCALES_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Offsets of BLOCK_N keys and of their scales, and which of them lie in a page that exists. The others are read
    from page 0, and their scores are dropped."""
    known = (page >= 0) & (page < pages)
    page = tl.where(known, page, 0).to(tl.int64)
    in_page = n % PAGE_SIZE + tl.arange(0, BLOCK_N) if PAGE_SIZE % BLOCK_N == 0 else position % PAGE_SIZE
    return page * keys_page_stride + in_page * KEYS_ROW, page * scales_page_stride + in_page * SCALES_ROW, known


@triton.jit
def _write_nothing(out_row, active, begin, end, BLOCK_N: tl.constexpr):
    """-inf from `begin` to `end` in the rows of the active tokens."""
    for n in range(begin, end, BLOCK_N):
        position = n + tl.arange(0, BLOCK_N)
        tl.store(out_row[None, :] + position[:, None], float("-inf"), mask=active[None, :] & (position < end)[:, None])


@triton.jit
def _score_span(
    q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, keys, keys_page_stride,
    scales, scales_page_stride, pages, table, page_id_stride, table_width, start, end, out_row, active, first_token,
    tokens, width, begin, stop, last, key, dim,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Scores of the keys begin .. stop for the active tokens, -inf for keys outside of a token's start .. end."""
    PAGED: tl.constexpr = table is not None
    inside = (dim < DIM)[None, :] if DIM < BLOCK_D or INTERPRETED else None
    if HEADS <= BLOCK_H:
        query, weight = load_queries(
            q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token, tokens,
            0, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_Q, COMPUTE, NATIVE, INTERPRETED,
        )  # fmt: skip
    if PAGED:
        # Page ids are read one step ahead: a key's load could not be pipelined if it had to wait for another load.
        next_page = _find_pages(table, page_id_stride, begin, table_width, PAGE_SIZE, BLOCK_N)
    for n in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        position = n + key
        if PAGED:
            page = next_page
            next_page = _find_pages(table, page_id_stride, n + BLOCK_N, table_width, PAGE_SIZE, BLOCK_N)
            key_offset, scale_offset, known = _paged_offsets(
                page, position, n, pages, keys_page_stride, scales_page_stride, KEYS_ROW, SCALES_ROW, PAGE_SIZE, BLOCK_N
            )
        else:
            row = tl.minimum(position, width - 1).to(tl.int64)
            key_offset, scale_offset = row * KEYS_ROW, row * SCALES_ROW
        if TILE:
            rows = load_packed(keys + key_offset, scales + scale_offset, DIM, BLOCK_D, TILE, COMPUTE)
        else:
            if scales is not None:
                scale = tl.load(scales + scale_offset)
            rows = load_rows(keys + key_offset[:, None] + dim[None, :], inside, COMPUTE, NATIVE, INTERPRETED)
        if HEADS <= BLOCK_H:
            score = sum_heads(tl.dot(rows, query, input_precision="ieee"), weight, 0, HEADS, BLOCK_H, BLOCK_Q)
        else:
            score = sum_head_blocks(
                rows, q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, first_token,
                tokens, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_Q, COMPUTE, NATIVE, INTERPRETED,
            )  # fmt: skip
        if scales is not None and TILE == 0:
            score *= scale[:, None]
        seen = position[:, None] < end[None, :]
        if start is not None:
            seen &= position[:, None] >= start[None, :]
        if PAGED:
            seen &= known if PAGE_SIZE % BLOCK_N == 0 else known[:, None]
        score = tl.where(seen, score, float("-inf"))
        tl.store(out_row[None, :] + position[:, None], score, mask=active[None, :] & (position < last)[:, None])


# do_not_specialize: Triton would otherwise recompile when one of these is 1 or a multiple of 16.
@triton.jit(
    do_not_specialize=["tokens", "requests", "table_width", "pages", "width", "listed_keys", "span", "table_stride"]
)
def score_keys(
    q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, keys, keys_page_stride,
    scales, scales_page_stride, pages, request_ids, block_table, table_stride, page_id_stride, requests, table_width,
    starts, ends, out, out_stride, tokens, width, listed_keys, span,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    FILL: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Scores of one span of keys for BLOCK_Q tokens, -inf for keys that a token does not see.

    Keys come from pages, of which a block-table row lists `listed_keys` positions, or without a block table from one
    list, of which a token sees starts .. ends. With a TILE they are e2m1 pairs. Without FILL nothing is written past
    the longest of the tokens' ends.

    Axis 0 of the grid has one program per span and group of BLOCK_Q tokens. With a block table axis 1 has BLOCK_Q
    programs: program i scores those tokens of the group that have the request of token i, if that token is their first,
    and exits otherwise.
    """
    # The groups of one span are neighbours in the grid, so that its keys come from the L2 cache after the first.
    groups = tl.cdiv(tokens, BLOCK_Q)
    first_token = tl.program_id(0) % groups * BLOCK_Q
    first = tl.program_id(0) // groups * span
    last = tl.minimum(first + span, width)
    token = first_token + tl.arange(0, BLOCK_Q)
    active = token < tokens
    known_request = True
    table = block_table
    if block_table is not None:
        leader = tl.program_id(1)
        request = tl.load(request_ids + tl.minimum(first_token + leader, tokens - 1))
        active &= tl.load(request_ids + token, mask=active, other=0) == request
        if tl.min(tl.where(active, token, tokens), 0) != first_token + leader:
            return
        known_request = (request >= 0) & (request < requests)
        table = block_table + tl.where(known_request, request, 0).to(tl.int64) * table_stride
    end = tl.load(ends + token, mask=active, other=0)
    out_row = out + token.to(tl.int64) * out_stride
    stop = tl.minimum(tl.max(end, 0), last)
    limit = last if FILL else stop
    stop = tl.where(known_request, tl.minimum(stop, listed_keys), first)
    # The host does not check lengths on a device: they may count positions past the block table.
    end = tl.minimum(end, listed_keys)
    begin = first
    start = starts
    if starts is not None:
        start = tl.load(starts + token, mask=active, other=2147483647)
        begin += tl.maximum(tl.minimum(tl.min(start, 0), last) - first, 0) // BLOCK_N * BLOCK_N
    # These ranges are made before the branch so that _write_nothing shares them, which saves registers.
    key = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    if begin < stop:
        _score_span(
            q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, keys,
            keys_page_stride, scales, scales_page_stride, pages, table, page_id_stride, table_width, start, end,
            out_row, active, first_token, tokens, width, begin, stop, last, key, dim, HEADS, BLOCK_H, DIM, BLOCK_D,
            KEYS_ROW, SCALES_ROW, TILE, PAGE_SIZE, BLOCK_Q, BLOCK_N, COMPUTE, NATIVE, STAGES, INTERPRETED,
        )  # fmt: skip
    # Positions without keys: past the longest length or the table, of an unknown request, before the first start.
    _write_nothing(out_row, active, begin + tl.cdiv(tl.maximum(stop - begin, 0), BLOCK_N) * BLOCK_N, limit, BLOCK_N)
    if starts is not None:
        _write_nothing(out_row, active, first, tl.minimum(begin, limit), BLOCK_N)


class ScoreLaunch(NamedTuple):
    """The launch shape of `score_keys`."""

    compute: torch.dtype
    """The type of the products' inputs."""
    block_q: int
    """Tokens per program."""
    span: int
    """Keys per program."""
    constants: dict[str, Any]
    """Arguments of the kernel that are the same for every launch of this shape."""
    options: dict[str, int]
    """Warps, pipeline stages and register limit of the launch."""


MAX_QUERY_BYTES = 16 * 1024
"""Limit for the heads of one token that a program holds at once; more heads go block by block."""
PROGRAMS_PER_SM = 5
"""How many one-token programs are resident on an SM of an H200."""
START_STEPS = 1.5
"""The cost of a program outside of its loop, in steps of the loop."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, E4M3: tl.float8e4nv}


@lru_cache(1024)
def choose_score_launch(
    tokens: int,
    width: int,
    heads: int,
    dim: int,
    query: torch.dtype,
    keys: torch.dtype,
    *,
    key_bytes: int,
    shared: bool,
    native: bool,
    on_host: bool,
    sms: int,
) -> ScoreLaunch:
    """The launch shape for scores [tokens, width].

    Args:
        tokens: rows of the result.
        width: columns of the result.
        heads: heads of each token.
        dim: width of a head.
        query: type of the queries.
        keys: type that holds a key without its scale, or with its scales if it is packed.
        key_bytes: bytes of a stored key without its scale. Keys of more than 256 bytes get 2 pipeline stages: beside
            the queries, 4 do not fit 99 KB of shared memory, and 3 do not fit the 64 KB of some AMD GPUs.
        shared: whether neighbouring tokens mostly see the same keys.
        native: whether the device converts and multiplies e4m3 in hardware.
        on_host: whether the kernel runs in Triton's interpreter.
        sms: SMs of the device.
    """
    compute = torch.float32 if on_host else _compute_dtype(query, keys, native=native)
    exact = compute == torch.float32
    block_d = triton.next_power_of_2(max(32, dim))
    block_h = max(16, min(MAX_QUERY_BYTES // (block_d * compute.itemsize), triton.next_power_of_2(heads)))
    block_q, block_n, stages = 1, 32 if exact else 64, 2 if key_bytes > 256 else 4
    options = {"num_warps": 4}
    simple = heads <= block_h and not exact
    # The logits of two tokens fit the registers up to 64 heads.
    if shared and simple and block_h <= 64:
        block_q, stages = 2, min(3, stages)
        steps = min(32, max(4, width * tokens // 2 // (8 * sms) // block_n))
        if compute == E4M3:
            options["maxnreg"] = 128  # the compiler would use more, at the cost of occupancy
    else:
        stages = stages if simple else 1
        steps = _choose_steps(tokens, ceil_div(width, block_n), PROGRAMS_PER_SM * sms)
    constants = {
        "HEADS": heads,
        "BLOCK_H": block_h,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_Q": block_q,
        "BLOCK_N": block_n,
        "COMPUTE": _TYPES[compute],
        "NATIVE": native,
        "STAGES": stages,
        "INTERPRETED": on_host,
    }
    return ScoreLaunch(compute, block_q, steps * block_n, constants, options | {"num_stages": stages})


def _compute_dtype(query: torch.dtype, keys: torch.dtype, *, native: bool) -> torch.dtype:
    """The type of the products' inputs: the narrowest that holds both, and e4m3 only where the device multiplies it."""
    if query == keys:
        return torch.float16 if query == E4M3 and not native else query
    if E4M3 in (query, keys):
        return keys if query == E4M3 else query
    return torch.float32


def _choose_steps(tokens: int, blocks: int, resident: int) -> int:
    """Blocks of keys per program with the shortest total time: waves of `resident` programs, times the cost of a
    program. Any number is allowed, not only powers of two, so that the last wave can be full."""

    def cost(steps: int) -> float:
        return ceil_div(tokens * ceil_div(blocks, steps), resident) * (steps + START_STEPS)

    return min(range(4, 65), key=cost)
