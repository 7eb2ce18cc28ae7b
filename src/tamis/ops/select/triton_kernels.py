"""Selects the rows that each token attends to and writes, in Triton: one launch per operation, a program per token."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from tamis.cuda.device import current_stream
from tamis.ops.rows.triton_launch import TritonLaunch, can_prepare
from tamis.ops.rows.triton_rows import launching_on
from tamis.ops.select.operations import SelectChosen, SelectEntries, SelectGathered, SelectGroups, SelectWindow
from tamis.ops.select.triton_device import chosen_rows, entry_rows, gathered_rows, group_rows, window_rows

LARGEST_BLOCK = 1024
"""Columns that a program handles at once."""
COLUMNS_PER_THREAD = 4

C = TypeVar("C", SelectWindow, SelectEntries)


class RowKernel(NamedTuple):
    """A kernel that writes one row per token, and what it is launched with."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    columns: int
    """Columns of the row that a program writes."""

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        found: torch.device = next(value for value in self.arguments.values() if isinstance(value, Tensor)).device
        return found

    @property
    def constants(self) -> dict[str, int]:
        """The block size, and the number of blocks of a row."""
        return _shape(self.columns)[0]

    @property
    def options(self) -> dict[str, int]:
        """Warps by the size of a block."""
        return _shape(self.columns)[1]

    def launch(self) -> None:
        """Launch it, unless there is no token."""
        if self.programs:
            constants, options = _shape(self.columns)
            with launching_on(self.device):
                self.kernel[(self.programs,)](**self.arguments, **constants, **options)


@cache
def _shape(columns: int) -> tuple[dict[str, int], dict[str, int]]:
    """The constants and options of a kernel that writes rows of so many columns."""
    block = min(LARGEST_BLOCK, triton.next_power_of_2(max(16, columns)))
    warps = max(1, min(8, block // (32 * COLUMNS_PER_THREAD)))
    return {"BLOCK": block, "BLOCKS": triton.cdiv(columns, block)}, {"num_warps": warps}


def select_window(call: SelectWindow) -> None:
    """As `reference.select_window`."""
    window_kernel(call).launch()


def select_entries(call: SelectEntries) -> None:
    """As `reference.select_entries`."""
    entry_kernel(call).launch()


def prepare_select_window(call: SelectWindow) -> Callable[[SelectWindow], None] | None:
    """A launch for calls like this one, if nothing is copied."""
    names = ("positions", "request_ids", "block_table", "own", "contexts", "ends", "slots", "lengths")
    return _prepared(window_kernel(call), call, names)


def prepare_select_entries(call: SelectEntries) -> Callable[[SelectEntries], None] | None:
    """A launch for calls like this one, if nothing is copied."""
    names = ("positions", "request_ids", "block_table", "own", "completed", "visible", "lengths", "every")
    return _prepared(entry_kernel(call), call, names)


def _prepared(row: RowKernel, call: C, names: tuple[str, ...]) -> Callable[[C], None] | None:
    """What launches a kernel with the addresses of the tensors of these names."""
    given = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    copied = any(row.arguments[name] is not tensor for name, tensor in given.items())
    if copied or not row.programs or not can_prepare(row.kernel):
        return None
    device, places = given["positions"].get_device(), [type(call)._fields.index(name) for name in given]
    launch = TritonLaunch(row.kernel, (row.programs,), row.arguments | row.constants, tuple(given), **row.options)

    def run(call: tuple[Any, ...]) -> None:
        launch(current_stream(device), [call[place].data_ptr() for place in places])

    return run


def select_chosen(call: SelectChosen) -> None:
    """As `reference.select_chosen`."""
    chosen_kernel(call).launch()


def select_gathered(call: SelectGathered) -> None:
    """As `reference.select_gathered`."""
    gathered_kernel(call).launch()


def select_groups(call: SelectGroups) -> None:
    """As `reference.select_groups`."""
    group_kernel(call).launch()


def window_kernel(call: SelectWindow) -> RowKernel:
    """The launch of `window_rows`."""
    arguments = {
        **_token_arguments(call),
        "positions": call.positions.contiguous(),
        "contexts": None if call.contexts is None else call.contexts.contiguous(),
        "ends": None if call.ends is None else call.ends.contiguous(),
        **_row_arguments(call),
        "PAGE_SIZE": call.page_size,
        "WINDOW": call.window,
    }
    return RowKernel(window_rows, len(call.positions), arguments, call.slots.shape[1])


def entry_kernel(call: SelectEntries) -> RowKernel:
    """The launch of `entry_rows`."""
    every = call.every
    columns = 0 if every is None else every.shape[1]
    arguments = {
        **_token_arguments(call),
        "positions": call.positions.contiguous(),
        "limit": call.limit,
        "local_from": call.first_local,
        "completed": call.completed,
        "visible": call.visible,
        "lengths": call.lengths,
        "every": every,
        "every_stride": None if every is None else every.stride(0),
        "columns": columns,
        "RATIO": call.ratio,
        "PAGE_SIZE": call.page_size,
    }
    return RowKernel(entry_rows, len(call.positions), arguments, columns)


def chosen_kernel(call: SelectChosen) -> RowKernel:
    """The launch of `chosen_rows`."""
    arguments = {
        **_strided("chosen", call.chosen),
        **_token_arguments(call),
        **_row_arguments(call),
        "PAGE_SIZE": call.page_size,
    }
    return RowKernel(chosen_rows, len(call.chosen), arguments, call.slots.shape[1])


def gathered_kernel(call: SelectGathered) -> RowKernel:
    """The launch of `gathered_rows`."""
    arguments = {
        "positions": call.positions.contiguous(),
        "request_ids": call.request_ids.contiguous(),
        "first_request": call.first_request,
        "requests": len(call.first),
        "first": call.first.contiguous(),
        **_strided("chosen", call.chosen),
        "entries": call.entries,
        "rows": call.rows,
        "limit": call.columns,
        **_row_arguments(call),
        "RATIO": call.ratio,
        "WINDOW": call.window,
    }
    return RowKernel(gathered_rows, len(call.positions), arguments, call.slots.shape[1])


def group_kernel(call: SelectGroups) -> RowKernel:
    """The launch of `group_rows`."""
    arguments = {
        **_strided("chosen", call.chosen),
        "groups": call.chosen.shape[1],
        "visible": call.visible.contiguous(),
        "positions": call.positions,
        "positions_stride": call.positions.stride(0),
        "columns": call.positions.shape[1],
        "SIZE": call.size,
    }
    return RowKernel(group_rows, len(call.chosen), arguments, call.positions.shape[1])


def _token_arguments(call: SelectWindow | SelectEntries | SelectChosen) -> dict[str, Any]:
    """The tokens' requests, and where these have their pages."""
    return {
        "request_ids": call.request_ids.contiguous(),
        **_strided("block_table", call.block_table),
        "requests": call.block_table.shape[0],
        "table_width": call.block_table.shape[1],
        "own": None if call.own is None else call.own.contiguous(),
    }


def _row_arguments(call: SelectWindow | SelectChosen | SelectGathered) -> dict[str, Any]:
    """The rows to write."""
    return {
        "slots": call.slots,
        "slots_stride": call.slots.stride(0),
        "lengths": call.lengths,
        "columns": call.slots.shape[1],
    }


def _strided(name: str, value: Tensor | None) -> dict[str, Any]:
    """A matrix and its two strides, all None without it."""
    row, column = (None, None) if value is None else value.stride()
    return {name: value, f"{name}_stride": row, f"{name}_column_stride": column}
