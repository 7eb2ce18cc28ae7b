"""Selects the rows that each token attends to and writes, in plain torch."""

import torch
from torch import Tensor

from tamis.cache.slots import slots_of
from tamis.ops.select.operations import SelectChosen, SelectEntries, SelectGathered, SelectGroups, SelectWindow


def select_window(call: SelectWindow) -> None:
    """The last raw tokens of each token; see `tamis.ops.select_window`."""
    position, request, real = _tokens(call.positions, call.request_ids, call.block_table.shape[0], call.own)
    if call.contexts is None or call.ends is None:
        begin, end = position + 1 - call.window, position + 1
    else:
        begin, end = call.contexts.long()[request] - call.window, call.ends.long()[request]
    begin = begin.clamp_min(0)
    count = torch.where(real, end - begin, 0).clamp(0, call.slots.shape[1])
    column = _columns(call.slots)
    found = slots_of(begin.unsqueeze(1) + column, request, call.block_table, call.page_size)
    call.slots.copy_(torch.where(column < count.unsqueeze(1), found, -1))
    call.lengths.copy_(count)


def select_entries(call: SelectEntries) -> None:
    """The entries that tokens complete and see; see `tamis.ops.select_entries`."""
    ratio, block_table, page_size = call.ratio, call.block_table, call.page_size
    position, request, real = _tokens(call.positions, call.request_ids, block_table.shape[0], call.own)
    count = torch.where(real, (position + 1) // ratio, 0)
    if call.completed is not None:
        ends = real & ((position + 1) % ratio == 0)
        slot = slots_of((position // ratio).unsqueeze(1), request, block_table, page_size)[:, 0]
        call.completed.copy_(torch.where(ends, slot, -1))
    if call.visible is not None:
        call.visible.copy_(count)
    if call.lengths is not None:
        call.lengths.copy_(count.clamp_max(call.limit))
    if call.every is not None:
        column = _columns(call.every)
        found = slots_of(column.expand(len(position), -1), request, block_table, page_size)
        local = torch.arange(len(position), dtype=torch.int64, device=position.device) >= call.first_local
        found = torch.where(local.unsqueeze(1), column, found)
        call.every.copy_(torch.where(column < count.unsqueeze(1), found, -1))


def select_chosen(call: SelectChosen) -> None:
    """Slots of the entries that an indexer chose; see `tamis.ops.select_chosen`."""
    no_padding = torch.zeros_like(call.request_ids)
    _, request, real = _tokens(no_padding, call.request_ids, call.block_table.shape[0], call.own)
    slots = slots_of(call.chosen.long(), request, call.block_table, call.page_size)
    found = torch.where(real.unsqueeze(1), slots, -1)
    order = torch.argsort((found < 0).to(torch.uint8), dim=1, stable=True)
    call.slots.copy_(found.gather(1, order))
    call.lengths.copy_((found >= 0).sum(1))


def select_gathered(call: SelectGathered) -> None:
    """Workspace rows of entries, then of the window; see `tamis.ops.select_gathered`."""
    position, request, real = _tokens(call.positions, call.request_ids - call.first_request, len(call.first), None)
    picked = torch.where(real, (position + 1) // call.ratio, 0).clamp_max(call.columns).unsqueeze(1)
    recent = torch.where(real, (position + 1).clamp_max(call.window), 0).unsqueeze(1)
    column, base = _columns(call.slots), (request * call.rows).unsqueeze(1)
    number = column.expand(len(position), -1)
    if call.chosen is not None and call.columns:
        number = call.chosen.long().gather(1, number.clamp_max(call.columns - 1))
    entry = torch.where((number >= 0) & (number < call.entries), base + number, -1)
    raw = (position + 1 - call.first.long()[request]).unsqueeze(1) - recent + column - picked
    raw = torch.where((raw >= 0) & (raw < call.rows - call.entries), base + call.entries + raw, -1)
    found = torch.where(column < picked, entry, raw)
    call.slots.copy_(torch.where(column < picked + recent, found, -1))
    call.lengths.copy_((picked + recent)[:, 0])


def _columns(table: Tensor) -> Tensor:
    """int64 [1, C], the numbers of a table's columns."""
    return torch.arange(table.shape[1], dtype=torch.int64, device=table.device).unsqueeze(0)


def select_groups(call: SelectGroups) -> None:
    """Positions of the tokens of chosen groups, then of the tail; see `tamis.ops.select_groups`."""
    size, seen = call.size, call.visible.long().clamp_min(0).unsqueeze(1)
    groups = call.chosen.long()
    known = (groups >= 0) & (groups < seen // size)
    order = torch.argsort((~known).to(torch.uint8), dim=1, stable=True)
    groups = torch.where(known, groups, -1).gather(1, order)
    inside = torch.arange(size, dtype=torch.int64, device=groups.device)
    tokens = torch.where(groups.unsqueeze(2) >= 0, groups.unsqueeze(2) * size + inside, -1).flatten(1)
    column, count = _columns(call.positions), known.sum(1, keepdim=True) * size
    in_groups = torch.full((len(groups), call.positions.shape[1]), -1, dtype=torch.int64, device=groups.device)
    in_groups[:, : tokens.shape[1]] = tokens
    tail = seen // size * size + column - count
    call.positions.copy_(torch.where(column < count, in_groups, torch.where(tail < seen, tail, -1)))


def _tokens(positions: Tensor, request_ids: Tensor, requests: int, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and requests clamped to valid ones, and which tokens select something.

    Padding, tokens of an unknown request and tokens that are not written themselves select nothing.
    """
    request = request_ids.long()
    real = (positions >= 0) & (request >= 0) & (request < requests)
    if own is not None:
        real &= own >= 0
    return positions.long().clamp_min(0), request.clamp(0, max(requests - 1, 0)), real
