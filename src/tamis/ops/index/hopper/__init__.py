"""Stage `index` on Hopper: a CUDA C++ kernel selects, Triton kernels prepare queries and keys and compute scores."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis.cuda.device import Rooms, current_stream, device_index
from tamis.ops.index.hopper import topk
from tamis.ops.index.operations import IndexTopk, TopkPositions
from tamis.ops.index.scoring import (
    check_index_scores,
    check_index_topk,
    check_ragged_scores,
    index_scores,
    prepare_scores,
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

if TYPE_CHECKING:
    from tamis.backends import Need

__all__ = [
    "check_index_scores",
    "check_index_topk",
    "check_quantise_index_query",
    "check_ragged_scores",
    "check_write_index_keys",
    "index_scores",
    "index_topk",
    "prepare_index_topk",
    "quantise_index_query",
    "ragged_scores",
    "topk_positions",
    "write_index_keys",
]


def topk_positions(call: TopkPositions) -> Tensor:
    """Positions, or slots if there is a block table, int32 [T, k]; see `tamis.ops.topk_positions`."""
    pages = (call.request_ids, call.block_table, call.page_size or 0)
    return topk.topk_positions(call.scores, call.lengths, call.k, *pages)


def index_topk(call: IndexTopk) -> None:
    """Fill `call.out`. The workspace holds the scores of some tokens at a time; selection needs no memory."""
    width = score_width(call)
    for chunk in scored_chunks(call, width, call.workspace_bytes // (4 * max(1, width))):
        topk.topk_positions(chunk.scores, chunk.lengths, call.k, out=chunk.out)


def prepare_index_topk(call: IndexTopk) -> Callable[[IndexTopk], None] | None:
    """Launches for calls like this one, if the workspace holds the scores of all tokens and nothing is copied."""
    tokens, width, device = call.q.shape[0], score_width(call), call.q.device
    if not tokens or tokens > call.workspace_bytes // (4 * max(1, width)):
        return None
    rooms = Rooms(device, ((tokens, width), torch.float32))
    score = prepare_scores(call, rooms()[0])
    if score is None:
        return None
    select, index = topk.prepare_topk(tokens, width, call.k, device), device_index(device)

    def run(call: IndexTopk) -> None:
        stream, (scores,) = current_stream(index), rooms()
        score(stream, call, scores.data_ptr())
        select(stream, (scores.data_ptr(), call.lengths.data_ptr(), call.out.data_ptr()))

    return run


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Say which source runs the stage for a layer: only the selection is in CUDA C++."""
    return "topk.cu selects, triton scores", []
