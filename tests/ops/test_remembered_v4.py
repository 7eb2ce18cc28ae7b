"""V4 layer calls that are remembered launch what they would launch if nothing were remembered."""

from dataclasses import replace
from typing import Any

import pytest
from pretended import Launched, Pretended
from remembered_v4 import HIDDEN, RANK, WINDOW, attention_weights, compare_launches, named_tensors, ones, plan_of

from tamis import LayerSpec, Limits, SparseV4, V4Caches, V4Planner
from tamis.layers import v4 as layers
from tamis.layers import v4_products
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights
from tamis.model.rope import Rope
from tamis.ops import Rotated

pytestmark = pytest.mark.own_settings("launches nothing")
SPECS = {
    "window": WINDOW,
    "plain": replace(WINDOW, kind="plain", compress=128),
    "overlapping": replace(WINDOW, kind="overlapping", compress=4, topk=512, index_heads=64, index_dim=128),
}
SIZES = {"window": 64, "state4": 4, "state128": 8}


def compressor(spec: LayerSpec, width: int) -> CompressorWeights:
    wide = width * (2 if spec.kind == "overlapping" else 1)
    return CompressorWeights(ones(wide, HIDDEN), ones(wide, HIDDEN), ones(spec.compress, wide), ones(width))


def layer_of(spec: LayerSpec) -> SparseV4:
    indexer = None
    if spec.kind == "overlapping":
        indexer = IndexerWeights(ones(64 * 128, RANK), ones(64, HIDDEN), compressor(spec, 128))
    weights = attention_weights(
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
        plan = plan_of(self.planner, SIZES, queries, lengths)
        pretended.launches()
        self.layer(ones(plan.step.rows, HIDDEN), self.caches, plan)
        named = named_tensors(self.caches, plan)
        for entries in plan.entries.values():
            named |= {} if entries.every is None else {"every": entries.every}
        return pretended.launches(**named, ids=plan.step.request_ids, sink=self.layer.weights.sink)


@pytest.fixture(autouse=True)
def without_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "run_rotate_and_write", lambda call: Rotated(call.q, call.index_q))
    monkeypatch.setattr(layers, "compress_kv", lambda call: None)
    monkeypatch.setattr(v4_products, "norm_rows", lambda call: call.x)
    monkeypatch.setattr(v4_products, "rotate_heads", lambda call: call.x)


@pytest.mark.parametrize("kind", SPECS)
def test_a_remembered_call_launches_the_same(kind: str, pretended: Pretended) -> None:
    def check(prepared: Any, remembers: bool) -> None:
        assert (prepared.index_topk is not None) == (remembers and kind == "overlapping")

    compare_launches(pretended, lambda: Layer(kind), check)
