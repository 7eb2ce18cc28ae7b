"""What the functions of this stage refuse: `check_<function>` for each, before anything is written."""

import torch
from torch import Tensor

from tamis import checks
from tamis.ops.select import operations
from tamis.ops.select.operations import MOST_COLUMNS, SelectChosen, SelectEntries, SelectGathered, SelectWindow


def check_select_window(call: SelectWindow) -> None:
    """Refuse what `select_window` refuses."""
    checks.instance("positions", call.positions, Tensor)
    tokens, device = (call.positions, call.request_ids, call.block_table, call.own), call.positions.device
    total = _check_tokens(*tokens)
    checks.integer("page_size", call.page_size, low=1)
    checks.integer("window", call.window, low=1)
    width = _check_rows("slots", call.slots, total, device)
    if width < call.window:
        raise checks.refuse("slots", f"at least window={call.window} columns wide", width, "widen the buffer")
    _check_vector("lengths", call.lengths, torch.int32, total, device)
    if call.contexts is not None or call.ends is not None:
        for name, value in (("blocks[0]", call.contexts), ("blocks[1]", call.ends)):
            checks.tensor(name, value, "B", (torch.int32,), B=call.block_table.shape[0], device=device)
    _check_written({"slots": call.slots, "lengths": call.lengths}, *tokens, call.contexts, call.ends)
    operations.select_window.check(call)


def check_select_entries(call: SelectEntries) -> None:
    """Refuse what `select_entries` refuses."""
    checks.instance("positions", call.positions, Tensor)
    tokens, device = (call.positions, call.request_ids, call.block_table, call.own), call.positions.device
    total = _check_tokens(*tokens)
    checks.integer("ratio", call.ratio, low=1)
    checks.integer("page_size", call.page_size, low=1)
    vectors = {"completed": call.completed, "visible": call.visible, "lengths": call.lengths}
    for name, value in vectors.items():
        if value is not None:
            _check_vector(name, value, torch.int64 if name == "completed" else torch.int32, total, device)
    width = MOST_COLUMNS if call.every is None else _check_rows("every", call.every, total, device)
    if call.columns is not None:
        checks.integer("columns", call.columns, low=0, high=width)
    if call.local_from is not None:
        checks.integer("local_from", call.local_from, low=0)
    _check_written(vectors | {"every": call.every}, *tokens)
    operations.select_entries.check(call)


def check_select_chosen(call: SelectChosen) -> None:
    """Refuse what `select_chosen` refuses."""
    total, device = _check_tokens(None, call.request_ids, call.block_table, call.own), call.request_ids.device
    columns = checks.tensor("chosen", call.chosen, "T K", (torch.int32,), T=total, device=device)["K"]
    checks.integer("page_size", call.page_size, low=1)
    if _check_rows("slots", call.slots, total, device) != columns:
        raise checks.refuse("slots", f"{columns} columns wide like chosen", list(call.slots.shape), "slice the buffer")
    _check_vector("lengths", call.lengths, torch.int32, total, device)
    read = (call.chosen, call.request_ids, call.block_table, call.own)
    _check_written({"slots": call.slots, "lengths": call.lengths}, *read)
    operations.select_chosen.check(call)


def check_select_gathered(call: SelectGathered) -> None:
    """Refuse what `select_gathered` refuses."""
    device = checks.same_device(positions=call.positions, request_ids=call.request_ids, first=call.first)
    total = checks.tensor("positions", call.positions, "T", (torch.int32,))["T"]
    checks.tensor("request_ids", call.request_ids, "T", (torch.int32,), T=total)
    if checks.tensor("first", call.first, "G", (torch.int32,))["G"] == 0 and total:
        raise checks.refuse("first", "of at least one request", list(call.first.shape), "pass the group's requests")
    for name, low in (("ratio", 1), ("window", 1), ("entries", 0), ("columns", 0)):
        checks.integer(name, getattr(call, name), low=low)
    checks.integer("rows", call.rows, low=call.entries)
    checks.integer("first_request", call.first_request, low=0)
    if call.chosen is not None:
        checks.tensor("chosen", call.chosen, "T K", (torch.int32,), T=total, K=call.columns, device=device)
    width, needed = _check_rows("slots", call.slots, total, device), call.columns + call.window
    if width < needed:
        raise checks.refuse("slots", f"at least columns + window = {needed} wide", width, "widen the buffer")
    _check_vector("lengths", call.lengths, torch.int32, total, device)
    read = (call.positions, call.request_ids, call.first, call.chosen)
    _check_written({"slots": call.slots, "lengths": call.lengths}, *read)
    operations.select_gathered.check(call)


def _check_written(buffers: dict[str, Tensor | None], *inputs: Tensor | None) -> None:
    """Refuse buffers that share memory with inputs or with each other."""
    before: list[Tensor | None] = list(inputs)
    for name, value in buffers.items():
        if value is not None:
            checks.writable(name, value, *before)
            before.append(value)


def _check_tokens(positions: Tensor | None, request_ids: Tensor, block_table: Tensor, own: Tensor | None) -> int:
    """Refuse tokens and a block table that do not fit each other; return how many tokens there are."""
    device = checks.same_device(request_ids=request_ids, positions=positions, block_table=block_table, own=own)
    total = checks.tensor("request_ids", request_ids, "T", (torch.int32,), device=device)["T"]
    if positions is not None:
        checks.tensor("positions", positions, "T", (torch.int32,), T=total)
    table = checks.tensor("block_table", block_table, "B W", (torch.int32,))
    if total and not (table["B"] and table["W"]):
        raise checks.refuse("block_table", "at least one page", list(block_table.shape), "pass the page table")
    if own is not None:
        checks.tensor("own", own, "T", checks.INTS, T=total)
    return total


def _check_vector(name: str, value: Tensor, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """Refuse an output that is not one contiguous number per token."""
    checks.tensor(name, value, "T", (dtype,), T=tokens, device=device)
    if tokens > 1 and value.stride(0) != 1:
        raise checks.refuse(name, "contiguous", value.stride(), "kernels write it as it lies")


def _check_rows(name: str, value: Tensor, tokens: int, device: torch.device) -> int:
    """Refuse an output that is not one row per token; return its width."""
    width = checks.tensor(name, value, "T C", (torch.int32,), T=tokens, device=device)["C"]
    if width > 1 and value.stride(1) != 1:
        raise checks.refuse(name, "with neighbouring columns side by side", value.stride(), "do not transpose it")
    return width
