"""torch.compile(fullgraph=True) around the stages and the layer call: same results, same bytes in the caches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layers.test_mla import PAGE, choose_positions, start
from seeds import reseed
from torch._dynamo.testing import CompileCounter

from tamis import Batch, Caches, IndexRecipe, PagedCache, Selection, SparseMLA
from tamis.cache.layout import index_fp8, rows
from tamis.layers.mla import LayerOutput
from tamis.ops import (
    Attended,
    IndexInputs,
    attend,
    attend_slots,
    combine_parts,
    gather_index,
    gather_kv,
    index_scores,
    index_topk,
    quantise_index_query,
    quantise_per_tensor,
    ragged_scores,
    topk_positions,
    translate_positions,
    write_index_keys,
    write_kv,
    write_normed_kv,
)
from tamis.ops.write import reference as write_reference

pytestmark = pytest.mark.own_settings("torch cannot trace through a mode; tests/test_settings.py compiles too")

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(run: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(run, fullgraph=True, backend=backend, **options)


def same(found: Any, expected: Any) -> None:
    """Equal bit for bit: the ops are opaque, so nothing may differ."""
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif expected is not None:
        assert found.dtype == expected.dtype
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(layout: str, scale: float | torch.Tensor = 1.0) -> PagedCache:
    cache = PagedCache(layout, 6, PAGE, scale=scale)
    write_kv(torch.randn(cache.rows, cache.layout.width), cache, torch.arange(cache.rows))
    return cache


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["v32-bf16", "v32-fp8", "v4-fp8", "plain-fp8"])
def test_attend(layout: str, backend: str) -> None:
    cache = filled(layout, torch.tensor([0.5]) if layout == "plain-fp8" else 1.0)
    q, sink = torch.randn(5, 3, cache.layout.width), torch.randn(3)
    slots = torch.randint(-2, cache.rows, (5, 20), dtype=torch.int32)
    selections = [Selection(cache, slots, ints([20, 0, 3, 9, 1])), Selection(filled("v32-fp32"), slots[:, :4])]
    selections = selections if cache.layout.width == 576 else selections[:1]

    def run(q, selections, sink, q_scale, out) -> Attended:
        return attend(q, selections, scale=0.1, value_dim=448, sink=sink, q_scale=q_scale, splits=2, out=out)

    out, factor = torch.empty(5, 3, 448), torch.tensor([0.5])
    found = compiled(run, backend)(q, selections, sink, factor, out)
    same(tuple(found), tuple(run(q, selections, sink, factor, None)))
    assert found.out is out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["v32-bf16", "v4-fp8", "plain-fp8"])
def test_a_compiled_write_is_read_in_the_same_graph_and_seen_afterwards(layout: str, backend: str) -> None:
    cache, other = PagedCache(layout, 6, PAGE), PagedCache(layout, 6, PAGE)
    kv, slots = torch.randn(5, cache.layout.width), torch.tensor([3, 60, -1, 7])

    def run(kv, cache, slots) -> torch.Tensor:
        write_kv(kv, cache, slots)
        first = cache.read(slots)
        write_kv(kv + 1, cache, slots)
        return first

    same(compiled(run, backend)(kv, cache, slots), run(kv, other, slots))
    same(cache.storage, other.storage)
    assert (cache.read(slots[:2]) != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_caches_in_one_block_of_memory(backend: str) -> None:
    def caches() -> tuple[PagedCache, PagedCache]:
        block = torch.zeros(4, PAGE * (656 + 132), dtype=torch.uint8)
        latent, keys = block.split([PAGE * 656, PAGE * 132], dim=1)
        return (
            PagedCache.wrap(latent.unflatten(1, (PAGE, 656)), "v32-fp8"),
            PagedCache.wrap(keys.unflatten(1, (PAGE, 132)), "index-fp8"),
        )

    def run(kv, keys, latent, index, slots) -> torch.Tensor:
        write_kv(kv, latent, slots)
        write_kv(keys, index, slots)
        return latent.read(slots)

    kv, keys, slots = torch.randn(3, 576), torch.randn(3, 128), torch.tensor([0, 5, 17])
    pair, other = caches(), caches()
    same(compiled(run, backend)(kv, keys, *pair, slots), run(kv, keys, *other, slots))
    for one, expected in zip(pair, other, strict=True):
        same(one.storage, expected.storage)


def test_every_other_stage() -> None:
    index, latent = filled("index-fp8"), filled("v32-fp8")
    table, lengths, ids = ints([[0, 1], [4, 2]]), ints([20, 7]), ints([0, 1, 1])
    q, weights, positions = torch.randn(3, 2, 128), torch.randn(3, 2), torch.randint(-1, 32, (3, 6)).int()
    query, selection = torch.randn(3, 2, 576), Selection(latent, positions, None, ids, table)

    def run(index, latent, out) -> tuple[torch.Tensor, ...]:
        partials = attend_slots(query, selection, scale=0.1, value_dim=512)
        return (
            *gather_index(index, table, lengths, rows=32),
            gather_kv(latent, table, lengths, first=ints([1, 0]), out=out),
            index_topk(q, weights, index, ids, table, ints([9, 7, 1]), 4),
            (scores := index_scores(q, weights, index, ids, table, ints([9, 7, 1]))),
            topk_positions(scores, ints([9, 7, 1]), 4, request_ids=ids, block_table=table, page_size=PAGE),
            ragged_scores(q, weights, q[:, 0], None, ints([0, 1, 2]), ints([3, 3, 1])),
            *translate_positions(positions, ids, table, page_size=PAGE, compact=True),
            *partials,
            *combine_parts(partials, sink=weights[0].exp(), lse_base="2"),
            *quantise_per_tensor(query),
        )

    same(compiled(run)(index, latent, torch.zeros(32, 576)), run(index, latent, torch.zeros(32, 576)))


def test_norm_and_rotation_before_a_write() -> None:
    caches = PagedCache("v32-fp32", 2, PAGE), PagedCache("v32-fp32", 2, PAGE)
    latent, rope, slots = torch.randn(3, 512), torch.randn(3, 64), torch.tensor([1, 2, 30])
    options = {"norm_weight": torch.randn(512), "positions": torch.arange(3), "cos_sin": torch.randn(8, 64)}
    write_normed_kv(latent, rope, caches[0], slots, **options)
    compiled(lambda cache: write_normed_kv(latent, rope, cache, slots, **options))(caches[1])
    torch.testing.assert_close(caches[1].storage, caches[0].storage)


def test_index_queries_and_keys_before_they_meet() -> None:
    recipe = IndexRecipe(hadamard=True)
    caches = [PagedCache("index-fp8", 2, PAGE, recipe=recipe) for _ in range(2)]
    q, weights, keys, slots = torch.randn(3, 4, 128), torch.randn(3, 4), torch.randn(3, 128), torch.tensor([1, 2, 30])
    where = {"positions": torch.arange(3), "cos_sin": torch.randn(8, 64)}
    norm = {"norm_weight": torch.randn(128), "norm_bias": torch.randn(128)}

    def run(cache) -> tuple[torch.Tensor, ...]:
        write_index_keys(keys, cache, slots, **norm, **where)
        return quantise_index_query(q, weights, recipe, **where)

    same(compiled(run)(caches[0]), run(caches[1]))
    same(caches[0].storage, caches[1].storage)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="prepare queries and keys alike"):
        compiled(lambda cache: write_index_keys(keys, cache, slots, IndexRecipe(), **where))(caches[0])


def serve(
    layer: Callable[..., LayerOutput], mode: str, steps: list[list[int]], *, index: bool, fp8: bool = False
) -> list[torch.Tensor]:
    """Outputs of some steps, and the caches' bytes after them."""
    reseed(3)
    spec, planner, pool, latent = start("v32-fp8", 4, mode, workspace_rows=256)
    recipe = IndexRecipe(16) if fp8 else None
    layout = index_fp8(dim=16) if fp8 else rows(torch.float32, latent=16, rope=0)
    caches = Caches(latent, PagedCache(layout, 120, PAGE, recipe=recipe))
    results: list[torch.Tensor] = []
    for lengths in steps:
        plan = planner.plan(Batch.build(lengths, lengths, pool))
        n = sum(lengths)
        chosen = {"positions": choose_positions(lengths, lengths, spec.topk)}
        raw, weights = torch.randn(n, 8, 16), torch.randn(n, 8)
        if recipe is not None:
            raw, weights = quantise_index_query(raw, weights, recipe)
        scores = {"index": IndexInputs(raw, weights, torch.randn(n, 16), recipe)}
        q, kv = torch.randn(n, 4, 576), (torch.randn(n, 512), torch.randn(n, 64))
        sink, out = torch.randn(4), torch.empty(n, 4, 512) if index else None
        found = layer(q, kv, caches, plan, sink=sink, out=out, **(scores if index else chosen))
        assert out is None or found.out is out
        results += [*found, latent.storage.clone(), caches.index.storage.clone()]
    return results


@pytest.mark.parametrize(
    ("mode", "index", "backend"),
    # What the simpler backend runs is the graph that the other one then rewrites: once is enough.
    [
        *((mode, index, "aot_eager") for mode in ("mixed", "separate") for index in (False, True)),
        ("separate", True, "eager"),
    ],
)
def test_the_layer_call(mode: str, index: bool, backend: str) -> None:
    layer = SparseMLA(start("v32-fp8", 4, mode)[0], batch_invariant=index)
    steps = [[1, 1, 20, 30], [1, 1, 10, 7]]
    same(
        tuple(serve(compiled(layer, backend), mode, steps, index=index)), tuple(serve(layer, mode, steps, index=index))
    )


def test_the_layer_call_with_fp8_index_queries() -> None:
    layer = SparseMLA(start("v32-fp8", 4, "mixed")[0])
    steps = [[1, 1, 20, 30], [1, 1, 10, 7]]
    found = serve(compiled(layer), "mixed", steps, index=True, fp8=True)
    same(tuple(found), tuple(serve(layer, "mixed", steps, index=True, fp8=True)))


def test_inductor_writes_to_the_cache_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, planner, pool, cache = start("v32-fp8", 4, "mixed")
    layer, lengths, addresses = SparseMLA(spec, backend="reference"), [1, 20], []
    plan = planner.plan(Batch.build(lengths, lengths, pool))
    q, kv, positions = torch.randn(21, 4, 576), torch.randn(21, 576), choose_positions(lengths, lengths, 24)
    expected = layer(q, kv, cache, plan, positions=positions)
    written = cache.storage.clone()
    cache.storage.zero_()
    write = write_reference.write_kv

    def spy(call) -> None:
        addresses.append(call.cache.storage.data_ptr())
        write(call)

    monkeypatch.setattr(write_reference, "write_kv", spy)
    found = compiled(layer, "inductor")(q, kv, cache, plan, positions=positions)
    same(tuple(found), tuple(expected))
    same(cache.storage, written)
    assert addresses == [cache.storage.data_ptr()], "a compiled step must not copy the cache"


def test_attention_with_a_dynamic_batch_is_compiled_once() -> None:
    cache, counter = filled("v32-fp8"), CompileCounter()
    run = compiled(lambda q, s: attend(q, s, scale=0.1, value_dim=512), counter)
    for tokens in (5, 9, 64):
        q, slots = torch.randn(tokens, 3, 576), torch.randint(-2, 80, (tokens, 20), dtype=torch.int32)
        torch._dynamo.mark_dynamic(q, 0)
        torch._dynamo.mark_dynamic(slots, 0)
        selection = Selection(cache, slots)
        same(tuple(run(q, selection)), tuple(attend(q, selection, scale=0.1, value_dim=512)))
    assert counter.frame_count == 1


def test_numbers_may_change_between_calls() -> None:
    cache, q, slots = filled("plain-fp8"), torch.randn(2, 3, 576), ints([[1, 2], [3, 4]])

    def run(q, cache, slots, scale) -> Attended:
        return attend(q, Selection(cache, slots), scale=scale, value_dim=512)

    for number in (0.1, 0.2, 0.3):
        scaled = cache.with_scale(number)
        same(tuple(compiled(run)(q, scaled, slots, number)), tuple(run(q, scaled, slots, number)))


@pytest.mark.parametrize("index", [False, True], ids=["positions", "index"])
def test_decode_steps_of_many_sizes_are_compiled_twice(index: bool) -> None:
    layer, counter = SparseMLA(start("v32-fp8", 4, "mixed")[0]), CompileCounter()
    steps = [[1] * n for n in (3, 5, 4, 8, 7)]
    same(
        tuple(serve(compiled(layer, counter), "mixed", steps, index=index)),
        tuple(serve(layer, "mixed", steps, index=index)),
    )
    assert counter.frame_count == 2, "the first size alone, then any"


def test_shapes_are_checked_and_values_are_not() -> None:
    cache, other = PagedCache("v32-fp8", 2, PAGE), PagedCache("v32-fp8", 2, PAGE)
    run = compiled(write_kv, "eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kv must be of shape"):
        run(torch.randn(2, 99), cache, torch.tensor([0, 1]))
    kv = torch.randn(2, 576)
    with pytest.raises(ValueError, match="slots must be between"):
        write_kv(kv, other, torch.tensor([1, 99]))
    run(kv, cache, torch.tensor([1, 99]))  # as on a device: what cannot be checked is skipped
    write_kv(kv[:1], other, torch.tensor([1]))
    same(cache.storage, other.storage)


def test_what_cannot_be_compiled_says_so() -> None:
    cache = filled("v32-fp8")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="out must be given under torch"):
        compiled(gather_kv)(cache, ints([[0, 1]]), ints([3]))
    q = torch.randn(1, 1, 576, requires_grad=True)
    with pytest.raises(Exception, match="q must be without gradient"):
        compiled(attend)(q, Selection(cache, ints([[1]])), scale=0.1, value_dim=512)
    with pytest.raises(Exception, match="backend must be 'auto' or one of"):
        compiled(attend)(q.detach(), Selection(cache, ints([[1]])), scale=0.1, value_dim=512, backend="magic")
