"""Steps without requests, and steps of nothing but padding, run like any other: rows of zeros, caches as they were."""

from dataclasses import replace

import pytest
import torch
from reliability.test_layer_atomicity import HEADS, LATENT, PAGE, RECIPE, ROPE, SPEC, TOPK, V4_LAYOUT, V4_SIZES, D
from small_v4 import HIDDEN, OVERLAPPING, PLAIN, WINDOW, caches_of, layer_of

from tamis import (
    Batch,
    Caches,
    LayerSpec,
    Limits,
    PagedCache,
    PagePool,
    Planner,
    SparseMLA,
    V4Planner,
)
from tamis.cache.layout import index_fp8, named
from tamis.ops import IndexInputs

# New tokens of each request, their lengths, and rows of padding.
STEPS = [([], [], 0), ([], [], 3), ([0], [5], 0), ([0], [5], 4), ([0, 0], [5, 9], 2)]
MODES = ("mixed", "separate")


def plan_of(planner, step, **pools):
    new, lengths, padding = step
    batch = Batch.build(new, lengths, PagePool(20, planner.limits.page_size), **pools)
    return planner.plan(replace(batch, padded_tokens=padding))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", ["positions", "index"])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_mla(mode: str, what: str, step) -> None:
    layout = named("v32-fp8", latent=LATENT, rope=ROPE)
    plan = plan_of(Planner(SPEC, Limits(16, 4, 32, PAGE), layout=layout, mode=mode), step)
    caches = Caches(PagedCache(layout, 20, PAGE), PagedCache(index_fp8(dim=16), 20, PAGE, recipe=RECIPE))
    count = plan.rows
    q, kv, out = torch.randn(count, HEADS, D), torch.randn(count, D), torch.full((count, HEADS, LATENT), 7.0)
    inputs = {"positions": torch.full((count, TOPK), -1, dtype=torch.int32)}
    if what == "index":
        parts = (torch.randn(count, 2, 16), torch.randn(count, 2), torch.randn(count, 16), RECIPE)
        inputs = {"index": IndexInputs(*parts)}
    layer = SparseMLA(SPEC)
    for given in (out, None):
        result = layer(q, kv, caches, plan, **inputs, sink=torch.randn(HEADS), out=given)
        assert result.out.shape == (count, HEADS, LATENT)
        assert (result.out == 0).all()
        assert (result.lse == -torch.inf).all()
        assert result.lse.shape == (count, HEADS)
        assert result.positions.shape == (count, TOPK)
        assert (result.positions == -1).all()
        assert given is None or result.out is given
    layer.write(kv, caches, plan, inputs.get("index"))
    if what == "index":
        assert (layer.select(inputs["index"], caches, plan) == -1).all()
    assert not caches.latent.storage.any()
    assert not caches.index.storage.any()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
@pytest.mark.parametrize("mode", MODES)
def test_sparse_v4(mode: str, spec: LayerSpec, step) -> None:
    planner = V4Planner([spec], Limits(80, 2, 80, 16, V4_SIZES), layout=V4_LAYOUT, mode=mode)
    pools = {name: PagePool(40, size) for name, size in V4_SIZES.items()}
    plan = plan_of(planner, step, other_pools=pools)
    caches = caches_of(spec, V4_LAYOUT, state_page_size=V4_SIZES.get(f"state{spec.compress}", 4))
    layer, hidden = layer_of(spec), torch.randn(plan.step.rows, HIDDEN)
    result = layer(hidden, caches, plan)
    assert result.shape == hidden.shape
    assert (result == 0).all()
    queries = layer.write(hidden, caches, plan)
    assert queries.q.shape == (plan.step.rows, spec.heads, spec.head_dim)
    if queries.index_q is not None:
        assert (layer.select(hidden, queries.index_q, caches, plan) == -1).all()
    held = (caches.window, caches.entries, caches.state, caches.index, caches.index_state)
    assert not any(cache.storage.any() for cache in held if cache is not None)


def test_bad_inputs_are_refused_in_empty_steps_too() -> None:
    layout = named("v32-fp8", latent=LATENT, rope=ROPE)
    plan = plan_of(Planner(SPEC, Limits(16, 4, 32, PAGE), layout=layout), STEPS[1])
    q, positions = torch.randn(3, HEADS, D), torch.full((3, TOPK), -1, dtype=torch.int32)
    out = torch.full((3, HEADS, LATENT), 7.0)
    good = {"kv": None, "positions": positions, "sink": None, "out": out}
    bad = {
        "kv": torch.randn(3, D + 1),
        "positions": positions[:2],
        "sink": torch.randn(HEADS + 1),
        "out": out[:1].expand(3, HEADS, LATENT),
    }
    for name, value in bad.items():
        with pytest.raises(ValueError, match=name):
            SparseMLA(SPEC)(q, caches=PagedCache(layout, 20, PAGE), plan=plan, **{**good, name: value})
    assert (out == 7).all()
