"""Stage `index` on Hopper: CUDA C++ kernels score and select, Triton kernels prepare queries and keys.

Scores of head counts and key formats that no source has are computed in Triton; see `scores.serves`. So are
the scores of positions in candidate blocks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis.cuda.device import Rooms, current_stream, device_index
from tamis.ops.index import scoring
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.hopper import scores, topk
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores, TopkPositions
from tamis.ops.index.scoring import (
    check_index_scores,
    check_index_topk,
    check_index_topk_and_blocks,
    check_index_topk_within,
    check_ragged_scores,
    prepare_scores,
    score_width,
    scored_chunks,
)
from tamis.ops.index.triton_blocks import topk_and_blocks, topk_within
from tamis.ops.index.triton_prepare import (
    check_quantise_index_query,
    check_write_index_keys,
    quantise_index_query,
    write_index_keys,
)

if TYPE_CHECKING:
    from tamis.backends import Need

__all__ = [
    "check_index_scores",
    "check_index_topk",
    "check_index_topk_and_blocks",
    "check_index_topk_within",
    "check_quantise_index_query",
    "check_ragged_scores",
    "check_write_index_keys",
    "index_scores",
    "index_topk",
    "index_topk_and_blocks",
    "index_topk_within",
    "prepare_index_topk",
    "quantise_index_query",
    "ragged_scores",
    "topk_positions",
    "write_index_keys",
]

UNALIGNED = "unaligned"


def index_scores(call: IndexScores) -> None:
    """Fill `call.out`; see `tamis.ops.index_scores`."""
    if scores.serves(call):
        scores.index_scores(call, call.out, fill=True)
    else:
        scoring.index_scores(call)


def ragged_scores(call: RaggedScores) -> None:
    """Fill `call.out`; see `tamis.ops.ragged_scores`."""
    if scores.serves_list(call):
        scores.ragged_scores(call)
    else:
        scoring.ragged_scores(call)


def topk_positions(call: TopkPositions) -> Tensor:
    """Positions, or slots if there is a block table, int32 [T, k]; see `tamis.ops.topk_positions`."""
    pages = (call.request_ids, call.block_table, call.page_size or 0)
    return topk.topk_positions(call.scores, call.lengths, call.k, *pages)


def index_topk(call: IndexTopk) -> None:
    """Fill `call.out`. The workspace holds the scores of some tokens at a time; selection needs no memory."""
    width = score_width(call)
    tokens = call.workspace_bytes // (4 * max(1, width))
    score = _score_chunk if scores.serves(call) else None
    for chunk in scored_chunks(call, width, tokens, score):
        topk.topk_positions(chunk.scores, chunk.call.lengths, call.k, out=chunk.call.out)
        chunk.call.keep_scores(chunk.scores)


def index_topk_and_blocks(call: IndexTopkAndBlocks) -> None:
    """Fill `call.out` and `call.blocks`; see `tamis.ops.index_topk_and_blocks`."""
    width = score_width(call.topk)
    # Block maxima take up to as much memory as the scores.
    tokens = call.workspace_bytes // (8 * max(1, width))
    score = _score_chunk if scores.serves(call.topk) else None
    topk_and_blocks(call, scored_chunks(call.topk, width, tokens, score), _select_rows)


def index_topk_within(call: IndexTopkWithin) -> None:
    """Fill `call.out`; see `tamis.ops.index_topk_within`. Candidates are scored in Triton."""
    topk_within(call, _select_rows, lambda _width: 0)


def _select_rows(scores: Tensor, lengths: Tensor, k: int, out: Tensor) -> None:
    topk.topk_positions(scores, lengths, k, out=out)


def _score_chunk(call: IndexTopk, out: Tensor) -> None:
    scores.index_scores(call, out, fill=False)


def prepare_index_topk(call: IndexTopk) -> Callable[[IndexTopk], None] | None:
    """Launches for calls like this one, if nothing is copied. A workspace that does not hold the scores of all tokens
    holds those of some at a time, as in `index_topk`."""
    tokens, width, device = call.q.shape[0], score_width(call), call.q.device
    if call.scores is not None or not tokens:
        return None
    most = min(tokens, max(1, call.workspace_bytes // (4 * max(1, width))))
    rooms = Rooms(device, ((most, width), torch.float32))
    sizes, score = {most, tokens % most or most}, {}
    for size in sizes:
        _, some = call.chunks(size)[0]
        prepared = _prepare_scores(some, rooms()[0][:size], whole=size == tokens)
        if prepared is None:
            return None
        score[size] = prepared
    select = {size: topk.prepare_topk(size, width, call.k, device) for size in sizes}
    parts = [(first, min(most, tokens - first)) for first in range(0, tokens, most)]
    index, row = device_index(device), 4 * call.k

    def run(call: IndexTopk) -> None:
        stream, (held,) = current_stream(index), rooms()
        out, lengths, positions = held.data_ptr(), call.lengths.data_ptr(), call.out.data_ptr()
        for first, size in parts:
            if score[size](stream, call, out, first) is UNALIGNED:
                index_topk(call)
                return
            select[size](stream, (out, lengths + 4 * first, positions + row * first))

    return run


def _prepare_scores(
    call: IndexTopk, out: Tensor, *, whole: bool
) -> Callable[[int, IndexTopk, int, int], str | None] | None:
    """A launch that scores as many tokens as this call has into memory like `out`: a function of the stream, the call,
    the address of its scores and the first token. Where a call's addresses do not fit the launch it does nothing and
    returns `UNALIGNED`. `whole`: whether the first token is always 0."""
    if not scores.serves(call):
        return _prepare_triton(call, out) if whole else None
    launch = scores.prepare_scores(call, out)
    if launch is None:
        return None
    keys, scales = scores.key_offsets(call.cache)
    query = call.q.stride(0) * call.q.element_size()
    weight = call.weights.stride(0) * call.weights.element_size()

    def run(stream: int, call: IndexTopk, out: int, first: int) -> str | None:
        pages, q = call.cache.storage.data_ptr(), call.q.data_ptr()
        # Calls are remembered without their addresses, and the launch reads queries and pages 16 bytes at a time.
        if (pages | q) % 16:
            return UNALIGNED
        weights, ids, ends = call.weights.data_ptr(), call.request_ids.data_ptr(), call.lengths.data_ptr()
        inputs = (q + query * first, weights + weight * first, pages + keys, 0 if scales is None else pages + scales)
        launch(stream, (*inputs, ids + 4 * first, call.block_table.data_ptr(), ends + 4 * first, out))
        return None

    return run


def _prepare_triton(call: IndexTopk, out: Tensor) -> Callable[[int, IndexTopk, int, int], None] | None:
    launch = prepare_scores(call, out)
    return None if launch is None else lambda stream, call, out, _: launch(stream, call, out)


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Say which source runs the stage for a layer."""
    return "topk.cu selects; scores.cu scores 16, 32 or 64 heads of 128, triton others", []
