"""V4.1 layer calls that are remembered launch what they would launch if nothing were remembered."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended import Launched, Pretended
from remembered_v4 import HIDDEN, RANK, WINDOW, attention_weights, compare_launches, named_tensors, ones, plan_of

from tamis import LayerSpec, Limits, V4Caches, V4Planner
from tamis.layers import v4_products
from tamis.layers import v41 as layers
from tamis.layers.v41 import SparseV41, V41Selection
from tamis.layers.v41_weights import LatentWeights, V41IndexerWeights, V41Weights
from tamis.model.rope import Rope
from tamis.model.v41 import Candidates
from tamis.ops import Rotated

pytestmark = pytest.mark.own_settings("launches nothing")
K, BLOCKS = 512, 3
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


def layer_of(spec: LayerSpec) -> SparseV41:
    attention = attention_weights()
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
        plan = plan_of(self.planner, SIZES, queries, lengths)
        rows = plan.step.rows
        given = V41Selection(torch.zeros(rows, K, dtype=torch.int32), torch.zeros(rows, BLOCKS, dtype=torch.int32))
        pretended.launches()
        self.layer(ones(rows, HIDDEN), self.caches, plan, given)
        named = named_tensors(self.caches, plan)
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
    def check(prepared: Any, remembers: bool) -> None:
        assert (prepared.topk is not None) == (remembers and kind in ("one level", "one token"))

    compare_launches(pretended, lambda: Layer(kind), check)
