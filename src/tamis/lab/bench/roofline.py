"""What a call must move and compute at least, and how long the machine needs for that at best."""

from collections.abc import Sequence
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
    """How many operations take the time of one in bf16: 2 for products of FP8 numbers."""


@dataclass(frozen=True)
class Ceiling:
    """What a machine can do at best."""

    bytes_per_second: float
    """Copying, read and written bytes together."""
    flops_per_second: float | None
    """A large bf16 matrix product; None where no arithmetic limit is assumed."""
    source: str
    """Where the numbers come from."""

    def seconds(self, cost: Cost) -> float:
        """The time below which no version runs: the larger of moving and computing."""
        moving = cost.bytes / self.bytes_per_second
        computing = cost.flops / (self.flops_per_second * cost.speed) if self.flops_per_second else 0.0
        return max(moving, computing)


MEASURED = {"H200": (4.3e12, 790e12)}
"""By a part of the GPU's name: copy bandwidth and bf16 matrix product, measured on such a machine."""


def distinct_rows(length: int, picked: int, tokens: int) -> float:
    """How many different rows `tokens` tokens touch on average that each pick `picked` of `length` at random."""
    picked = min(picked, length)
    return length * (1 - (1 - picked / length) ** tokens) if length else 0.0


def attend_cost(
    requests: Sequence[tuple[int, int]], *, heads: int, picks: Sequence[int], layout: Layout, value_dim: int
) -> Cost:
    """Of attention: selected rows, their indices, 16-bit queries and outputs; two products per selected row.

    Args:
        requests: new tokens and length of each.
        heads: query heads.
        picks: rows that a token picks from each of its selections.
        layout: of the rows.
        value_dim: width of the output.
    """
    rows = sum(distinct_rows(length, picked, tokens) for tokens, length in requests for picked in picks)
    pairs = sum(tokens * min(picked, length) for tokens, length in requests for picked in picks)
    tokens = sum(new for new, _ in requests)
    moved = rows * layout.row_bytes + 4 * tokens * sum(picks) + 2 * tokens * heads * (layout.width + value_dim)
    return Cost(round(moved), 2 * pairs * heads * (layout.width + value_dim))


def write_cost(tokens: int, layout: Layout) -> Cost:
    """Of a write: 16-bit rows and their 64-bit slots in, packed rows out."""
    return Cost(tokens * (2 * layout.width + 8 + layout.row_bytes))


def gather_cost(tokens: int, layout: Layout, page_size: int) -> Cost:
    """Of a gather: packed rows and their pages' ids in, 16-bit rows out."""
    return Cost(tokens * (layout.row_bytes + 2 * layout.width) + 4 * ceil_div(tokens, page_size))


def translate_cost(tokens: int, topk: int, pages: int) -> Cost:
    """Of a translation: positions, request ids and the block table in, slots and counts out."""
    return Cost(tokens * (8 * topk + 8) + 4 * pages)


def compress_cost(
    tokens: int, entries: int, heads: int, layout: Layout, index: Layout, index_heads: int, q_rank: int, span: int = 8
) -> Cost:
    """Of a C4A layer's small launches: rows and heads in and out in bf16 (compressed query, queries, index queries,
    outputs), raw rows, values and scores of two compressors in float32 to their state, and the spans and entries of
    those tokens that end one."""
    total = tokens * q_rank * 2 * 2
    for width, count, passes in ((layout.width, heads, 2), (index.width, index_heads, 1)):
        total += tokens * count * width * 2 * 2 * passes
    total += tokens * (layout.width * 2 + layout.row_bytes)
    for one in (layout, index):
        total += tokens * 2 * (2 * one.width) * 4 * 2
        total += entries * (2 * span * one.width * 4 + one.row_bytes)
    return Cost(total)


def select_cost(tokens: int, window: int, entries: int, columns: int) -> Cost:
    """Of a V4 step's rows: positions, requests and pages in, windows, rows of every entry and nine numbers out."""
    return Cost(tokens * (8 + 4 * window + 4 * columns + 36) + 4 * (tokens * (window // 64 + 3) + entries // 2))


def scores_cost(requests: Sequence[tuple[int, int]], *, heads: int, layout: Layout, page_size: int) -> Cost:
    """Of index scores: keys with their scales and page ids, FP8 queries, their weights and lengths in, scores out."""
    pairs = sum(tokens * length for tokens, length in requests)
    read = _index_cost(requests, heads=heads, layout=layout, page_size=page_size)
    return replace(read, bytes=read.bytes + 4 * pairs)


def topk_cost(requests: Sequence[tuple[int, int]], *, topk: int) -> Cost:
    """Of a selection: scores and lengths in, positions out."""
    tokens = sum(new for new, _ in requests)
    return Cost(4 * sum(new * length for new, length in requests) + 4 * tokens * (1 + topk))


def index_cost(requests: Sequence[tuple[int, int]], *, heads: int, topk: int, layout: Layout, page_size: int) -> Cost:
    """Of scores and selection in one: what scores read, positions out, and no score in memory."""
    read = _index_cost(requests, heads=heads, layout=layout, page_size=page_size)
    return replace(read, bytes=read.bytes + 4 * topk * sum(tokens for tokens, _ in requests))


def _index_cost(requests: Sequence[tuple[int, int]], *, heads: int, layout: Layout, page_size: int) -> Cost:
    keys = sum(length * layout.row_bytes + 4 * ceil_div(length, page_size) for _, length in requests)
    tokens = sum(new for new, _ in requests)
    queries = tokens * (heads * (layout.width + 4) + 8)
    pairs = sum(new * length for new, length in requests)
    return Cost(keys + queries, 2 * pairs * heads * layout.width, speed=2)


def find_ceiling(device: torch.device) -> Ceiling:
    """The measured numbers of a known GPU; otherwise measured here. A CPU has a copy bandwidth only."""
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


def _product_rate(device: torch.device, size: int = 8192) -> float:
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / _median_seconds(lambda: left @ left, device)


def _median_seconds(call: object, device: torch.device, repeats: int = 9) -> float:
    assert callable(call)
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return median(times[2:])
