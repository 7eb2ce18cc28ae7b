"""Translates positions to slots in Triton: one launch, with a program per token that also counts its valid slots."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.cuda.device import Rooms, current_stream, device_index
from tamis.ops.rows.triton_launch import TritonLaunch, can_prepare
from tamis.ops.rows.triton_rows import launching_on
from tamis.ops.translate.operations import TranslatePositions

LARGEST_BLOCK = 2048
"""Columns that a program handles at once."""
COLUMNS_PER_THREAD = 8


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["table_stride", "requests", "table_width", "rows_per_page", "workspaces"])
def translate_rows(
    positions, positions_stride, column_stride, request_ids, block_table, table_stride, page_id_stride, requests,
    table_width, rows_per_page, workspace_ids, workspace_starts, workspaces, slots, counts, columns,
    PAGE_SIZE: tl.constexpr, RANKS: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr,
    COMPACT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row of slots [tokens, columns] and its number of valid slots."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ids + token)
    known = (request >= 0) & (request < requests)
    table = block_table + tl.where(known, request, 0).to(tl.int64) * table_stride
    found = slots + token * columns
    if workspace_ids is not None:
        workspace = tl.load(workspace_ids + token)
        in_workspace = workspace >= 0
        base = tl.load(
            workspace_starts + tl.minimum(tl.maximum(workspace, 0), workspaces - 1), mask=workspaces > 0, other=0
        )
    count = 0
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        here = column < columns
        source = positions + token * positions_stride + column.to(tl.int64) * column_stride
        position = tl.load(source, mask=here, other=-1)
        valid = (position >= 0) & known
        position = tl.maximum(position, 0)
        if WIDE:
            position = position.to(tl.int64)
        if RANKS > 1:
            valid = valid & (position // INTERLEAVE % RANKS == RANK)
            position = position // (INTERLEAVE * RANKS) * INTERLEAVE + position % INTERLEAVE
        page = position // PAGE_SIZE
        valid = valid & (page < table_width)
        page_id = tl.load(table + page.to(tl.int64) * page_id_stride, mask=valid, other=-1)
        # The slot is computed in 64 bits, so that a garbage page id cannot wrap around into a valid slot.
        slot = page_id.to(tl.int64) * rows_per_page + (position - page * PAGE_SIZE)
        if workspace_ids is not None:
            valid = valid & (in_workspace | (page_id >= 0))
            slot = tl.where(in_workspace & (workspaces > 0), base.to(tl.int64) + position, slot)
        else:
            valid = valid & (page_id >= 0)
        valid = valid & (slot < 2147483648)
        result = tl.where(valid, slot, -1).to(tl.int32)
        if COMPACT:
            target = count + tl.cumsum(valid.to(tl.int32), 0) - 1
            tl.store(found + target, result, mask=valid)
        else:
            tl.store(found + column, result, mask=here)
        count += tl.sum(valid.to(tl.int32), 0)
    if COMPACT:
        for block in range(BLOCKS):
            column = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(found + column, -1, mask=(column >= count) & (column < columns))
    tl.store(counts + token, count)


def translate_positions(call: TranslatePositions) -> tuple[Tensor, Tensor]:
    """As `reference.translate_positions`."""
    positions = call.positions
    slots = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    counts = torch.empty(positions.shape[0], dtype=torch.int32, device=positions.device)
    if positions.shape[0] == 0:
        return slots, counts
    arguments = launch_arguments(call, slots, counts)
    with launching_on(positions.device):
        translate_rows[(positions.shape[0],)](**arguments, **launch_options(arguments["BLOCK"]))
    return slots, counts


class PreparedTranslation:
    """Translates positions like those of one call that was prepared."""

    def __init__(self, call: TranslatePositions) -> None:
        """Prepare the launch."""
        positions = call.positions
        rows, device = positions.shape[0], positions.device
        self._device = device_index(device)
        self._rooms = Rooms(device, (tuple(positions.shape), torch.int32), ((rows,), torch.int32))
        arguments = launch_arguments(call, *self._rooms())
        changing = ("positions", "request_ids", "block_table", "slots", "counts")
        options = launch_options(arguments["BLOCK"])
        self._launch = TritonLaunch(translate_rows, (rows,), arguments, changing, **options)

    def __call__(self, call: TranslatePositions) -> tuple[Tensor, Tensor]:
        """Slots and counts."""
        positions, ids, table = call[:3]
        slots, counts = self._rooms()
        addresses = (positions.data_ptr(), ids.data_ptr(), table.data_ptr(), slots.data_ptr(), counts.data_ptr())
        self._launch(current_stream(self._device), addresses)
        return slots, counts


def prepare_translate_positions(call: TranslatePositions) -> PreparedTranslation | None:
    """A launch for calls like this one, if nothing is copied."""
    plain = call.workspace_ids is None and call.workspace_starts is None and call.request_ids.is_contiguous()
    return PreparedTranslation(call) if plain and call.positions.shape[0] and can_prepare(translate_rows) else None


def launch_options(block: int) -> dict[str, int]:
    """Warps for a block of so many columns."""
    return {"num_warps": max(1, min(8, block // (32 * COLUMNS_PER_THREAD)))}


def launch_arguments(call: TranslatePositions, slots: Tensor, counts: Tensor) -> dict[str, Any]:
    """The arguments of `translate_rows`."""
    positions, block_table, page_size = call.positions, call.block_table, call.page_size
    ids, starts = call.workspace_ids, call.workspace_starts
    ranks, rank, interleave = call.shard if call.shard[0] > 1 else (1, 0, 1)
    block = min(LARGEST_BLOCK, triton.next_power_of_2(max(16, positions.shape[1])))
    return {
        "positions": positions,
        "positions_stride": positions.stride(0),
        "column_stride": positions.stride(1),
        "request_ids": call.request_ids.contiguous(),
        "block_table": block_table,
        "table_stride": block_table.stride(0),
        "page_id_stride": block_table.stride(1),
        "requests": block_table.shape[0],
        "table_width": block_table.shape[1],
        "rows_per_page": call.rows_per_page,
        "workspace_ids": ids.contiguous() if ids is not None else None,
        "workspace_starts": starts.contiguous() if starts is not None else None,
        "workspaces": len(starts) if starts is not None else None,
        "slots": slots,
        "counts": counts,
        "columns": positions.shape[1],
        "PAGE_SIZE": page_size,
        "RANKS": ranks,
        "RANK": rank,
        "INTERLEAVE": interleave,
        "COMPACT": call.compact,
        # If a divisor exceeds 32 bits, positions are divided in 64 bits.
        "WIDE": ranks * interleave >= 2**31 or page_size >= 2**31,
        "BLOCK": block,
        "BLOCKS": triton.cdiv(positions.shape[1], block),
    }
