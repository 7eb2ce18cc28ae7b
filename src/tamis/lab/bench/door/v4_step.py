"""A whole call of `SparseV4` on a decode step: a layer whose entries overlap, with an indexer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.paged import PagedCache
from tamis.cache.v4_caches import V4Caches
from tamis.lab.bench.door.cells import V4_LAYER, Cell
from tamis.lab.bench.door.versions import OURS, Version, Versions
from tamis.lab.bench.peers import Peer
from tamis.lab.bench.random_inputs import RandomInputs, SharedInputs
from tamis.lab.testing import compare
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_checks import V4Call
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights, V4Weights
from tamis.model.rope import Rope
from tamis.model.spec import LayerSpec
from tamis.ops import Rotated
from tamis.step.batch import Batch, PageMap, parse_shape
from tamis.step.plan import Limits
from tamis.step.v4_plan import WINDOW_POOL, V4Plan, state_pool
from tamis.step.v4_planner import V4Planner

RATIO, PAGE, WINDOW_PAGE, STATE_PAGE = 4, 256, 64, 4
INDEX_DIM, WIDTH, ROTARY = 128, 512, 64
BOUND = 2e-2
"""Against the reference on the same selection; both round to FP8 and bf16 at the same places, in other orders."""
SETS = 2
"""Every call reads the layer's weights, tens of megabytes, so that more sets would not make it colder."""


@dataclass(frozen=True)
class _Sizes:
    """Widths of a model."""

    hidden: int
    rank: int
    groups: int
    low: int
    index_heads: int


LARGE, SMALL = _Sizes(4096, 1024, 8, 1024, 64), _Sizes(64, 32, 2, 16, 8)


def v4_layer_versions(cell: Cell, doors: Sequence[str], drawn: SharedInputs, peers: Sequence[Peer]) -> Versions:
    """The whole layer from hidden states to hidden states."""
    job, device = cell.job, drawn.device
    assert job.heads is not None
    sizes = LARGE if device.type == "cuda" else SMALL
    spec = LayerSpec(
        heads=job.heads,
        latent_dim=WIDTH - ROTARY,
        rope_dim=ROTARY,
        value_dim=WIDTH,
        scale=WIDTH**-0.5,
        topk=job.topk,
        window=job.window,
        sink=True,
        kind="overlapping",
        compress=RATIO,
        index_heads=sizes.index_heads,
        index_dim=INDEX_DIM,
    )
    lengths = parse_shape(job.shape)[1]
    weights, table = _weights(spec, sizes, drawn), Rope(ROTARY, theta=160000.0).cos_sin_table(max(lengths), device)
    layer = SparseV4(spec, weights, table)
    sets = [_LayerSet.draw(spec, job.layout, lengths, sizes, drawn) for _ in range(SETS)]
    calls = [partial(layer, one.hidden, one.caches, one.plan) for one in sets]
    return Versions([Version(V4_LAYER, OURS, calls, partial(_error, layer, sets[0]), BOUND)], SETS, {})


@dataclass(frozen=True, eq=False)
class _LayerSet:
    """The inputs of one layer call."""

    hidden: Tensor
    caches: V4Caches
    plan: V4Plan

    @classmethod
    def draw(cls, spec: LayerSpec, layout: str, lengths: list[int], sizes: _Sizes, drawn: RandomInputs) -> "_LayerSet":
        """Requests of these lengths with one new token each. Of window and state only the last pages exist."""
        pools = {WINDOW_POOL: WINDOW_PAGE, state_pool(RATIO): STATE_PAGE}
        kept = {
            WINDOW_POOL: ceil_div(spec.window or 1, WINDOW_PAGE) + 1,
            state_pool(RATIO): 2 * RATIO // STATE_PAGE + 1,
        }
        limits = Limits(len(lengths), len(lengths), max(lengths), PAGE, pools)
        own = _pages(lengths, PAGE, ceil_div(max(lengths), PAGE), drawn.device)
        others = {name: _pages(lengths, size, kept[name], drawn.device) for name, size in pools.items()}
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cpu")
        batch = Batch(starts, torch.tensor(lengths, dtype=torch.int32, device="cpu"), own, other_pages=others)
        caches = V4Caches.allocate(
            spec,
            pages=_count(own),
            window_pages=_count(others[WINDOW_POOL]),
            state_pages=_count(others[state_pool(RATIO)]),
            page_size=PAGE,
            window_page_size=WINDOW_PAGE,
            state_page_size=STATE_PAGE,
            layout=layout,
            device=drawn.device,
        )
        assert caches.entries is not None
        assert caches.index is not None
        for cache in (caches.window, caches.entries, caches.index):
            drawn.fill(cache)
        for state in (caches.state, caches.index_state):
            assert state is not None
            state.storage.copy_(drawn.normal(*state.storage.shape, dtype=torch.float32))
        planner = V4Planner([spec], limits, drawn.device, layout=layout)
        return cls(drawn.normal(len(lengths), sizes.hidden), caches, planner.plan(batch))


def _pages(lengths: list[int], size: int, keep: int, device: torch.device) -> PageMap:
    """The last `keep` pages of each request, and the slots of their last tokens."""
    counts = [ceil_div(length, size) for length in lengths]
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32, device="cpu")
    used = 0
    for row, count in zip(table, counts, strict=True):
        held = min(keep, count)
        row[count - held : count] = torch.arange(used, used + held, dtype=torch.int32, device="cpu")
        used += held
    last = torch.tensor(lengths, dtype=torch.int64, device="cpu") - 1
    slots = table.long().gather(1, (last // size).unsqueeze(1)).squeeze(1) * size + last % size
    return PageMap(table.to(device), slots.to(device))


def _count(pages: PageMap) -> int:
    return int(pages.block_table.max()) + 1


def _weights(spec: LayerSpec, sizes: _Sizes, drawn: RandomInputs) -> V4Weights:
    hidden, rank = sizes.hidden, sizes.rank

    def matrix(*size: int) -> Tensor:
        scale = float(size[-1]) ** -0.5
        return drawn.normal(*size, dtype=torch.float32).mul_(scale).bfloat16()

    def gain(width: int) -> Tensor:
        return drawn.normal(width, dtype=torch.float32).abs() + 0.5

    def compressor(width: int) -> CompressorWeights:
        bias = drawn.normal(spec.compress, 2 * width, dtype=torch.float32)
        return CompressorWeights(matrix(2 * width, hidden), matrix(2 * width, hidden), bias, gain(width))

    index_q = matrix(spec.index_heads * spec.index_dim, rank)
    return V4Weights(
        matrix(rank, hidden),
        gain(rank),
        matrix(spec.heads * WIDTH, rank),
        matrix(WIDTH, hidden),
        gain(WIDTH),
        drawn.normal(spec.heads, dtype=torch.float32),
        matrix(sizes.groups, sizes.low, spec.heads * WIDTH // sizes.groups),
        matrix(hidden, sizes.groups * sizes.low),
        compressor(WIDTH),
        IndexerWeights(index_q, matrix(spec.index_heads, hidden), compressor(spec.index_dim)),
    )


class _Given(SparseV4):
    """A layer on the reference that attends to entries which were chosen elsewhere."""

    def __init__(self, like: SparseV4, chosen: Tensor) -> None:
        """Take another layer's weights."""
        super().__init__(like.spec, like.weights, like.cos_sin, eps=like.eps, backend="reference")
        self._chosen = chosen

    def _select(self, call: V4Call, queries: Rotated) -> Tensor:
        return self._chosen


def _error(layer: SparseV4, made: _LayerSet, result: Any) -> float:
    """Relative error against the reference, over copies of the caches and with the entries that the layer chooses.

    The selection itself is checked with `index_topk`. Where two scores are nearly equal, the reference might choose
    another entry.
    """
    index_q = layer.write(made.hidden, made.caches, made.plan).index_q
    assert index_q is not None
    chosen = layer.select(made.hidden, index_q, made.caches, made.plan)
    held = made.caches
    others = (held.entries, held.state, held.index, held.index_state)
    copies = V4Caches(_copy(held.window), *(None if cache is None else _copy(cache) for cache in others))
    expected = _Given(layer, chosen)(made.hidden, copies, made.plan)
    error = compare.relative_error(result, expected.double().cpu())
    return inf if isnan(error) else error


def _copy(cache: PagedCache) -> PagedCache:
    return PagedCache.wrap(cache.storage.clone(), cache.layout, recipe=cache.recipe)
