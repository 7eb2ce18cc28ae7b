"""What the functions of this stage refuse: `check_<function>` for each, before anything is written."""

import torch
from torch import Tensor

from tamis import checks
from tamis.ops import old_library as library

MOST_COLUMNS = 2**31 - 1
"""Of entries whose slots nobody asks for."""


def check_select_window(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    window: int,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor | None,
    blocks: tuple[Tensor, Tensor] | None,
    backend: str,
) -> None:
    """Refuse what `select_window` refuses."""
    checks.instance("positions", positions, Tensor)
    total = _check_tokens(positions, request_ids, block_table, own)
    checks.integer("page_size", page_size, low=1)
    checks.integer("window", window, low=1)
    width = _check_rows("slots", slots, total, positions.device)
    if width < window:
        raise checks.refuse("slots", f"at least window={window} columns wide", width, "widen the buffer")
    _check_vector("lengths", lengths, torch.int32, total, positions.device)
    context, ends = None, None
    if blocks is not None:
        if not isinstance(blocks, tuple) or len(blocks) != 2:
            raise checks.refuse_type("blocks", "a pair (context, length)", checks.describe(blocks), "pass both tensors")
        context, ends = blocks
        for name, value in (("blocks[0]", context), ("blocks[1]", ends)):
            checks.tensor(name, value, "B", (torch.int32,), B=block_table.shape[0], device=positions.device)
    _check_written({"slots": slots, "lengths": lengths}, positions, request_ids, block_table, own, context, ends)
    library.check_stage("select", backend, positions.device)


def check_select_entries(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    ratio: int,
    page_size: int,
    written: dict[str, Tensor | None],
    columns: int | None,
    own: Tensor | None,
    local_from: int | None,
    backend: str,
) -> None:
    """Refuse what `select_entries` refuses; `written` are its buffers by name."""
    checks.instance("positions", positions, Tensor)
    total, device = _check_tokens(positions, request_ids, block_table, own), positions.device
    checks.integer("ratio", ratio, low=1)
    checks.integer("page_size", page_size, low=1)
    width = MOST_COLUMNS
    for name, value in written.items():
        if value is not None and name == "every":
            width = _check_rows(name, value, total, device)
        elif value is not None:
            _check_vector(name, value, torch.int64 if name == "completed" else torch.int32, total, device)
    if columns is not None:
        checks.integer("columns", columns, low=0, high=width)
    if local_from is not None:
        checks.integer("local_from", local_from, low=0)
    _check_written(written, positions, request_ids, block_table, own)
    library.check_stage("select", backend, device)


def check_select_chosen(
    chosen: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor | None,
    backend: str,
) -> None:
    """Refuse what `select_chosen` refuses."""
    total = _check_tokens(None, request_ids, block_table, own)
    device = request_ids.device
    columns = checks.tensor("chosen", chosen, "T K", (torch.int32,), T=total, device=device)["K"]
    checks.integer("page_size", page_size, low=1)
    if _check_rows("slots", slots, total, device) != columns:
        raise checks.refuse("slots", f"{columns} columns wide like chosen", list(slots.shape), "slice the buffer")
    _check_vector("lengths", lengths, torch.int32, total, device)
    _check_written({"slots": slots, "lengths": lengths}, chosen, request_ids, block_table, own)
    library.check_stage("select", backend, device)


def check_select_gathered(
    positions: Tensor,
    request_ids: Tensor,
    first: Tensor,
    chosen: Tensor | None,
    *,
    ratio: int,
    window: int,
    entries: int,
    rows: int,
    columns: int,
    slots: Tensor,
    lengths: Tensor,
    first_request: int,
    backend: str,
) -> None:
    """Refuse what `select_gathered` refuses."""
    device = checks.same_device(positions=positions, request_ids=request_ids, first=first)
    total = checks.tensor("positions", positions, "T", (torch.int32,))["T"]
    checks.tensor("request_ids", request_ids, "T", (torch.int32,), T=total)
    if checks.tensor("first", first, "G", (torch.int32,))["G"] == 0 and total:
        raise checks.refuse("first", "of at least one request", list(first.shape), "pass the group's requests")
    for name, value, low in (
        ("ratio", ratio, 1),
        ("window", window, 1),
        ("entries", entries, 0),
        ("columns", columns, 0),
    ):
        checks.integer(name, value, low=low)
    checks.integer("rows", rows, low=entries)
    checks.integer("first_request", first_request, low=0)
    if chosen is not None:
        checks.tensor("chosen", chosen, "T K", (torch.int32,), T=total, K=columns, device=device)
    width = _check_rows("slots", slots, total, device)
    if width < columns + window:
        raise checks.refuse("slots", f"at least columns + window = {columns + window} wide", width, "widen the buffer")
    _check_vector("lengths", lengths, torch.int32, total, device)
    _check_written({"slots": slots, "lengths": lengths}, positions, request_ids, first, chosen)
    library.check_stage("select", backend, device)


def check_select_mixed(
    decode_window: Tensor,
    decode_entries: Tensor | None,
    decode_lengths: Tensor | None,
    prefill_entries: Tensor,
    query_starts: Tensor,
    request_lengths: Tensor,
    request_ids: Tensor,
    window_table: Tensor,
    entry_table: Tensor | None,
    *,
    window_page: int,
    entry_page: int,
    window: int,
    ratio: int,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    local: bool,
    real: Tensor | None,
    backend: str,
) -> None:
    """Refuse what `select_mixed` refuses."""
    checks.flag("local", local)
    device = checks.same_device(
        decode_window=decode_window, decode_entries=decode_entries, prefill_entries=prefill_entries
    )
    decode = checks.tensor("decode_window", decode_window, "Td Ws", (torch.int32,))
    prefill = checks.tensor("prefill_entries", prefill_entries, "Tp K", (torch.int32,))
    total = decode["Td"] + prefill["Tp"]
    checks.tensor("request_ids", request_ids, "T", (torch.int32,), T=total, device=device)
    requests = checks.tensor("request_lengths", request_lengths, "B", (torch.int32,), device=device)["B"]
    if requests == 0 and total:
        raise checks.refuse("request_lengths", "of at least one request", "none", "pass the tokens' requests")
    checks.tensor("query_starts", query_starts, "N", (torch.int32,), N=requests + 1, device=device)
    checks.tensor("window_table", window_table, "B W", (torch.int32,), B=requests, device=device)
    for name, value, low in (("window_page", window_page, 1), ("entry_page", entry_page, 1), ("ratio", ratio, 1)):
        checks.integer(name, value, low=low)
    checks.integer("window", window, low=1, high=decode["Ws"])
    checks.integer("topk", topk, low=0, high=prefill["K"])
    wide = topk
    if decode_entries is not None:
        found = checks.tensor("decode_entries", decode_entries, "Td Kd", (torch.int32,), Td=decode["Td"])
        wide = max(wide, found["Kd"])
    if decode_lengths is not None:
        checks.tensor("decode_lengths", decode_lengths, "Td", (torch.int32,), Td=decode["Td"], device=device)
    if real is not None:
        checks.tensor("real", real, "Td", (torch.bool,), Td=decode["Td"], device=device)
    if entry_table is not None:
        checks.tensor("entry_table", entry_table, "B W", (torch.int32,), B=requests, device=device)
    elif topk or (local and decode_entries is not None):
        raise checks.refuse("entry_table", "given where entries are numbers", None, "pass the entries' page table")
    width = _check_rows("slots", slots, total, device)
    if width < decode["Ws"] + wide:
        raise checks.refuse("slots", f"at least {decode['Ws'] + wide} columns wide", width, "widen the buffer")
    _check_vector("lengths", lengths, torch.int32, total, device)
    read = (decode_window, decode_entries, decode_lengths, prefill_entries, query_starts, request_lengths)
    _check_written({"slots": slots, "lengths": lengths}, *read, request_ids, window_table, entry_table, real)
    library.check_stage("select", backend, device)


def _check_written(buffers: dict[str, Tensor | None], *inputs: Tensor | None) -> None:
    """Refuse buffers that share memory with inputs or with each other."""
    before: list[Tensor | None] = list(inputs)
    for name, value in buffers.items():
        if value is not None:
            checks.writable(name, value, *before)
            before.append(value)


def _check_tokens(positions: Tensor | None, request_ids: Tensor, block_table: Tensor, own: Tensor | None) -> int:
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
    checks.tensor(name, value, "T", (dtype,), T=tokens, device=device)
    if tokens > 1 and value.stride(0) != 1:
        raise checks.refuse(name, "contiguous", value.stride(), "kernels write it as it lies")


def _check_rows(name: str, value: Tensor, tokens: int, device: torch.device) -> int:
    width = checks.tensor(name, value, "T C", (torch.int32,), T=tokens, device=device)["C"]
    if width > 1 and value.stride(1) != 1:
        raise checks.refuse(name, "with neighbouring columns side by side", value.stride(), "do not transpose it")
    return width
