"""Stage `select`: which rows each token of a step attends to and writes, where no indexer decides it (DeepSeek-V4), or
where an indexer decides it for whole groups of tokens (GLM-5.3-Flash).

Everything follows from positions and block tables, so most of it is made once per step and shared by all layers. The
functions write whole rows into buffers of the caller, who can keep them at one address for captured graphs. They read
no value on the host and change no table. A token that is padding (negative position), belongs to no request, or has a
negative slot of its own selects nothing: -1 in its row and a length of 0.
"""

from typing import cast

import torch
from torch import Tensor

from tamis import checks
from tamis.ops.select import operations
from tamis.ops.select.operations import (
    MOST_COLUMNS,
    SelectChosen,
    SelectEntries,
    SelectGathered,
    SelectGroups,
    SelectWindow,
)


def select_window(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    window: int,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor | None = None,
    blocks: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> None:
    """Slots of the last `window` raw tokens up to and including each token, oldest first.

    Args:
        positions: int32 [T], of each token in its request; negative for padding.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W] of the pool of raw tokens; an absent (negative) page gives -1.
        page_size: tokens per page.
        window: how many tokens.
        slots: int32 [T, C] to write: C is `window` or more, -1 beyond the length.
        lengths: int32 [T] to write: how many slots each row has.
        own: int32 or int64 [T], the slot that each token's own row is written to; a token with a negative one selects
            nothing.
        blocks: (context [B], length [B]) int32, for draft blocks without a causal mask: every token of a request sees
            the `window` tokens before `context` and all tokens from there up to `length`. `window` and the block must
            fit into C.
        backend: a name from `tamis backends`, or "auto".
    """
    if blocks is not None and (not isinstance(blocks, tuple) or len(blocks) != 2):
        raise checks.refuse_type("blocks", "a pair (context, length)", checks.describe(blocks), "pass both tensors")
    contexts, ends = blocks or (None, None)
    call = SelectWindow(
        positions, request_ids, block_table, own, contexts, ends, page_size, window, slots, lengths, backend
    )  # fmt: skip
    check_select_window(call)
    operations.select_window(call)


def check_select_window(call: SelectWindow) -> None:
    """Refuse what `select_window` refuses."""
    checks.instance("positions", call.positions, Tensor)
    tokens, device = (call.positions, call.request_ids, call.block_table, call.own), call.positions.device
    total = _check_tokens(*tokens)
    checks.integer("page_size", call.page_size, low=1)
    checks.integer("window", call.window, low=1)
    width = _check_rows("slots", call.slots, total, device)
    if width < call.window:
        raise checks.refuse("slots", f"at least window={call.window} columns wide", width, "allocate a wider one")
    _check_vector("lengths", call.lengths, torch.int32, total, device)
    if call.contexts is not None or call.ends is not None:
        for name, value in (("blocks[0]", call.contexts), ("blocks[1]", call.ends)):
            checks.tensor(name, value, "B", (torch.int32,), B=call.block_table.shape[0], device=device)
    _check_written({"slots": call.slots, "lengths": call.lengths}, *tokens, call.contexts, call.ends)
    operations.select_window.check(call)


def select_entries(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    page_size: int,
    completed: Tensor | None = None,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    every: Tensor | None = None,
    columns: int | None = None,
    own: Tensor | None = None,
    local_from: int | None = None,
    backend: str = "auto",
) -> None:
    """Compressed entries by position: which one a token completes, how many it sees, and the slots of all it sees.

    Entry j of a request is complete at its token `j * ratio + ratio - 1`, which already sees it.

    Args:
        positions: int32 [T], of each token in its request; negative for padding.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W] of the pool of entries; an absent (negative) page gives -1.
        ratio: tokens per entry.
        page_size: entries per page.
        completed: int64 [T] to write: the slot of the entry that a token completes, -1 for all other tokens.
        visible: int32 [T] to write: how many entries are complete at the token's position.
        lengths: int32 [T] to write: `visible` limited to `columns`.
        every: int32 [T, C] to write: slots of entries 0, 1, 2..., -1 beyond the visible ones. C is the buffer's own
            width, so nothing is written past a row.
        columns: the limit of `lengths`; the width of `every` if not given.
        own: int32 or int64 [T], the slot that each token's own row is written to; a token with a negative one selects
            and completes nothing.
        local_from: tokens from this one on get entry numbers (0, 1, 2...) instead of slots in `every`.
        backend: a name from `tamis backends`, or "auto".
    """
    tokens = (positions, request_ids, block_table, own)
    written = (completed, visible, lengths, every)
    call = SelectEntries(*tokens, ratio, page_size, columns, local_from, *written, backend)
    check_select_entries(call)
    operations.select_entries(call)


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


def select_chosen(
    chosen: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Slots of the entries that an indexer chose, valid ones first, and how many there are.

    This is for consumers that want slots; a `Selection` of positions is translated by the attention kernels. Unlike
    `translate_positions`, it writes to given buffers, and tokens may select nothing.

    Args:
        chosen: int32 [T, K], numbers of entries within the request; -1 for none.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W] of the pool of entries.
        page_size: entries per page.
        slots: int32 [T, K] to write.
        lengths: int32 [T] to write.
        own: int32 or int64 [T], the slot that each token's own row is written to; a token with a negative one selects
            nothing.
        backend: a name from `tamis backends`, or "auto".
    """
    call = SelectChosen(chosen, request_ids, block_table, own, page_size, slots, lengths, backend)
    check_select_chosen(call)
    operations.select_chosen(call)


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


def select_gathered(
    positions: Tensor,
    request_ids: Tensor,
    first: Tensor,
    chosen: Tensor | None = None,
    *,
    ratio: int,
    window: int,
    entries: int,
    rows: int,
    columns: int,
    slots: Tensor,
    lengths: Tensor,
    first_request: int = 0,
    backend: str = "auto",
) -> None:
    """Workspace rows that each token attends to, after entries and raw tokens of a few prefills were gathered there.

    Request k of the group has its entries in rows `k * rows`, `k * rows + 1`..., and its raw tokens from position
    `first[k]` on in rows `k * rows + entries` and so on. A token's row of `slots` holds its entries, chosen or all,
    then its window, and -1 beyond.

    Args:
        positions: int32 [T], of the group's tokens.
        request_ids: int32 [T]: the request of each token, counted from `first_request`.
        first: int32 [G], position of the first gathered raw token of each request.
        chosen: int32 [T, columns], left-packed numbers of entries that an indexer chose; None for all entries.
        ratio: tokens per entry.
        window: raw tokens that a token sees, its own included.
        entries: workspace rows reserved for entries, per request.
        rows: workspace rows per request.
        columns: the largest number of entries per token; 0 without entries.
        slots: int32 [T, columns + window or more] to write.
        lengths: int32 [T] to write.
        first_request: number of the group's first request.
        backend: a name from `tamis backends`, or "auto".
    """
    numbers = (first_request, ratio, window, entries, rows, columns)
    call = SelectGathered(positions, request_ids, first, chosen, *numbers, slots, lengths, backend)
    check_select_gathered(call)
    operations.select_gathered(call)


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
        raise checks.refuse("slots", f"at least columns + window = {needed} wide", width, "allocate a wider one")
    _check_vector("lengths", call.lengths, torch.int32, total, device)
    read = (call.positions, call.request_ids, call.first, call.chosen)
    _check_written({"slots": call.slots, "lengths": call.lengths}, *read)
    operations.select_gathered.check(call)


def select_groups(
    chosen: Tensor, visible: Tensor, *, size: int, positions: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Positions of the tokens of chosen groups, then those of the tail: int32 [T, C], -1 beyond.

    Group j of a request has its tokens `j * size` to `j * size + size - 1`. Every token also attends to the tail: the
    tokens up to itself that are in no whole group yet, at most `size - 1`. If groups are in ascending order, as
    `index_topk` selects them over pooled keys, so are the positions.

    Args:
        chosen: int32 [T, K], numbers of groups within the request. A negative number is skipped, and so is a group of
            which the token does not see every token.
        visible: int32 [T], how many tokens of its request each token sees (its position + 1); 0 for padding, which
            selects nothing.
        size: tokens per group.
        positions: int32 [T, C] to write: C is `K * size + size - 1`, the default, or more.
        backend: a name from `tamis backends`, or "auto".
    """
    # The check sees `positions` as they were given; memory is allocated once the other arguments are right.
    call = SelectGroups(chosen, visible, size, cast("Tensor", positions), backend)
    check_select_groups(call)
    if positions is None:
        shape = (chosen.shape[0], columns_of_groups(chosen.shape[1], size))
        call = call._replace(positions=torch.empty(shape, dtype=torch.int32, device=chosen.device))
    operations.select_groups(call)
    return call.positions


def columns_of_groups(groups: int, size: int) -> int:
    """The most positions that a token attends to if so many groups are selected: all of theirs, and the tail."""
    return groups * size + size - 1


def check_select_groups(call: SelectGroups) -> None:
    """Refuse what `select_groups` refuses; `positions` may be None."""
    device = checks.same_device(chosen=call.chosen, visible=call.visible, positions=call.positions)
    given = checks.tensor("chosen", call.chosen, "T K", (torch.int32,))
    total, size = given["T"], checks.integer("size", call.size, low=1)
    checks.tensor("visible", call.visible, "T", (torch.int32,), T=total)
    if call.positions is not None:
        width, needed = _check_rows("positions", call.positions, total, device), columns_of_groups(given["K"], size)
        if width < needed:
            raise checks.refuse("positions", f"at least K * size + size - 1 = {needed} wide", width, "allocate more")
        _check_written({"positions": call.positions}, call.chosen, call.visible)
    operations.select_groups.check(call)


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
        raise checks.refuse(name, "contiguous", f"a stride of {value.stride(0)}", "allocate a separate tensor")


def _check_rows(name: str, value: Tensor, tokens: int, device: torch.device) -> int:
    """Refuse an output that is not one row per token; return its width."""
    width = checks.tensor(name, value, "T C", (torch.int32,), T=tokens, device=device)["C"]
    if width > 1 and value.stride(1) != 1:
        raise checks.refuse(name, "contiguous along its rows", f"strides {value.stride()}", "do not transpose it")
    return width
