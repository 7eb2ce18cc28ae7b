"""The Triton kernels of this stage: each program writes all columns of one token's row, BLOCK of them at a time."""

import triton
import triton.language as tl

from tamis.ops.rows.triton_rows import slot_of


@triton.jit
def request_of(request_ids, token, first_request, requests):
    """A token's request, counted from `first_request`, and whether it is a known one; 0 if it is not."""
    request = tl.load(request_ids + token).to(tl.int64) - first_request
    known = (request >= 0) & (request < requests)
    return tl.where(known, request, 0), known


@triton.jit
def is_written(own, token):
    """Whether a token's own row is written, which is the case for every token if `own` is None."""
    if own is not None:
        written = tl.load(own + token) >= 0
    else:
        written = True
    return written


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["block_table_stride", "requests", "table_width"])
def window_rows(
    positions, request_ids, block_table, block_table_stride, block_table_column_stride, requests, table_width, own,
    contexts, ends,
    slots, slots_stride, lengths, columns,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the slots of one token's window."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)  # values are not checked: sums may exceed 32 bits
    request, known = request_of(request_ids, token, 0, requests)
    real = known & (position >= 0) & is_written(own, token)
    if contexts is not None:
        begin = tl.load(contexts + request).to(tl.int64) - WINDOW
        end = tl.load(ends + request).to(tl.int64)
    else:
        begin = position + 1 - WINDOW
        end = position + 1
    begin = tl.maximum(begin, 0)
    count = tl.where(real, tl.minimum(tl.maximum(end - begin, 0), columns), 0).to(tl.int32)
    begin = begin.to(tl.int32)
    table = block_table + request * block_table_stride
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        slot = slot_of(begin + column, column < count, table, block_table_column_stride, table_width, PAGE_SIZE)
        tl.store(slots + token * slots_stride + column, slot.to(tl.int32), mask=column < columns)
    tl.store(lengths + token, count)


@triton.jit(do_not_specialize=["block_table_stride", "requests", "table_width", "limit", "local_from"])
def entry_rows(
    positions, request_ids, block_table, block_table_stride, block_table_column_stride, requests, table_width, own,
    limit, local_from, completed, visible, lengths, every, every_stride, columns,
    RATIO: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the slot of the entry that one token completes, how many entries it sees, and their slots."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    request, known = request_of(request_ids, token, 0, requests)
    real = known & (position >= 0) & is_written(own, token)
    position = tl.maximum(position, 0)
    count = tl.where(real, (position + 1) // RATIO, 0)
    table = block_table + request * block_table_stride
    if completed is not None:
        ends = real & ((position + 1) % RATIO == 0)
        tl.store(
            completed + token,
            slot_of(position // RATIO, ends, table, block_table_column_stride, table_width, PAGE_SIZE),
        )
    if visible is not None:
        tl.store(visible + token, count)
    if lengths is not None:
        tl.store(lengths + token, tl.minimum(count, limit))
    if every is not None:
        local = token >= local_from
        for block in range(BLOCKS):
            column = block * BLOCK + tl.arange(0, BLOCK)
            seen = column < count
            slot = slot_of(
                column,
                seen & (column < columns) & (local == 0),
                table,
                block_table_column_stride,
                table_width,
                PAGE_SIZE,
            )
            found = tl.where(local & seen, column, slot)
            tl.store(every + token * every_stride + column, found.to(tl.int32), mask=column < columns)


@triton.jit(do_not_specialize=["block_table_stride", "requests", "table_width"])
def chosen_rows(
    chosen, chosen_stride, chosen_column_stride, request_ids, block_table, block_table_stride,
    block_table_column_stride, requests, table_width, own, slots, slots_stride, lengths, columns,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the slots of the entries chosen for one token, valid ones first."""
    token = tl.program_id(0).to(tl.int64)
    request, known = request_of(request_ids, token, 0, requests)
    real = known & is_written(own, token)
    table = block_table + request * block_table_stride
    count = 0
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        source = chosen + token * chosen_stride + column.to(tl.int64) * chosen_column_stride
        entry = tl.load(source, mask=(column < columns) & real, other=-1)
        slot = slot_of(entry, entry >= 0, table, block_table_column_stride, table_width, PAGE_SIZE)
        valid = slot >= 0
        target = count + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(slots + token * slots_stride + target, slot.to(tl.int32), mask=valid)
        count += tl.sum(valid.to(tl.int32), 0)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(slots + token * slots_stride + column, -1, mask=(column >= count) & (column < columns))
    tl.store(lengths + token, count)


@triton.jit(do_not_specialize=["first_request", "requests", "entries", "rows", "limit"])
def gathered_rows(
    positions, request_ids, first_request, requests, first, chosen, chosen_stride, chosen_column_stride, entries, rows,
    limit, slots, slots_stride, lengths, columns,
    RATIO: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the workspace rows of one token: those of its entries, then those of its window."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    request, known = request_of(request_ids, token, first_request, requests)
    real = known & (position >= 0)
    position = tl.maximum(position, 0)
    picked = tl.where(real, tl.minimum((position + 1) // RATIO, limit), 0)
    recent = tl.where(real, tl.minimum(position + 1, WINDOW), 0)
    oldest = position + 1 - recent - tl.load(first + request)
    base = request * rows
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        if chosen is not None:
            source = chosen + token * chosen_stride + column.to(tl.int64) * chosen_column_stride
            entry = tl.load(source, mask=column < picked, other=-1)
        else:
            entry = column
        entry_row = tl.where((entry >= 0) & (entry < entries), base + entry, -1)
        raw = oldest + column - picked
        raw_row = tl.where((raw >= 0) & (raw < rows - entries), base + entries + raw, -1)
        found = tl.where(column < picked, entry_row, raw_row)
        found = tl.where(column < picked + recent, found, -1)
        tl.store(slots + token * slots_stride + column, found.to(tl.int32), mask=column < columns)
    tl.store(lengths + token, picked + recent)


@triton.jit(do_not_specialize=["groups", "columns"])
def group_rows(
    chosen, chosen_stride, chosen_column_stride, groups, visible, positions, positions_stride, columns,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write the positions of one token: those of its groups' tokens, then those of the tail."""
    token = tl.program_id(0).to(tl.int64)
    seen = tl.maximum(tl.load(visible + token), 0).to(tl.int64)  # sums may exceed 32 bits
    whole = seen // SIZE
    count = 0
    for block in range(tl.cdiv(groups, BLOCK)):
        column = block * BLOCK + tl.arange(0, BLOCK)
        source = chosen + token * chosen_stride + column.to(tl.int64) * chosen_column_stride
        group = tl.load(source, mask=column < groups, other=-1)
        known = (group >= 0) & (group < whole)
        target = (count + tl.cumsum(known.to(tl.int32), 0) - 1) * SIZE
        for inside in tl.static_range(SIZE):
            found = group * SIZE + inside
            tl.store(positions + token * positions_stride + target + inside, found, mask=known)
        count += tl.sum(known.to(tl.int32), 0)
    filled = count * SIZE
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        tail = whole * SIZE + column - filled
        found = tl.where(tail < seen, tail, -1)
        beyond = (column >= filled) & (column < columns)
        tl.store(positions + token * positions_stride + column, found.to(tl.int32), mask=beyond)
