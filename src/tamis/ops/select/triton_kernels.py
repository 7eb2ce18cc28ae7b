"""Rows to attend to and to write in Triton: one launch per function, one program per token."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Generic, ParamSpec

import torch
import triton
from torch import Tensor

from tamis.ops.rows.triton_rows import launching_on
from tamis.ops.select.triton_device import chosen_rows, entry_rows, gathered_rows, mixed_rows, window_rows

LARGEST_BLOCK = 1024
"""Columns that a program handles at once."""
COLUMNS_PER_THREAD = 4
P = ParamSpec("P")


@dataclass(frozen=True)
class Launch:
    """A kernel, how many programs of it, and their arguments."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    columns: int
    """Of the row that a program writes."""

    @property
    def constants(self) -> dict[str, int]:
        """How a row is cut into blocks."""
        block = min(LARGEST_BLOCK, triton.next_power_of_2(max(16, self.columns)))
        return {"BLOCK": block, "BLOCKS": triton.cdiv(self.columns, block)}

    @property
    def options(self) -> dict[str, int]:
        """Warps for such a block."""
        return {"num_warps": max(1, min(8, self.constants["BLOCK"] // (32 * COLUMNS_PER_THREAD)))}


class Launcher(Generic[P]):
    """A function that runs the launch that `prepare` describes; offline compilation asks for the description only."""

    def __init__(self, prepare: Callable[P, Launch]) -> None:
        """Take over name and docstring."""
        self.prepare = prepare
        update_wrapper(self, prepare)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> None:
        """Launch, unless there is no token."""
        launch = self.prepare(*arguments, **named)
        if launch.programs:
            with launching_on(launch.arguments["request_ids"].device):
                launch.kernel[(launch.programs,)](**launch.arguments, **launch.constants, **launch.options)


@Launcher
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
) -> Launch:
    """The last raw tokens of each token; see `tamis.ops.select_window`."""
    contexts, ends = blocks if blocks is not None else (None, None)
    arguments = {
        **_tokens(positions, request_ids, block_table, own),
        "contexts": None if contexts is None else contexts.contiguous(),
        "ends": None if ends is None else ends.contiguous(),
        "slots": slots,
        "slots_stride": slots.stride(0),
        "lengths": lengths,
        "columns": slots.shape[1],
        "PAGE_SIZE": page_size,
        "WINDOW": window,
    }
    return Launch(window_rows, len(positions), arguments, slots.shape[1])


@Launcher
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
) -> Launch:
    """The entries that tokens complete and see; see `tamis.ops.select_entries`."""
    width = 0 if every is None else every.shape[1]
    arguments = {
        **_tokens(positions, request_ids, block_table, own),
        "limit": columns,
        "local_from": local_from,
        "completed": completed,
        "visible": visible,
        "lengths": lengths,
        "every": every,
        "every_stride": None if every is None else every.stride(0),
        "columns": width,
        "RATIO": ratio,
        "PAGE_SIZE": page_size,
    }
    return Launch(entry_rows, len(positions), arguments, width)


@Launcher
def select_chosen(
    chosen: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    own: Tensor | None,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
) -> Launch:
    """Slots of the entries that an indexer chose; see `tamis.ops.select_chosen`."""
    arguments = {
        **_strided("chosen", chosen),
        **_tokens(None, request_ids, block_table, own),
        "slots": slots,
        "slots_stride": slots.stride(0),
        "lengths": lengths,
        "columns": slots.shape[1],
        "PAGE_SIZE": page_size,
    }
    return Launch(chosen_rows, len(chosen), arguments, slots.shape[1])


@Launcher
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
) -> Launch:
    """Workspace rows of entries, then of the window; see `tamis.ops.select_gathered`."""
    arguments = {
        "positions": positions.contiguous(),
        "request_ids": request_ids.contiguous(),
        "first_request": first_request,
        "requests": len(first),
        "first": first.contiguous(),
        **_strided("chosen", chosen),
        "entries": entries,
        "rows": rows,
        "limit": columns,
        "slots": slots,
        "slots_stride": slots.stride(0),
        "lengths": lengths,
        "columns": slots.shape[1],
        "RATIO": ratio,
        "WINDOW": window,
    }
    return Launch(gathered_rows, len(positions), arguments, slots.shape[1])


@Launcher
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
) -> Launch:
    """Window columns, then entry columns, in one table; see `tamis.ops.select_mixed`."""
    arguments = {
        **_strided("decode_window", decode_window),
        **_strided("decode_entries", decode_entries),
        "decode_lengths": None if decode_lengths is None else decode_lengths.contiguous(),
        "real": None if real is None else real.contiguous().view(torch.uint8),
        "decodes": len(decode_window),
        **_strided("prefill_entries", prefill_entries),
        "query_starts": query_starts.contiguous(),
        "request_lengths": request_lengths.contiguous(),
        "request_ids": request_ids.contiguous(),
        "requests": len(request_lengths),
        **_strided("window_table", window_table),
        "window_pages": window_table.shape[1],
        **_strided("entry_table", entry_table),
        "entry_pages": None if entry_table is None else entry_table.shape[1],
        "width": decode_window.shape[1],
        "decode_width": 0 if decode_entries is None else decode_entries.shape[1],
        "topk": topk,
        "slots": slots,
        "slots_stride": slots.stride(0),
        "lengths": lengths,
        "columns": slots.shape[1],
        "WINDOW_PAGE": window_page,
        "ENTRY_PAGE": entry_page,
        "WINDOW": window,
        "RATIO": ratio,
        "LOCAL": local and decode_entries is not None,
    }
    return Launch(mixed_rows, len(slots), arguments, slots.shape[1])


def _tokens(positions: Tensor | None, request_ids: Tensor, block_table: Tensor, own: Tensor | None) -> dict[str, Any]:
    known = {} if positions is None else {"positions": positions.contiguous()}
    return known | {
        "request_ids": request_ids.contiguous(),
        **_strided("block_table", block_table),
        "requests": block_table.shape[0],
        "table_width": block_table.shape[1],
        "own": None if own is None else own.contiguous(),
    }


def _strided(name: str, value: Tensor | None) -> dict[str, Any]:
    """A matrix and its two strides, all None without it."""
    row, column = (None, None) if value is None else value.stride()
    return {name: value, f"{name}_stride": row, f"{name}_column_stride": column}
