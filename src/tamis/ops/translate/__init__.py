"""Stage `translate`: request-local positions to physical slots."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.ops import library


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
            list of rows whose pages lie apart (`PagedCache.rows_per_page`).
        workspace: (ids int32 [T], starts int32 [P]). A token with ids[t] >= 0 gets row `starts[ids[t]] + p` of a
            gathered workspace instead of a cache slot.
        ranks: how many ranks share each request's rows (context parallelism).
        rank: which of them this is; positions of other ranks give -1.
        interleave: how many consecutive positions one rank holds before the next rank's turn.
        compact: move the valid slots of a row to its front.
        backend: a name from `tamis backends`, or "auto".
    """
    shard = (ranks, rank, interleave)
    checks.flag("compact", compact)
    check_translate_positions(positions, request_ids, block_table, page_size, rows_per_page, workspace, shard, backend)
    return translate_unchecked(
        positions, request_ids, block_table, page_size, rows_per_page, workspace, shard, compact, backend
    )


def check_translate_positions(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    rows_per_page: int | None,
    workspace: tuple[Tensor, Tensor] | None,
    shard: tuple[int, int, int],
    backend: str,
) -> None:
    """Refuse what `translate_positions` refuses; `shard` is (ranks, rank, interleave)."""
    device = checks.same_device(positions=positions, request_ids=request_ids, block_table=block_table)
    total = checks.tensor("positions", positions, "T K", (torch.int32,))["T"]
    checks.tensor(
        "request_ids", request_ids, "T", (torch.int32,), T=total, remedy="slice it to the tokens being translated"
    )
    requests = checks.tensor("block_table", block_table, "B W", (torch.int32,))["B"]
    checks.integer("page_size", page_size, low=1)
    if rows_per_page is not None:
        checks.integer("rows_per_page", rows_per_page, low=page_size)
    check_shard(*shard)
    if block_table.shape[1] == 0:
        raise checks.refuse("block_table", "at least one page wide", list(block_table.shape), "pass the page table")
    checks.values_between("request_ids", request_ids, 0, requests - 1, "each must name a block-table row")
    if workspace is not None:
        if not isinstance(workspace, tuple) or len(workspace) != 2:
            received = checks.describe(workspace)
            raise checks.refuse_type("workspace", "a pair (ids, starts)", received, "pass both tensors")
        ids, starts = workspace
        checks.tensor("workspace ids", ids, "T", (torch.int32,), T=total, device=device)
        prefills = checks.tensor("workspace starts", starts, "P", (torch.int32,), device=device)["P"]
        checks.values_between("workspace ids", ids, -(2**31), prefills - 1, "use -1 for decode tokens")
    library.check_stage("translate", backend, device)


def check_shard(ranks: int, rank: int, interleave: int) -> None:
    """Refuse a share of rows that no rank has."""
    checks.integer("ranks", ranks, low=1)
    checks.integer("rank", rank, low=0, high=ranks - 1)
    checks.integer("interleave", interleave, low=1)


def translate_unchecked(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    rows_per_page: int | None,
    workspace: tuple[Tensor, Tensor] | None,
    shard: tuple[int, int, int],
    compact: bool,
    backend: str,
) -> Translated:
    """As `translate_positions`, for callers who know that its check would pass."""
    ids, starts = workspace if workspace is not None else (None, None)
    stride = page_size if rows_per_page is None else rows_per_page
    slots, counts = library.translate_positions(
        positions, request_ids, block_table, page_size, stride, ids, starts, shard, compact, backend
    )
    return Translated(slots, counts)
