"""Input sets for the small launches of a V4 layer: norms, rotations and compressors."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, compressor_state, index_fp8
from tamis.cache.paged import PagedCache
from tamis.lab.bench.roofline import Cost, compress_cost
from tamis.lab.testing import compare
from tamis.model.rope import Rope
from tamis.ops import StatePages, compress_kv, norm_rows, rotate_and_write, rotate_heads

RATIO, SPAN, STATE_PAGE = 4, 8, 4
INDEX_HEADS, INDEX_DIM, ROTARY, Q_RANK = 64, 128, 64, 1024


@dataclass(frozen=True, eq=False)
class Compressor:
    """The inputs and caches of one compressor."""

    values: Tensor
    scores: Tensor
    state: PagedCache
    cache: PagedCache
    bias: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class CompressSet:
    """The five small launches of a C4A layer: the norm of the compressed query, the rotation of queries with the write
    of raw rows, both compressors, and the inverse rotation of outputs."""

    low_q: Tensor
    low_weight: Tensor
    q: Tensor
    kv: Tensor
    index_q: Tensor
    window: PagedCache
    slots: Tensor
    positions: Tensor
    cos_sin: Tensor
    compressors: tuple[Compressor, Compressor]
    pages: StatePages
    completed: Tensor

    bound = 1e-2

    def run(self, backend: str) -> tuple[Tensor, ...]:
        """The compressed query, queries, index queries, and the queries rotated back, in place of real outputs."""
        table, positions = self.cos_sin, self.positions
        low = norm_rows(self.low_q, self.low_weight, backend=backend)
        q, index_q = rotate_and_write(
            self.q,
            self.kv,
            self.window,
            self.slots,
            positions=positions,
            cos_sin=table,
            norm_weight=self.compressors[0].weight,
            index_q=self.index_q,
            backend=backend,
        )
        for one in self.compressors:
            compress_kv(
                one.values,
                one.scores,
                one.state,
                one.cache,
                positions=positions,
                pages=self.pages,
                slots=self.completed,
                bias=one.bias,
                norm_weight=one.weight,
                cos_sin=table,
                backend=backend,
            )
        assert index_q is not None
        return low, q, index_q, rotate_heads(q, positions, table, inverse=True, backend=backend)

    def error(self, result: tuple[Tensor, ...]) -> float:
        """The largest relative error against the reference: queries, index queries, outputs, raw rows, entries."""
        first, second = (replace(c, state=_copy(c.state), cache=_copy(c.cache)) for c in self.compressors)
        other = replace(self, window=_copy(self.window), compressors=(first, second))
        pairs = list(zip(result, other.run("reference"), strict=True))
        pairs += [(self.window.read(self.slots), other.window.read(self.slots))]
        done = self.completed[self.completed >= 0]
        if len(done):
            both = zip(self.compressors, other.compressors, strict=True)
            pairs += [(one.cache.read(done), another.cache.read(done)) for one, another in both]
        return max(compare.relative_error(found, expected.double().cpu()) for found, expected in pairs)


def compress_sets(
    queries: list[int], lengths: list[int], heads: int, layout: Layout, device: torch.device, *, seed: int
) -> tuple[CompressSet, Cost]:
    """A set for a batch. Decodes are at different offsets within their compression spans."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    # Real decodes are spread over the offsets of a span; suites have lengths that all end one.
    requests = enumerate(zip(queries, lengths, strict=True))
    ends = [length - number % RATIO if new == 1 else length for number, (new, length) in requests]
    positions = torch.cat(
        [torch.arange(end - new, end, dtype=torch.int64, device="cpu") for new, end in zip(queries, ends, strict=True)]
    )
    ids = torch.repeat_interleave(
        torch.arange(len(queries), dtype=torch.int64, device="cpu"),
        torch.tensor(queries, dtype=torch.int64, device="cpu"),
    )
    begins = [max(0, end - new + 1 - SPAN) for new, end in zip(queries, ends, strict=True)]
    held = [ceil_div(end, STATE_PAGE) - begin // STATE_PAGE for begin, end in zip(begins, ends, strict=True)]
    table = torch.full((len(queries), ceil_div(max(ends), STATE_PAGE)), -1, dtype=torch.int32, device="cpu")
    order, used = torch.randperm(sum(held), dtype=torch.int64, device="cpu").int(), 0
    for row, count, end in zip(table, held, ends, strict=True):
        last = ceil_div(end, STATE_PAGE)
        row[last - count : last] = order[used : used + count]
        used += count
    state_slots = table[ids, positions // STATE_PAGE].long() * STATE_PAGE + positions % STATE_PAGE
    total, boundary = len(positions), (positions + 1) % RATIO == 0
    completed = torch.full((total,), -1, dtype=torch.int64, device="cpu")
    completed[boundary] = torch.randperm(int(boundary.sum()), dtype=torch.int64, device="cpu")
    pages = ceil_div(total, 64)

    def compressor(cache: PagedCache) -> Compressor:
        width = cache.layout.width
        state = PagedCache(compressor_state(dim=width), sum(held), STATE_PAGE, device)
        state.storage.copy_(normal(*state.storage.shape, dtype=torch.float32))
        inputs = [normal(total, 2 * width, dtype=torch.float32) for _ in range(2)]
        bias, weight = normal(RATIO, 2 * width, dtype=torch.float32), normal(width, dtype=torch.float32)
        return Compressor(inputs[0], inputs[1], state, cache, bias, weight)

    made = CompressSet(
        low_q=normal(total, Q_RANK),
        low_weight=normal(Q_RANK, dtype=torch.float32),
        q=normal(total, heads, layout.width),
        kv=normal(total, layout.width),
        index_q=normal(total, INDEX_HEADS, INDEX_DIM),
        window=PagedCache(layout, pages, 64, device),
        slots=torch.randperm(total, dtype=torch.int64, device="cpu").to(device),
        positions=positions.int().to(device),
        cos_sin=Rope(ROTARY, theta=160000.0).cos_sin_table(max(ends), device),
        compressors=(
            compressor(PagedCache(layout, pages, 64, device)),
            compressor(PagedCache(index_fp8(dim=INDEX_DIM), pages, 64, device)),
        ),
        pages=StatePages(state_slots.to(device), ids.int().to(device), table.to(device)),
        completed=completed.to(device),
    )
    cost = compress_cost(total, int(boundary.sum()), heads, layout, index_fp8(dim=INDEX_DIM), INDEX_HEADS, Q_RANK)
    return made, cost


def _copy(cache: PagedCache) -> PagedCache:
    return PagedCache.wrap(cache.storage.clone(), cache.layout)
