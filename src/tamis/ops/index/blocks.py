"""Selection in two levels (DeepSeek-V4.1): one layer selects blocks of positions, later layers select within them.

The score of a block is the highest score of its positions that the token sees. The block that holds the token's newest
position is always selected. Like positions, blocks are selected exactly and deterministically: the highest scores,
among equal ones the lowest blocks, in ascending order.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.ops.index import MAX_K, WORKSPACE_BYTES, block_operations, check_index_topk
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.prepared import new_positions

MAX_WITHIN = 1 << 24
"""The most positions in a token's candidate blocks."""


def index_topk_and_blocks(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    *,
    blocks: int,
    block_size: int,
    workspace_bytes: int = WORKSPACE_BYTES,
    out: Tensor | None = None,
    blocks_out: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The k best positions of each token, as by `index_topk`, and its best blocks of positions.

    Returns positions int32 [T, k] and blocks int32 [T, blocks], each in ascending order, then -1. Block b holds the
    positions b * block_size to (b + 1) * block_size - 1 of the token's request. Both are selected from the same scores.

    Args:
        q: [T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights.
        weights: [T, H].
        cache: index keys, `index-fp8`, `index-mxfp4` or unquantised rows of width D.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W]; positions of an absent (negative) page are never selected.
        lengths: int32 [T], how many leading positions each token sees; 0 or less: none.
        k: how many positions to select, 1 to 4096.
        blocks: how many blocks to select, 1 to 4096.
        block_size: positions per block; on a GPU at most 16384.
        workspace_bytes: as in `index_topk`.
        out: int32 [T, k], contiguous, to write the positions into.
        blocks_out: int32 [T, blocks], contiguous, to write the blocks into.
        backend: a name from `tamis backends`, or "auto".
    """
    inputs = (q, weights, cache, request_ids, block_table, lengths)
    given = (cast("Tensor", out), cast("Tensor", blocks_out))
    call = IndexTopkAndBlocks(*inputs, k, block_size, workspace_bytes, 0, *given, backend)
    check_index_topk_and_blocks(call, blocks)
    found = new_positions(q, k) if out is None else out
    best = new_positions(q, blocks) if blocks_out is None else blocks_out
    block_operations.index_topk_and_blocks(call._replace(batch=q.shape[0], out=found, blocks=best))
    return found, best


def check_index_topk_and_blocks(
    call: IndexTopkAndBlocks, blocks: int, sizes: Mapping[str, int] | None = None, **names: str
) -> None:
    """Refuse what `index_topk_and_blocks` refuses; `out` and `blocks` of the call may be None."""
    check_index_topk(call.topk, sizes, **names)
    checks.integer("blocks", blocks, low=1, high=MAX_K)
    checks.integer("block_size", call.block_size, low=1, high=MAX_WITHIN)
    if call.blocks is not None:
        tokens, device = call.q.shape[0], call.q.device
        checks.tensor("blocks_out", call.blocks, "T N", (torch.int32,), T=tokens, N=blocks, device=device)
        if not call.blocks.is_contiguous():
            received = f"strides {call.blocks.stride()}"
            raise checks.refuse("blocks_out", "contiguous", received, "allocate it as [T, blocks]")
        held = () if call.out is None else (call.out,)
        checks.writable("blocks_out", call.blocks, *call.topk.read, *held)
    block_operations.index_topk_and_blocks.check(call, **names)


def index_topk_within(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    candidates: Tensor,
    k: int,
    *,
    block_size: int,
    workspace_bytes: int = WORKSPACE_BYTES,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The k best positions of each token among those in its candidate blocks: int32 [T, k], ascending, then -1.

    The result is that of `topk_positions` over all scores of which those outside the candidate blocks were replaced by
    -inf, but only positions in candidate blocks are scored.

    Args:
        q: [T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights.
        weights: [T, H].
        cache: index keys, `index-fp8`, `index-mxfp4` or unquantised rows of width D.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W]; positions of an absent (negative) page are never selected.
        lengths: int32 [T], how many leading positions each token sees; 0 or less: none.
        candidates: int32 [T, N], blocks in ascending order without repetitions, then -1, as `index_topk_and_blocks`
            returns them. Blocks past the token's positions count for nothing.
        k: how many positions to select, 1 to 4096.
        block_size: positions per block.
        workspace_bytes: as in `index_topk`.
        out: int32 [T, k], contiguous, to write into.
        backend: a name from `tamis backends`, or "auto".
    """
    inputs = (q, weights, cache, request_ids, block_table, lengths)
    numbers = (k, block_size, workspace_bytes)
    call = IndexTopkWithin(*inputs, candidates, *numbers, cast("Tensor", out), backend)
    check_index_topk_within(call)
    call = call._replace(out=new_positions(q, k) if out is None else out)
    block_operations.index_topk_within(call)
    return call.out


def check_index_topk_within(call: IndexTopkWithin, sizes: Mapping[str, int] | None = None, **names: str) -> None:
    """Refuse what `index_topk_within` refuses; `out` may be None."""
    check_index_topk(call.topk, sizes, **names)
    checks.integer("block_size", call.block_size, low=1, high=MAX_WITHIN)
    check_candidates(call.candidates, call.q, call.block_size, names.get("candidates", "candidates"))
    if call.out is not None:
        checks.writable("out", call.out, call.candidates)
    block_operations.index_topk_within.check(call, **names)


def check_candidates(candidates: Tensor, q: Tensor, block_size: int, name: str) -> None:
    """Refuse candidate blocks of another shape than the tokens ask for, and those that are not in ascending order."""
    found = checks.tensor(name, candidates, "T N", (torch.int32,), T=q.shape[0], device=q.device)["N"]
    checks.integer(f"{name}: blocks", found, low=1, high=max(1, MAX_WITHIN // block_size))
    if checks.visible(candidates):
        before, after = candidates[:, :-1], candidates[:, 1:]
        wrong = (after >= 0) & ((before < 0) | (after <= before))
        if bool(wrong.any()):
            row = int(wrong.any(1).nonzero()[0])
            remedy = "sort them, and put -1 last"
            raise checks.refuse(name, "in ascending order, without repetitions", f"others in row {row}", remedy)
