"""Which rows each token attends to and writes, in plain torch."""

import torch
from torch import Tensor


def select_window(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    own: Tensor | None,
    blocks: tuple[Tensor, Tensor] | None,
    page_size: int,
    window: int,
    slots: Tensor,
    lengths: Tensor,
) -> None:
    """The last raw tokens of each token; see `tamis.ops.select_window`."""
    position, request, real = _tokens(positions, request_ids, block_table.shape[0], own)
    if blocks is None:
        begin, end = position + 1 - window, position + 1
    else:
        starts, ends = (value.long()[request] for value in blocks)
        begin, end = starts - window, ends
    begin = begin.clamp_min(0)
    count = torch.where(real, end - begin, 0).clamp(0, slots.shape[1])
    column = _columns(slots)
    found = _slots(begin.unsqueeze(1) + column, request, block_table, page_size)
    slots.copy_(torch.where(column < count.unsqueeze(1), found, -1))
    lengths.copy_(count)


def select_entries(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    own: Tensor | None,
    ratio: int,
    page_size: int,
    columns: int,
    local_from: int,
    completed: Tensor | None,
    visible: Tensor | None,
    lengths: Tensor | None,
    every: Tensor | None,
) -> None:
    """The entries that tokens complete and see; see `tamis.ops.select_entries`."""
    position, request, real = _tokens(positions, request_ids, block_table.shape[0], own)
    count = torch.where(real, (position + 1) // ratio, 0)
    if completed is not None:
        ends = real & ((position + 1) % ratio == 0)
        slot = _slots((position // ratio).unsqueeze(1), request, block_table, page_size)[:, 0]
        completed.copy_(torch.where(ends, slot, -1))
    if visible is not None:
        visible.copy_(count)
    if lengths is not None:
        lengths.copy_(count.clamp_max(columns))
    if every is not None:
        column = _columns(every)
        found = _slots(column.expand(len(position), -1), request, block_table, page_size)
        local = torch.arange(len(position), dtype=torch.int64, device=position.device) >= local_from
        found = torch.where(local.unsqueeze(1), column, found)
        every.copy_(torch.where(column < count.unsqueeze(1), found, -1))


def select_chosen(
    chosen: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    own: Tensor | None,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
) -> None:
    """Slots of the entries that an indexer chose; see `tamis.ops.select_chosen`."""
    nothing = torch.zeros_like(request_ids)
    _, request, real = _tokens(nothing, request_ids, block_table.shape[0], own)
    found = torch.where(real.unsqueeze(1), _slots(chosen.long(), request, block_table, page_size), -1)
    order = torch.argsort((found < 0).to(torch.uint8), dim=1, stable=True)
    slots.copy_(found.gather(1, order))
    lengths.copy_((found >= 0).sum(1))


def select_gathered(
    positions: Tensor,
    request_ids: Tensor,
    first: Tensor,
    chosen: Tensor | None,
    first_request: int,
    ratio: int,
    window: int,
    entries: int,
    rows: int,
    columns: int,
    slots: Tensor,
    lengths: Tensor,
) -> None:
    """Workspace rows of entries, then of the window; see `tamis.ops.select_gathered`."""
    position, request, real = _tokens(positions, request_ids - first_request, len(first), None)
    picked = torch.where(real, (position + 1) // ratio, 0).clamp_max(columns).unsqueeze(1)
    recent = torch.where(real, (position + 1).clamp_max(window), 0).unsqueeze(1)
    column, base = _columns(slots), (request * rows).unsqueeze(1)
    local = column.expand(len(position), -1)
    if chosen is not None and columns:
        local = chosen.long().gather(1, local.clamp_max(columns - 1))
    entry = torch.where((local >= 0) & (local < entries), base + local, -1)
    raw = (position + 1 - first.long()[request]).unsqueeze(1) - recent + column - picked
    raw = torch.where((raw >= 0) & (raw < rows - entries), base + entries + raw, -1)
    found = torch.where(column < picked, entry, raw)
    slots.copy_(torch.where(column < picked + recent, found, -1))
    lengths.copy_((picked + recent)[:, 0])


def select_mixed(
    decode_window: Tensor,
    decode_entries: Tensor | None,
    decode_lengths: Tensor | None,
    real: Tensor | None,
    prefill_entries: Tensor,
    query_starts: Tensor,
    request_lengths: Tensor,
    request_ids: Tensor,
    window_table: Tensor,
    entry_table: Tensor | None,
    window_page: int,
    entry_page: int,
    window: int,
    ratio: int,
    topk: int,
    local: bool,
    slots: Tensor,
    lengths: Tensor,
) -> None:
    """Window columns, then entry columns, in one table; see `tamis.ops.select_mixed`."""
    decodes, width = decode_window.shape
    slots.fill_(-1)
    slots[:decodes, :width] = decode_window
    lengths[:decodes] = width
    if decode_entries is not None:
        found, count = decode_entries.long(), decode_lengths
        if local and entry_table is not None:
            ids = request_ids[:decodes]
            _, request, known = _tokens(torch.zeros_like(ids), ids, len(entry_table), None)
            known = known if real is None else known & real
            found = torch.where(known.unsqueeze(1), _slots(found, request, entry_table, entry_page), -1)
            count = (found >= 0).sum(1, dtype=torch.int32)
        slots[:decodes, width : width + decode_entries.shape[1]] = found
        lengths[:decodes] += decode_entries.shape[1] if count is None else count
    number = torch.arange(decodes, len(slots), dtype=torch.int64, device=slots.device)
    ids = request_ids[decodes:]
    request = ids.long().clamp(0, len(request_lengths) - 1)
    position = request_lengths[request].long() - query_starts[request + 1] + number
    position, request, known = _tokens(position, ids, len(request_lengths), None)
    column = torch.arange(width, dtype=torch.int64, device=slots.device)
    recent = torch.where(known, (position + 1).clamp_max(window), 0).unsqueeze(1)
    found = _slots((position + 1).unsqueeze(1) - recent + column, request, window_table, window_page)
    slots[decodes:, :width] = torch.where(column < recent, found, -1)
    picked = torch.where(known, (position + 1) // ratio, 0).clamp_max(topk)
    if entry_table is not None and topk:
        found = _slots(prefill_entries[:, :topk].long(), request, entry_table, entry_page)
        column = torch.arange(topk, dtype=torch.int64, device=slots.device)
        slots[decodes:, width : width + topk] = torch.where(column < picked.unsqueeze(1), found, -1)
    lengths[decodes:] = width + picked


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], dtype=torch.int64, device=table.device).unsqueeze(0)


def _tokens(positions: Tensor, request_ids: Tensor, requests: int, own: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and requests, made legal, and which tokens are real: not padding, of a known request, written."""
    request = request_ids.long()
    real = (positions >= 0) & (request >= 0) & (request < requests)
    if own is not None:
        real &= own >= 0
    return positions.long().clamp_min(0), request.clamp(0, max(requests - 1, 0)), real


def _slots(positions: Tensor, request: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """int64 [T, C]: slots of positions; -1 for negative ones, past the table, in absent pages, or past 32 bits."""
    page = positions // page_size
    inside = (positions >= 0) & (page < block_table.shape[1])
    table = block_table.index_select(0, request)
    page_id = table.gather(1, page.clamp(0, block_table.shape[1] - 1)).long()
    slots = page_id * page_size + positions % page_size
    return torch.where(inside & (page_id >= 0) & (slots < 2**31), slots, -1)
