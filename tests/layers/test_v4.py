"""The V4 layer's own rules: weights under both namings, caches, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bounds import relative_error
from small_v4 import (
    GROUPS,
    HEADS,
    HIDDEN,
    LOW,
    OVERLAPPING,
    PLAIN,
    RANK,
    WINDOW,
    caches_of,
    layer_of,
    named_tensors,
    planner_of,
    weights,
)

from tamis import Batch, IndexRecipe, LayerSpec, PagedCache, SparseV4, V4Caches, V4Planner, V4Weights
from tamis.cache.layout import Layout, compressor_state, index_fp8, named
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights
from tamis.model.rope import Rope

FP8 = named("v4-fp8", latent=24, rope=8, tile=8)
EXACT = named("v4-fp32", latent=24, rope=8)


def tensors_of(weights: object) -> list[torch.Tensor]:
    parts = [getattr(weights, name) for name in weights.__dataclass_fields__]
    nested = [tensors_of(p) if not isinstance(p, torch.Tensor) else [p] for p in parts if p is not None]
    return [t for part in nested for t in part]


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
def test_weights_under_both_namings(spec: LayerSpec) -> None:
    known = named_tensors(spec.kind)
    checkpoint = {f"layers.7.attn.{name}": t for name, (_, t) in known.items()} | {"layers.7.ffn.x": torch.zeros(1)}
    first = V4Weights.from_state_dict(checkpoint, groups=GROUPS, prefix="layers.7.attn.")
    second = V4Weights.from_state_dict(dict(known.values()), groups=GROUPS)
    pairs = list(zip(tensors_of(first), tensors_of(second), strict=True))
    assert len(pairs) == len(known)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert first.sink.dtype == torch.float32
    assert first.o_a.shape == (GROUPS, LOW, HEADS * 32 // GROUPS)
    first.check(spec)


def test_a_missing_tensor_is_named() -> None:
    known = {theirs: t for theirs, t in named_tensors("window").values() if theirs != "kv_proj.weight"}
    with pytest.raises(ValueError, match=r"tensors must be with 'a\.q_a_proj\.weight'.*check the prefix"):
        V4Weights.from_state_dict(known, groups=GROUPS, prefix="a.")
    with pytest.raises(ValueError, match=r"tensors must be with 'kv_proj\.weight'"):
        V4Weights.from_state_dict(known, groups=GROUPS)


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        (WINDOW, {"q_b": torch.zeros(3, RANK)}, r"q_b must be of shape \[N=128, R=10\]"),
        (WINDOW, {"o_a": torch.zeros(2, 3, 5)}, r"o_a must be \[groups, rank, 128 / groups\]"),
        (WINDOW, {"compressor": CompressorWeights(*[torch.zeros(1)] * 4)}, "weights.compressor must be None"),
        (PLAIN, {"compressor": None}, "weights.compressor must be given for a layer of kind 'plain'"),
        (OVERLAPPING, {"indexer": None}, "weights.indexer must be given for a layer of kind 'overlapping'"),
        (OVERLAPPING, {"indexer": IndexerWeights(*[torch.zeros(1, 1)] * 3)}, "indexer.q must be of shape"),
        (replace(PLAIN, compress=8), {}, "compressor.bias must be of shape"),
    ],
)
def test_weights_that_do_not_fit_are_refused(spec: LayerSpec, change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseV4(spec, replace(weights(spec.kind), **change), torch.zeros(9, 8))


def test_layers_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="spec must be of a V4 kind, got 'tokens'; use SparseMLA"):
        SparseV4(LayerSpec(4, topk=3), weights("window"), torch.zeros(9, 8))
    with pytest.raises(ValueError, match="cos_sin must be of shape"):
        SparseV4(WINDOW, weights("window"), torch.zeros(9, 6))
    with pytest.raises(ValueError, match="index_share must be one of"):
        SparseV4(WINDOW, weights("window"), torch.zeros(9, 8), index_share="never")


def test_caches_by_kind_of_layer() -> None:
    sizes = {"pages": 3, "window_pages": 5, "state_pages": 7}
    layout = {"layout": "v4-bf16"}
    window = V4Caches.allocate(WINDOW, **sizes, **layout)
    assert (window.window.pages, window.window.page_size) == (5, 64)
    assert window.entries is window.state is window.index is window.index_state is None
    plain = V4Caches.allocate(replace(PLAIN, compress=128), **sizes, **layout)
    assert (plain.entries.pages, plain.entries.page_size, plain.state.page_size) == (3, 2, 8)
    assert plain.state.layout == compressor_state(dim=32, overlapping=False)
    assert plain.index is None
    both = V4Caches.allocate(OVERLAPPING, **sizes, **layout)
    assert (both.entries.page_size, both.index.page_size, both.index.layout.name) == (64, 64, "index-fp8")
    assert (both.state.page_size, both.state.layout) == (4, compressor_state(dim=32))
    assert both.index_state.layout == compressor_state(dim=16)
    with pytest.raises(ValueError, match="page_size must be a multiple of the ratio 16, got 40"):
        V4Caches.allocate(PLAIN, **sizes, page_size=40)


@pytest.mark.parametrize(
    ("caches", "plan", "message"),
    [
        ({}, {"rows": 6}, "hidden must be of shape"),
        ({}, {"size": 7}, "plan.window.size must be the layer's 6, got 7"),
        ({}, {"page_size": 32}, "caches.window must be of the plan's page size 32, got 8"),
        ({}, {"entries": {}}, "plan must be with entries and a state pool for ratio 4, got ratios"),
        ({}, {"columns": 6}, "plan.entries must be for top-k 5, got 6"),
        ({}, {"state_page_size": 8}, "caches.state must be of the plan's page size 8, got 4"),
        ({"index_state": None}, {}, "caches.index_state must be given for a layer of kind 'overlapping'"),
        ({"entries": PagedCache("v4-bf16", 2, 2)}, {}, "caches.entries must be of the plan's page size 4, got 2"),
        ({"state": PagedCache(compressor_state(dim=32), 2, 8)}, {}, "caches.state must be of the plan's page size 4"),
        ({"index_state": PagedCache(compressor_state(dim=16), 2, 8)}, {}, "caches.index_state must be of the plan's"),
    ],
)
def test_calls_are_refused_before_anything_is_written(caches, plan, message: str) -> None:
    layer = layer_of(OVERLAPPING)
    held, planner, batch = indexed(hadamard=False)
    made = planner.plan(batch([5], [5]))
    if "entries" in plan:
        made = replace(made, entries={})
    for part, names in (("step", {"rows"}), ("window", {"size", "page_size"})):
        changes = {name: value for name, value in plan.items() if name in names}
        made = replace(made, **{part: replace(getattr(made, part), **changes)})
    changes = {name: value for name, value in plan.items() if name in ("columns", "state_page_size")}
    made = replace(made, entries={ratio: replace(part, **changes) for ratio, part in made.entries.items()})
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(5, HIDDEN), replace(held, **caches), made)
    assert not any(getattr(held, name).storage.any() for name in held.__dataclass_fields__)


def test_a_layer_tells_what_its_indexer_selected() -> None:
    layer = layer_of(OVERLAPPING)
    hidden, selected = torch.randn(60, HIDDEN), torch.full((60, 5), 99, dtype=torch.int32)
    caches, planner, batch = indexed(hadamard=False)
    plan = planner.plan(batch([60], [60]))
    found = layer(hidden, caches, plan, selected=selected)
    others, planner, batch = indexed(hadamard=False)
    plan = planner.plan(batch([60], [60]))
    queries = layer.write(hidden, others, plan)
    assert torch.equal(selected, layer.select(hidden, queries.index_q, others, plan))
    assert torch.equal(found, layer(hidden, others, plan))
    seen = torch.arange(1, 61) // 4
    assert torch.equal((selected >= 0).sum(1), seen.clamp_max(5))
    assert (selected.max(1).values < seen).all()
    empty = planner.plan(replace(batch([], []), padded_tokens=3))
    layer(torch.zeros(3, HIDDEN), others, empty, selected=selected[:3])
    assert (selected[:3] == -1).all()


@pytest.mark.parametrize(
    ("kind", "selected", "message"),
    [
        ("window", torch.zeros(5, 5, dtype=torch.int32), "selected must be None for a layer without an indexer"),
        ("overlapping", torch.zeros(5, 4, dtype=torch.int32), "selected must be of shape"),
        ("overlapping", torch.zeros(5, 5, dtype=torch.int64), "selected must be int32"),
        ("overlapping", torch.zeros(5, 1, dtype=torch.int32).expand(5, 5), "selected must be"),
    ],
)
def test_a_selection_that_cannot_be_told_is_refused_first(kind: str, selected: torch.Tensor, message: str) -> None:
    spec = OVERLAPPING if kind == "overlapping" else WINDOW
    layer, (held, planner, batch) = layer_of(spec), indexed(hadamard=False)
    with pytest.raises((TypeError, ValueError), match=message):
        layer(torch.zeros(5, HIDDEN), held, planner.plan(batch([5], [5])), selected=selected)
    assert not held.window.storage.any()


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
@pytest.mark.own_settings("torch cannot trace through a mode")
def test_a_compiled_layer_gives_the_same_bits(spec: LayerSpec) -> None:
    torch._dynamo.reset()
    layer = layer_of(spec)
    planner, batch = planner_of(spec, "v4-bf16")
    eager, traced = (caches_of(spec, EXACT) for _ in range(2))
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for new, lengths in (([33, 20], [33, 20]), ([1, 17], [34, 37])):
        plan = planner.plan(batch(new, lengths))
        hidden = torch.randn(sum(new), HIDDEN)
        with torch.no_grad():
            assert torch.equal(run(hidden, traced, plan), layer(hidden, eager, plan))
        for name in ("window", "entries", "state", "index", "index_state"):
            one, other = getattr(eager, name), getattr(traced, name)
            assert one is None or torch.equal(one.storage, other.storage)


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
def test_gathered_prefills_give_what_pages_give(spec: LayerSpec) -> None:
    """With rows that bf16 can hold, the workspace changes nothing but the order of sums."""
    layer = layer_of(spec)
    outputs = []
    hidden = [torch.randn(53, HIDDEN), torch.randn(18, HIDDEN)]
    for mode in ("mixed", "separate"):
        planner, batch = planner_of(spec, FP8, mode)
        caches = caches_of(spec, FP8)
        for given, new, lengths in zip(hidden, ([33, 20], [1, 17]), ([33, 20], [34, 37]), strict=True):
            plan = planner.plan(batch(new, lengths))
            assert (plan.workspace is not None) == (mode == "separate")
            outputs.append(layer(given, caches, plan))
    for one, other in zip(outputs[:2], outputs[2:], strict=True):
        assert relative_error(one, other) < 1e-6


def test_weights_move_and_keep_what_must_stay_exact() -> None:
    moved = weights("overlapping").to("cpu", torch.bfloat16)
    moved.check(OVERLAPPING)
    assert moved.indexer is not None
    exact = (moved.sink, moved.q_norm, moved.kv_norm, moved.indexer.compressor.bias, moved.indexer.compressor.norm)
    assert all(t.dtype == torch.float32 for t in exact)
    matrices = (moved.q_a, moved.o_b, moved.indexer.q, moved.indexer.weights, moved.indexer.compressor.values)
    assert all(t.dtype == torch.bfloat16 for t in matrices)


def indexed(hadamard: bool, index_layout: Layout | None = None) -> tuple[V4Caches, V4Planner, Callable[..., Batch]]:
    """Caches of the overlapping layer, a planner for them, and what makes the batches of one request after another."""
    changes = {} if index_layout is None else {"index_layout": index_layout}
    return caches_of(OVERLAPPING, EXACT, hadamard=hadamard, **changes), *planner_of(OVERLAPPING, EXACT)


def test_index_caches_prepared_otherwise_are_refused() -> None:
    """Nothing in the bytes shows how pairs were rotated, and other queries would select the wrong entries."""
    caches, planner, batch = indexed(hadamard=False)
    plan = planner.plan(batch([5], [5]))
    assert caches.index is not None
    assert caches.index.recipe == IndexRecipe(8, interleaved=True, rope_first=False)
    layer = layer_of(OVERLAPPING)
    for recipe in (IndexRecipe(8), IndexRecipe.of_v4(6, hadamard=True)):
        other = PagedCache.wrap(caches.index.storage, caches.index.layout, recipe=recipe)
        with pytest.raises(ValueError, match=r"^caches.index.recipe must be IndexRecipe.*as entries are rotated"):
            layer(torch.randn(5, HIDDEN), replace(caches, index=other), plan)
    assert not caches.window.storage.any()
    unsaid = PagedCache.wrap(caches.index.storage, caches.index.layout)
    assert layer(torch.randn(5, HIDDEN), replace(caches, index=unsaid), plan).any()


def test_a_hadamard_rotation_needs_a_power_of_two() -> None:
    spec = replace(OVERLAPPING, index_dim=24)
    sizes = {"pages": 3, "window_pages": 5, "state_pages": 7, "layout": "v4-bf16"}
    assert V4Caches.allocate(spec, **sizes, index_layout=index_fp8(dim=24)).index is not None
    with pytest.raises(ValueError, match="width must be a power of two for a Hadamard rotation, got 24"):
        V4Caches.allocate(spec, **sizes, index_layout=index_fp8(dim=24), hadamard=True)


def test_a_hadamard_rotation_keeps_selections_and_outputs() -> None:
    """It is orthogonal, and turns queries and keys alike: exact keys give the same scores."""
    layer = layer_of(OVERLAPPING)
    hidden = [torch.randn(53, HIDDEN), torch.randn(18, HIDDEN)]
    found = []
    for hadamard in (False, True):
        caches, planner, batch = indexed(hadamard)
        assert caches.index is not None
        assert caches.index.recipe == IndexRecipe.of_v4(8, hadamard=hadamard)
        for given, new, lengths in zip(hidden, ([33, 20], [1, 17]), ([33, 20], [34, 37]), strict=True):
            plan = planner.plan(batch(new, lengths))
            _, index_q = layer.write(given, caches, plan)
            chosen = layer.select(given, index_q, caches, plan)
            found.append((layer(given, caches, plan), chosen, index_q, caches.index.read(torch.arange(80))))
    for plain, turned in zip(found[:2], found[2:], strict=True):
        assert torch.equal(plain[1], turned[1])
        assert (plain[1] >= 0).any()
        assert relative_error(turned[0], plain[0]) < 1e-6
        for one, other in zip(plain[2:], turned[2:], strict=True):
            assert relative_error(other, one.double() @ hadamard_matrix(16)) < 1e-6
            assert relative_error(other, one) > 0.1


@pytest.mark.own_settings("torch cannot trace through a mode")
def test_a_compiled_layer_turns_index_keys_alike() -> None:
    """A trace loses a cache's recipe, so that the op must be told."""
    torch._dynamo.reset()
    layer = layer_of(OVERLAPPING)
    hidden, keys = torch.randn(33, HIDDEN), []
    for run, hadamard in (
        (layer, True),
        (torch.compile(layer, fullgraph=True, backend="aot_eager"), True),
        (layer, False),
    ):
        caches, planner, batch = indexed(hadamard, index_fp8(dim=16))
        with torch.no_grad():
            run(hidden, caches, planner.plan(batch([33], [33])))
        assert caches.index is not None
        keys.append(caches.index.storage)
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[0], keys[2])


def test_output_weights_in_fp8() -> None:
    plain = weights("window")
    small = plain.with_fp8_output(tile=32)
    small.check(WINDOW)
    assert small.o_a_scales is not None
    assert small.o_a_scales.shape == (GROUPS, 1, HEADS // GROUPS)
    wide = small.o_a.float() * small.o_a_scales.repeat_interleave(32, dim=2)
    assert 1e-3 < relative_error(wide, plain.o_a) < 4e-2
    moved = small.to("cpu", torch.bfloat16)
    assert (moved.o_a.dtype, moved.o_b.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert moved.o_a_scales is not None
    with pytest.raises(TypeError, match=r"^o_a must be "):
        replace(plain, o_a_scales=small.o_a_scales).check(WINDOW)
    with pytest.raises(ValueError, match=r"^o_a_scales must be in tiles that divide a head of 32"):
        replace(small, o_a_scales=small.o_a_scales[:, :, :1]).check(WINDOW)


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
@pytest.mark.parametrize("fp8_output", [False, True])
@pytest.mark.parametrize("mode", ["mixed", "separate"])
def test_empty_steps_padding_and_paused_requests(spec: LayerSpec, fp8_output: bool, mode: str) -> None:
    held = weights(spec.kind)
    layer = SparseV4(spec, held.with_fp8_output(tile=32) if fp8_output else held, Rope(8).cos_sin_table(80))
    planner, batch = planner_of(spec, FP8, mode)
    caches = caches_of(spec, FP8)
    nothing = batch([], [])
    assert layer(torch.zeros(0, HIDDEN), caches, planner.plan(nothing)).shape == (0, HIDDEN)
    warm_up = planner.plan(replace(nothing, padded_tokens=3))
    assert not layer(torch.randn(3, HIDDEN), caches, warm_up).any()
    assert not caches.window.storage.any()
    paused = planner.plan(replace(batch([0, 1], [5, 1]), padded_tokens=4))
    found = layer(torch.randn(4, HIDDEN), caches, paused)
    assert found[0].any()
    assert not found[1:].any()
