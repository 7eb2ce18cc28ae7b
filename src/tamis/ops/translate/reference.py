"""Translates request-local positions to physical slots, in plain torch."""

import torch
from torch import Tensor

from tamis.cache.slots import look_up
from tamis.ops.translate.operations import TranslatePositions


def translate_positions(call: TranslatePositions) -> tuple[Tensor, Tensor]:
    """Slots and how many of them are valid per row; see `tamis.ops.translate_positions`."""
    block_table, page_size, ids, starts = call.block_table, call.page_size, call.workspace_ids, call.workspace_starts
    ranks, rank, interleave = call.shard
    position, here = call.positions.long(), None
    if ranks > 1:
        here = position // interleave % ranks == rank
        position = position // (interleave * ranks) * interleave + position % interleave
    page_id, valid = look_up(position, call.request_ids, block_table, page_size)
    valid = valid if here is None else valid & here
    slots = page_id * call.rows_per_page + position % page_size
    if ids is None or starts is None:
        valid &= page_id >= 0
    else:
        prefill = (ids >= 0).unsqueeze(1)
        if len(starts):
            base = starts.long()[ids.long().clamp(0, len(starts) - 1)]
            slots = torch.where(prefill, base.unsqueeze(1) + position, slots)
        valid &= prefill | (page_id >= 0)
    # The slot of a garbage page id may exceed 32 bits, and must not wrap around into a valid slot.
    valid &= slots < 2**31
    slots = torch.where(valid, slots, -1).int()
    if call.compact:
        order = torch.argsort((~valid).to(torch.uint8), dim=1, stable=True)
        slots = slots.gather(1, order)
    return slots, valid.sum(1, dtype=torch.int32)
