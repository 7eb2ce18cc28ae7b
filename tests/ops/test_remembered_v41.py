"""V4.1 layer calls that are remembered launch what they would launch if nothing were remembered."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended import Launched, Pretended
from torch import Tensor

from tamis import Batch, LayerSpec, Limits, PagePool, V4Caches, V4Planner, V4Weights
from tamis.layers import v4_products
from tamis.layers import v41 as layers
from tamis.layers.v41 import SparseV41, V41Selection
from tamis.layers.v41_weights import LatentWeights, V41IndexerWeights, V41Weights
from tamis.model.rope import Rope
from tamis.model.v41 import Candidates
from tamis.ops import Rotated

pytestmark = pytest.mark.own_settings("launches nothing")
HIDDEN, RANK, K, BLOCKS = 16, 8, 512, 3
WINDOW = LayerSpec(64, 448, 64, 512, 0.05, window=128, sink=True, kind="window")
INDEXED = replace(WINDOW, kind="indexed", compress=2, topk=K, index_heads=64, index_dim=128)
SPECS = {
    "window": WINDOW,
    "one level": INDEXED,
    "one token": replace(INDEXED, compress=1),
    "blocks": replace(INDEXED, candidates=Candidates(BLOCKS, 64, True)),
    "within": replace(INDEXED, candidates=Candidates(BLOCKS, 64, False), reuse_entries=True),
    "taken": replace(INDEXED, topk=K, reuse_entries=True, reuse_topk=True),
}
SIZES = {"window": 64, "state2": 8}
STEPS: list[Any] = [([1, 1, 1], [300, 20, 700]), ([1, 1, 1], [301, 21, 701]), ([1, 20], [9, 700]), ([1, 1], [9, 9])]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def layer_of(spec: LayerSpec) -> SparseV41:
    attention = V4Weights(
        q_a=ones(RANK, HIDDEN),
        q_norm=ones(RANK),
        q_b=ones(64 * 512, RANK),
        kv=ones(512, HIDDEN),
        kv_norm=ones(512),
        sink=torch.ones(64),
        o_a=ones(8, 4, 8 * 512),
        o_b=ones(HIDDEN, 32),
    )
    compressor, indexer, makes = None, None, spec.kind == "indexed" and not spec.reuse_entries
    if makes:
        compressor = LatentWeights(ones(512, HIDDEN), None if spec.compress == 1 else ones(512, HIDDEN), ones(512))
    if spec.kind == "indexed" and not spec.reuse_topk:
        keys = (ones(128, 512), ones(128)) if makes else ()
        indexer = V41IndexerWeights(ones(64 * 128, RANK), ones(64, HIDDEN), *keys)
    return SparseV41(spec, V41Weights(attention, compressor, indexer), Rope(64).cos_sin_table(2048))


class Layer:
    """A layer with its caches; everything but selecting in one level and attending is left out."""

    def __init__(self, kind: str) -> None:
        self.spec, options = SPECS[kind], {"pages": 40, "window_pages": 80, "state_pages": 80}
        source = None
        if self.spec.reuse_entries:
            source = V4Caches.allocate(INDEXED, **options)
        self.layer, self.caches = layer_of(self.spec), V4Caches.allocate(self.spec, **options, source=source)
        self.planner = V4Planner([self.spec], Limits(64, 8, 2048, 256, SIZES))

    def run(self, pretended: Pretended, queries: list[int], lengths: list[int]) -> list[Launched]:
        """What a step launches after its plan."""
        pools = {name: PagePool(300, size) for name, size in SIZES.items()}
        plan = self.planner.plan(Batch.build(queries, lengths, PagePool(40, 256), other_pools=pools))
        rows = plan.step.rows
        given = V41Selection(torch.zeros(rows, K, dtype=torch.int32), torch.zeros(rows, BLOCKS, dtype=torch.int32))
        pretended.launches()
        self.layer(ones(rows, HIDDEN), self.caches, plan, given)
        named = {"window": self.caches.window.storage, "slots": plan.window.slots, "lengths": plan.window.lengths}
        for name in ("entries", "index"):
            cache = getattr(self.caches, name)
            named |= {} if cache is None else {name: cache.storage}
        for entries in plan.entries.values():
            named |= {"visible": entries.visible, "table": entries.block_table, "taken": entries.lengths}
        if self.spec.reuse_topk:
            named |= {"given": given.entries}
        return pretended.launches(**named, ids=plan.step.request_ids, sink=self.layer.weights.attention.sink)


@pytest.fixture(autouse=True)
def without_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "run_rotate_and_write", lambda call: Rotated(call.q, call.index_q))
    monkeypatch.setattr(layers, "pool_kv", lambda call: call.values.to(call.dtype))
    for name in ("write_rotated", "index_topk_and_blocks", "index_topk_within"):
        monkeypatch.setattr(layers, name, lambda call: None)
    for module in (layers, v4_products):
        monkeypatch.setattr(module, "norm_rows", lambda call: call.x)
    monkeypatch.setattr(v4_products, "rotate_heads", lambda call: call.x)


@pytest.mark.parametrize("kind", SPECS)
def test_a_remembered_call_launches_the_same(kind: str, pretended: Pretended) -> None:
    found = []
    for remembers in (False, True):
        pretended.forget()
        pretended.remembers, layer = remembers, Layer(kind)
        found.append([layer.run(pretended, *step) for step in STEPS for _ in range(2)])
        known = layer.layer._checks._known._known
        for prepared in known.values():
            assert (prepared.attend is not None) == remembers
            assert (prepared.topk is not None) == (remembers and kind in ("one level", "one token"))
        assert len(known) == 3  # two of the steps have their shapes in common
    for one, other in zip(*found, strict=True):
        assert one == other
        assert any("heads" in launch.kernel or "attend" in launch.kernel for launch in one)
