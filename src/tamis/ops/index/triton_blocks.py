"""Selection in two levels on GPUs: block maxima, scores of positions in candidate blocks, and their launches.

A token has its own candidate blocks, so its program reads keys for no other token. Scores of candidates lie in the
order of the blocks, which is ascending: the best columns are then the best positions, in the same order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.arithmetic import ceil_div, round_up
from tamis.cuda.device import sm_count
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.scoring import MAX_BLOCK, Chunk, paged_keys, score_launch
from tamis.ops.index.triton_scores import load_packed, load_queries, load_rows, sum_head_blocks, sum_heads
from tamis.ops.rows.triton_rows import has_native_e4m3, launching_on

Select = Callable[[Tensor, Tensor, int, Tensor], None]
"""A backend's top-k: scores float32 [T, S], lengths int32 [T], k, and the result int32 [T, k] to write into."""
TILE = 128
"""The most blocks, or positions, of one program of the two small kernels."""


# do_not_specialize: Triton would otherwise recompile when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["blocks", "listed"])
def block_maxima(
    scores, scores_stride, lengths, out, blocks, listed,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The highest score of each block of a token, inf for the block with its newest position, -inf if it sees none."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    length = tl.minimum(tl.load(lengths + row), listed)
    offset = tl.arange(0, COLUMNS)
    position = block[:, None] * BLOCK_SIZE + offset[None, :]
    seen = (offset < BLOCK_SIZE)[None, :] & (position < length)
    score = tl.load(scores + row * scores_stride + position, mask=seen, other=float("-inf"))
    # NaN counts as -inf, as in the selection of positions.
    best = tl.max(tl.where(score == score, score, float("-inf")), axis=1)
    newest = (length > 0) & (block == (length - 1) // BLOCK_SIZE)
    tl.store(out + row * blocks + block, tl.where(newest, float("inf"), best), mask=block < blocks)


@triton.jit(do_not_specialize=["tokens", "requests", "table_width", "pages", "width", "listed_keys", "span"])
def score_candidates(
    q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, keys, keys_page_stride,
    scales, scales_page_stride, pages, request_ids, block_table, table_stride, page_id_stride, requests, table_width,
    ends, candidates, candidates_stride, out, out_stride, tokens, width, listed_keys, span,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr, STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Scores of one span of a token's candidate positions, -inf for those that it does not see."""
    token = tl.program_id(0) % tokens
    first = tl.program_id(0) // tokens * span
    last = tl.minimum(first + span, width)
    request = tl.load(request_ids + token)
    known_request = (request >= 0) & (request < requests)
    table = block_table + tl.where(known_request, request, 0).to(tl.int64) * table_stride
    # The host does not check lengths on a device: they may count positions past the block table.
    end = tl.where(known_request, tl.minimum(tl.load(ends + token), listed_keys), 0)
    key = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    inside = (dim < DIM)[None, :] if DIM < BLOCK_D or INTERPRETED else None
    if HEADS <= BLOCK_H:
        query, weight = load_queries(
            q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, token, tokens, 0,
            HEADS, BLOCK_H, DIM, BLOCK_D, 1, COMPUTE, NATIVE, INTERPRETED,
        )  # fmt: skip
    for n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        column = n + key
        own = candidates + token.to(tl.int64) * candidates_stride + column // BLOCK_SIZE
        block = tl.load(own, mask=column < width, other=-1)
        position = block.to(tl.int64) * BLOCK_SIZE + column % BLOCK_SIZE
        seen = (block >= 0) & (position < end)
        position = tl.where(seen, position, 0)
        page = tl.load(table + position // PAGE_SIZE * page_id_stride, mask=seen, other=-1)
        seen &= (page >= 0) & (page < pages)
        page = tl.where(seen, page, 0).to(tl.int64)
        in_page = position % PAGE_SIZE
        key_offset = page * keys_page_stride + in_page * KEYS_ROW
        scale_offset = page * scales_page_stride + in_page * SCALES_ROW
        if TILE:
            rows = load_packed(keys + key_offset, scales + scale_offset, DIM, BLOCK_D, TILE, COMPUTE)
        else:
            rows = load_rows(keys + key_offset[:, None] + dim[None, :], inside, COMPUTE, NATIVE, INTERPRETED)
        if HEADS <= BLOCK_H:
            score = sum_heads(tl.dot(rows, query, input_precision="ieee"), weight, 0, HEADS, BLOCK_H, 1)
        else:
            score = sum_head_blocks(
                rows, q, q_token_stride, q_head_stride, weights, weights_token_stride, weights_head_stride, token,
                tokens, HEADS, BLOCK_H, DIM, BLOCK_D, 1, COMPUTE, NATIVE, INTERPRETED,
            )  # fmt: skip
        score = tl.reshape(score, [BLOCK_N])
        if scales is not None and TILE == 0:
            score *= tl.load(scales + scale_offset)
        score = tl.where(seen, score, float("-inf"))
        tl.store(out + token.to(tl.int64) * out_stride + column, score, mask=column < last)


@triton.jit(do_not_specialize=["k"])
def candidate_positions(candidates, candidates_stride, out, k, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Replace the columns of candidates that were selected by their positions, in place; -1 stays."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.load(out + row * k + at, mask=at < k, other=-1)
    block = tl.load(candidates + row * candidates_stride + column // BLOCK_SIZE, mask=column >= 0, other=0)
    tl.store(out + row * k + at, block * BLOCK_SIZE + column % BLOCK_SIZE, mask=(at < k) & (column >= 0))


def topk_and_blocks(call: IndexTopkAndBlocks, chunks: Iterator[Chunk], select: Select) -> None:
    """Fill `call.out` and `call.blocks` from the scores of some tokens at a time."""
    size, listed, start = call.block_size, call.block_table.shape[1] * call.cache.page_size, 0
    blocks = ceil_div(listed, size)
    for scores, part in chunks:
        rows, lengths = len(scores), part.lengths.contiguous()
        select(scores, lengths, call.k, part.out)
        found = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
        if found.numel():
            with launching_on(found.device):
                arguments = maxima_arguments(scores, lengths, found, size, listed)
                block_maxima[(rows, ceil_div(blocks, arguments["TILE"]))](**arguments)
        # A token does not see every block up to `listed`; the others score -inf.
        every = torch.full((rows,), blocks, dtype=torch.int32, device=found.device)
        select(found, every, call.blocks.shape[1], call.blocks[start : start + rows])
        start += rows


def maxima_arguments(scores: Tensor, lengths: Tensor, out: Tensor, size: int, listed: int) -> dict[str, Any]:
    """Arguments of `block_maxima`. A program of few large blocks holds no more scores than one of many small blocks."""
    columns = triton.next_power_of_2(size)
    return {
        "scores": scores,
        "scores_stride": scores.stride(0),
        "lengths": lengths,
        "out": out,
        "blocks": out.shape[1],
        "listed": listed,
        "BLOCK_SIZE": size,
        "COLUMNS": columns,
        "TILE": min(TILE, MAX_BLOCK // columns),
    }


def topk_within(call: IndexTopkWithin, select: Select, scratch_bytes: Callable[[int], int]) -> None:
    """Fill `call.out`, for as many tokens at a time as the workspace holds scores of.

    Args:
        call: the operation.
        select: the backend's top-k.
        scratch_bytes: from the columns of scores, the memory that selecting takes for each token beside its scores.
    """
    # A multiple of 16, so that rows are aligned for vector loads.
    width, total = round_up(width_of(call), 16), call.q.shape[0]
    tokens = max(1, min(total, call.workspace_bytes // (4 * width + scratch_bytes(width))))
    scores = torch.empty(tokens, width, dtype=torch.float32, device=call.q.device)
    for part in call.chunks(tokens):
        found = scores[: part.q.shape[0]]
        _score(part, found)
        columns = torch.full((len(found),), width_of(call), dtype=torch.int32, device=found.device)
        select(found, columns, call.k, part.out)
        _to_positions(part)


def width_of(call: IndexTopkWithin) -> int:
    """Columns of scores: the positions of all candidate blocks."""
    return call.candidates.shape[1] * call.block_size


def _score(call: IndexTopkWithin, out: Tensor) -> None:
    if call.block_table.numel() == 0:
        out.fill_(-torch.inf)
        return
    device = out.device
    arguments, options, programs = candidate_arguments(call, out, has_native_e4m3(device), sm_count(device))
    if programs:
        with launching_on(device):
            score_candidates[(programs,)](**arguments, **options)


def candidate_arguments(
    call: IndexTopkWithin, out: Tensor, native: bool, sms: int
) -> tuple[dict[str, Any], dict[str, int], int]:
    """Arguments and options of `score_candidates`, and its number of programs."""
    topk: IndexTopk = call.topk
    keys = paged_keys(topk, out.shape[1])
    grid, arguments, options = score_launch(topk, keys, out, shared=False, fill=True, native=native, sms=sms)
    candidates = call.candidates if call.candidates.stride(1) == 1 else call.candidates.contiguous()
    used = {name: value for name, value in arguments.items() if name not in ("starts", "FILL", "BLOCK_Q")}
    used |= {
        "candidates": candidates,
        "candidates_stride": candidates.stride(0),
        "listed_keys": call.block_table.shape[1] * call.cache.page_size,
        "width": width_of(call),
        "BLOCK_SIZE": call.block_size,
    }
    return used, options, grid[0]


def _to_positions(call: IndexTopkWithin) -> None:
    rows, k = call.out.shape
    if rows:
        with launching_on(call.out.device):
            candidate_positions[(rows, ceil_div(k, TILE))](**position_arguments(call))


def position_arguments(call: IndexTopkWithin) -> dict[str, Any]:
    """Arguments of `candidate_positions`."""
    candidates = call.candidates if call.candidates.stride(1) == 1 else call.candidates.contiguous()
    return {
        "candidates": candidates,
        "candidates_stride": candidates.stride(0),
        "out": call.out,
        "k": call.k,
        "BLOCK_SIZE": call.block_size,
        "TILE": TILE,
    }
