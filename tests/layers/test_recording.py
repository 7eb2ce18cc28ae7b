"""Selections in the layer call: shared between layers, recorded and replayed, and wrong ones refused."""

from dataclasses import replace

import bounds
import pytest
import torch
from layers.test_mla import PAGE, choose_positions, exact_attention, start

from tamis import Batch, Caches, IndexRecipe, LayerSpec, Limits, PagedCache, PagePool, Planner, Recording, SparseMLA
from tamis.cache.layout import index_fp8, rows
from tamis.ops import IndexInputs, index_scores, quantise_index_query

RECIPE = IndexRecipe(rope_dim=16)


def index_caches(latent: PagedCache, layout=None, **options) -> Caches:
    layout = layout or rows(torch.float32, latent=16, rope=0)
    return Caches(latent, PagedCache(layout, 120, PAGE, **options))


def inputs(tokens: int, **options) -> IndexInputs:
    return IndexInputs(torch.randn(tokens, 8, 16), torch.randn(tokens, 8), torch.randn(tokens, 16), **options)


def test_a_later_layer_shares_what_an_earlier_one_selected() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    caches = index_caches(cache)
    plan = planner.plan(Batch.build([60], [60], pool))
    owner, sharer = SparseMLA(spec), SparseMLA(replace(spec, reuse_topk=True))
    own = owner(torch.randn(60, 4, 576), torch.randn(60, 576), caches, plan, index=inputs(60))
    assert own.positions.shape == (60, 24)
    for t in range(60):
        chosen = own.positions[t, : min(t + 1, 24)].tolist()
        assert chosen == sorted(set(chosen))
        assert chosen[0] >= 0
        assert chosen[-1] <= t
        assert (own.positions[t, t + 1 :] == -1).all()
    kept, keys = own.positions.clone(), caches.index.storage.clone()
    other = PagedCache("v32-fp32", 120, PAGE)
    shared = sharer(torch.randn(60, 4, 576), torch.randn(60, 576), other, plan, positions=own.positions)
    assert shared.positions is own.positions
    assert torch.equal(own.positions, kept), "a sharing layer leaves the selection as it was"
    assert torch.equal(caches.index.storage, keys)


def test_e4m3_queries_select_in_the_layer() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    caches = index_caches(cache, index_fp8(dim=16), recipe=RECIPE)
    plan = planner.plan(Batch.build([60], [60], pool))
    raw = inputs(60)
    q, weights = quantise_index_query(raw.q, raw.weights, RECIPE)
    index = IndexInputs(q, weights, raw.keys, RECIPE)
    result = SparseMLA(spec)(torch.randn(60, 4, 576), torch.randn(60, 576), caches, plan, index=index)
    scores = index_scores(q, weights, caches.index, plan.request_ids, plan.block_table, plan.positions + 1)
    for t in range(24, 60):
        left = scores[t, : t + 1].clone()
        left[result.positions[t].long()] = -torch.inf
        assert left.max() <= scores[t, result.positions[t].long()].min()


def test_the_workspace_of_the_selection_changes_nothing() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    caches, index = index_caches(cache), inputs(60)
    plan = planner.plan(Batch.build([60], [60], pool))
    q, kv = torch.randn(60, 4, 576), torch.randn(60, 576)
    usual = SparseMLA(spec)(q, kv, caches, plan, index=index)
    small = SparseMLA(spec, index_workspace_bytes=1)(q, kv, caches, plan, index=index)
    assert torch.equal(usual.positions, small.positions)
    assert torch.equal(usual.out, small.out)


@pytest.mark.parametrize("chunks", [[70], [33, 37], [40, 1, 1, 28], [1] * 70], ids=str)
def test_selections_recorded_in_any_steps_are_replayed_in_any_others(chunks: list[int]) -> None:
    history = {name: (torch.randn(70, 4, 576), torch.randn(70, 576), inputs(70)) for name in "ab"}
    recording, chosen = Recording(24), torch.zeros(2, 0, 24, dtype=torch.int32)
    for steps, replayed in (([25, 45], False), (chunks, True)):
        spec, planner, pool, cache = start("v32-fp32", 4, max_tokens=140)
        caches, layer = index_caches(cache), SparseMLA(spec)
        done = 0
        for new in steps:
            plan = planner.plan(Batch.build([new, new], [done + new, done + new], pool))
            some = slice(done, done + new)
            q, kv = (torch.cat([history[name][part][some] for name in "ab"]) for part in (0, 1))
            if not replayed:
                parts = [history[name][2] for name in "ab"]
                index = IndexInputs(
                    *(torch.cat([getattr(p, f)[some] for p in parts]) for f in ("q", "weights", "keys"))
                )
                result = layer(q, kv, caches, plan, index=index)
                recording.record(3, ["a", "b"], plan, result.positions)
                chosen = torch.cat((chosen, result.positions.view(2, new, 24)), 1)
            else:
                positions = recording.replay(3, ["a", "b"], plan)
                result = layer(q, kv, cache, plan, positions=positions)
                assert result.positions is positions
            known, selected = [history[name][1] for name in "ab"], chosen[:, some].flatten(0, 1)
            exact = exact_attention(q, known, [new, new], selected, spec.scale)
            bounds.agree(result.out, exact.out, exact.out_error)
            done += new


def recorded(tokens: int = 40):
    _, planner, pool, _ = start("v32-fp32", 4)
    plan = planner.plan(Batch.build([tokens], [tokens], pool))
    recording = Recording(24)
    positions = choose_positions([tokens], [tokens], 24)
    recording.record(0, ["a"], plan, positions)
    return recording, planner, pool, plan, positions


def test_a_position_recorded_again_is_replaced() -> None:
    recording, planner, pool, _, positions = recorded()
    step = planner.plan(Batch.build([3], [40], pool))
    other = choose_positions([3], [40], 24)
    recording.record(0, ["a"], step, other)
    whole = planner.plan(Batch.build([40], [40], pool))
    found = recording.replay(0, ["a"], whole)
    assert torch.equal(found[:37], positions[:37])
    assert torch.equal(found[37:], other)


def test_padded_rows_are_neither_recorded_nor_replayed() -> None:
    recording, planner, pool, _, positions = recorded()
    batch = Batch.build([1], [40], pool)
    plan = planner.plan(Batch(batch.query_starts, batch.lengths, batch.pages, padded_tokens=4))
    found = recording.replay(0, ["a"], plan)
    assert torch.equal(found[:1], positions[39:])
    assert (found[1:] == -1).all()
    garbage = torch.full((4, 24), 77, dtype=torch.int32)
    garbage[:1] = positions[39:]
    recording.record(0, ["a"], plan, garbage)
    assert torch.equal(recording.replay(0, ["a"], plan), found)


def test_a_recording_refuses_what_it_does_not_hold() -> None:
    recording, planner, pool, plan, positions = recorded()
    for layer, name in ((1, "a"), (0, "b")):
        with pytest.raises(ValueError, match="recording must be at least 40 tokens long, got 0 tokens of"):
            recording.replay(layer, [name], plan)
    longer = planner.plan(Batch.build([1], [41], pool))
    with pytest.raises(ValueError, match="recording must be at least 41 tokens long, got 40"):
        recording.replay(0, ["a"], longer)
    later = planner.plan(Batch.build([1], [60], pool))
    recording.record(0, ["a"], later, choose_positions([1], [60], 24))
    with pytest.raises(ValueError, match="24 different positions up to 50 for token 50 of 'a'"):
        recording.replay(0, ["a"], planner.plan(Batch.build([1], [51], pool)))
    plan = planner.plan(Batch.build([40], [40], pool))
    with pytest.raises(ValueError, match="requests must be 1 different names"):
        recording.replay(0, ["a", "b"], plan)
    with pytest.raises(ValueError, match=r"positions must be of shape \[rows=40, 24\]"):
        recording.record(0, ["a"], plan, positions[:, :20].contiguous())


@pytest.mark.parametrize("spoil", ["short", "empty", "ahead", "twice"])
def test_incomplete_selections_are_not_recorded(spoil: str) -> None:
    recording, _, _, plan, positions = recorded()
    wrong = positions.clone()
    if spoil == "short":
        wrong[30, 5] = -1
    elif spoil == "empty":
        wrong[30] = -1
    elif spoil == "ahead":
        wrong[30, 5] = 31
    else:
        wrong[30, 5] = wrong[30, 6]
    with pytest.raises(ValueError, match="24 different positions up to 30 for token 30 of 'a'"):
        recording.record(0, ["a"], plan, wrong)
    assert torch.equal(recording.replay(0, ["a"], plan), positions)


def test_wrong_selections_are_refused_and_nothing_is_written() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    plan = planner.plan(Batch.build([30], [30], pool))
    q, kv, index = torch.randn(30, 4, 576), torch.randn(30, 576), inputs(30)
    caches = index_caches(cache, recipe=RECIPE)
    ahead = choose_positions([30], [30], 24)
    ahead[4, 7] = 5
    fitting = replace(index, recipe=RECIPE)
    sharer = SparseMLA(replace(spec, reuse_topk=True))
    wide = SparseMLA(replace(spec, index_heads=8, index_dim=16))
    cases = [
        (SparseMLA(spec), {"positions": ahead}, r"positions\[4\] must be at most 4, the position of token 4, got 5"),
        (SparseMLA(spec), {"positions": ahead[:, :20].contiguous()}, r"positions must be of shape \[rows=30, 24\]"),
        (sharer, {"index": fitting}, "index must be None for a layer that shares an earlier layer's selection"),
        (sharer, {}, "positions and index must be given one at a time, got neither"),
        (SparseMLA(spec), {"index": index}, "index.recipe must be that of the cache"),
        (SparseMLA(spec), {"index": replace(index, recipe=IndexRecipe(8))}, "index.recipe must be that of the cache"),
        (wide, {"index": replace(fitting, q=index.q[:, :4])}, r"index.q must be of shape \[T=30, H=8, D=16\]"),
        (SparseMLA(replace(spec, topk=None, window=4)), {"index": fitting}, "index must be None for a layer without"),
    ]
    for layer, options, message in cases:
        with pytest.raises(ValueError, match=message):
            layer(q, kv, caches, plan, **options)
    with pytest.raises(ValueError, match="kv must be None for a layer that reads an earlier layer's rows"):
        SparseMLA(replace(spec, reuse_rows=True))(q, kv, caches, plan, index=fitting)
    other = Caches(cache, PagedCache(rows(torch.float32, latent=16, rope=0), 120, PAGE * 2))
    with pytest.raises(ValueError, match=r"caches\.index must be of the plan's page size 16, got 32"):
        SparseMLA(spec)(q, kv, other, plan, index=index)
    with pytest.raises(ValueError, match="index must be None for a layer that shares"):
        sharer.select(fitting, caches, plan)
    assert (cache.storage == 0).all()
    assert (caches.index.storage == 0).all()
    assert SparseMLA(spec)(q, kv, caches, plan, index=fitting).out.isfinite().all()


def test_a_refused_recording_keeps_nothing() -> None:
    spec = LayerSpec(heads=1, latent_dim=32, rope_dim=8, value_dim=32, scale=1.0, topk=2)
    planner = Planner(spec, Limits(8, 2, 8, 4), layout="v32-bf16")
    plan = planner.plan(Batch.build([2, 2], [2, 2], PagePool(9, 4)))
    positions = torch.tensor([[0, -1], [0, 1], [0, -1], [1, 1]], dtype=torch.int32)  # the last names one twice
    recording = Recording(2)
    with pytest.raises(ValueError, match="positions must be 2 different positions up to 1 for token 1 of 'b'"):
        recording.record(0, ["a", "b"], plan, positions)
    with pytest.raises(ValueError, match="recording must be at least 2 tokens long, got 0 tokens of 'a'"):
        recording.replay(0, ["a", "b"], plan)
