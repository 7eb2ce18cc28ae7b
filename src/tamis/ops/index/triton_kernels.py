"""Stage `index` on any GPU that Triton supports: scores by `scoring`, selections by `triton_topk`, queries and keys by
`triton_prepare`."""

import torch
from torch import Tensor

from tamis.cuda.device import sm_count
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.operations import IndexTopk, TopkPositions
from tamis.ops.index.scoring import (
    check_index_scores,
    check_index_topk,
    check_index_topk_and_blocks,
    check_index_topk_within,
    check_ragged_scores,
    index_scores,
    ragged_scores,
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
from tamis.ops.index.triton_topk import choose_topk_launch, topk_launches
from tamis.ops.rows.triton_rows import launching_on

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
    "quantise_index_query",
    "ragged_scores",
    "topk_positions",
    "write_index_keys",
]

SCRATCH_BYTES = 64 << 20
"""The memory that a selection may take beside scores and result, unless one row needs more."""


def topk_positions(call: TopkPositions) -> Tensor:
    """Positions, or slots if there is a block table, int32 [T, k]; see `tamis.ops.topk_positions`."""
    result = torch.empty(call.scores.shape[0], call.k, dtype=torch.int32, device=call.scores.device)
    _select(call, result)
    return result


def index_topk(call: IndexTopk) -> None:
    """Fill `call.out`, for as many tokens at a time as the workspace holds scores and scratch memory of."""
    width = score_width(call)
    each = 4 * width + _scratch_bytes(call.q, width, call.k)
    for chunk in scored_chunks(call, width, call.workspace_bytes // each):
        _select_rows(chunk.scores, chunk.call.lengths, call.k, chunk.call.out)
        chunk.call.keep_scores(chunk.scores)


def index_topk_and_blocks(call: IndexTopkAndBlocks) -> None:
    """Fill `call.out` and `call.blocks`; see `tamis.ops.index_topk_and_blocks`."""
    width = score_width(call.topk)
    # Block maxima take up to as much memory as the scores.
    each = 8 * width + max(_scratch_bytes(call.q, width, k) for k in (call.k, call.blocks.shape[1]))
    topk_and_blocks(call, scored_chunks(call.topk, width, call.workspace_bytes // each), _select_rows)


def index_topk_within(call: IndexTopkWithin) -> None:
    """Fill `call.out`; see `tamis.ops.index_topk_within`."""
    topk_within(call, _select_rows, lambda width: _scratch_bytes(call.q, width, call.k))


def _scratch_bytes(q: Tensor, width: int, k: int) -> int:
    """The memory for selecting k of `width` scores of a token, beside scores and result."""
    sms = sm_count(q.device)
    return 4 * max(choose_topk_launch(rows, width, k, sms).scratch for rows in (1, max(1, q.shape[0])))


def _select_rows(scores: Tensor, lengths: Tensor, k: int, out: Tensor) -> None:
    _select(TopkPositions(scores, lengths, k, None, None, None, "triton"), out)


def _select(call: TopkPositions, result: Tensor) -> None:
    """Select into `result`, as many rows at a time as the scratch memory allows."""
    scores, lengths = call.scores, call.lengths.contiguous()
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    request_ids = None if call.request_ids is None else call.request_ids.contiguous()
    tokens, width = scores.shape
    launch = choose_topk_launch(tokens, width, call.k, sm_count(scores.device))
    step = max(1, SCRATCH_BYTES // (4 * launch.scratch))
    for start in range(0, tokens, step):
        some = slice(start, start + step)
        ids = None if request_ids is None else request_ids[some]
        part = call._replace(scores=scores[some], lengths=lengths[some], request_ids=ids)
        with launching_on(scores.device):
            for kernel, grid, arguments, options in topk_launches(launch, part, result[some]):
                kernel[(grid,)](**arguments, **options)
