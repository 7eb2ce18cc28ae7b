"""The functions of a V3.2 step besides attention: a whole layer call, `index_topk`, `write_kv` and `Planner.plan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis.cache.layout import named
from tamis.cache.selection import Caches, Selection
from tamis.lab.bench.door.cells import INDEX, INDEX_HEADS, LAYER, PLAN, WRITE, Cell
from tamis.lab.bench.door.versions import OURS, Version, Versions
from tamis.lab.bench.index_sets import FP8, IndexSet, ScoreSet
from tamis.lab.bench.inputs import AttendSet, WriteSet, prepare, worst_error
from tamis.lab.bench.peers import Peer, Unsupported
from tamis.lab.bench.random_inputs import SharedInputs
from tamis.lab.bench.roofline import attend_cost, index_cost
from tamis.lab.bench.timing import set_count
from tamis.layers.mla import SparseMLA
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs, index_topk, write_kv
from tamis.step.batch import Batch, PageMap, parse_shape
from tamis.step.plan import Limits, Plan
from tamis.step.planner import Planner

MOST_LAYER_SETS = 48
"""Sets of a layer call, each with a plan of its own. Their keys alone exceed the cache."""
PLANNED = 4
"""Batches that a planner plans in turn."""


@dataclass(frozen=True, eq=False)
class _Step:
    """The requests of a decode step on the shared pages."""

    lengths: list[int]
    table: Tensor
    batch: Batch

    @classmethod
    def draw(cls, cell: Cell, drawn: SharedInputs) -> "_Step":
        """A step whose new tokens are the last ones of their requests."""
        queries, lengths = parse_shape(cell.job.shape)
        size = cell.job.page_size
        table, _ = drawn.block_table(lengths, size)
        last = torch.tensor(lengths, dtype=torch.int64, device=drawn.device) - 1
        pages = table.long().gather(1, (last // size).unsqueeze(1)).squeeze(1)
        starts = torch.tensor([0, *queries], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        counts = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        return cls(lengths, table, Batch(starts, counts, PageMap(table, pages * size + last % size, page_size=size)))

    def limits(self, page_size: int) -> Limits:
        """Limits that this step just fits in."""
        return Limits(len(self.lengths), len(self.lengths), max(self.lengths), page_size)


def layer_versions(cell: Cell, doors: Sequence[str], drawn: SharedInputs, peers: Sequence[Peer]) -> Versions:
    """A whole call of `SparseMLA`: write the new rows and keys, select by the indexer, attend."""
    job, (_, lengths) = cell.job, parse_shape(cell.job.shape)
    assert job.heads is not None
    assert job.topk is not None
    layout, keys = named(job.layout), named("index-fp8")
    requests, heads = [(1, length) for length in lengths], INDEX_HEADS if drawn.device.type == "cuda" else 8
    bytes_read = attend_cost(requests, heads=job.heads, picks=[job.topk], layout=layout, value_dim=layout.latent).bytes
    bytes_read += index_cost(requests, heads=heads, topk=job.topk, layout=keys, page_size=job.page_size).bytes
    made = [
        _LayerSet.draw(cell, drawn, heads) for _ in range(set_count(bytes_read, drawn.device, most=MOST_LAYER_SETS))
    ]
    first = made[0]
    return Versions([Version(LAYER, OURS, [one.call() for one in made], first.error, 1e-2)], len(made), {})


@dataclass(frozen=True, eq=False)
class _LayerSet:
    """The inputs of one layer call."""

    layer: SparseMLA
    q: Tensor
    kv: Tensor
    caches: Caches
    plan: Plan
    index: IndexInputs
    step: _Step

    @classmethod
    def draw(cls, cell: Cell, drawn: SharedInputs, index_heads: int) -> "_LayerSet":
        job, step = cell.job, _Step.draw(cell, drawn)
        assert job.heads is not None
        layout, keys, tokens = named(job.layout), named("index-fp8"), len(step.lengths)
        spec = LayerSpec(heads=job.heads, scale=layout.width**-0.5, topk=job.topk, index_heads=index_heads)
        planner = Planner(spec, step.limits(job.page_size), drawn.device, layout=layout)
        caches = Caches(*(drawn.cache(one, drawn.pages, job.page_size) for one in (layout, keys)))
        index = IndexInputs(
            drawn.normal(tokens, index_heads, keys.width, dtype=FP8),
            drawn.normal(tokens, index_heads, dtype=torch.float32),
            drawn.normal(tokens, keys.width),
        )
        q, kv = drawn.normal(tokens, job.heads, layout.width), drawn.normal(tokens, layout.width)
        return cls(SparseMLA(spec), q, kv, caches, planner.plan(step.batch), index, step)

    def call(self) -> Callable[[], Any]:
        return partial(self.layer, self.q, self.kv, self.caches, self.plan, index=self.index)

    def error(self, result: Any) -> float:
        """The larger error of the selection and of attention over what was selected."""
        plan, spec, positions = self.plan, self.layer.spec, result.positions
        assert self.caches.index is not None
        lengths = plan.positions + 1
        scored = ScoreSet(
            self.index.q,
            self.index.weights,
            self.caches.index,
            plan.request_ids,
            plan.block_table,
            lengths,
            plan.max_length,
            1,
        )
        size = plan.page_size
        pages = plan.block_table.long().gather(1, positions.long().clamp_min(0) // size)
        slots = torch.where(positions >= 0, pages * size + positions % size, -1).int()
        attended = AttendSet(
            self.q, (Selection(self.caches.latent, slots),), spec.scale, spec.value_dim, 1, plan.block_table, lengths
        )
        chosen = worst_error(IndexSet(scored, positions.shape[1]), positions)
        return max(chosen, worst_error(attended, result.out))


def index_versions(cell: Cell, doors: Sequence[str], drawn: SharedInputs, peers: Sequence[Peer]) -> Versions:
    """`index_topk`, beside DeepGEMM's scores and vLLM's top-k where they can be imported."""
    items = [item for item in prepare(cell.job, drawn.device, drawn=drawn).sets if isinstance(item, IndexSet)]
    first = items[0]
    judge = partial(worst_error, first)
    found = [Version(INDEX, OURS, [_index_call(item) for item in items], judge, first.bound)]
    missing: dict[str, str] = {}
    for peer in peers:
        if peer.name != "vllm":
            continue
        try:
            found.append(Version(INDEX, peer.name, peer.calls(cell.job, items), judge, first.bound, peer.build))
        except Unsupported as reason:
            missing[peer.name] = str(reason)
    return Versions(found, len(items), missing)


def _index_call(item: IndexSet) -> Callable[[], Tensor]:
    s = item.scored
    return partial(index_topk, s.q, s.weights, s.cache, s.request_ids, s.block_table, s.lengths, item.k)


def write_versions(cell: Cell, doors: Sequence[str], drawn: SharedInputs, peers: Sequence[Peer]) -> Versions:
    """`write_kv` of a decode step's rows."""
    items = [item for item in prepare(cell.job, drawn.device, drawn=drawn).sets if isinstance(item, WriteSet)]
    first = items[0]
    calls = [partial(write_kv, item.kv, item.cache, item.slots) for item in items]
    return Versions(
        [Version(WRITE, OURS, calls, lambda _: worst_error(first, first.cache), first.bound)], len(items), {}
    )


def plan_versions(cell: Cell, doors: Sequence[str], drawn: SharedInputs, peers: Sequence[Peer]) -> Versions:
    """`Planner.plan` of a decode step whose block table is on the device, as an engine's is."""
    job, steps = cell.job, [_Step.draw(cell, drawn) for _ in range(PLANNED)]
    layout = named(job.layout)
    spec = LayerSpec(heads=job.heads or 1, scale=layout.width**-0.5, topk=job.topk)
    planner = Planner(spec, steps[0].limits(job.page_size), drawn.device, layout=layout)
    calls = [partial(planner.plan, step.batch) for step in steps]
    judge = partial(_plan_error, steps[0])
    return Versions([Version(PLAN, OURS, calls, judge, 0.0, capturable=False)], len(calls), {})


def _plan_error(step: _Step, plan: Plan) -> float:
    """How many positions, slots and pages of a plan are wrong."""
    last = torch.tensor(step.lengths, dtype=torch.int32, device=plan.positions.device) - 1
    pairs = [(plan.positions, last), (plan.slots, step.batch.pages.slots)]
    pairs += [(plan.block_table[:, : step.table.shape[1]], step.table)]
    return float(sum(int((found.long() != wanted.long()).sum()) for found, wanted in pairs))
