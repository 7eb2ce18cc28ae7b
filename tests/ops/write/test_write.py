"""Cache writes: which rows are written, what is refused, and that what is written reads back."""

import math

import numpy as np
import pytest
import torch
from byte_formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    PAGE_SIZES,
    Format,
    all_formats,
    engine_cache,
    expected_bytes,
    hostile_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded
from torch import Tensor

from tamis import PagedCache, ops
from tamis.cache.layout import Layout, named

# --- Which rows are written -------------------------------------------------------------------------------------------


@all_formats
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_negative_slots_are_skipped(form: Format, dtype: torch.dtype) -> None:
    buffer, cache = engine_cache(form.layout, 3, 2, gap=64, scale=form.scale)
    before = buffer.clone()
    kv = hostile_rows(form.layout.width, BF16)
    slots = [-1, 4, -7, torch.iinfo(dtype).min, 1]
    ops.write_kv(kv, cache, torch.tensor(slots, dtype=dtype))
    assert torch.equal(buffer, expected_bytes(form, before, cache, kv, slots, 0))


@all_formats
def test_rows_past_the_slots_are_not_written(form: Format) -> None:
    buffer, cache = engine_cache(form.layout, 3, 2, gap=64, scale=form.scale)
    before = buffer.clone()
    kv = hostile_rows(form.layout.width, BF16)
    kv[2:] = math.nan
    ops.write_kv(kv, cache, torch.tensor([4, 1]))
    assert torch.equal(buffer, expected_bytes(form, before, cache, kv, [4, 1], 0))


@all_formats
@pytest.mark.parametrize("slots", [[], [-1, -1, -1]], ids=["none", "all-skipped"])
def test_nothing_to_write_changes_nothing(form: Format, slots: list[int]) -> None:
    buffer, cache = engine_cache(form.layout, 2, 2, gap=64, scale=form.scale)
    before = buffer.clone()
    ops.write_kv(torch.randn(3, form.layout.width), cache, torch.tensor(slots, dtype=torch.int64))
    ops.write_kv(torch.randn(0, form.layout.width), cache, torch.tensor([], dtype=torch.int32))
    assert torch.equal(buffer, before)


@all_formats
def test_pairs_and_strided_inputs_write_the_same_bytes(form: Format) -> None:
    layout = form.layout
    kv = hostile_rows(layout.width, FP32)
    slots = torch.tensor([5, 0, -1, 3, 2])
    buffers = []
    for rows, where in (
        (kv, slots),
        ((kv[:, : layout.latent].clone(), kv[:, layout.latent :].clone()), slots),
        (kv.T.contiguous().T, slots),
        (torch.stack((kv, torch.zeros_like(kv)), dim=2).flatten(1)[:, ::2], slots.int()),
        (kv, torch.stack((slots, slots - 1), dim=1)[:, 0]),
    ):
        buffer, cache = engine_cache(layout, 3, 2, scale=form.scale)
        ops.write_kv(rows, cache, where)
        buffers.append(buffer)
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers[1:])


def test_inputs_are_left_unchanged() -> None:
    kv, slots = hostile_rows(576, FP32), torch.tensor([3, -1, 2, 0, 1])
    kv[0, 0] = math.nan
    kept = kv.clone(), slots.clone()
    ops.write_kv(kv, PagedCache("v32-fp8", 2, 2), slots)
    torch.testing.assert_close(kv, kept[0], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(slots, kept[1])


@pytest.mark.parametrize("name", ["v32-fp8-pow2", "v4-fp8", "index-fp8"])
def test_a_slot_given_twice_holds_the_last_row_whole(name: str) -> None:
    torch.use_deterministic_algorithms(False)  # the library must not need it
    layout = FORMATS[name].layout
    kv = torch.randn(8192, layout.width) * torch.logspace(-3, 3, 8192).unsqueeze(1)
    slots = torch.full((8192,), 3)
    slots[8000:] = -1
    many, one = PagedCache(layout, 2, 2), PagedCache(layout, 2, 2)
    ops.write_kv(kv, many, slots, backend="reference")
    ops.write_kv(kv[7999:8000], one, slots[:1])
    assert torch.equal(many.storage, one.storage)


def test_rows_beyond_two_gib_are_addressed() -> None:
    page_stride = 2**30 + 576 * 4
    lazy = torch.from_numpy(np.zeros(2 * page_stride + 4096, dtype=np.uint8))  # memory is only taken where touched
    cache = PagedCache.wrap(torch.as_strided(lazy, (3, 2, 584), (page_stride, 584, 1)), "v4-fp8")
    kv = torch.full((2, 512), 2.0)
    ops.write_kv(kv, cache, torch.tensor([4, 5], dtype=torch.int32))
    assert lazy[2 * page_stride] == 0x78
    assert lazy[2 * page_stride + 2 * 576 + 8] == 127 - 7
    assert torch.equal(cache.read(torch.tensor([4, 5, 0])), torch.cat((kv, torch.zeros(1, 512))))


# --- Refusals ---------------------------------------------------------------------------------------------------------

ROWS, SLOTS = torch.ones(4, 576), torch.arange(4)


@pytest.mark.parametrize(
    ("kv", "slots", "kind", "message"),
    [
        (
            torch.ones(576),
            SLOTS,
            ValueError,
            r"kv must be of shape \[T, D=576\], got \[576\]; the rows go to PagedCache",
        ),
        (torch.ones(4, 1, 576), SLOTS, ValueError, r"kv must be of shape \[T, D=576\], got \[4, 1, 576\]; "),
        (torch.ones(4, 512), SLOTS, ValueError, r"kv must be of shape \[T, D=576\], got \[4, 512\]; "),
        (ROWS.int(), SLOTS, TypeError, "kv must be bfloat16 or float16 or float32, got int32; "),
        (ROWS.double(), SLOTS, TypeError, "kv must be bfloat16 or float16 or float32, got float64; "),
        (ROWS.to(torch.float8_e4m3fn), SLOTS, TypeError, "kv must be bfloat16 .*, got float8_e4m3fn; "),
        (ROWS.tolist(), SLOTS, TypeError, r"kv must be a tensor \[T, D\], got list; "),
        (ROWS.to("meta"), SLOTS, ValueError, "kv must be on cpu, got a tensor on meta; move it"),
        (ROWS, SLOTS.to("meta"), ValueError, "slots must be on cpu, got a tensor on meta; move it"),
        (ROWS, SLOTS.float(), TypeError, "slots must be int32 or int64, got float32; "),
        (ROWS, SLOTS.short(), TypeError, "slots must be int32 or int64, got int16; "),
        (ROWS, [0, 1], TypeError, r"slots must be a tensor \[S\], got list; "),
        (ROWS, SLOTS.view(4, 1), ValueError, r"slots must be of shape \[S\], got \[4, 1\]; "),
        (ROWS, torch.arange(5), ValueError, "slots must be at most 4 long, one per row of kv, got 5; slice it"),
        (ROWS, torch.tensor([0, 6]), ValueError, "slots must be .*5, got a value of 6; the cache has 6 rows; use -1"),
        (ROWS, torch.tensor([0, 2**40]), ValueError, f"slots must be .*5, got a value of {2**40}; the cache has 6"),
        ((ROWS,), SLOTS, ValueError, r"kv must be one tensor or a pair \(latent, rope\), got 1 parts; "),
        ((ROWS, ROWS, ROWS), SLOTS, ValueError, "kv must be one tensor or a pair .*, got 3 parts; "),
        ((ROWS[:, :512], None), SLOTS, TypeError, "kv must be a pair of tensors, got float32 .* and NoneType; "),
        (
            (ROWS[:, :512], ROWS[:3, 512:]),
            SLOTS,
            ValueError,
            r"kv must be a pair of tensors alike .*, got .*\[4, 512\] .*\[3, 64\].*; ",
        ),
        (
            (ROWS[:, :512], ROWS[:, 512:].int()),
            SLOTS,
            ValueError,
            "kv must be a pair of tensors alike .*, got .*int32.*; ",
        ),
        (
            (ROWS[:, :512], ROWS[:, 512:].to("meta")),
            SLOTS,
            ValueError,
            "kv must be a pair of tensors alike .*, got .* on meta; ",
        ),
        (
            (ROWS[:, :448], ROWS[:, 448:]),
            SLOTS,
            ValueError,
            r"kv must be a pair of widths \[512, 64\], got \[\[4, 448\], \[4, 128\]\]; ",
        ),
    ],
)
def test_refused_writes_leave_the_cache_alone(kv: object, slots: object, kind: type[Exception], message: str) -> None:
    buffer, cache = engine_cache(named("v32-fp8"), 3, 2, gap=64)
    before = buffer.clone()
    with pytest.raises(kind, match="^" + message):
        ops.write_kv(kv, cache, slots)  # type: ignore[arg-type]
    assert torch.equal(buffer, before)


def test_unknown_backend_is_refused_before_anything_is_written() -> None:
    buffer, cache = engine_cache(named("v32-fp8"), 3, 2)
    before = buffer.clone()
    with pytest.raises(ValueError, match=r"^backend must be 'auto' or one of .*, got 'cuda'; see `tamis backends`"):
        ops.write_kv(ROWS, cache, SLOTS, backend="cuda")
    assert torch.equal(buffer, before)


# --- Write and read back ----------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    name = draw(st.sampled_from(["v32-fp8", "v4-fp8", "plain-fp8", "index-fp8", "v32-bf16", "v4-fp16", "v32-fp32"]))
    if name == "index-fp8":
        return named(name, dim=draw(st.sampled_from([128, 64, 4])), rounding=draw(st.sampled_from(["bf16", "none"])))
    tile = {"v32-fp8": 128, "v4-fp8": 64}.get(name, 1)
    rope = draw(st.sampled_from([0, 2, 32, 64]))
    options: dict[str, object] = {"latent": tile * draw(st.integers(1, 5)), "rope": rope}
    if name == "v32-fp8":
        options["scale_mode"] = draw(st.sampled_from(["pow2", "exact"]))
    if name == "v4-fp8":
        options["rounding"] = draw(st.sampled_from(["bf16", "none"]))
        options["page_align"] = draw(st.sampled_from([None, 2, 512]))
    return named(name, **options)


@st.composite
def writes(draw: st.DrawFn) -> tuple[Tensor, PagedCache, Tensor, Tensor]:
    """A buffer of random bytes, a cache in it, rows, and distinct slots (some -1)."""
    layout = draw(layouts())
    page_size, pages = draw(st.sampled_from(PAGE_SIZES)), draw(st.integers(1, 3))
    gap = layout.alignment * draw(st.sampled_from([0, 1, 16, 301]))
    scale = draw(st.sampled_from([1.0, 0.037, 12.5])) if layout.scale_mode == "tensor" else 1.0
    # Pages must start aligned; the gap keeps that, the library's own padding may not.
    gap += -layout.page_bytes(page_size) % layout.alignment
    seed = draw(st.integers(0, 2**31))
    buffer, cache = engine_cache(layout, pages, page_size, gap=gap, scale=scale, seed=seed)
    count = draw(st.integers(0, min(6, cache.rows)))
    generator = seeded(seed)
    slots = torch.randperm(cache.rows, generator=generator)[:count]
    slots[torch.rand(count, generator=generator) < 0.2] = -1
    kv = torch.randn(count, layout.width, generator=generator)
    kv *= 10.0 ** draw(st.integers(-6, 4)) * torch.rand(count, 1, generator=generator)
    kv = kv.to(draw(st.sampled_from([BF16, FP16, FP32])))
    return buffer, cache, kv, slots.to(draw(st.sampled_from([torch.int32, torch.int64])))


@settings(deadline=None, max_examples=150)
@given(writes())
def test_what_is_written_reads_back(case: tuple[Tensor, PagedCache, Tensor, Tensor]) -> None:
    _, cache, kv, slots = case
    layout = cache.layout
    ops.write_kv(kv, cache, slots)
    found = cache.read(slots)
    wanted = kv.float().masked_fill((slots < 0).unsqueeze(1), 0.0)
    if layout.scale_mode == "none":
        assert torch.equal(found, wanted.to(layout.element).float())
        return
    latent = wanted[:, : layout.latent]
    if layout.rounding == "bf16":
        latent = latent.to(BF16).float()
    if layout.scale_mode == "tensor":
        latent = wanted.clamp(-448 * cache.scale, 448 * cache.scale)
        step = torch.full_like(latent, float(cache.scale))
    else:
        assert torch.equal(found[:, layout.latent :], wanted[:, layout.latent :].to(BF16).float())
        amax = latent.unflatten(1, (-1, layout.tile)).abs().amax(-1, keepdim=True)
        largest_scale = 2 * (amax / 448).clamp_min(1e-4 if "v32" in layout.name else 1e-4 / 448)
        step = largest_scale.expand(-1, -1, layout.tile).flatten(1)
    error = (found[:, : latent.shape[1]] - latent).abs()
    assert (error <= (latent.abs() / 16 + step * 2.0**-10) * (1 + 1e-6)).all()


@settings(deadline=None, max_examples=100)
@given(writes())
def test_no_other_byte_changes(case: tuple[Tensor, PagedCache, Tensor, Tensor]) -> None:
    buffer, cache, kv, slots = case
    before = buffer.clone()
    ops.write_kv(kv, cache, slots)
    may_change = torch.zeros_like(buffer, dtype=torch.bool)
    for slot in slots[slots >= 0].tolist():
        page, row = divmod(slot, cache.page_size)
        for field in (cache.layout.values, cache.layout.scales, cache.layout.tail):
            if field is not None:
                start = field.plane * cache.page_size + field.offset + row * field.stride
                may_change[page, start : start + field.count * field.dtype.itemsize] = True
    assert torch.equal(buffer[~may_change], before[~may_change])


@settings(deadline=None, max_examples=60)
@given(writes().filter(lambda case: case[1].layout.scale_mode != "exact"))  # there amax / 448 * 448 may round
def test_writing_what_was_read_changes_nothing_more(case: tuple[Tensor, PagedCache, Tensor, Tensor]) -> None:
    _, cache, kv, slots = case
    ops.write_kv(kv, cache, slots)
    once = cache.read(slots)
    ops.write_kv(once, cache, slots)
    assert torch.equal(cache.read(slots), once)
