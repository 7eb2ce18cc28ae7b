"""Reads rows back in plain torch: by slot, and whole requests by block table."""

import torch
from torch import Tensor

from tamis.cache.codec import decode_rows, fetch_field, read_rows
from tamis.cache.slots import slots_of
from tamis.ops.gather.operations import GatherIndex, GatherKv, ReadKv


def read_kv(call: ReadKv) -> Tensor:
    """Rows [..., width] with zeros where a slot is negative or past the end."""
    return read_rows(call.cache, call.slots, call.dtype)


def gather_kv(call: GatherKv) -> None:
    """Fill the workspace rows that belong to a request; the others keep their content."""
    slots = request_slots(call, call.out.shape[0])
    covered = slots >= 0
    call.out[covered] = decode_rows(call.cache, slots[covered]).to(call.out.dtype)


def gather_index(call: GatherIndex) -> tuple[Tensor, Tensor]:
    """Keys and their scales as they are stored; zeros in rows of no request."""
    values, scales = call.zeros()
    slots, layout = request_slots(call, call.rows), call.cache.layout
    covered = slots >= 0
    assert layout.scales is not None
    values.view(torch.uint8)[covered] = fetch_field(call.cache, layout.values, slots[covered])
    scales.view(-1, layout.scales.count)[covered] = fetch_field(call.cache, layout.scales, slots[covered])
    return values, scales


def request_slots(call: GatherKv | GatherIndex, rows: int) -> Tensor:
    """The slot behind each of `rows` workspace rows, int64 [rows], -1 where no request has one.

    Each row finds its request by a search in `starts`, so that the lengths need not be known on the host.
    """
    row = torch.arange(rows, dtype=torch.int64, device=call.block_table.device)
    if call.block_table.numel() == 0:
        return torch.full_like(row, -1)
    request = torch.searchsorted(call.starts.long(), row, right=True) - 1
    known = request.clamp_min(0)
    offset = row - call.starts.long()[known]
    position = offset + call.first.long()[known]
    slots = slots_of(position.unsqueeze(1), request, call.block_table, call.cache.page_size, call.cache.pages)
    return torch.where(offset < call.lengths.long()[known], slots.squeeze(1), -1)
