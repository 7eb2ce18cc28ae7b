"""Stage `index`: score cached index keys for each query token and select the best positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tamis import checks
from tamis.cache import PagedCache
from tamis.ops import library


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """What a layer's indexer computed for the tokens of a step."""

    q: Tensor
    """[T, index_heads, index_dim], rotated."""
    weights: Tensor
    """[T, index_heads], with every constant factor folded in."""
    keys: Tensor | None = None
    """[T, index_dim] of the new tokens, rotated; written to the index cache first. None: already there."""


def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """The k best request-local positions of each token: int32 [T, k], valid ones first, then -1.

    The score of position j is sum over heads of weight * relu(q . key_j). Among equal scores the lowest position wins,
    so the result is deterministic. Weights may be negative.

    Args:
        q: [T, H, D] in bf16, fp16 or fp32.
        weights: [T, H].
        cache: index keys, `index-fp8` or unquantised rows of width D.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W].
        lengths: int32 [T], how many leading positions each token may see (its own position + 1); 0 selects nothing.
        k: how many to select.
        backend: a name from `tamis backends`, or "auto".
    """
    device = checks.same_device(q=q, weights=weights, request_ids=request_ids, lengths=lengths)
    sizes = checks.tensor("q", q, "T H D", checks.FLOATS, D=cache.layout.width, remedy=lambda: f"keys are in {cache!r}")
    checks.tensor("weights", weights, "T H", checks.FLOATS, T=sizes["T"], H=sizes["H"])
    checks.tensor("request_ids", request_ids, "T", (torch.int32,), T=sizes["T"], remedy="one per query token")
    requests = checks.tensor("block_table", block_table, "B W", (torch.int32,), device=device)["B"]
    checks.tensor("lengths", lengths, "T", (torch.int32,), T=sizes["T"], remedy="one per query token")
    checks.integer("k", k, low=1)
    checks.values_between("request_ids", request_ids, 0, requests - 1, "each must name a block-table row")
    longest = block_table.shape[1] * cache.page_size
    checks.values_between("lengths", lengths, 0, longest, "the block table has no page for more")
    return library.index_topk(q, weights, cache, request_ids, block_table, lengths, k, backend)
