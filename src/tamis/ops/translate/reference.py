"""Request-local positions to physical slots, in plain torch."""

import torch
from torch import Tensor

from tamis.ops.translate.operations import TranslatePositions


def translate_positions(call: TranslatePositions) -> tuple[Tensor, Tensor]:
    """Slots and how many of them are valid per row; see `tamis.ops.translate_positions`."""
    block_table, page_size, ids, starts = call.block_table, call.page_size, call.workspace_ids, call.workspace_starts
    ranks, rank, interleave = call.shard
    position = call.positions.long()
    valid = position >= 0
    if ranks > 1:
        valid &= position // interleave % ranks == rank
        position = position // (interleave * ranks) * interleave + position % interleave
    page = position // page_size
    valid &= page < block_table.shape[1]
    # On a device nobody has looked at the ids; an unknown request selects nothing instead of reading past the table.
    request = call.request_ids.long()
    valid &= ((request >= 0) & (request < block_table.shape[0])).unsqueeze(1)
    table = block_table.index_select(0, request.clamp(0, block_table.shape[0] - 1))
    page_id = table.gather(1, page.clamp(0, block_table.shape[1] - 1)).long()
    slots = page_id * call.rows_per_page + position % page_size
    if ids is None or starts is None:
        valid &= page_id >= 0
    else:
        prefill = (ids >= 0).unsqueeze(1)
        if len(starts):
            base = starts.long()[ids.long().clamp(0, len(starts) - 1)]
            slots = torch.where(prefill, base.unsqueeze(1) + position, slots)
        valid &= prefill | (page_id >= 0)
    # A page id so large that its slot leaves 32 bits would come back as some other, valid slot.
    valid &= slots < 2**31
    slots = torch.where(valid, slots, -1).int()
    if call.compact:
        order = torch.argsort((~valid).to(torch.uint8), dim=1, stable=True)
        slots = slots.gather(1, order)
    return slots, valid.sum(1, dtype=torch.int32)
