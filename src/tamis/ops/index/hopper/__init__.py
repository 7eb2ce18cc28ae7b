"""Stage `index` on Hopper: CUDA C++ kernels score and select, Triton kernels prepare queries and keys.

Scores of head counts and key formats that no source has are computed in Triton; see `scores.serves`. So are
the scores of positions in candidate blocks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tamis.cuda.device import Rooms, current_stream, device_index
from tamis.cuda.launch import PreparedLaunch
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


class Part(NamedTuple):
    """Tokens of a call whose scores the workspace holds: their launches, and the bytes before their rows."""

    score: PreparedLaunch
    select: PreparedLaunch
    q: int
    weights: int
    request_ids: int
    lengths: int
    out: int


def prepare_index_topk(call: IndexTopk) -> Callable[[IndexTopk], None] | None:
    """Launches for calls like this one, if nothing is copied. A workspace that does not hold the scores of all tokens
    holds those of some at a time, as in `index_topk`."""
    tokens, width, device = call.q.shape[0], score_width(call), call.q.device
    if call.scores is not None or not tokens:
        return None
    most = min(tokens, max(1, call.workspace_bytes // (4 * max(1, width))))
    rooms = Rooms(device, ((most, width), torch.float32))
    if not scores.serves(call):
        return _prepare_triton(call, rooms) if most == tokens else None
    score, select = {}, {}
    for size in {most, tokens % most or most}:
        prepared = scores.prepare_scores(call.chunks(size)[0][1], rooms()[0][:size])
        if prepared is None:
            return None
        score[size], select[size] = prepared, topk.prepare_topk(size, width, call.k, device)
    # Not the strides of a part: one token is contiguous, whatever the call is.
    rows = [t.stride(0) * t.element_size() for t in (call.q, call.weights, call.request_ids, call.lengths, call.out)]
    sizes = {first: min(most, tokens - first) for first in range(0, tokens, most)}
    parts = [Part(score[size].launch, select[size], *[first * row for row in rows]) for first, size in sizes.items()]
    index, map_of, (to_keys, to_scales) = device_index(device), score[most].key_map, scores.key_offsets(call.cache)

    def run(call: IndexTopk) -> None:
        q, pages = call.q.data_ptr(), call.cache.storage.data_ptr()
        # Calls are remembered without their addresses, and launches read queries and pages 16 bytes at a time.
        if (pages | q) % 16:
            index_topk(call)
            return
        weights, ids, table = call.weights.data_ptr(), call.request_ids.data_ptr(), call.block_table.data_ptr()
        lengths, positions = call.lengths.data_ptr(), call.out.data_ptr()
        keys, scales = pages + to_keys, 0 if to_scales is None else pages + to_scales
        stream, key_map, (held,) = current_stream(index), map_of(keys), rooms()
        out = held.data_ptr()
        # Nothing that all parts share is looked up in this loop: a call may have many of them.
        for score, select, query, weight, request, length, row in parts:
            ends = lengths + length
            score(stream, (q + query, weights + weight, keys, scales, ids + request, table, ends, out), 0.0, key_map)
            select(stream, (out, ends, positions + row))

    return run


def _prepare_triton(call: IndexTopk, rooms: Rooms) -> Callable[[IndexTopk], None] | None:
    """Launches for calls whose scores are computed in Triton, and which are one chunk."""
    score = prepare_scores(call, rooms()[0])
    if score is None:
        return None
    tokens, width, device = call.q.shape[0], score_width(call), call.q.device
    select, index = topk.prepare_topk(tokens, width, call.k, device), device_index(device)

    def run(call: IndexTopk) -> None:
        stream, (held,) = current_stream(index), rooms()
        out = held.data_ptr()
        score(stream, call, out)
        select(stream, (out, call.lengths.data_ptr(), call.out.data_ptr()))

    return run


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Say which source runs the stage for a layer."""
    return (
        "topk_rows.cu and topk.cu select; fp8_scores.cu and scores.cu score 16, 32 or 64 heads of 128, triton others",
        [],
    )
