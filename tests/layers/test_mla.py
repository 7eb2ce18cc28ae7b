"""The layer call against fp64, over steps of a served batch."""

from dataclasses import replace

import bounds
import pytest
import torch
from bounds import selected_attention
from seeds import reseed, seed_of

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, Selection, Shard, SparseMLA
from tamis.cache.layout import rows
from tamis.layers import mla_checks
from tamis.ops import IndexInputs, Partials, attention, combine_parts, memory, translate_positions, write_kv
from tamis.ops.attention import reference

LAYOUTS = ["v32-fp32", "v32-bf16", "v32-fp8", "plain-fp8"]
PAGE = 16


def stored(kv: torch.Tensor, layout: str) -> torch.Tensor:
    """What a cache keeps of these rows, so that rounding on the way in does not hide errors on the way out."""
    cache = PagedCache(layout, len(kv), 1)
    write_kv(kv, cache, torch.arange(len(kv)))
    return cache.read(torch.arange(len(kv)))


def start(layout: str, heads: int, mode: str = "auto", topk: int = 24, **limits):
    spec = LayerSpec(heads=heads, scale=0.08, topk=topk)
    fields = {"max_tokens": 128, "max_requests": 8, "max_length": 256, "page_size": PAGE} | limits
    planner = Planner(spec, Limits(**fields), layout=layout, mode=mode)
    return spec, planner, PagePool(120, PAGE, seed=seed_of(2)), PagedCache(layout, 120, PAGE)


def choose_positions(query_lengths: list[int], lengths: list[int], k: int) -> torch.Tensor:
    """Random causal positions per token, -1 padded, each token its own."""
    found = []
    for query, length in zip(query_lengths, lengths, strict=True):
        for position in range(length - query, length):
            picked = torch.randperm(position + 1)[:k].int()
            found.append(torch.nn.functional.pad(picked, (0, k - len(picked)), value=-1))
    return torch.stack(found)


def exact_attention(q, history, query_lengths, positions, scale, **options) -> bounds.Attention:
    requests = [request for request, query in enumerate(query_lengths) for _ in range(query)]
    options |= {"scale": scale, "value_dim": 512}
    return bounds.stacked(
        [
            bounds.attention(q[token], history[request][positions[token][positions[token] >= 0].long()], **options)
            for token, request in enumerate(requests)
        ]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "mode"), [(4, "auto"), (32, "auto"), (4, "separate"), (32, "mixed")])
def test_chunked_prefill_mixed_and_decode_steps(layout: str, heads: int, mode: str) -> None:
    if mode == "separate" and not layout.endswith("fp8"):
        mode = "auto"
    spec, planner, pool, cache = start(layout, heads, mode, workspace_rows=256)
    layer = SparseMLA(spec)
    history = [torch.zeros(0, 576) for _ in range(3)]
    steps = [[30, 0, 0], [20, 40, 0], [1, 1, 50], [1, 1, 1], [1, 1, 1]]
    for number, news in enumerate(steps):
        order = sorted(range(3), key=lambda r: news[r])
        order = [r for r in order if news[r]]
        queries = [news[r] for r in order]
        kv = torch.randn(sum(queries), 576)
        for r, part in zip(order, kv.split(queries), strict=True):
            history[r] = torch.cat((history[r], part))
        lengths = [len(history[r]) for r in order]
        plan = planner.plan(Batch.build(queries, lengths, pool, requests=order))
        q = torch.randn(sum(queries), heads, 576)
        positions = choose_positions(queries, lengths, spec.topk)
        sink = torch.randn(heads) if number % 2 else None
        result = layer(q, kv, cache, plan, positions=positions, sink=sink)
        known = [stored(history[r], layout) for r in order]
        # Gathered prefills are rounded to bf16 once more.
        gathered = plan.prefill is not None and plan.prefill.chunks
        unit = bounds.unit(torch.bfloat16) if gathered else 0.0
        exact = exact_attention(q, known, queries, positions, spec.scale, sink=sink, row_unit=unit)
        bounds.agree(result.out, exact.out, exact.out_error)


def test_modes_agree_within_the_fp8_tolerance() -> None:
    results, bf16 = [], bounds.unit(torch.bfloat16)
    for mode in ("mixed", "separate"):
        reseed(1)
        spec, planner, pool, cache = start("v32-fp8", 32, mode)
        plan = planner.plan(Batch.build([1, 40, 50], [1, 40, 50], pool))
        q, kv = torch.randn(91, 32, 576), torch.randn(91, 576)
        positions = choose_positions([1, 40, 50], [1, 40, 50], 24)
        results.append(SparseMLA(spec)(q, kv, cache, plan, positions=positions))
    known = list(stored(kv, "v32-fp8").split((1, 40, 50)))
    for result, unit in zip(results, (0.0, bf16), strict=True):
        exact = exact_attention(q, known, [1, 40, 50], positions, spec.scale, row_unit=unit)
        bounds.agree(result.out, exact.out, exact.out_error)
        bounds.agree(result.lse, exact.lse, exact.lse_error)
    torch.testing.assert_close(results[0].out, results[1].out, rtol=0.065, atol=0.05)
    torch.testing.assert_close(results[0].lse, results[1].lse, rtol=1e-2, atol=1e-2)


def test_the_layer_selects_its_own_positions_and_another_layer_shares_them() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    caches = Caches(cache, PagedCache(rows(torch.float32, latent=16, rope=0), 120, PAGE))
    plan = planner.plan(Batch.build([60], [60], pool))
    q, kv = torch.randn(60, 4, 576), torch.randn(60, 576)
    index = IndexInputs(torch.randn(60, 8, 16), torch.randn(60, 8), torch.randn(60, 16))
    layer = SparseMLA(spec)
    own = layer(q, kv, caches, plan, index=index)
    positions = layer.select(index, caches, plan)
    for t in range(60):
        assert sorted(positions[t][positions[t] >= 0].tolist()) == sorted(set(positions[t].tolist()) - {-1})
        assert (positions[t] >= 0).sum() == min(t + 1, 24)
        assert positions[t].max() <= t
    kept = positions.clone()
    shared = layer(q, kv, caches, plan, positions=positions)
    assert torch.equal(own.out, shared.out)
    assert torch.equal(positions, kept)


def test_selecting_everything_is_dense_causal_attention() -> None:
    spec, planner, pool, cache = start("v32-fp32", 3, topk=64)
    plan = planner.plan(Batch.build([50], [50], pool))
    q, kv = torch.randn(50, 3, 576), torch.randn(50, 576)
    positions = torch.arange(64, dtype=torch.int32).expand(50, 64).clone()
    positions[positions > torch.arange(50).unsqueeze(1)] = -1
    result = SparseMLA(spec)(q, kv, cache, plan, positions=positions)
    mask = torch.ones(50, 50, dtype=torch.bool).tril()
    wide = kv.double()
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1),
        wide.expand(3, 50, 576),
        wide[:, :512].expand(3, 50, 512),
        attn_mask=mask,
        scale=spec.scale,
    )
    error = exact_attention(q, [kv], [50], positions, spec.scale).out_error
    bounds.agree(result.out, dense.transpose(0, 1), error)


def test_padded_rows_do_no_harm() -> None:
    spec, planner, pool, cache = start("v32-fp8", 4)
    batch = Batch.build([1, 1], [20, 30], pool)
    padded = Batch(batch.query_starts, batch.lengths, batch.pages, padded_tokens=6)
    before = cache.storage.clone()
    plan = planner.plan(padded)
    positions = torch.full((6, 24), -1, dtype=torch.int32)
    positions[:2] = choose_positions([1, 1], [20, 30], 24)
    positions[3] = 7  # garbage in a padded row may give a garbage row, nothing else
    q, kv = torch.randn(6, 4, 576), torch.randn(6, 576)
    result = SparseMLA(spec)(q, kv, cache, plan, positions=positions)
    assert (result.out[[2, 4, 5]] == 0).all()
    changed = (cache.storage != before).any(-1).sum()
    assert changed == 2
    plan = planner.plan(batch)
    alone = SparseMLA(spec)(q[:2], None, cache, plan, positions=positions[:2].contiguous())
    slots = translate_positions(positions[:2], plan.request_ids, plan.block_table, page_size=PAGE).slots
    exact = selected_attention(q[:2], [Selection(cache, slots)], scale=spec.scale, value_dim=512)
    for found in (alone.out, result.out[:2]):
        bounds.agree(found, exact.out, exact.out_error)


def test_speculative_tokens_each_have_their_own_positions() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4, speculative_tokens=2)
    history = [torch.randn(n, 576) for n in (40, 50)]
    for r, known in enumerate(history):
        plan = planner.plan(Batch.build([len(known)], [len(known)], pool, requests=[r]))
        SparseMLA(spec).write(known, Caches(cache), plan)
    plan = planner.plan(Batch.build([3, 3], [40, 50], pool))
    assert plan.prefill is None
    assert plan.decode.query_length == 3
    q = torch.randn(6, 4, 576)
    positions = choose_positions([3, 3], [40, 50], 24)
    result = SparseMLA(spec)(q, None, cache, plan, positions=positions)
    exact = exact_attention(q, history, [3, 3], positions, spec.scale)
    bounds.agree(result.out, exact.out, exact.out_error)


def test_context_parallel_ranks_merge_to_the_whole() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4, context_parallel=True)
    plan = planner.plan(Batch.build([60], [60], pool))
    q, kv = torch.randn(60, 4, 576), torch.randn(60, 576)
    positions = choose_positions([60], [60], 24)
    whole = SparseMLA(spec)(q, kv, cache, plan, positions=positions)
    ranks, interleave, parts = 3, 2, []
    for rank in range(ranks):
        owned = [p for p in range(60) if p // interleave % ranks == rank]
        local_pool = PagePool(20, PAGE, seed=seed_of(rank))
        local_cache = PagedCache("v32-fp32", 20, PAGE)
        batch = Batch.build([len(owned)], [len(owned)], local_pool)
        local = planner.plan(batch)
        SparseMLA(spec).write(kv[owned], Caches(local_cache), local)
        full = Batch(torch.tensor([0, 60], dtype=torch.int32), torch.tensor([60], dtype=torch.int32), batch.pages)
        spread = torch.full((60,), -1)
        spread[: len(owned)] = batch.pages.slots
        local = planner.plan(Batch(full.query_starts, full.lengths, type(batch.pages)(batch.pages.block_table, spread)))
        layer = SparseMLA(spec, shard=Shard(ranks, rank, interleave))
        parts.append(layer(q, None, local_cache, local, positions=positions))
    merged = combine_parts(
        Partials(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts])), dtype=torch.float32
    )
    exact = exact_attention(q, [kv], [60], positions, spec.scale, parts=ranks)
    for found in (merged, whole):
        bounds.agree(found.out, exact.out, exact.out_error)
        bounds.agree(found.lse, exact.lse, exact.lse_error)


def test_output_buffer_and_query_pair() -> None:
    for layout, heads in (("v32-fp32", 4), ("v32-fp8", 32)):
        spec, planner, pool, cache = start(layout, heads)
        plan = planner.plan(Batch.build([1, 20], [1, 20], pool))
        latent, rope = torch.randn(heads, 21, 512).transpose(0, 1), torch.randn(21, heads, 64)
        kv = (torch.randn(21, 512), torch.randn(21, 64))
        positions = choose_positions([1, 20], [1, 20], 24)
        out = torch.empty(21, heads, 512)
        result = SparseMLA(spec)((latent, rope), kv, cache, plan, positions=positions, out=out)
        assert result.out is out
        assert not out.isnan().any()
        assert result.lse.shape == (21, heads)


@pytest.mark.parametrize("mode", ["mixed", "separate"])
def test_padded_rows_of_a_given_output_are_zeros(mode: str) -> None:
    """Whatever the buffer held before, another request's rows perhaps, is gone."""
    spec, planner, pool, cache = start("v32-fp8", 32, mode)
    plan = planner.plan(replace(Batch.build([1, 20], [1, 20], pool), padded_tokens=27))
    positions = torch.nn.functional.pad(choose_positions([1, 20], [1, 20], 24), (0, 0, 0, 6), value=-1)
    out = torch.full((27, 32, 512), 1e6)
    result = SparseMLA(spec)(torch.randn(27, 32, 576), torch.randn(27, 576), cache, plan, positions=positions, out=out)
    assert out[:21].abs().max() < 100
    assert out[21:].eq(0).all()
    assert result.lse[21:].eq(-torch.inf).all()


def test_what_a_layer_is_unless_told() -> None:
    assert Shard() == Shard(ranks=1, rank=0, interleave=1)
    assert not SparseMLA(LayerSpec(heads=4, scale=0.1, topk=8)).batch_invariant
    with pytest.raises(TypeError, match="spec must be"):
        SparseMLA({"heads": 4})


def test_selecting_alone_checks_its_inputs() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    plan = planner.plan(Batch.build([3], [30], pool))
    caches = Caches(cache, PagedCache(rows(torch.float32, latent=16, rope=0), 120, PAGE))
    for wrong in (torch.randn(2, 8, 16), torch.randn(3, 8, 17)):
        with pytest.raises(ValueError, match=r"index\.q must be of shape"):
            SparseMLA(spec).select(IndexInputs(wrong, torch.randn(3, 8)), caches, plan)


def test_a_step_without_requests_hands_given_positions_on() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4)
    plan = planner.plan(replace(Batch.build([], [], pool), padded_tokens=2))
    positions = torch.full((2, 24), 7, dtype=torch.int32)
    result = SparseMLA(spec)(torch.randn(2, 4, 576), torch.randn(2, 576), cache, plan, positions=positions)
    assert result.positions is positions
    assert result.out.eq(0).all()


def test_bad_calls_are_refused_and_nothing_is_written() -> None:
    spec, planner, pool, cache = start("v32-fp8", 4)
    plan = planner.plan(Batch.build([3], [30], pool))
    q, kv = torch.randn(3, 4, 576), torch.randn(3, 576)
    positions = choose_positions([3], [30], 24)
    before = cache.storage.clone()
    layer = SparseMLA(spec)
    index = IndexInputs(torch.randn(3, 8, 16), torch.randn(3, 8))
    cases = [
        ((q[:2], kv, cache, plan), {"positions": positions}, ValueError, "q must be of shape"),
        ((q[:, :3], kv, cache, plan), {"positions": positions}, ValueError, "H=4"),
        ((q, kv, cache, plan), {}, ValueError, "positions and index must be given one at a time, got neither"),
        ((q, kv, cache, plan), {"positions": positions, "index": index}, ValueError, "got both"),
        ((q, kv, cache, plan), {"positions": positions[:2]}, ValueError, "positions must be of shape"),
        ((q, kv, cache, plan), {"positions": positions.long()}, TypeError, "positions must be int32"),
        ((q, kv, cache, plan), {"index": index}, ValueError, "caches.index must be a cache of index keys"),
        ((q, kv, PagedCache("v32-fp8", 9, 8), plan), {"positions": positions}, ValueError, "page size 16"),
        ((q, kv[:, :9], cache, plan), {"positions": positions}, ValueError, "kv must be of shape"),
    ]
    for arguments, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            layer(*arguments, **options)
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        SparseMLA(spec, backend="magic")(q, kv, cache, plan, positions=positions)
    assert torch.equal(cache.storage, before)


def test_batch_invariant_mode_gives_the_same_attention() -> None:
    spec, planner, pool, cache = start("v32-fp32", 4, topk=1100)
    plan = planner.plan(Batch.build([60], [60], pool))
    q, kv = torch.randn(60, 4, 576), torch.randn(60, 576)
    positions = choose_positions([60], [60], 1100)
    usual = SparseMLA(spec)(q, kv, cache, plan, positions=positions)
    fixed = SparseMLA(spec, batch_invariant=True)(q, kv, cache, plan, positions=positions)
    exact = exact_attention(q, [kv], [60], positions, spec.scale, parts=3)
    for found in (usual, fixed):
        bounds.agree(found.out, exact.out, exact.out_error)


def test_positions_looked_up_on_the_way_give_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, planner, pool, cache = start("v32-bf16", 4)
    plan = planner.plan(Batch.build([1, 3], [70, 9], pool))
    write_kv(torch.randn(cache.rows, 576), cache, torch.arange(cache.rows))
    q, positions = torch.randn(4, 4, 576), choose_positions([1, 3], [70, 9], 24)
    expected = SparseMLA(spec)(q, None, cache, plan, positions=positions)
    direct = SparseMLA(spec).attend_positions(q, cache, positions, plan.request_ids, plan.block_table)
    plain = reference.attend
    monkeypatch.setattr(reference, "attend", lambda call: plain(call.translated()))
    first = SparseMLA(spec)(q, None, cache, plan, positions=positions)
    for found in (direct, first):
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)


def test_shapes_that_passed_are_not_checked_again_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, planner, pool, cache = start("v32-bf16", 4)
    plan = planner.plan(Batch.build([1, 3], [70, 9], pool))
    given = {
        "q": torch.randn(4, 4, 576),
        "cache": cache,
        "positions": choose_positions([1, 3], [70, 9], 24),
        "request_ids": plan.request_ids,
        "block_table": plan.block_table,
    }
    layer, checked = SparseMLA(spec), []

    def check_query(q, selections, value_dim) -> None:
        checked.append(q.shape)
        attention.check_query(q, selections, value_dim)

    monkeypatch.setattr(mla_checks, "check_query", check_query)
    for _ in range(2):
        layer.attend_positions(**given)
    assert len(checked) == 2, "on the host values are checked, every time"
    monkeypatch.setattr(mla_checks.checks, "visible", lambda tensor: False)
    monkeypatch.setattr(memory, "remembered_on", lambda tensor: True)
    for _ in range(3):
        layer.attend_positions(**given)
    assert len(checked) == 3
    wrong = {
        "q": (torch.randn(4, 5, 576), "q must be of shape"),
        "positions": (given["positions"].long(), "positions must be int32"),
        "request_ids": (plan.request_ids[:3], r"selections\[0\].request_ids must be of shape"),
        "block_table": (plan.block_table[0], r"selections\[0\].block_table must be of shape"),
        "sink": (torch.zeros(5), "sink must be of shape"),
        "out": (torch.zeros(4, 4, 500), "out must be of shape"),
        "q_scale": (-1.0, "q_scale must be finite and > 0"),
    }
    for name, (value, message) in wrong.items():
        for _ in range(2):
            with pytest.raises((ValueError, TypeError), match=message):
                layer.attend_positions(**(given | {name: value}))
    layer.attend_positions(**given)
