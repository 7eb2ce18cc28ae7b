"""The lightning indexer on Hopper: portable but for top-k, which is in CUDA C++."""

from typing import TYPE_CHECKING

from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.index.hopper.topk import topk_positions
from tamis.ops.index.triton_kernels import check_scores, index_scores, ragged_scores, score_and_select, score_width
from tamis.ops.index.triton_prepare import check_recipe, quantise_index_query, write_index_keys

if TYPE_CHECKING:
    from tamis.backends import Need

__all__ = [
    "check_recipe",
    "check_scores",
    "index_scores",
    "index_topk",
    "quantise_index_query",
    "ragged_scores",
    "topk_positions",
    "write_index_keys",
]


def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    workspace_bytes: int,
) -> Tensor:
    """Positions int32 [T, k], as many tokens at a time as the workspace holds scores of; selection takes no memory."""

    def select(scores: Tensor, visible: Tensor, result: Tensor) -> None:
        topk_positions(scores, visible, k, out=result)

    rows = workspace_bytes // (4 * score_width(cache, block_table))
    return score_and_select(q, weights, cache, request_ids, block_table, lengths, k, rows, select)


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Which source runs the stage for a layer: whatever it is, the selection is the only part in CUDA C++."""
    return "topk.cu selects, triton scores", []
