"""The bytes that each stage must move, its arithmetic, and the shortest time that a machine needs for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout


@dataclass(frozen=True)
class Cost:
    """Bytes that a call must move through memory, each input and output once, and its arithmetic."""

    bytes: int
    flops: int = 0
    speed: int = 1
    """Peak rate of the products relative to bf16: 2 for FP8."""


@dataclass(frozen=True)
class Ceiling:
    """The highest rates of a machine."""

    bytes_per_second: float
    """Rate of a large copy, counting the bytes read and the bytes written."""
    flops_per_second: float | None
    """Rate of a large bf16 matrix product; None where no arithmetic limit is assumed."""
    source: str
    """The origin of the numbers, shown to the user."""

    def seconds(self, cost: Cost) -> float:
        """The roofline time: the larger of bytes over bandwidth and operations over peak."""
        moving = cost.bytes / self.bytes_per_second
        computing = cost.flops / (self.flops_per_second * cost.speed) if self.flops_per_second else 0.0
        return max(moving, computing)


_SPAN = 8
"""Tokens that one entry of a C4A layer is made of."""
MEASURED = {"H200": (4.3e12, 790e12)}
"""Copy bandwidth and bf16 matrix product rate measured on a GPU whose name contains the key."""


def distinct_rows(length: int, picked: int, tokens: int) -> float:
    """Expected number of different rows read by `tokens` tokens that each pick `picked` of `length` at random."""
    picked = min(picked, length)
    return length * (1 - (1 - picked / length) ** tokens) if length else 0.0


def attend_cost(
    requests: Sequence[tuple[int, int]], *, heads: int, picks: Sequence[int], layout: Layout, value_dim: int
) -> Cost:
    """Cost of attention: selected rows, their indices, 16-bit queries and outputs; two products per selected row.

    Args:
        requests: new tokens and length of each request.
        heads: query heads.
        picks: rows that a token picks from each of its selections.
        layout: byte format of the rows.
        value_dim: width of the output.
    """
    rows = sum(distinct_rows(length, picked, tokens) for tokens, length in requests for picked in picks)
    pairs = sum(tokens * min(picked, length) for tokens, length in requests for picked in picks)
    tokens = sum(new for new, _ in requests)
    moved = rows * layout.row_bytes + 4 * tokens * sum(picks) + 2 * tokens * heads * (layout.width + value_dim)
    return Cost(round(moved), 2 * pairs * heads * (layout.width + value_dim))


def write_cost(tokens: int, layout: Layout) -> Cost:
    """Cost of a write: 16-bit rows and their 64-bit slots in, packed rows out."""
    return Cost(tokens * (2 * layout.width + 8 + layout.row_bytes))


def gather_cost(tokens: int, layout: Layout, page_size: int) -> Cost:
    """Cost of a gather: packed rows and their pages' ids in, 16-bit rows out."""
    return Cost(tokens * (layout.row_bytes + 2 * layout.width) + 4 * ceil_div(tokens, page_size))


def translate_cost(tokens: int, topk: int, pages: int) -> Cost:
    """Cost of a translation: positions, request ids and the block table in, slots and counts out."""
    return Cost(tokens * (8 * topk + 8) + 4 * pages)


def compress_cost(
    tokens: int, entries: int, heads: int, layout: Layout, index: Layout, index_heads: int, q_rank: int
) -> Cost:
    """Cost of a C4A layer's small launches: the compressed query, queries, index queries and outputs in and out in
    bf16, raw rows, float32 values and scores of two compressors into their state, and the spans and entries of the
    tokens that complete an entry."""
    total = tokens * q_rank * 2 * 2
    for width, count, passes in ((layout.width, heads, 2), (index.width, index_heads, 1)):
        total += tokens * count * width * 2 * 2 * passes
    total += tokens * (layout.width * 2 + layout.row_bytes)
    for one in (layout, index):
        total += tokens * 2 * (2 * one.width) * 4 * 2
        total += entries * (2 * _SPAN * one.width * 4 + one.row_bytes)
    return Cost(total)


def select_cost(tokens: int, window: int, entries: int, columns: int) -> Cost:
    """Cost of a V4 step's row selection: positions, request ids and pages in; per token a window, all entries and nine
    numbers out."""
    return Cost(tokens * (8 + 4 * window + 4 * columns + 36) + 4 * (tokens * (window // 64 + 3) + entries // 2))


def seen_pairs(requests: Sequence[tuple[int, int]]) -> int:
    """Pairs of a token and a key that it sees, if the new tokens are the last ones of their request."""
    return sum(new * length - new * (new - 1) // 2 for new, length in requests)


def scores_cost(requests: Sequence[tuple[int, int]], *, heads: int, layout: Layout, page_size: int) -> Cost:
    """Cost of index scores: keys, scales, page ids, FP8 queries, weights and lengths in, scores out."""
    read = _index_cost(requests, heads=heads, layout=layout, page_size=page_size)
    return replace(read, bytes=read.bytes + 4 * seen_pairs(requests))


def topk_cost(requests: Sequence[tuple[int, int]], *, topk: int) -> Cost:
    """Cost of top-k: scores and lengths in, positions out."""
    tokens = sum(new for new, _ in requests)
    return Cost(4 * seen_pairs(requests) + 4 * tokens * (1 + topk))


def index_cost(requests: Sequence[tuple[int, int]], *, heads: int, topk: int, layout: Layout, page_size: int) -> Cost:
    """Cost of scores and top-k in one call: the inputs of scores in, positions out, no score in memory."""
    read = _index_cost(requests, heads=heads, layout=layout, page_size=page_size)
    return replace(read, bytes=read.bytes + 4 * topk * sum(tokens for tokens, _ in requests))


def _index_cost(requests: Sequence[tuple[int, int]], *, heads: int, layout: Layout, page_size: int) -> Cost:
    keys = sum(length * layout.row_bytes + 4 * ceil_div(length, page_size) for _, length in requests)
    tokens = sum(new for new, _ in requests)
    queries = tokens * (heads * (layout.width + 4) + 8)
    return Cost(keys + queries, 2 * seen_pairs(requests) * heads * layout.width, speed=2)


def find_ceiling(device: torch.device) -> Ceiling:
    """The limits of a device: from `MEASURED` for a known GPU, otherwise measured here; on a CPU copies only."""
    if device.type != "cuda":
        return Ceiling(_copy_rate(device, 2**26), None, "copy measured here")
    name = torch.cuda.get_device_name(device)
    for part, (moving, computing) in MEASURED.items():
        if part in name:
            return Ceiling(moving, computing, f"measured on an {part}")
    return Ceiling(_copy_rate(device, 2**30), _product_rate(device), "copy and matrix product measured here")


def _copy_rate(device: torch.device, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


def _product_rate(device: torch.device) -> float:
    size = 8192
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / _median_seconds(lambda: left @ left, device)


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(2 + 9):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return median(times[2:])  # the first two warm the device up
