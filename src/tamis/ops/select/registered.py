"""The functions of this stage as torch ops; see `tamis.ops.library`."""

from typing import Any

from torch import Tensor

from tamis.ops.old_library import op, stage_module


def _nothing(*arguments: Any) -> None:
    """A fake: the ops return nothing, they write. It asks for the backend, so that a wrong name fails the trace."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    stage_module("select", arguments[-1], device)


_TOKENS = "Tensor positions, Tensor request_ids, Tensor block_table, Tensor? own"
_ROWS = "Tensor(a!) slots, Tensor(b!) lengths, str backend"


@op(
    f"select_window({_TOKENS}, Tensor? contexts, Tensor? ends, SymInt page_size, SymInt window, {_ROWS}) -> ()",
    _nothing,
)
def select_window(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    own: Tensor | None,
    contexts: Tensor | None,
    ends: Tensor | None,
    page_size: int,
    window: int,
    slots: Tensor,
    lengths: Tensor,
    backend: str,
) -> None:
    """The last raw tokens of each token."""
    stage_module("select", backend, slots.device).select_window(
        positions,
        request_ids,
        block_table,
        own,
        None if contexts is None else (contexts, ends),
        page_size,
        window,
        slots,
        lengths,
    )


@op(
    f"select_entries({_TOKENS}, SymInt ratio, SymInt page_size, SymInt columns, SymInt local_from, "
    "Tensor(a!)? completed, Tensor(b!)? visible, Tensor(c!)? lengths, Tensor(d!)? every, str backend) -> ()",
    _nothing,
)
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
    backend: str,
) -> None:
    """The entries that tokens complete and see."""
    stage_module("select", backend, positions.device).select_entries(
        positions,
        request_ids,
        block_table,
        own,
        ratio,
        page_size,
        columns,
        local_from,
        completed,
        visible,
        lengths,
        every,
    )


@op(
    f"select_chosen(Tensor chosen, Tensor request_ids, Tensor block_table, Tensor? own, SymInt page_size, {_ROWS})"
    " -> ()",
    _nothing,
)
def select_chosen(
    chosen: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    own: Tensor | None,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    backend: str,
) -> None:
    """Slots of the entries that an indexer chose."""
    stage = stage_module("select", backend, slots.device)
    stage.select_chosen(chosen, request_ids, block_table, own, page_size, slots, lengths)


@op(
    "select_gathered(Tensor positions, Tensor request_ids, Tensor first, Tensor? chosen, SymInt first_request, "
    f"SymInt ratio, SymInt window, SymInt entries, SymInt rows, SymInt columns, {_ROWS}) -> ()",
    _nothing,
)
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
    backend: str,
) -> None:
    """Workspace rows of entries, then of the window."""
    numbers = (first_request, ratio, window, entries, rows, columns)
    stage = stage_module("select", backend, slots.device)
    stage.select_gathered(positions, request_ids, first, chosen, *numbers, slots, lengths)


@op(
    "select_mixed(Tensor decode_window, Tensor? decode_entries, Tensor? decode_lengths, Tensor? real, "
    "Tensor prefill_entries, Tensor query_starts, Tensor request_lengths, Tensor request_ids, Tensor window_table, "
    "Tensor? entry_table, SymInt window_page, SymInt entry_page, SymInt window, SymInt ratio, SymInt topk, bool local, "
    f"{_ROWS}) -> ()",
    _nothing,
)
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
    backend: str,
) -> None:
    """Window columns, then entry columns, in one table."""
    stage_module("select", backend, slots.device).select_mixed(
        decode_window,
        decode_entries,
        decode_lengths,
        real,
        prefill_entries,
        query_starts,
        request_lengths,
        request_ids,
        window_table,
        entry_table,
        window_page,
        entry_page,
        window,
        ratio,
        topk,
        local,
        slots,
        lengths,
    )
