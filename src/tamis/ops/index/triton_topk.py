"""Exact top-k in Triton: the kernels, and how they are launched.

The k-th highest of the highest scores of many disjoint groups bounds the k-th highest score from below, whatever the
scores are: k groups have a score that high. With four times as many groups as k, a third more than k scores pass the
bound in random order, and in no order more scores than little over k groups hold. So a row is read twice: for the group
maxima, and for the positions of the scores that pass, in ascending order. The rest happens among those few. Only where
the bound itself is the k-th highest score, as on a plateau of equal scores, the row is read a third time.

A bound is found by bisection on the bits of numbers held in registers, where a step costs one count. Nothing depends on
the order in which programs run, and rows cut into parts give the same selection as whole ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PARTS = 64
MOST_LANES = 8192
"""Numbers that a program can hold on to while it counts them."""

_LOWEST = tl.constexpr(-2139095041)
"""Order of -inf."""
_HIGHEST = tl.constexpr(2139095040)
"""Order of inf."""
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _order(x):
    """Integers that compare like the numbers; -0.0 is 0.0, and NaN is -inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x > -_INFINITY, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)


@triton.jit
def _number(order):
    """The number of that order, or the next below."""
    order = tl.where(order == -1, -2, order)  # -0.0 would stand there
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)  # the sum may need 33 bits


@triton.jit
def _halve(low, high, middle, count, k, slack):
    """Bounds of the k-th highest order, which is `low` or above and below `high`, once `count` reach their middle.
    Between k and k + slack is close enough: the search ends just below the middle."""
    enough = count >= k
    close = enough & (count <= k + slack)
    return tl.where(close, middle - 1, tl.where(enough, middle, low)), tl.where(
        enough & (count > k + slack), high, middle
    )


@triton.jit
def _bisect(orders, low, k, slack):
    """An order above which k to k + slack of these lie, or that of the k-th highest, or `low` if that is lower."""
    high = tl.maximum(tl.max(orders, 0), low) + 1
    while low + 1 < high:
        middle = _middle(low, high)
        low, high = _halve(low, high, middle, tl.sum((orders >= middle).to(tl.int32), 0), k, slack)
    return low


@triton.jit
def _bound(maxima, k):
    """A number that at least k of these reach, or -inf; if fewer than k lie above it, the k-th highest."""
    return _number(_bisect(_order(maxima), tl.full([], _LOWEST, tl.int32), k, k // 8))


@triton.jit
def _lane_maxima(row, first, end, LANES: tl.constexpr, STAGES: tl.constexpr):
    """For each lane the highest of every LANES-th score from `first` to `end`; NaN is nothing."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], -_INFINITY, tl.float32)
    # A mask would cut wide loads into single numbers: only the rest has one.
    whole = first + tl.maximum(end - first, 0) // LANES * LANES
    for start in tl.range(first, whole, LANES, num_stages=STAGES):
        x = tl.load(row + start + lane)
        best = tl.where(x > best, x, best)
    if whole < end:
        x = tl.load(row + whole + lane, mask=whole + lane < end, other=-_INFINITY)
        best = tl.where(x > best, x, best)
    return best


@triton.jit
def _append(x, position, bound, count, found):
    above = (x > bound).to(tl.int32)
    tl.store(found + count + tl.cumsum(above, 0) - 1, position, mask=above != 0)
    return count + tl.sum(above, 0)


@triton.jit
def _collect(row, first, end, bound, found, TILE: tl.constexpr, STAGES: tl.constexpr):
    """Write the positions of the scores above the bound, in ascending order, and return how many."""
    lane = tl.arange(0, TILE)
    count = 0
    whole = first + tl.maximum(end - first, 0) // TILE * TILE
    for start in tl.range(first, whole, TILE, num_stages=STAGES):
        count = _append(tl.load(row + start + lane), start + lane, bound, count, found)
    if whole < end:
        x = tl.load(row + whole + lane, mask=whole + lane < end, other=-_INFINITY)
        count = _append(x, whole + lane, bound, count, found)
    return count


@triton.jit
def _candidates(row, found, ends, place, count, part_size, PARTS: tl.constexpr):
    """Positions at these places of a row's list and their orders, below that of -inf where the list has ended.

    Each part has written to a place of its own; `ends` says how many positions there are up to the end of each.
    """
    there = place < count
    at = place.to(tl.int64)
    if PARTS > 1:
        part = tl.zeros_like(place)
        for level in tl.static_range(1, 7):
            # The last part that begins at or before the place, one binary digit after the other.
            if PARTS >> level > 0:
                other = part + (PARTS >> level)
                begin = tl.gather(ends, other - 1, 0)
                part = tl.where(begin <= place, other, part)
        begin = tl.where(part > 0, tl.gather(ends, tl.maximum(part - 1, 0), 0), 0)
        at = part.to(tl.int64) * part_size + (place - begin)
    position = tl.load(found + at, mask=there, other=0)
    x = tl.load(row + position, mask=there, other=-_INFINITY)
    return position, tl.where(there, _order(x), _LOWEST - 1)


@triton.jit
def _emit(position, orders, least, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE):
    """Append positions above the least order, and as many of that order as are left; return the new counts."""
    equal = (orders == least).to(tl.int32)
    keep = (orders > least) | ((equal != 0) & (tl.cumsum(equal, 0) <= ties_left))
    place = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
    if table is not None:
        page = position // PAGE_SIZE
        page_id = tl.load(table + page.to(tl.int64) * page_id_stride, mask=keep & (page < table_width), other=-1)
        slot = page_id.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        position = tl.where((page_id >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)
    tl.store(result + place, position, mask=keep)
    return ties_left - tl.sum(equal, 0), taken + tl.sum(keep.to(tl.int32), 0)


@triton.jit
def _finish(
    row, end, bound, found, ends, count, part_size, k, result, request_ids, block_table, table_stride, page_id_stride,
    requests, table_width, token,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Select k of the positions that a row has found above its bound, and write them, or their slots."""
    table = block_table
    if block_table is not None:
        request = tl.load(request_ids + token)
        listed = (request >= 0) & (request < requests)
        table = block_table + tl.where(listed, request, 0).to(tl.int64) * table_stride
        table_width = tl.where(listed, table_width, 0)
    lane = tl.arange(0, BLOCK)
    taken = 0
    if (count < k) & (bound > -_INFINITY):
        # The bound is the k-th highest score: its first positions fill up.
        ties_left = k - count
        for start in range(0, end, BLOCK):
            x = tl.load(row + start + lane, mask=start + lane < end, other=-_INFINITY)
            ties_left, taken = _emit(
                start + lane, _order(x), _order(bound), ties_left, taken, result, table, table_width, page_id_stride,
                PAGE_SIZE,
            )  # fmt: skip
    elif count <= BLOCK:
        position, orders = _candidates(row, found, ends, lane, count, part_size, PARTS)
        least = tl.full([], _LOWEST, tl.int32)
        if count > k:
            least = _bisect(orders, tl.min(tl.where(lane < count, orders, _HIGHEST), 0), k, 0)
        ties_left = k - tl.sum((orders > least).to(tl.int32), 0)
        ties_left, taken = _emit(
            position, orders, least, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE
        )
    else:
        # Scores in an order that defeats the groups: the same, but through memory.
        low = tl.full([], _LOWEST, tl.int32)
        high = tl.full([], _HIGHEST + 1, tl.int32)
        while low + 1 < high:
            middle = _middle(low, high)
            reaching = 0
            for start in range(0, count, BLOCK):
                _, orders = _candidates(row, found, ends, start + lane, count, part_size, PARTS)
                reaching += tl.sum((orders >= middle).to(tl.int32), 0)
            low, high = _halve(low, high, middle, reaching, k, 0)
        ties_left = k
        for start in range(0, count, BLOCK):
            _, orders = _candidates(row, found, ends, start + lane, count, part_size, PARTS)
            ties_left -= tl.sum((orders > low).to(tl.int32), 0)
        for start in range(0, count, BLOCK):
            position, orders = _candidates(row, found, ends, start + lane, count, part_size, PARTS)
            ties_left, taken = _emit(
                position, orders, low, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE
            )
    column = tl.arange(0, BLOCK_K)
    tl.store(result + column, -1, mask=(column >= taken) & (column < k))


# Batches of any size share one kernel: where alignment does not matter, sizes are not looked at.
@triton.jit(do_not_specialize=["width", "k", "table_stride", "requests", "table_width"])
def select_rows(
    scores, scores_stride, lengths, width, k, found, found_stride, result, request_ids, block_table, table_stride,
    page_id_stride, requests, table_width,
    LANES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The whole selection of one row."""
    token = tl.program_id(0).to(tl.int64)
    row = scores + token * scores_stride
    found += token * found_stride
    end = tl.minimum(tl.load(lengths + token), width)
    bound = _bound(_lane_maxima(row, 0, end, LANES, STAGES), k)
    count = _collect(row, 0, end, bound, found, TILE, STAGES)
    tl.debug_barrier()  # what other threads have found is read next
    _finish(
        row, end, bound, found, None, count, 0, k, result + token * k, request_ids, block_table, table_stride,
        page_id_stride, requests, table_width, token, 1, BLOCK, BLOCK_K, PAGE_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def part_maxima(
    scores, scores_stride, lengths, width, part_size, maxima,
    PARTS: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Group maxima [tokens, PARTS, LANES // PARTS] of a part of a row."""
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    first = part * part_size
    end = tl.minimum(tl.minimum(tl.load(lengths + token), width), first + part_size)
    best = _lane_maxima(scores + token * scores_stride, first, end, LANES // PARTS, STAGES)
    tl.store(maxima + tl.program_id(0).to(tl.int64) * (LANES // PARTS) + tl.arange(0, LANES // PARTS), best)


@triton.jit(do_not_specialize=["width", "k"])
def part_candidates(
    scores, scores_stride, lengths, width, k, part_size, maxima, found, counts, bounds,
    PARTS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Positions [tokens, PARTS, part_size] of a part's scores above the bound of its row, and how many.

    Every program of a row works out its bound, which is faster than a launch that does it once.
    """
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    first = part * part_size
    end = tl.minimum(tl.minimum(tl.load(lengths + token), width), first + part_size)
    count = 0
    if (first < end) | (part == 0):
        bound = _bound(tl.load(maxima + token * LANES + tl.arange(0, LANES)), k)
        target = found + tl.program_id(0).to(tl.int64) * part_size
        count = _collect(scores + token * scores_stride, first, end, bound, target, TILE, STAGES)
        tl.store(bounds + token, bound, mask=part == 0)
    tl.store(counts + tl.program_id(0), count)


@triton.jit(do_not_specialize=["width", "k", "table_stride", "requests", "table_width"])
def merge_parts(
    scores, scores_stride, lengths, width, k, part_size, found, counts, bounds, result, request_ids, block_table,
    table_stride, page_id_stride, requests, table_width,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The selection of one row from what its parts have found."""
    token = tl.program_id(0).to(tl.int64)
    of_parts = tl.load(counts + token * PARTS + tl.arange(0, PARTS))
    end = tl.minimum(tl.load(lengths + token), width)
    _finish(
        scores + token * scores_stride, end, tl.load(bounds + token), found + token * PARTS * part_size,
        tl.cumsum(of_parts, 0), tl.sum(of_parts, 0), part_size, k, result + token * k, request_ids, block_table,
        table_stride, page_id_stride, requests, table_width, token, PARTS, BLOCK, BLOCK_K, PAGE_SIZE,
    )  # fmt: skip


@dataclass(frozen=True)
class TopkLaunch:
    """How a selection is laid out."""

    parts: int
    """Programs per row, a power of two."""
    part_size: int
    lanes: int
    """Groups of scores whose maxima bound the selection."""
    tile: int
    """Scores per step of the second pass."""
    block: int
    """Positions that are sorted out in registers."""
    warps: int
    stages: int
    found: int
    """Positions per part that may pass the bound."""

    @property
    def scratch(self) -> int:
        """Numbers per row beside scores and result."""
        return self.parts * self.found + (self.lanes + self.parts + 1 if self.parts > 1 else 0)


def choose_topk_launch(tokens: int, width: int, k: int, cores: int) -> TopkLaunch:
    """Blocks for so many rows. Few long rows are cut into parts, which costs two more launches."""
    power = triton.next_power_of_2(k)
    lanes = min(MOST_LANES, 4 * max(256, power), triton.next_power_of_2(max(128, width)))
    parts = 1
    while 2 * parts * tokens <= 2 * cores and width >= 4096 * parts and parts < min(MOST_PARTS, lanes // 128):
        parts *= 2
    part_size = triton.cdiv(triton.cdiv(width, parts), lanes // parts) * (lanes // parts)
    tile = min(4096, triton.next_power_of_2(max(128, part_size)))
    # The scores of all groups that reach above the bound.
    most = (k + k // 8) * triton.cdiv(max(1, width), lanes)
    found = part_size if parts > 1 else min(max(1, width), most)
    block = min(2 * max(64, power), triton.next_power_of_2(max(128, width)))
    warps = _warps(max(lanes, block) if parts == 1 else lanes)
    return TopkLaunch(parts, part_size, lanes, tile, block, warps, 3, found)


def _warps(lanes: int) -> int:
    """Enough that 16 numbers are left to each thread."""
    return max(4, min(16, lanes // 512))


def topk_launches(
    launch: TopkLaunch,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None,
    block_table: Tensor | None,
    page_size: int,
    result: Tensor,
) -> Iterator[tuple[Any, int, dict[str, Any], dict[str, int]]]:
    """Kernel, grid, arguments and options of each launch of a selection."""
    tokens, width = scores.shape
    parts = launch.parts
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    rows = {"scores": scores, "scores_stride": scores.stride(0), "lengths": lengths, "width": width}
    found = torch.empty(tokens, parts * launch.found, dtype=torch.int32, device=scores.device)
    finish = {
        "k": k,
        "found": found,
        "result": result,
        "request_ids": request_ids,
        "block_table": block_table,
        "table_stride": None if block_table is None else block_table.stride(0),
        "page_id_stride": None if block_table is None else block_table.stride(1),
        "requests": None if block_table is None else block_table.shape[0],
        "table_width": None if block_table is None else block_table.shape[1],
        "BLOCK": launch.block,
        "BLOCK_K": triton.next_power_of_2(k),
        "PAGE_SIZE": page_size,
    }
    passes = {"LANES": launch.lanes, "STAGES": launch.stages}
    if parts == 1:
        whole = finish | rows | passes | {"found_stride": found.stride(0), "TILE": launch.tile}
        yield select_rows, tokens, whole, options
        return
    maxima = torch.empty(tokens, launch.lanes, dtype=torch.float32, device=scores.device)
    counts = torch.empty(tokens, parts, dtype=torch.int32, device=scores.device)
    bounds = torch.empty(tokens, dtype=torch.float32, device=scores.device)
    cut = {"part_size": launch.part_size, "PARTS": parts}
    yield part_maxima, tokens * parts, rows | cut | passes | {"maxima": maxima}, options
    collect = {"k": k, "maxima": maxima, "found": found, "counts": counts, "bounds": bounds, "TILE": launch.tile}
    yield part_candidates, tokens * parts, rows | cut | passes | collect, options
    merge = {"counts": counts, "bounds": bounds}
    yield merge_parts, tokens, finish | rows | cut | merge, {"num_warps": _warps(launch.block)}
