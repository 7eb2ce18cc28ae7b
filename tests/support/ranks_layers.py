"""What the ranks of `tests/layers/test_layers_over_ranks.py` do: layer calls that select together, and alone."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, Shard, SparseMLA, SparseV4
from tamis.cache.layout import rows
from tamis.lab.verify.check import Target
from tamis.lab.verify.v4_layer import V4Served
from tamis.ops import IndexInputs
from tamis.step.plan import Plan

PAGE, HEADS, INDEX_HEADS, INDEX_DIM, CONTEXT = 16, 4, 8, 16, 60
SPEC = LayerSpec(heads=HEADS, scale=0.08, topk=12)
KEYS = rows(torch.float32, latent=INDEX_DIM, rope=0)
V4 = LayerSpec(
    heads=32,
    scale=512**-0.5,
    latent_dim=448,
    rope_dim=64,
    kind="overlapping",
    window=64,
    compress=4,
    topk=8,
    index_heads=32,
    index_dim=128,
)


class Step:
    """One request of which the last tokens are new, as a rank with a shard of its rows sees it."""

    def __init__(self, new: int, shard: Shard | None = None, padding: int = 0) -> None:
        torch.manual_seed(11)
        shard = shard or Shard()
        kv, keys = torch.randn(CONTEXT, 576), torch.randn(CONTEXT, INDEX_DIM).round()
        place = torch.arange(CONTEXT)
        own = place // shard.interleave % shard.ranks == shard.rank
        pool = PagePool(20, PAGE, seed=shard.rank)
        limits = Limits(64, 2, 10 * CONTEXT, PAGE, context_parallel=shard.ranks > 1)
        planner = Planner(SPEC, limits, layout="v32-fp32")
        self.caches = Caches(PagedCache("v32-fp32", 20, PAGE), PagedCache(KEYS, 20, PAGE))
        held = int(own.sum())
        first = planner.plan(Batch.build([held], [held], pool))
        inputs = IndexInputs(torch.zeros(held, 1, INDEX_DIM), torch.zeros(held, 1), keys[own])
        SparseMLA(SPEC).write(kv[own], self.caches, first, inputs)
        batch = Batch.build([new], [CONTEXT], pool) if shard.ranks == 1 else None
        if batch is None:
            slots = torch.full((new,), -1)
            ends = (torch.tensor([0, new], dtype=torch.int32), torch.tensor([CONTEXT], dtype=torch.int32))
            pages = Batch.build([0], [held], pool).pages
            batch = Batch(*ends, type(pages)(pages.block_table, slots))
        self.plan: Plan = planner.plan(replace(batch, padded_tokens=new + padding))
        count = new + padding
        self.q = torch.randn(count, HEADS, 576)
        self.index = IndexInputs(torch.randn(count, INDEX_HEADS, INDEX_DIM).round(), torch.randn(count, INDEX_HEADS))
        self.kv = kv[CONTEXT - new :] if shard.ranks == 1 else None

    def run(self, layer: SparseMLA, **options: Any) -> Any:
        return layer(self.q, None, self.caches, self.plan, **({"index": self.index} | options))


def together() -> dict[str, bool]:
    """Whether layer calls over ranks equal those of one rank, by case."""
    world, found = dist.group.WORLD, {}
    usual, shared = SparseMLA(SPEC), SparseMLA(SPEC, index_group=world, index_share="always")
    for new, padding in ((1, 0), (3, 2), (37, 3)):
        ours, alone = Step(new, padding=padding), Step(new, padding=padding)
        results = ours.run(shared), alone.run(usual)
        same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        same.append(torch.equal(shared.select(ours.index, ours.caches, ours.plan), results[1].positions))
        found[f"{new} tokens and {padding} more"] = all(same)
    for interleave in (1, 4):
        shard = Shard(world.size(), world.rank(), interleave)
        expected = Step(20).run(usual).positions
        # With a workspace of few scores, columns of the table that no request needs are left out.
        for room in (usual.index_workspace_bytes, 20_000):
            layer = SparseMLA(SPEC, shard=shard, index_group=world, index_workspace_bytes=room)
            found[f"keys in runs of {interleave}, {room} bytes"] = torch.equal(
                Step(20, shard).run(layer).positions, expected
            )
    small = SparseMLA(SPEC, index_group=world, index_share="always", index_workspace_bytes=20_000)
    found["few columns"] = torch.equal(Step(20).run(small).positions, Step(20).run(usual).positions)
    return found


def v4() -> dict[str, bool]:
    """As `together`, for a V4 layer with an indexer."""
    found = {}
    alone, ours = (V4Served(Target(torch.device("cpu")), V4, "v4-bf16") for _ in range(2))
    options: dict[str, Any] = {"index_group": dist.group.WORLD, "index_share": "always"}
    layer = SparseV4(V4, ours.weights, ours.table, **options)
    for number, news in enumerate(([70, 33], [1, 1])):
        plans = alone.plan(news), ours.plan(news)
        hidden = alone.inputs(plans[0])
        assert torch.equal(hidden, ours.inputs(plans[1]))
        same = torch.equal(alone.layer(hidden, alone.caches, plans[0]), layer(hidden, ours.caches, plans[1]))
        index_q = layer.write(hidden, ours.caches, plans[1]).index_q
        chosen = [one.select(hidden, index_q, ours.caches, plans[1]) for one in (alone.layer, layer)]
        found[f"step {number}"] = same and torch.equal(*chosen)
    return found


def failures() -> dict[str, tuple[str, bool]]:
    """What is raised on this rank if another one refuses a layer call, and whether its caches are as they were."""
    world, found = dist.group.WORLD, {}
    last = world.rank() == world.size() - 1
    step = Step(20)
    layer = SparseMLA(SPEC, index_group=world, index_share="always")
    index = replace(step.index, keys=torch.ones(20, INDEX_DIM))
    assert step.caches.index is not None
    stores = (step.caches.latent.storage, step.caches.index.storage)

    def attempt(name: str, **wrong: Any) -> None:
        options: dict[str, Any] = {"q": step.q, "kv": torch.ones(20, 576), "index": index} | (wrong if last else {})
        before = [store.clone() for store in stores]
        try:
            layer(caches=step.caches, plan=step.plan, **options)
            told = "nothing"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        found[name] = (told, all(map(torch.equal, before, stores)))

    attempt("sink", sink=torch.zeros(3))
    attempt("index queries", index=replace(index, q=index.q[:, :, :-1]))
    attempt("query", q=None)
    attempt("afterwards")
    try:
        layer.select(replace(index, weights=None) if last else index, step.caches, step.plan)
    except Exception as error:
        found["select"] = (f"{type(error).__name__}: {error}", True)
    served = V4Served(Target(torch.device("cpu")), V4, "v4-bf16")
    v4_layer = SparseV4(V4, served.weights, served.table, index_group=world)
    plan = served.plan([9])
    hidden: Tensor = served.inputs(plan)
    try:
        v4_layer(hidden.double() if last else hidden, served.caches, plan)
    except Exception as error:
        written = bool(served.caches.window.storage.any())
        found["V4"] = (f"{type(error).__name__}: {error}", not written)
    return found


def everything() -> dict[str, Any]:
    """All of these, in the order in which every rank runs them."""
    return {step.__name__: step() for step in (together, v4, failures)}
