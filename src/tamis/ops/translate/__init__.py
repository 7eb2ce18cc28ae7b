"""Stage `translate`: translates request-local positions to physical slots."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.shard import check_shard
from tamis.ops import memory
from tamis.ops.translate import operations
from tamis.ops.translate.operations import TranslatePositions


class Translated(NamedTuple):
    """Physical slots and, per row, how many of them are valid."""

    slots: Tensor
    """int32 [T, K], -1 where there is none."""
    counts: Tensor
    """int32 [T]. A `Selection` may use them as lengths only where the valid slots come first: always with
    `compact`, and otherwise if the positions had their -1 at the end and none lay past the table."""


def translate_positions(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    rows_per_page: int | None = None,
    workspace: tuple[Tensor, Tensor] | None = None,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
    compact: bool = False,
    backend: str = "auto",
) -> Translated:
    """Slots of request-local positions: `block_table[request, p // page_size] * rows_per_page + p % page_size`.

    A negative position, a position past the block table, and a page the table marks as absent (negative) give -1.
    Columns keep their order unless `compact`.

    Args:
        positions: int32 [T, K].
        request_ids: int32 [T], the block-table row of each token; exactly one per row of positions.
        block_table: int32 [B, W].
        page_size: positions per page.
        rows_per_page: distance of two pages in the slot numbering, `page_size` unless the consumer indexes a flat
            list of rows with gaps between pages (`PagedCache.rows_per_page`).
        workspace: (ids int32 [T], starts int32 [P]). A token with ids[t] >= 0 gets row `starts[ids[t]] + p` of a
            gathered workspace instead of a cache slot.
        ranks: how many ranks share each request's rows (context parallelism).
        rank: which of them this is; positions of other ranks give -1.
        interleave: how many consecutive positions each rank holds; the next ones belong to the next rank.
        compact: move the valid slots of a row to its front.
        backend: a name from `tamis backends`, or "auto".
    """
    if workspace is not None and (not isinstance(workspace, tuple) or len(workspace) != 2):
        received = checks.describe(workspace)
        raise checks.refuse_type("workspace", "a pair (ids, starts)", received, "pass both tensors")
    ids, starts = workspace or (None, None)
    call = TranslatePositions(
        positions,
        request_ids,
        block_table,
        page_size,
        page_size if rows_per_page is None else rows_per_page,
        ids,
        starts,
        (ranks, rank, interleave),
        compact,
        backend,
    )
    signature = None
    if not torch.compiler.is_compiling():
        with torch._C.DisableTorchFunction():
            signature = _sign(call)
            known = _KNOWN.find(signature)
            if known is not None:
                return Translated(*known(call))
    check_translate_positions(call)
    return Translated(*_KNOWN.run(operations.translate_positions, call, signature))


_KNOWN: memory.Calls[TranslatePositions, tuple[Tensor, Tensor]] = memory.Calls()


def _sign(call: TranslatePositions) -> memory.Signature | None:
    """The signature of a call of `translate_positions`."""
    positions, request_ids, block_table, *options, ids, starts, shard, compact, backend = call
    try:
        if not memory.remembered_on(positions):
            return None
        numbers = (*options, *shard, compact)
        tensors = map(memory.sign, (positions, request_ids, block_table, ids, starts))
        return (backend, *numbers, *map(type, numbers), *tensors)
    except memory.NOT_ARGUMENTS:
        return None


def check_translate_positions(call: TranslatePositions) -> None:
    """Refuse what `translate_positions` refuses."""
    positions, request_ids, block_table = call.positions, call.request_ids, call.block_table
    device = checks.same_device(positions=positions, request_ids=request_ids, block_table=block_table)
    total = checks.tensor("positions", positions, "T K", (torch.int32,))["T"]
    checks.tensor(
        "request_ids", request_ids, "T", (torch.int32,), T=total, remedy="slice it to the tokens being translated"
    )
    requests = checks.tensor("block_table", block_table, "B W", (torch.int32,))["B"]
    checks.integer("page_size", call.page_size, low=1)
    checks.integer("rows_per_page", call.rows_per_page, low=call.page_size)
    checks.flag("compact", call.compact)
    check_shard(*call.shard)
    if block_table.shape[1] == 0:
        raise checks.refuse("block_table", "at least one page wide", list(block_table.shape), "pass the page table")
    checks.values_between("request_ids", request_ids, 0, requests - 1, "each must name a block-table row")
    if call.workspace_ids is None and call.workspace_starts is not None:
        raise checks.refuse_type("workspace ids", "a tensor [T]", "None", "pass both tensors")
    if call.workspace_ids is not None:
        checks.tensor("workspace ids", call.workspace_ids, "T", (torch.int32,), T=total, device=device)
        prefills = checks.tensor("workspace starts", call.workspace_starts, "P", (torch.int32,), device=device)["P"]
        checks.values_between("workspace ids", call.workspace_ids, -(2**31), prefills - 1, "use -1 for decode tokens")
    operations.translate_positions.check(call)
