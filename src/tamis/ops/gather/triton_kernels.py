"""Reads rows back in Triton, by slot or for whole requests: each row is read once, dequantised, and written once.

A value is e4m3 x scale in float32, rounded once to the output's dtype; rope values keep their bits. Workspace rows find
their request by a binary search in `starts`, so nothing about the lengths has to reach the host.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.gather.operations import GatherIndex, GatherKv, ReadKv
from tamis.ops.rows.triton_rows import (
    copy_rounded,
    decode_e2m1,
    decode_e4m3,
    has_native_e4m3,
    interpreted,
    launching_on,
    power_of_two,
    row_arguments,
    row_block,
    row_start,
    store_rounded,
)

WARP_VALUES = 2048
"""Values that one warp handles: 64 per thread. A program of one warp needs no barriers."""
MOST_ROWS = 16
"""Rows of one program; more would make its unrolled look-ups long."""
SEARCH_STEPS = 4
"""Binary searches take a multiple of this many steps, so that batches of most sizes share a compiled kernel."""


@triton.jit
def _requests_begun(row, starts, requests, STEPS: tl.constexpr):
    """How many requests start at or before a row; the row belongs to the last of them."""
    low = row * 0
    high = low + requests
    for _ in tl.static_range(STEPS):
        middle = (low + high) >> 1
        searching = low < high
        before = searching & (tl.load(starts + middle, mask=searching, other=0) <= row)
        high = tl.where(searching & (before == 0), middle, high)
        low = tl.where(before, middle + 1, low)
    return low


@triton.jit
def _request_slots(
    rows, starts, lengths, first, block_table, table_stride, page_id_stride, requests, table_width, pages,
    PAGE_SIZE: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The slot behind each of the program's workspace rows; -1 for rows of no request, and for pages that the cache
    does not have.

    Rows are looked up one by one, as scalars: a tensor of them would be looked up again for every register layout that
    the compiler wants the result in.
    """
    first_row = tl.program_id(0) * ROWS
    lane = tl.arange(0, ROWS)
    slots = tl.full([ROWS], -1, tl.int32)
    # The rows of a program mostly belong to one request; then these two searches are enough.
    first_begun = _requests_begun(first_row, starts, requests, STEPS)
    last_begun = _requests_begun(first_row + (ROWS - 1), starts, requests, STEPS)
    for index in tl.static_range(ROWS):
        row = first_row + index
        begun = first_begun
        if first_begun != last_begun:
            begun = _requests_begun(row, starts, requests, STEPS)
        request = tl.maximum(begun - 1, 0)
        # Values on a device are not checked, so the sum of a start and a first position may exceed 32 bits.
        offset = row.to(tl.int64) - tl.load(starts + request)
        position = offset + tl.load(first + request)
        page = position // PAGE_SIZE
        inside = (row < rows) & (begun > 0) & (offset < tl.load(lengths + request)) & (position >= 0)
        inside = inside & (page < table_width)
        entry = block_table + request.to(tl.int64) * table_stride + page * page_id_stride
        page_id = tl.load(entry, mask=inside, other=-1)
        inside = inside & (page_id >= 0) & (page_id < pages)
        slot = page_id * PAGE_SIZE + (position - page * PAGE_SIZE).to(tl.int32)
        slots = tl.where((lane == index) & inside, slot, slots)
    return slots


@triton.jit
def _decode_tiles(
    values, scales, out, out_column_stride, readable, writable, MODE: tl.constexpr, LATENT: tl.constexpr,
    TILE: tl.constexpr, NATIVE_E4M3: tl.constexpr, NATIVE_BF16: tl.constexpr, TILES_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The latent part [rows, tiles, values of a tile] times its tile scales."""
    TILES: tl.constexpr = LATENT // TILE
    tile = tl.arange(0, TILES_BLOCK)
    lane = tl.arange(0, TILE_BLOCK)
    column = tile[None, :, None] * TILE + lane[None, None, :]
    inside = (tile < TILES)[None, :, None] & (lane < TILE)[None, None, :]
    if MODE == "packed" or MODE == "packed_e4m3":
        pair = tl.arange(0, TILE_BLOCK // 2)
        there = readable[:, None, None] & (tile < TILES)[None, :, None] & (pair < TILE // 2)[None, None, :]
        at = tile[None, :, None] * (TILE // 2) + pair[None, None, :]
        found = decode_e2m1(tl.load(values[:, None, None] + at, mask=there, other=0))
    else:
        codes = tl.load(values[:, None, None] + column, mask=readable[:, None, None] & inside, other=0)
        found = decode_e4m3(codes, NATIVE_E4M3)
    wanted = readable[:, None] & (tile < TILES)[None, :]
    if MODE == "exponent" or MODE == "packed":
        exponent = tl.load(scales[:, None] + tile[None, :], mask=wanted, other=127)
        factor = power_of_two(exponent, MODE == "packed")
    elif MODE == "packed_e4m3":
        factor = decode_e4m3(tl.load(scales[:, None] + tile[None, :], mask=wanted, other=0), NATIVE_E4M3).to(tl.float32)
    else:
        pointers = scales.to(tl.pointer_type(tl.float32), bitcast=True)
        factor = tl.load(pointers[:, None] + tile[None, :], mask=wanted, other=0.0)
    x = found.to(tl.float32) * factor[:, :, None]
    target = out[:, None, None] + column.to(tl.int64) * out_column_stride
    store_rounded(target, x, writable[:, None, None] & inside, NATIVE_BF16)


@triton.jit
def _read_columns(
    source, out, out_column_stride, readable, writable, scale, MODE: tl.constexpr, START: tl.constexpr,
    COUNT: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr, NATIVE_E4M3: tl.constexpr, NATIVE_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns without tile scales: copied, converted, or multiplied by the cache's one scale."""
    column = tl.arange(0, BLOCK)
    can_read = readable[:, None] & (column < COUNT)[None, :]
    can_write = writable[:, None] & (column < COUNT)[None, :]
    origin = source[:, None] + column[None, :]
    target = out[:, None] + ((START + column).to(tl.int64) * out_column_stride)[None, :]
    if MODE == "tensor":
        if SCALE_IN_MEMORY:
            factor = tl.load(scale)
        else:
            factor = scale
        x = decode_e4m3(tl.load(origin, mask=can_read, other=0), NATIVE_E4M3).to(tl.float32) * factor
        store_rounded(target, x, can_write, NATIVE_BF16)
    else:
        copy_rounded(origin, target, can_read, can_write, NATIVE_BF16)


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows", "table_stride", "requests", "table_width", "pages"])
def read_rows(
    cache, page_stride, scale, out, out_stride, out_column_stride, rows, slots, starts, lengths, first, block_table,
    table_stride, page_id_stride, requests, table_width, pages,
    PAGE_SIZE: tl.constexpr, STEPS: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    TILE: tl.constexpr, VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_E4M3: tl.constexpr, NATIVE_BF16: tl.constexpr, ROWS: tl.constexpr,
    LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, TILES_BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `out` from the given slots (zeros for those outside the cache), or, without slots, from the requests
    (rows of no request keep their content). Distances inside the cache are in its elements."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if slots is not None:
        writable = row < rows
        slot = tl.load(slots + row, mask=writable, other=-1)
        readable = (slot >= 0) & (slot < pages * PAGE_SIZE)
    else:
        slot = _request_slots(
            rows, starts, lengths, first, block_table, table_stride, page_id_stride, requests, table_width, pages,
            PAGE_SIZE, STEPS, ROWS,
        )  # fmt: skip
        readable = slot >= 0
        writable = readable
    slot = tl.where(readable, slot, 0).to(tl.int32)
    target = out + row.to(tl.int64) * out_stride
    values = cache + (row_start(slot, page_stride, VALUES_STRIDE, PAGE_SIZE, False) + VALUES_START)
    if MODE == "none" or MODE == "tensor":
        _read_columns(
            values, target, out_column_stride, readable, writable, scale, MODE, 0, LATENT, SCALE_IN_MEMORY,
            NATIVE_E4M3, NATIVE_BF16, LATENT_BLOCK,
        )  # fmt: skip
        if ROPE:
            _read_columns(
                values + LATENT, target, out_column_stride, readable, writable, scale, MODE, LATENT, ROPE,
                SCALE_IN_MEMORY, NATIVE_E4M3, NATIVE_BF16, ROPE_BLOCK,
            )  # fmt: skip
    else:
        scales = cache + (row_start(slot, page_stride, SCALES_STRIDE, PAGE_SIZE, False) + SCALES_START)
        _decode_tiles(
            values, scales, target, out_column_stride, readable, writable, MODE, LATENT, TILE, NATIVE_E4M3,
            NATIVE_BF16, TILES_BLOCK, TILE_BLOCK,
        )  # fmt: skip
        if ROPE:
            tail = cache + (row_start(slot, page_stride, TAIL_STRIDE, PAGE_SIZE, False) + TAIL_START)
            _read_columns(
                tail.to(tl.pointer_type(tl.bfloat16), bitcast=True), target, out_column_stride, readable, writable,
                scale, "none", LATENT, ROPE, False, NATIVE_E4M3, NATIVE_BF16, ROPE_BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "table_stride", "requests", "table_width", "pages"])
def copy_index_rows(
    cache, page_stride, values, values_stride, values_column_stride, scales, scales_stride, rows, starts, lengths,
    first, block_table, table_stride, page_id_stride, requests, table_width, pages,
    PAGE_SIZE: tl.constexpr, STEPS: tl.constexpr, DIM: tl.constexpr, SCALES: tl.constexpr, VALUES_START: tl.constexpr,
    VALUES_STRIDE: tl.constexpr, SCALES_START: tl.constexpr, SCALES_STRIDE: tl.constexpr, ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr, SCALES_BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys of DIM bytes and their scales, byte for byte; rows of no request keep their content."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = _request_slots(
        rows, starts, lengths, first, block_table, table_stride, page_id_stride, requests, table_width, pages,
        PAGE_SIZE, STEPS, ROWS,
    )  # fmt: skip
    covered = slot >= 0
    slot = tl.maximum(slot, 0)
    column = tl.arange(0, DIM_BLOCK)
    inside = covered[:, None] & (column < DIM)[None, :]
    values_at = row_start(slot, page_stride, VALUES_STRIDE, PAGE_SIZE, False) + VALUES_START
    codes = tl.load(cache + values_at[:, None] + column[None, :], mask=inside, other=0)
    target = values + row.to(tl.int64)[:, None] * values_stride + (column.to(tl.int64) * values_column_stride)[None, :]
    tl.store(target, codes, mask=inside)
    scales_at = row_start(slot, page_stride, SCALES_STRIDE, PAGE_SIZE, False) + SCALES_START
    number = tl.arange(0, SCALES_BLOCK)
    inside = covered[:, None] & (number < SCALES)[None, :]
    stored = (cache + scales_at).to(tl.pointer_type(scales.dtype.element_ty), bitcast=True)
    factor = tl.load(stored[:, None] + number[None, :], mask=inside, other=0)
    tl.store(scales + row.to(tl.int64)[:, None] * scales_stride + number[None, :], factor, mask=inside)


def read_kv(call: ReadKv) -> Tensor:
    """As `reference.read_kv`."""
    slots, cache, dtype, _ = call
    flat = slots.reshape(-1).contiguous()
    out = torch.empty(flat.shape[0], cache.layout.width, dtype=dtype, device=cache.device)
    if flat.shape[0]:
        _launch(read_rows, read_arguments(cache, out, no_request_arguments(cache) | {"slots": flat}), out)
    return out.view(*slots.shape, cache.layout.width)


def gather_kv(call: GatherKv) -> None:
    """As `reference.gather_kv`."""
    if call.out.shape[0] and call.block_table.numel():
        arguments = read_arguments(call.cache, call.out, request_arguments(call) | {"slots": None})
        _launch(read_rows, arguments, call.out)


def gather_index(call: GatherIndex) -> tuple[Tensor, Tensor]:
    """As `reference.gather_index`."""
    values, scales = call.zeros()
    if call.rows and call.block_table.numel():
        _launch(copy_index_rows, index_arguments(call.cache, values, scales, request_arguments(call)), values)
    return values, scales


def _launch(kernel: Any, arguments: dict[str, Any], out: Tensor) -> None:
    with launching_on(out.device):
        kernel[(triton.cdiv(out.shape[0], arguments["ROWS"]),)](**arguments, **launch_options(arguments))


def launch_options(arguments: dict[str, Any]) -> dict[str, int]:
    """One warp, and more only for rows that are too wide for one."""
    block = arguments["DIM_BLOCK"] if "DIM_BLOCK" in arguments else row_block(arguments)
    return {"num_warps": max(1, min(8, block // WARP_VALUES))}


def _rows_per_program(block: int) -> int:
    return max(1, min(MOST_ROWS, WARP_VALUES // block))


def request_arguments(call: GatherKv | GatherIndex) -> dict[str, Any]:
    """Arguments by which a workspace row finds its slot."""
    requests, table_width = call.block_table.shape
    return {
        "starts": call.starts.contiguous(),
        "lengths": call.lengths.contiguous(),
        "first": call.first.contiguous(),
        "block_table": call.block_table,
        "table_stride": call.block_table.stride(0),
        "page_id_stride": call.block_table.stride(1),
        "requests": requests,
        "table_width": table_width,
        "pages": call.cache.pages,
        "STEPS": triton.cdiv(requests.bit_length(), SEARCH_STEPS) * SEARCH_STEPS,
    }


def no_request_arguments(cache: PagedCache) -> dict[str, Any]:
    """The same arguments where slots are given."""
    names = ("starts", "lengths", "first", "block_table", "table_stride", "page_id_stride", "requests", "table_width")
    return dict.fromkeys(names) | {"pages": cache.pages, "STEPS": 0}


def read_arguments(cache: PagedCache, out: Tensor, rows_from: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `read_rows`."""
    rows = row_arguments(cache)
    return (
        rows_from
        | rows
        | {
            "out": out,
            "out_stride": out.stride(0),
            "out_column_stride": out.stride(1),
            "rows": out.shape[0],
            "NATIVE_E4M3": has_native_e4m3(cache.device),
            "NATIVE_BF16": not interpreted(read_rows),
            "ROWS": _rows_per_program(row_block(rows)),
        }
    )


def index_arguments(cache: PagedCache, values: Tensor, scales: Tensor, rows_from: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `copy_index_rows`."""
    used = ("cache", "page_stride", "PAGE_SIZE", "VALUES_START", "VALUES_STRIDE", "SCALES_START", "SCALES_STRIDE")
    rows, layout = row_arguments(cache), cache.layout
    assert layout.scales is not None
    block = triton.next_power_of_2(layout.values.count)
    return (
        rows_from
        | {name: rows[name] for name in used}
        | {
            "values": values.view(torch.uint8),
            "values_stride": values.stride(0),
            "values_column_stride": values.stride(1),
            "scales": scales,
            "scales_stride": scales.stride(0),
            "rows": values.shape[0],
            "DIM": layout.values.count,
            "DIM_BLOCK": block,
            "SCALES": layout.scales.count,
            "SCALES_BLOCK": triton.next_power_of_2(layout.scales.count),
            "ROWS": _rows_per_program(block),
        }
    )
