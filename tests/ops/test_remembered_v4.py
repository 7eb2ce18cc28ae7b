"""V4 layer calls that are remembered launch what they would launch if nothing were remembered."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended import Launched, Pretended
from torch import Tensor

from tamis import Batch, LayerSpec, Limits, PagePool, SparseV4, V4Caches, V4Planner, V4Weights
from tamis.layers import v4 as layers
from tamis.layers import v4_products
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights
from tamis.model.rope import Rope
from tamis.ops import Rotated

pytestmark = pytest.mark.own_settings("launches nothing")
HIDDEN, RANK = 16, 8
WINDOW = LayerSpec(64, 448, 64, 512, 0.05, window=128, sink=True, kind="window")
SPECS = {
    "window": WINDOW,
    "plain": replace(WINDOW, kind="plain", compress=128),
    "overlapping": replace(WINDOW, kind="overlapping", compress=4, topk=512, index_heads=64, index_dim=128),
}
SIZES = {"window": 64, "state4": 4, "state128": 8}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def compressor(spec: LayerSpec, width: int) -> CompressorWeights:
    wide = width * (2 if spec.kind == "overlapping" else 1)
    return CompressorWeights(ones(wide, HIDDEN), ones(wide, HIDDEN), ones(spec.compress, wide), ones(width))


def layer_of(spec: LayerSpec) -> SparseV4:
    indexer = None
    if spec.kind == "overlapping":
        indexer = IndexerWeights(ones(64 * 128, RANK), ones(64, HIDDEN), compressor(spec, 128))
    weights = V4Weights(
        q_a=ones(RANK, HIDDEN),
        q_norm=ones(RANK),
        q_b=ones(64 * 512, RANK),
        kv=ones(512, HIDDEN),
        kv_norm=ones(512),
        sink=torch.ones(64),
        o_a=ones(8, 4, 8 * 512),
        o_b=ones(HIDDEN, 32),
        compressor=None if spec.kind == "window" else compressor(spec, 512),
        indexer=indexer,
    )
    return SparseV4(spec, weights, Rope(64).cos_sin_table(2048))


class Layer:
    """A layer with its caches; everything but selecting and attending is left out."""

    def __init__(self, kind: str) -> None:
        self.spec = SPECS[kind]
        self.layer = layer_of(self.spec)
        options = {"pages": 40, "window_pages": 80, "state_pages": 80}
        self.caches = V4Caches.allocate(self.spec, **options)
        self.planner = V4Planner([self.spec], Limits(64, 8, 2048, 256, SIZES))

    def run(self, pretended: Pretended, queries: list[int], lengths: list[int]) -> list[Launched]:
        """What a step launches after its plan."""
        pools = {name: PagePool(300, size) for name, size in SIZES.items()}
        plan = self.planner.plan(Batch.build(queries, lengths, PagePool(40, 256), other_pools=pools))
        pretended.launches()
        self.layer(ones(plan.step.rows, HIDDEN), self.caches, plan)
        named = {"window": self.caches.window.storage, "slots": plan.window.slots, "lengths": plan.window.lengths}
        for name in ("entries", "index"):
            cache = getattr(self.caches, name)
            named |= {} if cache is None else {name: cache.storage}
        for entries in plan.entries.values():
            named |= {"visible": entries.visible, "table": entries.block_table, "taken": entries.lengths}
            named |= {} if entries.every is None else {"every": entries.every}
        return pretended.launches(**named, ids=plan.step.request_ids, sink=self.layer.weights.sink)


@pytest.fixture(autouse=True)
def without_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "run_rotate_and_write", lambda call: Rotated(call.q, call.index_q))
    monkeypatch.setattr(layers, "compress_kv", lambda call: None)
    monkeypatch.setattr(v4_products, "norm_rows", lambda call: call.x)
    monkeypatch.setattr(v4_products, "rotate_heads", lambda call: call.x)


STEPS: list[Any] = [([1, 1, 1], [300, 20, 700]), ([1, 1, 1], [301, 21, 701]), ([1, 20], [9, 700]), ([1, 1], [9, 9])]


@pytest.mark.parametrize("kind", SPECS)
def test_a_remembered_call_launches_the_same(kind: str, pretended: Pretended) -> None:
    found = []
    for remembers in (False, True):
        pretended.forget()
        pretended.remembers, layer = remembers, Layer(kind)
        found.append([layer.run(pretended, *step) for step in STEPS for _ in range(2)])
        for prepared in layer.layer._checks._known._known.values():
            assert (prepared.attend is not None) == remembers
            assert (prepared.index_topk is not None) == (remembers and kind == "overlapping")
        assert len(layer.layer._checks._known._known) == 3  # two of the steps have their shapes in common
    for one, other in zip(*found, strict=True):
        assert one == other
        assert any("heads" in launch.kernel or "attend" in launch.kernel for launch in one)
