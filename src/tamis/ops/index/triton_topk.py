"""Exact top-k in Triton: the kernels and their launches.

The scores of a row are divided into disjoint groups. The k-th highest of the groups' maxima is a lower bound of the
k-th highest score, since k groups have a score at least that high. With four times as many groups as k, about 1.3 k
scores pass the bound if scores are in random order, and never more than the scores of little over k groups. So a row is
read twice: once for the group maxima, and once to collect the positions of the scores above the bound, in ascending
order. The exact selection is made among those few. Only if the bound itself is the k-th highest score, as on a plateau
of equal scores, the row is read a third time.

The bound is found by bisection on the bits of values in registers, where a step costs one count. Nothing depends on the
order in which programs run, and rows divided into splits give the same selection as whole rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.index.operations import TopkPositions
from tamis.ops.rows.triton_rows import slot_of

MAX_SPLITS = 64
MAX_GROUPS = 8192
"""Group maxima that a program can hold in registers."""

MAX_STRIPS = 32
STRIP_STEP = 128
"""Scores of a strip that its warp reads per step."""
_STEP = tl.constexpr(STRIP_STEP)

_LOWEST = tl.constexpr(-2139095041)
"""Ordinal of -inf."""
_HIGHEST = tl.constexpr(2139095040)
"""Ordinal of inf."""
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _ordinal(x):
    """Integers that compare like the floats; -0.0 counts as 0.0, and NaN as -inf."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x > -_INFINITY, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)


@triton.jit
def _from_ordinal(ordinal):
    """The float with that ordinal, or the next lower one if there is none."""
    ordinal = tl.where(ordinal == -1, -2, ordinal)  # -1 would be -0.0
    return (ordinal ^ ((ordinal >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)  # low + high may need 33 bits


@triton.jit
def _halve(low, high, middle, count, k, slack):
    """The next interval of a bisection for the k-th highest ordinal, which lies in [low, high), given that `count`
    values reach the middle. If the count is from k to k + slack, the search ends just below the middle."""
    enough = count >= k
    close = enough & (count <= k + slack)
    next_low = tl.where(close, middle - 1, tl.where(enough, middle, low))
    return next_low, tl.where(enough & (count > k + slack), high, middle)


@triton.jit
def _bisect(ordinals, low, k, slack):
    """An ordinal that k to k + slack of these exceed, or else the k-th highest of them, but at least `low`."""
    high = tl.maximum(tl.max(ordinals, 0), low) + 1
    while low + 1 < high:
        middle = _middle(low, high)
        low, high = _halve(low, high, middle, tl.sum((ordinals >= middle).to(tl.int32), 0), k, slack)
    return low


@triton.jit
def _bound(maxima, k):
    """A float that at least k of these reach, or -inf. If fewer than k are above it, it is the k-th highest."""
    return _from_ordinal(_bisect(_ordinal(maxima), tl.full([], _LOWEST, tl.int32), k, k // 8))


@triton.jit
def _load_scores(row, position, end, ALIGNED: tl.constexpr):
    """Scores at positions before `end`, -inf past it. In ALIGNED rows the mask covers whole groups of four, because a
    mask that may end anywhere would turn 16-byte loads into 4-byte loads."""
    mask = position // 4 * 4 < end if ALIGNED else position < end
    return tl.where(position < end, tl.load(row + position, mask=mask), -_INFINITY)


@triton.jit
def _group_maxima(
    row, first, end, GROUPS: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr
):
    """The maxima [GROUPS] of the scores from `first` to `end`; group g has every GROUPS-th score. NaN is ignored."""
    offset = tl.arange(0, TILE // GROUPS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    best = tl.full([TILE // GROUPS, GROUPS], -_INFINITY, tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        x = _load_scores(row, start + offset, end, ALIGNED)
        best = tl.where(x > best, x, best)
    return tl.max(best, 0)


@triton.jit
def _strip_size(length, STRIPS: tl.constexpr):
    """The size of each of the strips that a length is divided into."""
    return tl.cdiv(tl.maximum(length, 0), STRIPS * _STEP) * _STEP


@triton.jit
def _collect(row, first, end, bound, found, STRIPS: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr):
    """Write the positions of the scores above the bound, those of each strip in ascending order from the strip's own
    start, and return how many each strip has. A strip belongs to one warp, so warps need no count from each other."""
    strip, lane = tl.arange(0, STRIPS), tl.arange(0, _STEP)
    # A thread holds four neighbours of a strip. Their own prefix sum leaves one value per thread for the warp's scan.
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
        at = (strip * size + counts)[None, :] + tl.cumsum(through3, 0) - through3
        position = base[None, :] + 4 * thread[:, None]
        tl.store(found + at, position, mask=above0 != 0)
        tl.store(found + at + above0, position + 1, mask=above1 != 0)
        tl.store(found + at + through1, position + 2, mask=above2 != 0)
        tl.store(found + at + through2, position + 3, mask=above3 != 0)
        counts += tl.sum(through3, 0)
    return counts


@triton.jit
def _candidates(row, end, found, ends, rank, count, split_size, SPLITS: tl.constexpr, STRIPS: tl.constexpr):
    """The positions with these ranks among the `count` that a row has collected, and their ordinals, which are below
    that of -inf for ranks past the count.

    Each strip has stored its positions in a separate region; `ends` is the running sum of their counts over strips.
    """
    valid = rank < count
    strip = tl.zeros_like(rank)
    for level in tl.static_range(1, 12):
        # Binary search for the last strip that begins at or before the rank.
        if SPLITS * STRIPS >> level > 0:
            other = strip + (SPLITS * STRIPS >> level)
            strip = tl.where(tl.gather(ends, other - 1, 0) <= rank, other, strip)
    begin = tl.where(strip > 0, tl.gather(ends, tl.maximum(strip - 1, 0), 0), 0)
    first = strip // STRIPS * split_size
    size = _strip_size(tl.minimum(end - first, split_size), STRIPS)
    at = first.to(tl.int64) + strip % STRIPS * size + (rank - begin)
    position = tl.load(found + at, mask=valid, other=0)
    x = tl.load(row + position, mask=valid, other=-_INFINITY)
    return position, tl.where(valid, _ordinal(x), _LOWEST - 1)


@triton.jit
def _emit(position, ordinals, least, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE):
    """Append the positions above the least ordinal and the first `ties_left` of those at it, as slots if there is a
    table; return how many ties are left and how many positions the result has."""
    equal = (ordinals == least).to(tl.int32)
    equals = tl.sum(equal, 0)
    keep = ordinals >= least
    if equals > ties_left:
        keep = (ordinals > least) | (keep & (tl.cumsum(equal, 0) <= ties_left))
    column = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
    if table is not None:
        position = slot_of(position, keep, table, page_id_stride, table_width, PAGE_SIZE).to(tl.int32)
    tl.store(result + column, position, mask=keep)
    return ties_left - equals, taken + tl.sum(keep.to(tl.int32), 0)


@triton.jit
def _finish(
    row, end, bound, found, counts, split_size, k, result, request_ids, block_table, table_stride, page_id_stride,
    requests, table_width, token,
    SPLITS: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Select k of the positions that a row has collected, and write them or their slots."""
    table = block_table
    if block_table is not None:
        request = tl.load(request_ids + token)
        known = (request >= 0) & (request < requests)
        table = block_table + tl.where(known, request, 0).to(tl.int64) * table_stride
        table_width = tl.where(known, table_width, 0)
    lane = tl.arange(0, BLOCK)
    count = tl.sum(counts, 0)
    ends = tl.cumsum(counts, 0)
    taken = 0
    if (count < k) & (bound > -_INFINITY):
        # The bound is the k-th highest score: the first positions with that score fill the result up.
        ties_left = k - count
        for start in range(0, end, BLOCK):
            x = tl.load(row + start + lane, mask=start + lane < end, other=-_INFINITY)
            ties_left, taken = _emit(
                start + lane, _ordinal(x), _ordinal(bound), ties_left, taken, result, table, table_width,
                page_id_stride, PAGE_SIZE,
            )  # fmt: skip
    elif count <= BLOCK:
        position, ordinals = _candidates(row, end, found, ends, lane, count, split_size, SPLITS, STRIPS)
        least = tl.full([], _LOWEST, tl.int32)
        if count > k:
            least = _bisect(ordinals, tl.min(tl.where(lane < count, ordinals, _HIGHEST), 0), k, 0)
        ties_left = k - tl.sum((ordinals > least).to(tl.int32), 0)
        ties_left, taken = _emit(
            position, ordinals, least, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE
        )
    else:
        # There are more candidates than registers hold, for example if the order of the scores defeats the groups. The
        # same selection then reads them from memory.
        low = tl.full([], _LOWEST, tl.int32)
        high = tl.full([], _HIGHEST + 1, tl.int32)
        while low + 1 < high:
            middle = _middle(low, high)
            reaching = 0
            for start in range(0, count, BLOCK):
                _, ordinals = _candidates(row, end, found, ends, start + lane, count, split_size, SPLITS, STRIPS)
                reaching += tl.sum((ordinals >= middle).to(tl.int32), 0)
            low, high = _halve(low, high, middle, reaching, k, 0)
        ties_left = k
        for start in range(0, count, BLOCK):
            _, ordinals = _candidates(row, end, found, ends, start + lane, count, split_size, SPLITS, STRIPS)
            ties_left -= tl.sum((ordinals > low).to(tl.int32), 0)
        for start in range(0, count, BLOCK):
            position, ordinals = _candidates(row, end, found, ends, start + lane, count, split_size, SPLITS, STRIPS)
            ties_left, taken = _emit(
                position, ordinals, low, ties_left, taken, result, table, table_width, page_id_stride, PAGE_SIZE
            )
    column = tl.arange(0, BLOCK_K)
    tl.store(result + column, -1, mask=(column >= taken) & (column < k))


# do_not_specialize: Triton would otherwise recompile when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["width", "k", "table_stride", "requests", "table_width"])
def select_rows(
    scores, scores_stride, lengths, width, k, split_size, found, result, request_ids, block_table, table_stride,
    page_id_stride, requests, table_width,
    GROUPS: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The whole selection of one row."""
    token = tl.program_id(0).to(tl.int64)
    row = scores + token * scores_stride
    found += token * split_size
    end = tl.minimum(tl.load(lengths + token), width)
    bound = _bound(_group_maxima(row, 0, end, GROUPS, GROUPS, ALIGNED, STAGES), k)
    counts = _collect(row, 0, end, bound, found, STRIPS, ALIGNED, STAGES)
    tl.debug_barrier()  # _finish reads what other threads have written to `found`
    _finish(
        row, end, bound, found, counts, split_size, k, result + token * k, request_ids, block_table, table_stride,
        page_id_stride, requests, table_width, token, 1, STRIPS, BLOCK, BLOCK_K, PAGE_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width"])
def split_maxima(
    scores, scores_stride, lengths, width, split_size, maxima,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, STRIPS: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Group maxima [tokens, SPLITS, GROUPS // SPLITS]; a program has one split of one row."""
    token, split = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    first = split * split_size
    end = tl.minimum(tl.minimum(tl.load(lengths + token), width), first + split_size)
    row = scores + token * scores_stride
    best = _group_maxima(row, first, end, GROUPS // SPLITS, STRIPS * _STEP, ALIGNED, STAGES)
    tl.store(maxima + tl.program_id(0).to(tl.int64) * (GROUPS // SPLITS) + tl.arange(0, GROUPS // SPLITS), best)


@triton.jit(do_not_specialize=["width", "k"])
def split_candidates(
    scores, scores_stride, lengths, width, k, split_size, maxima, found, counts, bounds,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, STRIPS: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Positions [tokens, SPLITS, split_size] of a split's scores above the bound of its row, and how many per strip.

    Every program of a row computes the bound, which is faster than one more launch that computes it once.
    """
    token, split = (tl.program_id(0) // SPLITS).to(tl.int64), tl.program_id(0) % SPLITS
    first = split * split_size
    end = tl.minimum(tl.minimum(tl.load(lengths + token), width), first + split_size)
    own = tl.program_id(0).to(tl.int64)
    strip_counts = tl.zeros([STRIPS], tl.int32)
    if (first < end) | (split == 0):
        bound = _bound(tl.load(maxima + token * GROUPS + tl.arange(0, GROUPS)), k)
        row = scores + token * scores_stride
        strip_counts = _collect(row, first, end, bound, found + own * split_size, STRIPS, ALIGNED, STAGES)
        tl.store(bounds + token, bound, mask=split == 0)
    tl.store(counts + own * STRIPS + tl.arange(0, STRIPS), strip_counts)


@triton.jit(do_not_specialize=["width", "k", "table_stride", "requests", "table_width"])
def merge_splits(
    scores, scores_stride, lengths, width, k, split_size, found, counts, bounds, result, request_ids, block_table,
    table_stride, page_id_stride, requests, table_width,
    SPLITS: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The selection of one row from the candidates of its splits."""
    token = tl.program_id(0).to(tl.int64)
    strip_counts = tl.load(counts + token * (SPLITS * STRIPS) + tl.arange(0, SPLITS * STRIPS))
    end = tl.minimum(tl.load(lengths + token), width)
    _finish(
        scores + token * scores_stride, end, tl.load(bounds + token), found + token * SPLITS * split_size, strip_counts,
        split_size, k, result + token * k, request_ids, block_table, table_stride, page_id_stride, requests,
        table_width, token, SPLITS, STRIPS, BLOCK, BLOCK_K, PAGE_SIZE,
    )  # fmt: skip


@dataclass(frozen=True)
class TopkLaunch:
    """The launch shape of a selection."""

    splits: int
    """Programs per row, a power of two."""
    split_size: int
    """Positions per program."""
    groups: int
    """Groups of scores per row, whose maxima bound the selection."""
    strips: int
    """Strips per split, one per warp or few warps, a power of two."""
    block: int
    """Candidates that the exact selection holds in registers."""
    warps: int
    stages: int

    @property
    def scratch(self) -> int:
        """4-byte elements per row beside scores and result."""
        between = self.groups + self.splits * self.strips + 1 if self.splits > 1 else 0
        return self.splits * self.split_size + between


def choose_topk_launch(tokens: int, width: int, k: int, sms: int) -> TopkLaunch:
    """The launch shape for rows of scores. Few long rows are divided into splits, which costs two more launches."""
    power = triton.next_power_of_2(k)
    groups = min(MAX_GROUPS, 4 * max(256, power), triton.next_power_of_2(max(STRIP_STEP, width)))
    splits = 1
    while splits * tokens <= sms and width >= 4096 * splits and splits < min(MAX_SPLITS, groups // 128):
        splits *= 2
    share = max(1, triton.cdiv(width, splits))
    strips = max(1, min(MAX_STRIPS, triton.next_power_of_2(share) // STRIP_STEP))
    block = min(2 * max(64, power), triton.next_power_of_2(max(128, width)))
    split_size = triton.cdiv(share, strips * STRIP_STEP) * strips * STRIP_STEP
    warps = _warps(max(groups, block) if splits == 1 else groups)
    return TopkLaunch(splits, split_size, groups, strips, block, warps, 3)


def _warps(numbers: int) -> int:
    """Warps for so many values: 16 values per thread."""
    return max(4, min(16, numbers // 512))


def topk_launches(
    launch: TopkLaunch, call: TopkPositions, result: Tensor
) -> Iterator[tuple[Any, int, dict[str, Any], dict[str, int]]]:
    """Kernel, grid, arguments and options of each launch of a selection. Rows of scores must be contiguous."""
    scores, block_table = call.scores, call.block_table
    tokens, width = scores.shape
    splits, device = launch.splits, scores.device
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    rows = {"scores": scores, "scores_stride": scores.stride(0), "lengths": call.lengths, "width": width}
    cut = {"split_size": launch.split_size, "STRIPS": launch.strips}
    found = torch.empty(tokens, splits * launch.split_size, dtype=torch.int32, device=device)
    finish = cut | {
        "k": call.k,
        "found": found,
        "result": result,
        "request_ids": call.request_ids,
        "block_table": block_table,
        "table_stride": None if block_table is None else block_table.stride(0),
        "page_id_stride": None if block_table is None else block_table.stride(1),
        "requests": None if block_table is None else block_table.shape[0],
        "table_width": None if block_table is None else block_table.shape[1],
        "BLOCK": launch.block,
        "BLOCK_K": triton.next_power_of_2(call.k),
        "PAGE_SIZE": call.page_size,
    }
    aligned = width % 4 == 0 and scores.stride(0) % 4 == 0
    passes = rows | cut | {"GROUPS": launch.groups, "ALIGNED": aligned, "STAGES": launch.stages}
    if splits == 1:
        yield select_rows, tokens, finish | passes, options
        return
    maxima = torch.empty(tokens, launch.groups, dtype=torch.float32, device=device)
    counts = torch.empty(tokens, splits * launch.strips, dtype=torch.int32, device=device)
    bounds = torch.empty(tokens, dtype=torch.float32, device=device)
    streaming = options | {"num_warps": _warps(launch.strips * STRIP_STEP)}
    yield split_maxima, tokens * splits, passes | {"SPLITS": splits, "maxima": maxima}, streaming
    collected = {"SPLITS": splits, "counts": counts, "bounds": bounds}
    candidates = passes | collected | {"k": call.k, "maxima": maxima, "found": found}
    yield split_candidates, tokens * splits, candidates, options
    yield merge_splits, tokens, finish | rows | collected, {"num_warps": _warps(launch.block)}
