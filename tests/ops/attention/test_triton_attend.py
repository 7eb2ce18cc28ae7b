"""The portable attention and combine kernels against the references, interpreted on a CPU or compiled on a GPU."""

import bounds
import pytest
import torch
from attention_calls import attend_call, attend_slots_call, combine_call
from bounds import relative_error, selected_attention
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.arithmetic import ceil_div
from tamis.cache.codec import write_rows
from tamis.cache.layout import Layout, index_fp8, named, plain_fp8, rows, v4_fp8, v32_fp8
from tamis.lab.testing.cases import INT_MAX, INT_MIN
from tamis.ops.attention import triton_kernels
from tamis.ops.combine import reference as combine_reference
from tamis.ops.combine import triton_kernels as combine_kernels

LAYOUTS = [
    v32_fp8(),
    v32_fp8(scale_mode="exact"),
    v4_fp8(),
    plain_fp8(),
    plain_fp8(latent=448),
    named("v32-bf16"),
    named("v32-fp16"),
    named("v32-fp32"),
    named("v4-bf16"),
    v32_fp8(latent=128, rope=32),
    v32_fp8(latent=512, rope=0),
    v4_fp8(latent=128, rope=32),
    rows(torch.bfloat16, latent=128, rope=32),
    rows(torch.float32, latent=20, rope=3),
    index_fp8(),
]
SCALE = 0.05


def filled(layout: Layout, count: int, page_size: int, device: torch.device, gap: int = 0) -> PagedCache:
    """Random rows; `gap` leaves other layers' pages in between, filled with NaN codes."""
    pages = ceil_div(count, page_size)
    made = PagedCache(layout, pages * (1 + gap), page_size, device=device)
    if gap:
        made.storage.view(torch.uint8).fill_(0x7F)
        made = PagedCache.wrap(made.storage[:: 1 + gap], layout)
    cache = made.with_scale(0.5) if layout.scale_mode == "tensor" else made
    write_rows(torch.randn(cache.rows, layout.width, device=device), cache, torch.arange(cache.rows, device=device))
    return cache


def slots_for(cache: PagedCache, tokens: int, k: int) -> Tensor:
    return torch.randint(0, cache.rows, (tokens, k), dtype=torch.int32, device=cache.device)


def on_host(selection: Selection) -> Selection:
    cache = selection.cache
    scale = cache.scale.cpu() if isinstance(cache.scale, Tensor) else cache.scale
    moved = [None if t is None else t.cpu() for t in (selection.slots, selection.lengths)]
    return Selection(PagedCache.wrap(cache.storage.cpu(), cache.layout, scale=scale), *moved)


def total_columns(selections: list[Selection]) -> int:
    return sum(selection.slots.shape[1] for selection in selections)


def weight_unit(q: Tensor, layout: Layout) -> float:
    """0 for interpreted kernels and products in float32, whose weights are float32; others round them to bf16."""
    grouped = triton_kernels.can_group(layout, layout.latent)
    exact = triton_kernels.compute_dtype(q.dtype, layout, grouped=grouped) == torch.float32
    return 0.0 if exact or q.device.type == "cpu" else bounds.unit(torch.bfloat16)


def check(
    q: Tensor, selections: list[Selection], value_dim: int, splits: int | None = None, sink: Tensor | None = None
):
    out, lse, top = triton_kernels.attend_slots(
        attend_slots_call(q, selections, scale=SCALE, value_dim=value_dim, splits=splits)
    )
    merged = torch.empty(out.shape[1:], device=q.device)
    # One part without a sink is only copied; `test_combine` has that.
    combine = combine_reference if len(out) == 1 and sink is None else combine_kernels
    total = combine.combine_parts(combine_call(out, lse, sink, merged))
    wide = q.float().cpu()
    host_sink = None if sink is None else sink.cpu()
    coarse = weight_unit(q, selections[0].cache.layout)
    options = {"scale": SCALE, "value_dim": value_dim, "parts": len(out) + ceil_div(total_columns(selections), 16)}
    options["weight_unit"] = coarse
    exact = selected_attention(wide, [on_host(s) for s in selections], sink=host_sink, **options)
    empty = exact.lse == -torch.inf
    assert torch.equal(total.cpu() == -torch.inf, empty)
    assert not merged.isnan().any()
    assert (merged.cpu()[empty] == 0).all()
    bounds.agree(merged, exact.out, exact.out_error)
    bounds.agree(total, exact.lse, exact.lse_error + 2e-5 * (coarse > 0))
    bounds.agree(top.amax(0), exact.top, exact.top_error + 2e-5 * (coarse > 0))
    return merged


@pytest.mark.parametrize(
    ("layout", "page_size"),
    # Every format in pages apart; every kind of page (rows in one piece, planes, plain rows) in other sizes too.
    [(layout, 7) for layout in LAYOUTS]
    + [(layout, size) for layout in (v32_fp8(), v4_fp8(), index_fp8(), named("v32-bf16")) for size in (1, 64)],
    ids=lambda value: f"{value.name}-{value.scale_mode}" if isinstance(value, Layout) else str(value),
)
def test_layouts_and_page_sizes(layout: Layout, page_size: int, device: torch.device) -> None:
    cache = filled(layout, 70, page_size, device, gap=page_size == 7)
    q = torch.randn(2, 5, layout.width, device=device)
    slots = slots_for(cache, 2, 40)
    check(q, [Selection(cache, slots)], layout.width if layout.latent == 448 else layout.latent)
    check(q.bfloat16(), [Selection(cache, slots)], layout.latent, splits=3)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 2), (3, 2), (16, 2), (17, 2), (64, 1), (128, 1)])
def test_head_counts(heads: int, tokens: int, device: torch.device) -> None:
    cache = filled(v32_fp8(), 100, 64, device)
    q = torch.randn(tokens, heads, 576, device=device).bfloat16()
    check(q, [Selection(cache, slots_for(cache, tokens, 33))], 512)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", ["v32-fp8", "v32-bf16", "v32-fp16", "plain-fp8"])
def test_query_dtypes(dtype: torch.dtype, layout: str, device: torch.device) -> None:
    cache = filled(named(layout), 60, 16, device)
    q = torch.randn(2, 4, 576, device=device).to(dtype)
    check(q, [Selection(cache, slots_for(cache, 2, 20))], 512)


def test_hostile_slots_lengths_and_nan_rows(device: torch.device) -> None:
    cache = filled(v32_fp8(), 128, 16, device)
    cache.storage[4:].fill_(0x7F)  # NaN in every row that is not selected
    slots = torch.randint(0, 64, (6, 34), dtype=torch.int32, device=device)
    bad = torch.tensor([INT_MIN, -123456, -1, 128, 129, INT_MAX], dtype=torch.int32, device=device)
    slots[:, ::3] = bad[torch.randint(0, 6, slots[:, ::3].shape, device=device)]
    slots[4] = -1
    lengths = torch.tensor([34, 1, 0, 17, 34, 33], dtype=torch.int32, device=device)
    slots[3, 17:] = 100
    sink = torch.tensor([0.0, -torch.inf, torch.inf, 2.0], device=device)
    q = torch.randn(6, 4, 576, device=device).bfloat16()
    for splits in (None, 1, 4):
        check(q, [Selection(cache, slots, lengths)], 512, splits, sink)
    check(q, [Selection(cache, slots[:, :9], lengths.clamp_max(9))], 512, 9, sink)  # a part for each column


def test_several_selections(device: torch.device) -> None:
    window, entries = filled(v4_fp8(), 64, 64, device), filled(v4_fp8(), 32, 2, device)
    lengths = torch.tensor([16, 3, 0], dtype=torch.int32, device=device)
    visible = torch.tensor([9, 0, 0], dtype=torch.int32, device=device)
    selections = [
        Selection(window, slots_for(window, 3, 16), lengths),
        Selection(entries, slots_for(entries, 3, 9), visible),
    ]
    check(torch.randn(3, 8, 512, device=device).bfloat16(), selections, 512, sink=torch.randn(8, device=device))


def test_positions_are_translated_on_the_way(device: torch.device) -> None:
    cache = filled(v32_fp8(), 128, 16, device)
    table = torch.tensor([[3, 1, -1], [0, 7, 2**30]], dtype=torch.int32, device=device)
    ids = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    positions = torch.randint(-2, 60, (3, 20), dtype=torch.int32, device=device)
    q = torch.randn(3, 3, 576, device=device).bfloat16()
    page = positions // 16
    known = (positions >= 0) & (page < 3)
    page_ids = table[ids.long()].gather(1, page.clamp(0, 2).long())
    known &= (page_ids >= 0) & (page_ids < 8)
    slots = torch.where(known, page_ids * 16 + positions % 16, -1).int()
    arguments = {"scale": SCALE, "value_dim": 512, "splits": 2}
    fused = triton_kernels.attend_slots(
        attend_slots_call(q, [Selection(cache, positions, None, ids, table)], **arguments)
    )
    plain = triton_kernels.attend_slots(attend_slots_call(q, [Selection(cache, slots)], **arguments))
    for found, expected in zip(fused, plain, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("largest", [1e-5, 1e-2, 1.0, 1e4])
def test_tile_maxima_far_outside_the_range_of_fp16(largest: float, device: torch.device) -> None:
    for layout in (v32_fp8(scale_mode="exact"), v4_fp8()):
        cache = filled(layout, 64, 16, device)
        kv = torch.randn(64, layout.width, device=device) * largest
        kv[::2] *= 1e-5
        write_rows(kv, cache, torch.arange(64, device=device))
        q = torch.randn(2, 4, layout.width, device=device).bfloat16() / largest
        check(q, [Selection(cache, slots_for(cache, 2, 30))], layout.latent)


def test_scales_as_tensors_and_strided_inputs(device: torch.device) -> None:
    cache = filled(plain_fp8(), 64, 16, device)
    q = torch.randn(4, 576, 3, device=device).transpose(1, 2)
    slots = slots_for(cache, 40, 4).T[:, ::2]
    selection = Selection(cache.with_scale(torch.tensor(0.5, device=device)), slots)
    arguments = {"value_dim": 512, "splits": 1}
    found = triton_kernels.attend_slots(
        attend_slots_call(q, [selection], scale=torch.tensor(SCALE, device=device), **arguments)
    )
    expected = triton_kernels.attend_slots(attend_slots_call(q, [Selection(cache, slots)], scale=SCALE, **arguments))
    assert torch.equal(found[0], expected[0])
    check(q, [Selection(cache, slots)], 512)


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16"])
@pytest.mark.parametrize("splits", [1, 3])
def test_straight_into_an_output(layout: str, splits: int, device: torch.device) -> None:
    cache = filled(named(layout), 60, 16, device)
    q = torch.randn(3, 5, cache.layout.width, device=device).bfloat16()
    slots = slots_for(cache, 3, 40)
    slots[1] = -1
    sink = torch.tensor([0.5, -torch.inf, torch.inf, 3.0, -2.0], device=device)
    arguments = {"scale": SCALE, "splits": splits}
    parts, lses, maxima = triton_kernels.attend_slots(
        attend_slots_call(q, [Selection(cache, slots)], value_dim=512, **arguments)
    )
    expected = torch.empty(3, 5, 512, device=device)
    expected_lse = combine_reference.combine_parts(combine_call(parts, lses, sink, expected))
    rooms = [
        (torch.empty(3, 5, 512), torch.float32),
        (torch.empty(5, 3, 520).transpose(0, 1)[..., 3:515], torch.bfloat16),
        (torch.empty(3, 512, 5).mT, torch.float32),
    ]
    for room, dtype in rooms:
        out = room.to(device, dtype).fill_(torch.nan)
        lse, top = triton_kernels.attend(attend_call(q, [Selection(cache, slots)], sink=sink, out=out, **arguments))
        torch.testing.assert_close(
            out.float(), expected.to(dtype).float(), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
        )
        torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
        assert torch.equal(top, maxima.amax(0))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_in_a_selected_row_shows(code: int, device: torch.device) -> None:
    cache = filled(v32_fp8(), 64, 16, device)
    cache.field(cache.layout.values)[1, 3, 200] = code
    q = torch.randn(2, 16, 576, device=device).bfloat16()
    slots = torch.arange(40, dtype=torch.int32, device=device).repeat(2, 1)
    slots[1, 16 + 3] = -1
    out, lse, _ = triton_kernels.attend_slots(
        attend_slots_call(q, [Selection(cache, slots)], scale=SCALE, value_dim=512, splits=1)
    )
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()


@pytest.mark.parametrize("size", [0.0, 1e-36, 1e-20, 1e20, 1e36])
def test_queries_of_any_size(size: float, device: torch.device) -> None:
    cache = filled(v32_fp8(), 64, 16, device)
    q = torch.randn(2, 3, 576, device=device) * size
    q[0, 1] = 0.0  # a head of a padded token
    selection = Selection(cache, slots_for(cache, 2, 30))
    scale = SCALE / max(size, 1e-30)
    out, _, _ = triton_kernels.attend_slots(
        attend_slots_call(q.bfloat16(), [selection], scale=scale, value_dim=512, splits=1)
    )
    wide = q.bfloat16().double().cpu()
    options = {"parts": 2, "weight_unit": weight_unit(q.bfloat16(), cache.layout)}
    exact = selected_attention(wide, [on_host(selection)], scale=scale, value_dim=512, **options)
    assert relative_error(out[0].cpu(), exact.out) < bounds.relative(exact.out_error, exact.out)


def test_nothing_to_do(device: torch.device) -> None:
    cache = filled(v32_fp8(), 16, 16, device)
    q = torch.randn(2, 3, 576, device=device).bfloat16()
    none = torch.zeros(2, 0, dtype=torch.int32, device=device)
    out, lse, _ = triton_kernels.attend_slots(
        attend_slots_call(q, [Selection(cache, none)], scale=1.0, value_dim=512, splits=None)
    )
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert triton_kernels.attend_slots(
        attend_slots_call(q[:0], [Selection(cache, none[:0])], scale=1.0, value_dim=512, splits=None)
    )[0].shape[1:] == (0, 3, 512)


@pytest.mark.parametrize(("parts", "width"), [(1, 512), (2, 3), (7, 128), (7, 512), (64, 128)])
def test_combine(parts: int, width: int, device: torch.device) -> None:
    out, lse = torch.randn(parts, 3, 3, width, device=device), torch.randn(parts, 3, 3, device=device) * 20
    lse[:, 0] = -torch.inf
    lse[0, 1] = -torch.inf
    out[0, 1] = torch.nan
    out[:, 0] = torch.nan
    for sink in (None, torch.tensor([0.5, -torch.inf, torch.inf], device=device)):
        found, expected = torch.empty_like(out[0]), torch.empty_like(out[0])
        found_lse = combine_kernels.combine_parts(combine_call(out, lse, sink, found))
        expected_lse = combine_reference.combine_parts(combine_call(out, lse, sink, expected))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_lse, expected_lse, rtol=1e-6, atol=1e-6)
    strided = torch.full((3, width, 7), torch.nan, dtype=torch.bfloat16, device=device).transpose(1, 2)[:, ::2][:, :3]
    combine_kernels.combine_parts(combine_call(out, lse, sink, strided))
    assert torch.equal(strided, found.bfloat16())


@pytest.mark.parametrize(
    ("programs", "places", "parts"),
    [(128, 264, 2), (32, 264, 8), (128, 132, 1), (256, 132, 1), (1, 264, 64), (4096, 264, 1)],
)
def test_parts_fill_the_device_without_starting_a_new_round(programs: int, places: int, parts: int) -> None:
    assert triton_kernels.choose_splits(programs, 2048, 32, places) == parts


def test_one_token_more_than_fits_does_not_cost_a_whole_round() -> None:
    parts = triton_kernels.choose_splits(133, 2048, 32, 264)
    rounds = ceil_div(133 * parts, 264)
    assert rounds * ceil_div(64, parts) < 1.3 * 64 / 2
    assert triton_kernels.choose_splits(3, 0, 32, 264) == 1


@pytest.mark.parametrize("heads", [4, 40])
def test_lengths_and_tables_may_have_any_strides(heads: int, device: torch.device) -> None:
    cache = filled(plain_fp8(latent=128), 24, 2, device)
    lengths = torch.tensor([7, 9, 3, 9], dtype=torch.int32, device=device).repeat_interleave(2)[::2]
    ids = torch.tensor([1, 2, 0, 1], dtype=torch.int32, device=device).repeat_interleave(3)[::3]
    table = torch.randperm(12, device=device)[:9].view(3, 3).int().T
    positions = torch.randint(0, 6, (9, 4), dtype=torch.int32, device=device).T
    q = torch.randn(4, heads, 192, device=device).half()
    assert not any(value.is_contiguous() for value in (lengths, ids, table, positions))
    given = (positions, lengths, ids, table)
    found, plain = (
        triton_kernels.attend_slots(
            attend_slots_call(q, [Selection(cache, *values)], scale=SCALE, value_dim=128, splits=2)
        )
        for values in (given, [value.contiguous() for value in given])
    )
    for left, right in zip(found, plain, strict=True):
        assert torch.equal(left, right)
