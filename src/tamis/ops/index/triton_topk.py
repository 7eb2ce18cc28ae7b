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

MOST_STRIPS = 32
STRIP_STEP = 128
"""Scores of a strip that a warp reads at a time."""
_STEP = tl.constexpr(STRIP_STEP)

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
def _load_scores(row, position, end, ALIGNED: tl.constexpr):
    """Scores at positions before `end`, -inf behind. Where rows are whole quadruples they are read as such: a mask that
    may end anywhere would cut the loads into single numbers."""
    mask = position // 4 * 4 < end if ALIGNED else position < end
    return tl.where(position < end, tl.load(row + position, mask=mask), -_INFINITY)


@triton.jit
def _lane_maxima(row, first, end, LANES: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr):
    """For each lane the highest of every LANES-th score from `first` to `end`; NaN is nothing."""
    place = tl.arange(0, TILE // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full([TILE // LANES, LANES], -_INFINITY, tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        x = _load_scores(row, start + place, end, ALIGNED)
        best = tl.where(x > best, x, best)
    return tl.max(best, 0)


@triton.jit
def _strip_size(length, STRIPS: tl.constexpr):
    """Positions of each of the strips that a length is cut into."""
    return tl.cdiv(tl.maximum(length, 0), STRIPS * _STEP) * _STEP


@triton.jit
def _collect(row, first, end, bound, found, STRIPS: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr):
    """Write the positions of the scores above the bound, in ascending order for each strip and from its own start, and
    return how many each has. A strip is the work of one warp: no other needs to know how many it has found so far."""
    strip, lane = tl.arange(0, STRIPS), tl.arange(0, _STEP)
    # A thread holds four neighbours of a strip: adding them up by hand leaves one number for the sum over its warp.
    thread = tl.arange(0, _STEP // 4)
    size = _strip_size(end - first, STRIPS)
    counts = tl.zeros([STRIPS], tl.int32)
    for start in tl.range(0, size, _STEP, num_stages=STAGES):
        base = first + strip * size + start
        x = _load_scores(row, base[None, :] + lane[:, None], end, ALIGNED)
        above = (x > bound).to(tl.int32).reshape([_STEP // 4, 2, 2, STRIPS])
        even, odd = tl.split(tl.permute(above, [0, 3, 1, 2]))
        above0, above2 = tl.split(even)
        above1, above3 = tl.split(odd)
        through1 = above0 + above1
        through2 = through1 + above2
        through3 = through2 + above3
        place = (strip * size + counts)[None, :] + tl.cumsum(through3, 0) - through3
        position = base[None, :] + 4 * thread[:, None]
        tl.store(found + place, position, mask=above0 != 0)
        tl.store(found + place + above0, position + 1, mask=above1 != 0)
        tl.store(found + place + through1, position + 2, mask=above2 != 0)
        tl.store(found + place + through2, position + 3, mask=above3 != 0)
        counts += tl.sum(through3, 0)
    return counts


@triton.jit
def _candidates(row, end, found, ends, place, count, part_size, PARTS: tl.constexpr, STRIPS: tl.constexpr):
    """Positions at these places of a row's list and their orders, below that of -inf where the list has ended.

    Each strip has its part of the list in a place of its own; `ends` says how many there are up to the end of each.
    """
    there = place < count
    strip = tl.zeros_like(place)
    for level in tl.static_range(1, 12):
        # The last strip that begins at or before the place, one binary digit after the other.
        if PARTS * STRIPS >> level > 0:
            other = strip + (PARTS * STRIPS >> level)
            strip = tl.where(tl.gather(ends, other - 1, 0) <= place, other, strip)
    begin = tl.where(strip > 0, tl.gather(ends, tl.maximum(strip - 1, 0), 0), 0)
    first = strip // STRIPS * part_size
    size = _strip_size(tl.minimum(end - first, part_size), STRIPS)
    at = first.to(tl.int64) + strip % STRIPS * size + (place - begin)
    position = tl.load(found + at, mask=there, other=0)
    x = tl.load(row + position, mask=there, other=-_INFINITY)
    return position, tl.where(there, _order(x), _LOWEST - 1)


@triton.jit
def _emit(position, orders, least, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE):
    """Append positions above the least order, and as many of that order as are left; return the new counts."""
    equal = (orders == least).to(tl.int32)
    equals = tl.sum(equal, 0)
    keep = orders >= least
    if equals > ties_left:
        keep = (orders > least) | (keep & (tl.cumsum(equal, 0) <= ties_left))
    place = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
    if table is not None:
        page = position // PAGE_SIZE
        page_id = tl.load(table + page.to(tl.int64) * page_id_stride, mask=keep & (page < table_width), other=-1)
        slot = page_id.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        position = tl.where((page_id >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)
    tl.store(result + place, position, mask=keep)
    return ties_left - equals, taken + tl.sum(keep.to(tl.int32), 0)


@triton.jit
def _finish(
    row, end, bound, found, counts, part_size, k, result, request_ids, block_table, table_stride, page_id_stride,
    requests, table_width, token,
    PARTS: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Select k of the positions that a row has found above its bound, and write them, or their slots."""
    table = block_table
    if block_table is not None:
        request = tl.load(request_ids + token)
        listed = (request >= 0) & (request < requests)
        table = block_table + tl.where(listed, request, 0).to(tl.int64) * table_stride
        table_width = tl.where(listed, table_width, 0)
    lane = tl.arange(0, BLOCK)
    count = tl.sum(counts, 0)
    ends = tl.cumsum(counts, 0)
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
        position, orders = _candidates(row, end, found, ends, lane, count, part_size, PARTS, STRIPS)
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
                _, orders = _candidates(row, end, found, ends, start + lane, count, part_size, PARTS, STRIPS)
                reaching += tl.sum((orders >= middle).to(tl.int32), 0)
            low, high = _halve(low, high, middle, reaching, k, 0)
        ties_left = k
        for start in range(0, count, BLOCK):
            _, orders = _candidates(row, end, found, ends, start + lane, count, part_size, PARTS, STRIPS)
            ties_left -= tl.sum((orders > low).to(tl.int32), 0)
        for start in range(0, count, BLOCK):
            position, orders = _candidates(row, end, found, ends, start + lane, count, part_size, PARTS, STRIPS)
            ties_left, taken = _emit(
                position, orders, low, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE
            )
    column = tl.arange(0, BLOCK_K)
    tl.store(result + column, -1, mask=(column >= taken) & (column < k))


# Batches of any size share one kernel: where alignment does not matter, sizes are not looked at.
@triton.jit(do_not_specialize=["width", "k", "table_stride", "requests", "table_width"])
def select_rows(
    scores, scores_stride, lengths, width, k, part_size, found, result, request_ids, block_table, table_stride,
    page_id_stride, requests, table_width,
    LANES: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The whole selection of one row."""
    token = tl.program_id(0).to(tl.int64)
    row = scores + token * scores_stride
    found += token * part_size
    end = tl.minimum(tl.load(lengths + token), width)
    bound = _bound(_lane_maxima(row, 0, end, LANES, LANES, ALIGNED, STAGES), k)
    counts = _collect(row, 0, end, bound, found, STRIPS, ALIGNED, STAGES)
    tl.debug_barrier()  # what other threads have found is read next
    _finish(
        row, end, bound, found, counts, part_size, k, result + token * k, request_ids, block_table, table_stride,
        page_id_stride, requests, table_width, token, 1, STRIPS, BLOCK, BLOCK_K, PAGE_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def part_maxima(
    scores, scores_stride, lengths, width, part_size, maxima,
    PARTS: tl.constexpr, LANES: tl.constexpr, STRIPS: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Group maxima [tokens, PARTS, LANES // PARTS] of a part of a row."""
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    first = part * part_size
    end = tl.minimum(tl.minimum(tl.load(lengths + token), width), first + part_size)
    row = scores + token * scores_stride
    best = _lane_maxima(row, first, end, LANES // PARTS, STRIPS * _STEP, ALIGNED, STAGES)
    tl.store(maxima + tl.program_id(0).to(tl.int64) * (LANES // PARTS) + tl.arange(0, LANES // PARTS), best)


@triton.jit(do_not_specialize=["width", "k"])
def part_candidates(
    scores, scores_stride, lengths, width, k, part_size, maxima, found, counts, bounds,
    PARTS: tl.constexpr, LANES: tl.constexpr, STRIPS: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Positions [tokens, PARTS, part_size] of a part's scores above the bound of its row, and how many in each strip.

    Every program of a row works out its bound, which is faster than a launch that does it once.
    """
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    first = part * part_size
    end = tl.minimum(tl.minimum(tl.load(lengths + token), width), first + part_size)
    own = tl.program_id(0).to(tl.int64)
    found_here = tl.zeros([STRIPS], tl.int32)
    if (first < end) | (part == 0):
        bound = _bound(tl.load(maxima + token * LANES + tl.arange(0, LANES)), k)
        row = scores + token * scores_stride
        found_here = _collect(row, first, end, bound, found + own * part_size, STRIPS, ALIGNED, STAGES)
        tl.store(bounds + token, bound, mask=part == 0)
    tl.store(counts + own * STRIPS + tl.arange(0, STRIPS), found_here)


@triton.jit(do_not_specialize=["width", "k", "table_stride", "requests", "table_width"])
def merge_parts(
    scores, scores_stride, lengths, width, k, part_size, found, counts, bounds, result, request_ids, block_table,
    table_stride, page_id_stride, requests, table_width,
    PARTS: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The selection of one row from what its parts have found."""
    token = tl.program_id(0).to(tl.int64)
    of_strips = tl.load(counts + token * (PARTS * STRIPS) + tl.arange(0, PARTS * STRIPS))
    end = tl.minimum(tl.load(lengths + token), width)
    _finish(
        scores + token * scores_stride, end, tl.load(bounds + token), found + token * PARTS * part_size, of_strips,
        part_size, k, result + token * k, request_ids, block_table, table_stride, page_id_stride, requests, table_width,
        token, PARTS, STRIPS, BLOCK, BLOCK_K, PAGE_SIZE,
    )  # fmt: skip


@dataclass(frozen=True)
class TopkLaunch:
    """How a selection is laid out."""

    parts: int
    """Programs per row, a power of two."""
    part_size: int
    """Positions per program."""
    lanes: int
    """Groups of scores whose maxima bound the selection."""
    strips: int
    """Pieces of a part in which positions are collected, a power of two."""
    block: int
    """Positions that are sorted out in registers."""
    warps: int
    stages: int

    @property
    def scratch(self) -> int:
        """Numbers per row beside scores and result."""
        return self.parts * self.part_size + (self.lanes + self.parts * self.strips + 1 if self.parts > 1 else 0)


def choose_topk_launch(tokens: int, width: int, k: int, cores: int) -> TopkLaunch:
    """Blocks for so many rows. Few long rows are cut into parts, which costs two more launches."""
    power = triton.next_power_of_2(k)
    lanes = min(MOST_LANES, 4 * max(256, power), triton.next_power_of_2(max(STRIP_STEP, width)))
    parts = 1
    while parts * tokens <= cores and width >= 4096 * parts and parts < min(MOST_PARTS, lanes // 128):
        parts *= 2
    share = max(1, triton.cdiv(width, parts))
    strips = max(1, min(MOST_STRIPS, triton.next_power_of_2(share) // STRIP_STEP))
    block = min(2 * max(64, power), triton.next_power_of_2(max(128, width)))
    part_size = triton.cdiv(share, strips * STRIP_STEP) * strips * STRIP_STEP
    warps = _warps(max(lanes, block) if parts == 1 else lanes)
    return TopkLaunch(parts, part_size, lanes, strips, block, warps, 3)


def _warps(numbers: int) -> int:
    """Enough that 16 numbers are left to each thread."""
    return max(4, min(16, numbers // 512))


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
    cut = {"part_size": launch.part_size, "STRIPS": launch.strips}
    found = torch.empty(tokens, parts * launch.part_size, dtype=torch.int32, device=scores.device)
    finish = cut | {
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
    aligned = width % 4 == 0 and scores.stride(0) % 4 == 0
    passes = rows | cut | {"LANES": launch.lanes, "ALIGNED": aligned, "STAGES": launch.stages}
    if parts == 1:
        yield select_rows, tokens, finish | passes, options
        return
    maxima = torch.empty(tokens, launch.lanes, dtype=torch.float32, device=scores.device)
    counts = torch.empty(tokens, parts * launch.strips, dtype=torch.int32, device=scores.device)
    bounds = torch.empty(tokens, dtype=torch.float32, device=scores.device)
    streaming = options | {"num_warps": _warps(launch.strips * STRIP_STEP)}
    yield part_maxima, tokens * parts, passes | {"PARTS": parts, "maxima": maxima}, streaming
    collected = {"PARTS": parts, "counts": counts, "bounds": bounds}
    yield part_candidates, tokens * parts, passes | collected | {"k": k, "maxima": maxima, "found": found}, options
    yield merge_parts, tokens, finish | rows | collected, {"num_warps": _warps(launch.block)}
