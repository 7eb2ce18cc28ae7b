"""PagedCache: allocation, wrapping of an engine's tensor, addressing, reading."""

import math

import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis import PagedCache, Selection, ops
from tamis.cache.layout import NAMES, named

PAGE_SIZES = (1, 2, 61, 64, 69, 256)


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))


def some_rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Rows that every format stores without error: numbers of e2m1 times a power of two, with the largest one in each
    group of 16, so that a scale is a power of two too."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((sizes, -sizes))[torch.randint(0, 16, (count, width), generator=seeded(seed))]
    numbers[:, ::16] = 6.0
    return numbers / 4 + 0.0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_allocated_pages_are_zero_and_hold_rows(name: str, page_size: int) -> None:
    cache = PagedCache(name, pages=3, page_size=page_size)
    layout = cache.layout
    assert layout == named(name)
    assert cache.storage.shape == (3, page_size, layout.row_elements)
    assert cache.storage.dtype == layout.element
    assert (cache.pages, cache.page_size, cache.rows) == (3, page_size, 3 * page_size)
    assert cache.device == torch.device("cpu")
    assert not cache.storage.view(torch.uint8).any()
    slots = torch.tensor([0, page_size, 3 * page_size - 1])
    kv = some_rows(3, layout.width)
    ops.write_kv(kv, cache, slots)
    assert torch.equal(cache.read(slots), kv)


@pytest.mark.parametrize(
    ("name", "page_size", "page_stride"),
    [
        ("v4-fp8", 64, 37440),
        ("v4-fp8", 2, 1728),
        ("v32-fp8", 64, 41984),
        ("index-fp8", 64, 8448),
        ("v32-bf16", 61, 70272),
    ],
)
def test_allocated_page_stride_in_bytes(name: str, page_size: int, page_stride: int) -> None:
    cache = PagedCache(name, 2, page_size)
    assert cache.page_stride == page_stride
    assert cache.storage.stride(0) * cache.storage.element_size() == page_stride


def test_layout_may_be_an_object() -> None:
    layout = named("v4-fp8", page_align=512)
    cache = PagedCache(layout, 2, 2)
    assert cache.layout is layout
    assert cache.page_stride == 1536


def test_repr_names_layout_and_size() -> None:
    assert repr(PagedCache("v4-fp8", 5, 64)) == "PagedCache('v4-fp8', pages=5, page_size=64, cpu)"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("v32", 2, 64), ValueError, "layout must be one of .*, got 'v32'; "),
        (("v32-fp8", 0, 64), ValueError, "pages must be >= 1, got 0$"),
        (("v32-fp8", 2, 0), ValueError, "page_size must be >= 1, got 0$"),
        (("v32-fp8", 2, -64), ValueError, "page_size must be >= 1, got -64$"),
        (("v32-fp8", 2.0, 64), TypeError, "pages must be an int, got float$"),
        (("v32-fp8", 2, True), TypeError, "page_size must be an int, got bool$"),
        (
            ("v32-bf16", 2**25, 64, "meta"),
            ValueError,
            r"pages must be fewer than 2\*\*31 rows in all, got 2147483648; ",
        ),
    ],
)
def test_wrong_allocations_are_refused(arguments: tuple[object, ...], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^" + message):
        PagedCache(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, 4, 656), (3, 4, 1, 656), (3, 1, 4, 656)], ids=str)
def test_wrap_takes_every_engine_shape(shape: tuple[int, ...]) -> None:
    storage = random_bytes(*shape)
    cache = PagedCache.wrap(storage, "v32-fp8")
    assert (cache.pages, cache.page_size) == (3, 4)
    assert cache.storage.shape == (3, 4, 656)
    assert cache.storage.data_ptr() == storage.data_ptr()


@pytest.mark.parametrize("shape", [(5, 1, 656), (5, 1, 1, 656)], ids=str)
def test_wrap_takes_pages_of_one_row(shape: tuple[int, ...]) -> None:
    cache = PagedCache.wrap(random_bytes(*shape), "v32-fp8")
    assert (cache.pages, cache.page_size) == (5, 1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["v32-fp8", "v4-fp8", "plain-fp8", "index-fp8", "index-mxfp4"])
def test_wrap_takes_any_one_byte_dtype(name: str, dtype: torch.dtype) -> None:
    kv = some_rows(8, named(name).width)
    storage = torch.zeros(2, 4, named(name).row_elements, dtype=torch.uint8).view(dtype)
    cache = PagedCache.wrap(storage, name, 4)
    ops.write_kv(kv, cache, torch.arange(8))
    assert storage.view(torch.uint8).any()
    assert torch.equal(cache.read(torch.arange(8)), kv)


@pytest.mark.parametrize("name", NAMES)
def test_wrap_honours_pages_of_other_layers_in_between(name: str) -> None:
    layout = named(name)
    used = layout.row_bytes * 4
    buffer = random_bytes(3, 5, used)
    before = buffer.clone()
    cache = PagedCache.wrap(buffer[:, 2].unflatten(1, (4, layout.row_bytes)).view(layout.element), layout)
    assert cache.page_stride == 5 * used
    kv = some_rows(12, layout.width)
    ops.write_kv(kv, cache, torch.arange(12))
    assert torch.equal(cache.read(torch.arange(12)), kv)
    others = [0, 1, 3, 4]
    assert torch.equal(buffer[:, others], before[:, others])
    assert not torch.equal(buffer[:, 2], before[:, 2])


def test_wrap_of_one_page_ignores_the_page_stride() -> None:
    storage = torch.as_strided(random_bytes(4 * 656), (1, 4, 656), (7, 656, 1))
    assert PagedCache.wrap(storage, "v32-fp8").page_stride == 4 * 656


@pytest.mark.parametrize(
    ("storage", "layout", "options", "kind", "message"),
    [
        ([1], "v32-fp8", {}, TypeError, "storage must be a tensor, got list; "),
        (torch.zeros(2, 4, 656), "v32-fp8", {}, TypeError, "storage must be uint8 or int8 or .*, got float32; "),
        (torch.zeros(2, 4, 576), "v32-bf16", {}, TypeError, "storage must be bfloat16, got float32; "),
        (
            random_bytes(2, 4, 584),
            "v32-fp8",
            {},
            ValueError,
            r"storage must be .*C=656\], got \[2, 4, 584\]; a v32-fp8",
        ),
        (random_bytes(4, 656), "v32-fp8", {}, ValueError, r"storage must be of shape .*, got \[4, 656\]; "),
        (random_bytes(2, 4, 2, 656), "v32-fp8", {}, ValueError, r"storage must be of shape .*, got \[2, 4, 2, 656\]; "),
        (random_bytes(2, 4, 656), "v32-fp8", {"page_size": 64}, ValueError, "page_size must be 4, .*, got 64; "),
        (random_bytes(2, 4, 656), "v32-fp8", {"page_size": 0}, ValueError, "page_size must be >= 1, got 0$"),
        (random_bytes(2, 4, 656), "v32-fp8", {"page_size": "4"}, TypeError, "page_size must be an int, got str$"),
        (
            random_bytes(0, 4, 656),
            "v32-fp8",
            {},
            ValueError,
            r"storage must be at least one page .*got \[0, 4, 656\]; ",
        ),
        (
            random_bytes(2, 0, 656),
            "v32-fp8",
            {},
            ValueError,
            r"storage must be at least one page .*got \[2, 0, 656\]; ",
        ),
        (random_bytes(2, 4, 656), "fp8", {}, ValueError, "layout must be one of .*, got 'fp8'; "),
    ],
)
def test_wrap_refuses_wrong_tensors(
    storage: object, layout: str, options: dict[str, int], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match="^" + message):
        PagedCache.wrap(storage, layout, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "shape", "strides", "start", "message"),
    [
        ("v32-fp8", (2, 4, 656), (4 * 700, 700, 1), 0, r"contiguous inside a page \(strides \*, 656, 1\), got "),
        ("v32-fp8", (2, 4, 656), (1, 2, 8), 0, r"contiguous inside a page \(strides \*, 656, 1\), got "),
        ("v32-fp8", (3, 4, 656), (2 * 656, 656, 1), 0, "in pages at least 2624 elements apart, got 1312; "),
        ("v32-fp8", (3, 4, 656), (0, 656, 1), 0, "in pages at least 2624 elements apart, got 0; "),
        ("v32-fp8", (2, 4, 656), (2626, 656, 1), 0, "aligned, its page stride a multiple of 4 bytes, got 2626 bytes; "),
        ("v32-fp8", (2, 4, 656), (2624, 656, 1), 2, "aligned, its start a multiple of 4 bytes, got 2 bytes; "),
        ("v4-fp8", (2, 4, 584), (2337, 584, 1), 0, "aligned, its page stride a multiple of 2 bytes, got 2337 bytes; "),
        ("v4-fp8", (2, 4, 584), (2336, 584, 1), 3, "aligned, its start a multiple of 2 bytes, got 3 bytes; "),
        ("index-fp8", (2, 4, 132), (530, 132, 1), 0, "aligned, its page stride a multiple of 4 bytes, got 530 bytes; "),
    ],
)
def test_wrap_refuses_strides_it_cannot_address(
    layout: str, shape: tuple[int, ...], strides: tuple[int, ...], start: int, message: str
) -> None:
    storage = torch.as_strided(random_bytes(8000), shape, strides, start)
    with pytest.raises(ValueError, match="^storage must be " + message):
        PagedCache.wrap(storage, layout)


def test_wrap_refuses_one_head_of_many() -> None:
    with pytest.raises(ValueError, match=r"^storage must be contiguous inside a page .*call .contiguous"):
        PagedCache.wrap(torch.zeros(2, 4, 2, 576, dtype=torch.bfloat16)[:, :, :1], "v32-bf16")


def test_wrap_takes_an_odd_start_where_bytes_suffice() -> None:
    storage = torch.as_strided(torch.zeros(4000, dtype=torch.uint8), (2, 2, 576), (1501, 576, 1), 7)
    cache = PagedCache.wrap(storage, "plain-fp8")
    kv = some_rows(4, 576)
    ops.write_kv(kv, cache, torch.arange(4))
    assert torch.equal(cache.read(torch.arange(4)), kv)


@pytest.mark.parametrize(
    ("scale", "kind", "message"),
    [
        (math.nan, ValueError, "scale must be finite and > 0, got nan; "),
        (math.inf, ValueError, "scale must be finite and > 0, got inf; "),
        (0.0, ValueError, "scale must be finite and > 0, got 0.0; "),
        (-1.0, ValueError, "scale must be finite and > 0, got -1.0; "),
        ("1", TypeError, "scale must be a number, got str$"),
        (True, TypeError, "scale must be a number, got bool$"),
        (torch.tensor([math.nan]), ValueError, "scale must be finite and > 0, got nan; "),
        (torch.ones(2), TypeError, r"scale must be one float32 element, got float32 \[2\] on cpu; "),
        (torch.ones(1, dtype=torch.float64), TypeError, r"scale must be one float32 element, got float64 \[1\]"),
        (torch.ones(1, device="meta"), ValueError, "scale must be on cpu like storage, got a tensor on meta; "),
    ],
    ids=str,
)
def test_wrong_scales_are_refused(scale: object, kind: type[Exception], message: str) -> None:
    for make in (
        lambda: PagedCache("plain-fp8", 2, 4, scale=scale),  # type: ignore[arg-type]
        lambda: PagedCache.wrap(random_bytes(2, 4, 576), "plain-fp8", scale=scale),  # type: ignore[arg-type]
        lambda: PagedCache("plain-fp8", 2, 4).with_scale(scale),  # type: ignore[arg-type]
    ):
        with pytest.raises(kind, match="^" + message):
            make()


@pytest.mark.parametrize("scale", [0.5, torch.tensor([1.0])], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "plain-fp8"])
def test_only_plain_fp8_takes_a_scale(name: str, scale: float | Tensor) -> None:
    with pytest.raises(ValueError, match=rf"^scale must be 1.0 for {name}, got .*; only plain-fp8"):
        PagedCache(name, 2, 4, scale=scale)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_scale_as_tensor_means_the_same_as_a_float(shape: tuple[int, ...]) -> None:
    kv = torch.randn(8, 576)
    by_float = PagedCache("plain-fp8", 2, 4, scale=0.037)
    by_tensor = PagedCache("plain-fp8", 2, 4, scale=torch.full(shape, 0.037))
    for cache in (by_float, by_tensor):
        ops.write_kv(kv, cache, torch.arange(8))
    assert torch.equal(by_float.storage.view(torch.uint8), by_tensor.storage.view(torch.uint8))
    assert torch.equal(by_float.read(torch.arange(8)), by_tensor.read(torch.arange(8)))


def test_with_scale_shares_storage() -> None:
    cache = PagedCache("plain-fp8", 2, 4)
    other = cache.with_scale(2.0)
    assert (cache.scale, other.scale) == (1.0, 2.0)
    assert other.storage.data_ptr() == cache.storage.data_ptr()
    ops.write_kv(torch.full((1, 576), 3.0), cache, torch.tensor([5]))
    assert torch.equal(other.read(torch.tensor([5])), torch.full((1, 576), 6.0))


def test_with_scale_keeps_a_page_stride() -> None:
    cache = PagedCache.wrap(random_bytes(3, 2, 4, 576)[:, 1], "plain-fp8")
    assert cache.with_scale(2.0).page_stride == cache.page_stride == 8 * 576


@pytest.mark.parametrize("name", ["v32-bf16", "v32-fp8", "plain-fp8", "index-fp8"])
def test_rows_per_page_counts_pages_in_between(name: str) -> None:
    layout = named(name)
    buffer = torch.zeros(3, 5, 4, layout.row_elements, dtype=layout.element)
    assert PagedCache.wrap(buffer[:, 1], name).rows_per_page == 20
    assert PagedCache(name, 3, 4).rows_per_page == 4


def test_rows_per_page_refuses_a_stride_that_is_not_whole_rows() -> None:
    with pytest.raises(
        ValueError, match=r"^storage must be .*whole number of 584-byte rows apart, got 37440 bytes; addr"
    ):
        _ = PagedCache("v4-fp8", 2, 64).rows_per_page
    assert PagedCache(named("v4-fp8", page_align=584), 2, 64).rows_per_page == 64


@pytest.mark.parametrize(
    ("name", "page_size", "field", "row", "position", "byte"),
    [
        ("v32-fp8", 64, "values", 3, 7, 3 * 656 + 7),
        ("v32-fp8", 64, "scales", 3, 2, 3 * 656 + 512 + 8),
        ("v32-fp8", 64, "tail", 3, 5, 3 * 656 + 528 + 10),
        ("v4-fp8", 64, "values", 3, 7, 3 * 576 + 7),
        ("v4-fp8", 64, "scales", 3, 2, 64 * 576 + 3 * 8 + 2),
        ("v4-fp8", 2, "scales", 1, 7, 2 * 576 + 8 + 7),
        ("v4-fp8", 64, "tail", 3, 5, 3 * 576 + 448 + 10),
        ("index-fp8", 64, "values", 3, 7, 3 * 128 + 7),
        ("index-fp8", 64, "scales", 3, 0, 64 * 128 + 12),
        ("v32-bf16", 64, "values", 3, 7, 3 * 1152 + 14),
        ("v32-fp32", 61, "values", 60, 575, 60 * 2304 + 2300),
    ],
)
@pytest.mark.parametrize("gap", [0, 48])
def test_field_views_point_at_the_bytes_of_the_specification(
    name: str, page_size: int, field: str, row: int, position: int, byte: int, gap: int
) -> None:
    layout = named(name)
    used = layout.row_bytes * page_size
    buffer = torch.zeros(3, used + gap, dtype=torch.uint8)
    cache = PagedCache.wrap(buffer[:, :used].unflatten(1, (page_size, -1)).view(layout.element), layout)
    view = cache.field(getattr(layout, field))
    assert view.shape[:2] == (3, page_size)
    view[2, row, position] = 1
    touched = buffer[2].nonzero().flatten().tolist()
    assert touched
    assert byte <= touched[0]
    assert touched[-1] < byte + view.element_size()
    assert not buffer[:2].any()


@pytest.mark.parametrize("name", NAMES)
def test_reading_minus_one_or_past_the_end_gives_zeros(name: str) -> None:
    layout = named(name)
    cache = PagedCache(name, 2, 4)
    cache.storage.view(torch.uint8).fill_(0xFF)
    rows = cache.read(torch.tensor([-1, 8, -(2**63), 2**62, 0]))
    assert rows.shape == (5, layout.width)
    assert torch.equal(rows[:4], torch.zeros(4, layout.width))
    assert rows[4].isnan().any()


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (1, 2, 3)], ids=str)
def test_read_keeps_the_shape_of_slots(shape: tuple[int, ...], slots_dtype: torch.dtype) -> None:
    cache = PagedCache("v32-fp8", 2, 4)
    kv = some_rows(8, 576)
    ops.write_kv(kv, cache, torch.arange(8))
    slots = torch.randint(0, 8, shape, dtype=slots_dtype)
    assert torch.equal(cache.read(slots), kv[slots.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read_in_another_dtype_rounds_once(dtype: torch.dtype) -> None:
    cache = PagedCache("v32-fp32", 2, 4)
    kv = torch.randn(8, 576)
    ops.write_kv(kv, cache, torch.arange(8))
    rows = cache.read(torch.arange(8), dtype=dtype)
    assert rows.dtype == dtype
    assert torch.equal(rows, kv.to(dtype))


@pytest.mark.parametrize(
    ("slots", "options", "kind", "message"),
    [
        ([1, 2], {}, TypeError, "slots must be an int32 or int64 tensor, got list; "),
        (torch.tensor([1.0]), {}, TypeError, r"slots must be an int32 or int64 tensor, got float32 \[1\] on cpu; "),
        (torch.zeros(1, dtype=torch.int64, device="meta"), {}, ValueError, "slots must be on cpu, got .*meta; move"),
        (torch.tensor([1]), {"dtype": torch.int32}, ValueError, "dtype must be one of .*, got torch.int32$"),
    ],
)
def test_wrong_reads_are_refused(
    slots: object, options: dict[str, torch.dtype], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match="^" + message):
        PagedCache("v32-fp8", 2, 4).read(slots, **options)  # type: ignore[arg-type]


def test_selection_rows_cuts_slots_and_lengths() -> None:
    cache = PagedCache("v32-bf16", 2, 4)
    selection = Selection(cache, torch.arange(12, dtype=torch.int32).view(4, 3), torch.tensor([3, 2, 1, 0]))
    part = selection.rows(1, 3)
    assert part.cache is cache
    assert part.slots.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part.lengths is not None
    assert part.lengths.tolist() == [2, 1]
    assert Selection(cache, selection.slots).rows(1, 3).lengths is None


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("name", ["v32-fp8", "v4-fp8", "plain-fp8", "v32-bf16", "index-fp8", "index-mxfp4"])
def test_a_trace_cuts_the_same_fields(name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache(name, 5, page_size)
    cache.storage.view(torch.uint8).random_()
    layout = cache.layout
    fields = [field for field in (layout.values, layout.scales, layout.tail) if field is not None]
    expected = [cache.field(field) for field in fields]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for field, wanted in zip(fields, expected, strict=True):
        found = cache.field(field)
        assert found.data_ptr() == wanted.data_ptr()
        assert found.shape == wanted.shape
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
