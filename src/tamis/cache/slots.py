"""From a request's positions to slots, in plain torch. The rule for kernels is in `tamis.ops.rows.triton_rows`."""

import torch
from torch import Tensor


def look_up(positions: Tensor, request_ids: Tensor, block_table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page ids int64 [T, K] of request-local positions, and where the block table has an entry for them.

    On a device nobody has looked at values, so that negative positions, positions past the table and unknown requests
    must read nothing outside the table.

    Args:
        positions: integer [T, K].
        request_ids: integer [T], the block-table row of each token.
        block_table: int32 [B, W] with at least one entry; negative page ids, which mean absent, are returned.
        page_size: positions per page.
    """
    requests, width = block_table.shape
    request, page = request_ids.long().unsqueeze(1), positions.long() // page_size
    known = (positions >= 0) & (page < width) & (request >= 0) & (request < requests)
    return block_table[request.clamp(0, requests - 1), page.clamp(0, width - 1)].long(), known


def slots_of(
    positions: Tensor, request_ids: Tensor, block_table: Tensor, page_size: int, pages: int | None = None
) -> Tensor:
    """Slots int64 [T, K] of request-local positions: `block_table[r, p // page_size] * page_size + p % page_size`.

    Where there is none, the slot is -1; with `pages`, also where the page is not one of so many.
    """
    if block_table.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int64)
    page_id, known = look_up(positions, request_ids, block_table, page_size)
    slots = page_id * page_size + positions.long() % page_size
    known &= page_id >= 0
    # A page id so large that its slot leaves 32 bits would come back as some other, valid slot.
    known &= slots < 2**31 if pages is None else page_id < pages
    return torch.where(known, slots, -1)
