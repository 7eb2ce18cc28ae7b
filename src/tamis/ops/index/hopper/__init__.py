"""Stage `index` on Hopper: CUDA C++ kernels score and select, Triton kernels prepare queries and keys.

Scores of head counts and key formats that `scores.cu` does not have are computed in Triton; see `scores.serves`. So are
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
    """Launches for calls like this one, if the workspace holds the scores of all tokens and nothing is copied."""
    tokens, width, device = call.q.shape[0], score_width(call), call.q.device
    if call.scores is not None or not tokens or tokens > call.workspace_bytes // (4 * max(1, width)):
        return None
    rooms = Rooms(device, ((tokens, width), torch.float32))
    score = _prepare_scores(call, rooms()[0])
    if score is None:
        return None
    select, index = topk.prepare_topk(tokens, width, call.k, device), device_index(device)

    def run(call: IndexTopk) -> None:
        stream, (held,) = current_stream(index), rooms()
        out = held.data_ptr()
        if score(stream, call, out) is UNALIGNED:
            index_topk(call)
        else:
            select(stream, (out, call.lengths.data_ptr(), call.out.data_ptr()))

    return run


def _prepare_scores(call: IndexTopk, out: Tensor) -> Callable[[int, IndexTopk, int], str | None] | None:
    """A launch that scores calls like this one into memory like `out`; see `scoring.prepare_scores`. Where a call's
    addresses do not fit the launch it does nothing and returns `UNALIGNED`."""
    if not scores.serves(call):
        return prepare_scores(call, out)
    launch = scores.prepare_scores(call, out)
    if launch is None:
        return None
    keys, scales = scores.key_offsets(call.cache)

    def run(stream: int, call: IndexTopk, out: int) -> str | None:
        pages, q = call.cache.storage.data_ptr(), call.q.data_ptr()
        # Calls are remembered without their addresses, and the launch reads queries and pages 16 bytes at a time.
        if (pages | q) % 16:
            return UNALIGNED
        inputs = (q, call.weights.data_ptr(), pages + keys, 0 if scales is None else pages + scales)
        table = (call.request_ids.data_ptr(), call.block_table.data_ptr(), call.lengths.data_ptr())
        launch(stream, (*inputs, *table, out))
        return None

    return run


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Say which source runs the stage for a layer."""
    return "topk.cu selects; scores.cu scores 16, 32 or 64 heads of 128, triton others", []
