"""The torch ops behind the stages: schemas, fakes, and what they write to."""

import importlib
from collections.abc import Callable

import pytest
import torch
from small_layouts import LAYOUTS
from traced_ops import traced

from tamis import IndexRecipe, PagedCache, Selection
from tamis.cache.layout import Layout, compressor_state, index_fp8, named, rows
from tamis.ops import (
    Partials,
    StatePages,
    attend,
    attend_slots,
    combine_parts,
    compress_kv,
    gather_index,
    gather_kv,
    index_scores,
    index_topk,
    index_topk_and_blocks,
    index_topk_within,
    lower_groups,
    norm_rows,
    pool_kv,
    quantise_blocks,
    quantise_index_query,
    ragged_scores,
    read_kv,
    rotate_and_write,
    rotate_heads,
    rotate_to_fp8,
    select_chosen,
    select_entries,
    select_gathered,
    select_groups,
    select_window,
    topk_positions,
    translate_positions,
    write_index_keys,
    write_kv,
    write_rotated,
)
from tamis.ops.attention import reference as attend_reference

pytestmark = pytest.mark.own_settings("pretends to trace, where a mode does not know its caller")

PAGES, PAGE = 6, 4


def opcheck(run: Callable[[], object], name: str) -> None:
    func, arguments = traced(run)
    assert func.name() == f"tamis::{name}"
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    # The schema test compares tensors with a tolerance, which torch cannot do in FP8.
    skipped = any(t.dtype == torch.float8_e4m3fn for t in tensors)
    torch.library.opcheck(func, arguments, test_utils=tests[1:] if skipped else tests)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(layout: str | Layout, *, apart: bool = False, scale: float | torch.Tensor = 1.0) -> PagedCache:
    """A small cache with something in every row; `apart` puts other bytes between its pages and calls FP8 bytes."""
    made = named(layout)
    cache = PagedCache(made, PAGES, PAGE, scale=scale)
    if apart:
        dtype = torch.uint8 if made.element.itemsize == 1 else made.element
        block = torch.zeros(PAGES, 2 * PAGE, made.row_elements, dtype=dtype)
        cache = PagedCache.wrap(block[:, PAGE:], made, scale=scale)
    write_kv(torch.randn(PAGES * PAGE, made.width), cache, torch.arange(PAGES * PAGE))
    return cache


def test_the_registered_ops_and_what_they_write_to() -> None:
    written = {
        "attend": ["out"],
        "attend_rows": [],
        "attend_rows_backward": [],
        "attend_slots": [],
        "combine_parts": ["out"],
        "compress_kv": ["state_storage", "cache_storage"],
        "compress_rows": [],
        "compress_rows_backward": [],
        "fake_quantise": [],
        "gather_index": [],
        "gather_kv": ["out"],
        "index_loss": [],
        "index_scores": ["out"],
        "index_target": [],
        "index_topk": ["out", "scores"],
        "index_topk_and_blocks": ["out", "blocks"],
        "index_topk_within": ["out"],
        "lower_groups": [],
        "ragged_scores": ["out"],
        "read_kv": [],
        "norm_rows": [],
        "pool_kv": ["state_storage"],
        "quantise_index_query": [],
        "rotate_and_write": ["cache_storage"],
        "rotate_heads": [],
        "rotate_to_fp8": [],
        "select_chosen": ["slots", "lengths"],
        "select_entries": ["completed", "visible", "lengths", "every"],
        "select_gathered": ["slots", "lengths"],
        "select_groups": ["positions"],
        "select_window": ["slots", "lengths"],
        "topk_positions": [],
        "translate_positions": [],
        "warmup_loss": [],
        "write_index_keys": ["cache_storage"],
        "write_kv": ["cache_storage"],
        "write_rotated": ["cache_storage"],
    }
    importlib.import_module("tamis.train")  # registers its own
    registered = {
        schema.name.removeprefix("tamis::"): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("tamis::")
    }
    assert sorted(registered) == sorted(written)
    for name, schema in registered.items():
        assert [a.name for a in schema.arguments if a.is_write] == written[name]
        assert all(r.alias_info is None for r in schema.returns), "an op must not return what it was given"
        assert torch.Tag.needs_exact_strides in getattr(torch.ops.tamis, name).default.tags


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_write_and_read(layout: Layout) -> None:
    cache = filled(layout, apart=True, scale=0.5 if layout.scale_mode == "tensor" else 1.0)
    slots = torch.tensor([3, -1, 20])
    opcheck(lambda: write_kv(torch.randn(4, layout.width), cache, slots.int()), "write_kv")
    opcheck(lambda: read_kv(cache, slots), "read_kv")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("overlapping", [False, True])
def test_compress(layout: Layout, overlapping: bool) -> None:
    cache = filled(layout, apart=True, scale=torch.tensor(0.5) if layout.scale_mode == "tensor" else 1.0)
    if layout.width & (layout.width - 1) == 0:
        cache.recipe = IndexRecipe.of_v4(4, hadamard=True)
    state = PagedCache(compressor_state(dim=layout.width, overlapping=overlapping), PAGES, PAGE)
    channels = state.layout.width // 2

    def run() -> None:
        compress_kv(
            torch.randn(3, channels),
            torch.randn(3, channels),
            state,
            cache,
            positions=torch.tensor([0, 1, -1]),
            pages=StatePages(torch.tensor([5, 6, -1]), ints([0, 0, 0]), ints([[1, -1]])),
            slots=torch.tensor([-1, 9, -1]),
            bias=torch.randn(2, channels),
            norm_weight=torch.ones(layout.width),
            cos_sin=torch.randn(4, 4),
        )

    opcheck(run, "compress_kv")


def test_pool_kv() -> None:
    state = PagedCache(compressor_state(dim=8, overlapping=False), 6, 4)
    pages = StatePages(torch.tensor([5, -1, 6]), ints([0, 0, 1]), ints([[1, 2], [3, 4]]))
    x = torch.randn(8, 3).t()
    where = {"positions": torch.tensor([1, -1, 2]), "pages": pages, "norm_weight": torch.ones(8), "ratio": 2}
    opcheck(lambda: pool_kv(x, x, state, dtype=torch.float32, **where), "pool_kv")
    opcheck(lambda: pool_kv(x.half(), x.half(), state, **where), "pool_kv")


def test_fp8_output() -> None:
    x, positions, table = torch.randn(3, 2, 64).transpose(0, 1), torch.tensor([2, -1]), torch.randn(4, 6)
    opcheck(lambda: rotate_to_fp8(x, positions, table, tile=32), "rotate_to_fp8")
    opcheck(lambda: rotate_to_fp8(x[:0].half(), positions[:0], table, tile=64, inverse=False), "rotate_to_fp8")
    values, scales = rotate_to_fp8(x, positions, table, tile=32)
    weight = quantise_blocks(torch.randn(3, 5, 64), tile=32)
    opcheck(lambda: lower_groups(values, scales, *weight), "lower_groups")
    opcheck(lambda: lower_groups(values[:0], scales[:0], *weight, dtype=torch.float32), "lower_groups")


def test_rotate() -> None:
    q, positions, table = torch.randn(3, 2, 40).transpose(0, 1), torch.tensor([2, -1]), torch.randn(4, 6)
    opcheck(lambda: rotate_heads(q, positions, table, eps=1e-6), "rotate_heads")
    opcheck(lambda: norm_rows(q[0], torch.ones(40)), "norm_rows")
    opcheck(lambda: rotate_heads(q.half(), positions.int(), table, inverse=True), "rotate_heads")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rotate_and_write(layout: Layout) -> None:
    cache = filled(layout, apart=True, scale=torch.tensor(0.5) if layout.scale_mode == "tensor" else 1.0)
    q, positions, table = torch.randn(3, 2, layout.width).transpose(0, 1), torch.tensor([2, -1]), torch.randn(4, 6)
    opcheck(
        lambda: rotate_and_write(
            q,
            torch.randn(2, layout.width),
            cache,
            torch.tensor([7]),
            positions=positions,
            cos_sin=table,
            norm_weight=torch.ones(layout.width),
            index_q=q[:, :1, -32:] if layout.quantised else None,
            index_hadamard=layout.packed,
        ),
        "rotate_and_write",
    )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_write_rotated(layout: Layout) -> None:
    cache = filled(layout, apart=True, scale=torch.tensor(0.5) if layout.scale_mode == "tensor" else 1.0)
    where = {"positions": torch.tensor([2, -1]), "cos_sin": torch.randn(4, 6), "span": 2}
    rows = torch.randn(2, layout.width)
    opcheck(lambda: write_rotated(rows, cache, torch.tensor([7]), **where), "write_rotated")
    norm = torch.ones(layout.width).half()
    opcheck(lambda: write_rotated(rows.half(), cache, torch.tensor([7, 3]), norm_weight=norm, **where), "write_rotated")


def test_write_and_read_in_other_forms() -> None:
    cache = filled("plain-fp8", scale=torch.tensor([0.25]))
    kv = torch.randn(576, 3).t()
    opcheck(lambda: write_kv(kv, cache, torch.tensor([3, 4, 5])), "write_kv")
    opcheck(lambda: write_kv((kv[:, :512].half(), kv[:, 512:].half()), cache, torch.tensor([3])), "write_kv")
    opcheck(lambda: write_kv(kv[:0], cache, torch.tensor([], dtype=torch.int64)), "write_kv")
    slots = torch.randint(-1, 24, (2, 5), dtype=torch.int32).t()
    opcheck(lambda: read_kv(cache, slots, dtype=torch.bfloat16), "read_kv")
    opcheck(lambda: read_kv(cache, torch.tensor(3)), "read_kv")


@pytest.mark.parametrize("layout", ["bf16", "v4-fp8", "plain-fp8"])
def test_gather(layout: str) -> None:
    cache = filled(LAYOUTS[layout])
    table, lengths = ints([[0, 3], [5, 1]]), ints([6, 3])
    out = torch.zeros(2, cache.layout.width, 12).transpose(1, 2)[0]
    opcheck(lambda: gather_kv(cache, table, lengths, out=torch.zeros(9, cache.layout.width).half()), "gather_kv")
    opcheck(lambda: gather_kv(cache, table, lengths, starts=ints([1, 8]), first=ints([1, 2]), out=out), "gather_kv")


@pytest.mark.parametrize("layout", ["index-fp8", "index-mxfp4"])
def test_gather_index(layout: str) -> None:
    cache = filled(layout)
    table = ints([[0, 3], [5, 1]])
    opcheck(lambda: gather_index(cache, table, ints([6, 3]), rows=12), "gather_index")
    opcheck(lambda: gather_index(cache, table[:0], ints([]), rows=0), "gather_index")


@pytest.mark.parametrize(
    "layout", ["index-fp8", "index-mxfp4", rows(torch.float32, latent=128, rope=0)], ids=["fp8", "mxfp4", "rows"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["wide-q", "fp8-q"])
def test_index(layout: str | Layout, dtype: torch.dtype) -> None:
    cache = filled(layout, apart=True)
    q, weights = torch.randn(2, 3, 128).transpose(0, 1).to(dtype), torch.randn(3, 2)
    paged = q, weights, cache, ints([0, 0, 1]), ints([[0, 3], [5, 1]]), ints([4, 5, 8])
    opcheck(lambda: index_topk(*paged, 6), "index_topk")
    opcheck(lambda: index_topk(*paged, 6, workspace_bytes=1), "index_topk")
    opcheck(lambda: index_topk(*paged, 6, out=torch.empty(len(paged[0]), 6, dtype=torch.int32)), "index_topk")
    opcheck(lambda: index_topk_and_blocks(*paged, 6, blocks=2, block_size=3), "index_topk_and_blocks")
    candidates = ints([[0, 1], [1, -1], [0, 2]])
    opcheck(lambda: index_topk_within(*paged, candidates, 6, block_size=3), "index_topk_within")
    opcheck(lambda: index_scores(*paged), "index_scores")
    opcheck(lambda: index_scores(*paged, out=torch.zeros(3, 20)[:, :9]), "index_scores")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["wide-q", "fp8-q"])
def test_ragged_scores(dtype: torch.dtype) -> None:
    q, weights = torch.randn(2, 3, 128).transpose(0, 1).to(dtype), torch.randn(3, 2)
    keys, bounds = torch.randn(7, 128).to(dtype), (ints([0, 3, 9]), ints([7, 4, -1]))
    opcheck(lambda: ragged_scores(q, weights, keys, torch.rand(7), *bounds), "ragged_scores")
    opcheck(lambda: ragged_scores(q, weights, keys, None, *bounds), "ragged_scores")
    packed = torch.randint(0, 256, (7, 64)).byte(), torch.randint(120, 130, (7, 4)).byte()
    opcheck(lambda: ragged_scores(q, weights, *packed, *bounds), "ragged_scores")


@pytest.mark.parametrize(("layout", "hadamard"), [("fp32", False), ("bf16", True), ("fp8", False), ("fp8", True)])
def test_index_keys(layout: str, hadamard: bool) -> None:
    width = 32 if hadamard else 40
    kinds = {"fp32": rows(torch.float32, latent=width, rope=0), "bf16": rows(latent=width, rope=0)}
    cache = filled(kinds.get(layout, index_fp8(dim=width)), apart=True)
    recipe, where = IndexRecipe(8, hadamard=hadamard), where_rotated()
    norm = {"norm_weight": torch.randn(width), "norm_bias": torch.randn(width), "norm_eps": 1e-5}
    keys, slots = torch.randn(width, 3).t(), torch.tensor([3, -1])
    for options in ({}, where, where | norm):
        opcheck(lambda: write_index_keys(keys, cache, slots, recipe, **options), "write_index_keys")  # noqa: B023
    opcheck(lambda: write_index_keys(keys[:0], cache, slots[:0], recipe), "write_index_keys")


def where_rotated() -> dict[str, torch.Tensor]:
    return {"positions": torch.tensor([3, 0, -1]), "cos_sin": torch.randn(9, 8)}


@pytest.mark.parametrize("hadamard", [False, True])
def test_index_queries(hadamard: bool) -> None:
    width, recipe, where = 32 if hadamard else 40, IndexRecipe(8, hadamard=hadamard), where_rotated()
    q, weights = torch.randn(2, 3, width).bfloat16().transpose(0, 1), torch.randn(2, 3).t()
    for options in ({}, where, where | {"rounding": "none", "scale_mode": "exact", "scale": 2}):
        opcheck(lambda: quantise_index_query(q, weights, recipe, **options), "quantise_index_query")  # noqa: B023


def test_topk() -> None:
    scores, lengths = torch.randn(9, 3).t(), ints([9, 0, 4])
    table = {"request_ids": ints([0, 1, 0]), "block_table": ints([[4, 2, 1], [0, 3, -1]]), "page_size": 4}
    opcheck(lambda: topk_positions(scores, lengths, 5), "topk_positions")
    opcheck(lambda: topk_positions(scores, lengths, 5, **table), "topk_positions")
    opcheck(lambda: topk_positions(scores[:0], lengths[:0], 5), "topk_positions")


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("workspace", [None, (ints([-1, 0, 1]), ints([0, 9]))], ids=["cache", "workspace"])
def test_translate(compact: bool, turned: bool, workspace: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    positions = torch.randint(-1, 9, (5, 3) if turned else (3, 5), dtype=torch.int32)
    positions = positions.t() if turned else positions
    ids, table = ints([0, 1, 1]), ints([[0, 3], [5, -1]])
    options = {"page_size": PAGE, "workspace": workspace, "compact": compact}
    opcheck(lambda: translate_positions(positions, ids, table, **options), "translate_positions")
    options |= {"rows_per_page": 7, "ranks": 2, "rank": 1, "interleave": 2}
    opcheck(lambda: translate_positions(positions, ids, table, **options), "translate_positions")


def test_select() -> None:
    positions, ids, table, own = ints([5, -1, 9]), ints([0, 0, 1]), ints([[0, 3], [5, -1]]), torch.tensor([3, -1, 4])
    rows, wide, each = ints([[0] * 8] * 3), ints([[0] * 20] * 3), torch.zeros(3, dtype=torch.int32)
    out = {"slots": rows, "lengths": each}
    options = {"page_size": PAGE, "window": 6, **out}
    opcheck(lambda: select_window(positions, ids, table, own=own, **options), "select_window")
    opcheck(
        lambda: select_window(positions, ids, table, blocks=(ints([4, 9]), ints([6, 9])), **options), "select_window"
    )
    numbers = {"ratio": 4, "page_size": 2}
    opcheck(lambda: select_entries(positions, ids, table, completed=own.clone(), **numbers), "select_entries")
    outputs = {"every": rows, "visible": each, "lengths": each.clone()}
    opcheck(lambda: select_entries(positions, ids, table, own=own, **outputs, **numbers), "select_entries")
    chosen = torch.randint(-1, 4, (3, 8), dtype=torch.int32)
    opcheck(lambda: select_chosen(chosen, ids, table, own=own, page_size=2, **out), "select_chosen")
    seen = ints([18, 0, 40])
    opcheck(lambda: select_groups(chosen, seen, size=4, positions=torch.zeros(3, 36).int()), "select_groups")
    sizes = {"ratio": 4, "window": 6, "entries": 3, "rows": 9, "columns": 8, "slots": wide, "lengths": each}
    for picked in (chosen, None):
        opcheck(lambda: select_gathered(positions, ids, ints([0, 4]), picked, **sizes), "select_gathered")  # noqa: B023


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_attend(layout: Layout) -> None:
    selection = Selection(filled(layout, apart=True), torch.randint(-2, 30, (3, 7), dtype=torch.int32))
    q = torch.randn(3, 2, layout.width)
    options = {"scale": 0.2, "value_dim": 16, "splits": 3}
    opcheck(lambda: attend(q, selection, **options), "attend")
    opcheck(lambda: attend_slots(q, selection, **options), "attend_slots")


def test_a_backend_may_choose_the_number_of_parts() -> None:
    selection = Selection(filled("v32-fp8"), ints([[1, 2], [3, -1]]))
    func, arguments = traced(lambda: attend_slots(torch.randn(2, 1, 576), selection, scale=1.0, value_dim=8))
    assert arguments[-2] == 1, "a trace needs to know"
    torch.library.opcheck(func, (*arguments[:-2], None, arguments[-1]))


@pytest.mark.parametrize("splits", [1, 3, 4, 9])
def test_a_fixed_number_of_parts_is_kept_whatever_the_backend_makes(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = Selection(filled("v32-fp8"), torch.randint(0, 24, (2, 8), dtype=torch.int32))
    q = torch.randn(2, 3, 576)
    expected = attend(q, selection, scale=0.1, value_dim=512)
    usual = attend_reference.attend_slots
    monkeypatch.setattr(attend_reference, "attend_slots", lambda call: usual(call._replace(splits=4)))
    found = attend_slots(q, selection, scale=0.1, value_dim=512, splits=splits)
    assert found.out.shape == (splits, 2, 3, 512)
    assert found.lse.shape == found.max_logits.shape == (splits, 2, 3)
    merged = combine_parts(found, dtype=torch.float32)
    for one, other in zip(merged, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("splits", [None, 2])
def test_attend_with_every_option(splits: int | None) -> None:
    first = filled("plain-fp8", scale=torch.tensor([0.5]))
    slots = torch.randint(-1, 24, (9, 3), dtype=torch.int32).t()
    selections = [
        Selection(first, slots, ints([9, 0, 4])),
        Selection(filled("v32-fp8"), slots[:, :4], None, ints([0, 0, 1]), ints([[0, 3], [5, -1]])),
        Selection(first.with_scale(0.5), slots[:, :0]),
    ]
    options = {"scale": 0.2, "value_dim": 512, "splits": splits}
    for dtype in (torch.float64, torch.float16, torch.float8_e4m3fn):
        q = torch.randn(2, 3, 576).transpose(0, 1).to(dtype)
        out = torch.empty(3, 2, 1024, dtype=torch.bfloat16)[..., ::2]
        more = {"q_scale": torch.tensor([0.5]), "sink": torch.randn(2), "out": out}
        opcheck(lambda: attend(q, selections, **options, **more), "attend")  # noqa: B023
    opcheck(lambda: attend_slots(q, selections, **options, q_scale=more["q_scale"]), "attend_slots")
    opcheck(lambda: attend(q[:0], [Selection(first, slots[:0])], **options), "attend")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_combine(dtype: torch.dtype) -> None:
    parts = Partials(torch.randn(4, 3, 2, 8).to(dtype), torch.randn(2, 3, 4).transpose(0, 2))
    opcheck(lambda: combine_parts(parts), "combine_parts")
    out = torch.empty(3, 2, 8, dtype=torch.float64)
    opcheck(lambda: combine_parts(parts, sink=torch.randn(2), out=out, lse_base="2"), "combine_parts")


def test_gradients_are_refused_by_name() -> None:
    cache = filled("v32-fp32")
    q = torch.randn(1, 2, 576, requires_grad=True)
    selection = Selection(cache, ints([[1, 2]]))
    with pytest.raises(ValueError, match=r"q must be without gradient, .* torch.no_grad\(\)"):
        attend(q, selection, scale=0.1, value_dim=512)
    with pytest.raises(ValueError, match="sink must be without gradient"):
        attend(q.detach(), selection, scale=0.1, value_dim=512, sink=torch.zeros(2, requires_grad=True))
    before = cache.storage.clone()
    with pytest.raises(ValueError, match="kv must be without gradient"):
        write_kv(q[0], cache, torch.tensor([0, 1]))
    assert torch.equal(cache.storage, before)
    with torch.no_grad():
        found = attend(q, selection, scale=0.1, value_dim=512)
    assert torch.equal(found.out, attend(q.detach(), selection, scale=0.1, value_dim=512).out)
    assert not found.out.requires_grad


def test_unknown_backends_are_refused_by_the_op_as_well() -> None:
    cache = filled("v32-fp8")
    func, arguments = traced(lambda: write_kv(torch.randn(1, 576), cache, torch.tensor([0])))
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*reference"):
        func(*arguments[:-1], "magic")


def test_kernels_get_a_sink_of_one_number_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expanded sink has one number in memory, and kernels would read those behind it."""
    seen = []
    plain = attend_reference.attend

    def attend_and_see(call):
        seen.append(call.sink)
        return plain(call)

    monkeypatch.setattr(attend_reference, "attend", attend_and_see)
    cache = PagedCache("v32-fp32", 2, 4)
    given = {"scale": 0.1, "value_dim": 512}
    rows = Selection(cache, torch.zeros(1, 3, dtype=torch.int32))
    attend(torch.randn(1, 4, 576), rows, sink=torch.tensor(0.5).expand(4), **given)
    attend(torch.randn(1, 4, 576), rows, sink=torch.arange(8.0)[::2], **given)
    assert [sink.stride() for sink in seen] == [(1,), (1,)]
    assert seen[1].tolist() == [0, 2, 4, 6]
