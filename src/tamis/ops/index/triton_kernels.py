"""Stage `index` on any GPU that Triton supports: scores by `scoring`, selections by `triton_topk`, queries and keys by
`triton_prepare`."""

import torch
from torch import Tensor

from tamis.cuda.device import sm_count
from tamis.ops.index.operations import IndexTopk, TopkPositions
from tamis.ops.index.scoring import (
    check_index_scores,
    check_index_topk,
    check_ragged_scores,
    index_scores,
    ragged_scores,
    score_width,
    scored_chunks,
)
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
    "check_quantise_index_query",
    "check_ragged_scores",
    "check_write_index_keys",
    "index_scores",
    "index_topk",
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
    tokens, device = call.q.shape[0], call.q.device
    width, sms = score_width(call), sm_count(device)
    scratch = max(choose_topk_launch(rows, width, call.k, sms).scratch for rows in (1, max(1, tokens)))
    for chunk in scored_chunks(call, width, call.workspace_bytes // (4 * (width + scratch))):
        selection = TopkPositions(chunk.scores, chunk.lengths, call.k, None, None, None, call.backend)
        _select(selection, chunk.out)


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
