"""Translates a request's positions to slots in plain torch. `slot_of` in `tamis.ops.rows.triton_rows` is the same rule
for kernels."""

import torch
from torch import Tensor


def look_up(positions: Tensor, request_ids: Tensor, block_table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page ids int64 [T, K] of request-local positions, and where the block table has an entry for them.

    Values on a device are not checked, so negative positions, positions past the table and unknown requests must not
    read outside the table.

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

    The slot is -1 where there is no page and, if `pages` is given, where the page id is not below it.
    """
    if block_table.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int64)
    page_id, known = look_up(positions, request_ids, block_table, page_size)
    slots = page_id * page_size + positions.long() % page_size
    known &= page_id >= 0
    # The slot of a garbage page id may exceed 32 bits, and must not wrap around into a valid slot.
    known &= slots < 2**31 if pages is None else page_id < pages
    return torch.where(known, slots, -1)
