"""Every offset and size of every byte format, against the numbers of the specification."""

import dataclasses

import pytest
import torch

from tamis.cache import layout
from tamis.cache.fields import Field, from_key
from tamis.cache.layout import Layout, for_engine, named

U8, BF16, FP16, FP32 = torch.uint8, torch.bfloat16, torch.float16, torch.float32
PAGE_SIZES = (1, 2, 61, 64, 69, 256)


def fields(found: Layout) -> list[Field]:
    return [f for f in (found.values, found.scales, found.tail) if f is not None]


@pytest.mark.parametrize(
    ("name", "latent", "rope", "element", "row_elements", "row_bytes", "alignment"),
    [
        ("v32-bf16", 512, 64, BF16, 576, 1152, 2),
        ("v32-fp16", 512, 64, FP16, 576, 1152, 2),
        ("v32-fp32", 512, 64, FP32, 576, 2304, 4),
        ("v32-fp8", 512, 64, U8, 656, 656, 4),
        ("v4-bf16", 448, 64, BF16, 512, 1024, 2),
        ("v4-fp16", 448, 64, FP16, 512, 1024, 2),
        ("v4-fp32", 448, 64, FP32, 512, 2048, 4),
        ("v4-fp8", 448, 64, U8, 584, 584, 2),
        ("plain-fp8", 512, 64, torch.float8_e4m3fn, 576, 576, 1),
        ("v41-fp8", 512, 0, U8, 528, 528, 1),
        ("v41-fp4", 512, 0, U8, 288, 288, 1),
        ("index-fp8", 128, 0, U8, 132, 132, 4),
        ("index-mxfp4", 128, 0, U8, 68, 68, 1),
    ],
)
def test_named_layout_has_the_sizes_of_the_specification(
    name: str, latent: int, rope: int, element: torch.dtype, row_elements: int, row_bytes: int, alignment: int
) -> None:
    found = named(name)
    assert (found.name, found.latent, found.rope, found.width) == (name, latent, rope, latent + rope)
    assert (found.element, found.row_elements, found.row_bytes) == (element, row_elements, row_bytes)
    assert found.alignment == alignment


def test_every_name_is_covered_above() -> None:
    assert len(layout.NAMES) == 13
    assert all(named(name).name == name for name in layout.NAMES)


@pytest.mark.parametrize(
    ("name", "values", "scales", "tail"),
    [
        ("v32-bf16", Field(BF16, 576, 0, 1152), None, None),
        ("v32-fp32", Field(FP32, 576, 0, 2304), None, None),
        ("v4-fp16", Field(FP16, 512, 0, 1024), None, None),
        ("v32-fp8", Field(U8, 512, 0, 656), Field(FP32, 4, 512, 656), Field(BF16, 64, 528, 656)),
        ("v4-fp8", Field(U8, 448, 0, 576), Field(U8, 8, 0, 8, plane=576), Field(BF16, 64, 448, 576)),
        ("plain-fp8", Field(U8, 576, 0, 576), None, None),
        ("v41-fp8", Field(U8, 512, 0, 512), Field(U8, 16, 0, 16, plane=512), None),
        ("v41-fp4", Field(U8, 256, 0, 256), Field(U8, 32, 0, 32, plane=256), None),
        ("index-fp8", Field(U8, 128, 0, 128), Field(FP32, 1, 0, 4, plane=128), None),
        ("index-mxfp4", Field(U8, 64, 0, 64), Field(U8, 4, 0, 4, plane=64), None),
    ],
)
def test_fields_lie_where_the_specification_puts_them(
    name: str, values: Field, scales: Field | None, tail: Field | None
) -> None:
    found = named(name)
    assert (found.values, found.scales, found.tail) == (values, scales, tail)


@pytest.mark.parametrize(
    ("name", "tile", "scale_mode", "rounding"),
    [
        ("v32-bf16", 0, "none", "none"),
        ("v32-fp8", 128, "pow2", "none"),
        ("v4-fp8", 64, "exponent", "bf16"),
        ("plain-fp8", 0, "tensor", "none"),
        ("index-fp8", 128, "pow2", "bf16"),
        ("index-mxfp4", 32, "exponent", "bf16"),
    ],
)
def test_tiles_and_scale_modes(name: str, tile: int, scale_mode: str, rounding: str) -> None:
    found = named(name)
    assert (found.tile, found.scale_mode, found.rounding) == (tile, scale_mode, rounding)
    assert found.quantised == (scale_mode != "none")
    assert found.packed == (name == "index-mxfp4")


@pytest.mark.parametrize(
    ("found", "floor"),
    [
        (named("v32-fp8"), 1e-4),
        (named("v32-fp8", scale_mode="exact"), 2.0**-126),
        (named("v4-fp8"), 1e-4 / 448),
        (named("index-fp8"), 1e-4 / 448),
        (named("index-mxfp4"), 2.0**-126),
    ],
    ids=["v32-pow2", "v32-exact", "v4", "index", "index-mxfp4"],
)
def test_smallest_scale(found: Layout, floor: float) -> None:
    assert found.scale_floor == pytest.approx(floor, rel=1e-7)


@pytest.mark.parametrize(
    ("name", "page_size", "scale_start"),
    [
        ("v4-fp8", 64, 36864),
        ("v4-fp8", 2, 1152),
        ("v4-fp8", 1, 576),
        ("index-fp8", 64, 8192),
        ("index-fp8", 61, 7808),
        ("index-mxfp4", 64, 4096),
        ("v32-fp8", 64, 512),
    ],
)
def test_scale_plane_starts_after_all_values_of_a_page(name: str, page_size: int, scale_start: int) -> None:
    found = named(name).scales
    assert found is not None
    assert found.start(page_size) == scale_start


@pytest.mark.parametrize(
    ("name", "page_size", "page_bytes"),
    [
        ("v32-bf16", 64, 73728),
        ("v32-fp8", 64, 41984),
        ("v32-fp8", 1, 656),
        ("v4-bf16", 64, 65536),
        ("v4-bf16", 2, 2048),
        ("v4-fp8", 1, 1152),
        ("v4-fp8", 2, 1728),
        ("v4-fp8", 61, 35712),
        ("v4-fp8", 64, 37440),
        ("v4-fp8", 69, 40320),
        ("v4-fp8", 256, 149760),
        ("plain-fp8", 64, 36864),
        ("index-fp8", 64, 8448),
        ("index-fp8", 1, 132),
        ("index-mxfp4", 64, 4352),
        ("index-mxfp4", 1, 68),
    ],
)
def test_page_bytes(name: str, page_size: int, page_bytes: int) -> None:
    assert named(name).page_bytes(page_size) == page_bytes


@pytest.mark.parametrize(("page_size", "page_bytes"), [(64, 37376), (2, 1536), (1, 1024), (61, 35840)])
def test_v4_pages_padded_to_512(page_size: int, page_bytes: int) -> None:
    found = named("v4-fp8", page_align=512)
    assert found.page_bytes(page_size) == page_bytes
    assert (found.row_bytes, found.values, found.scales) == (584, named("v4-fp8").values, named("v4-fp8").scales)


@pytest.mark.parametrize(("align", "page_bytes"), [(576, 4608), (512, 4608), (1, 4352)])
def test_mxfp4_pages_padded_to_those_of_the_rows(align: int, page_bytes: int) -> None:
    assert named("index-mxfp4", page_align=align).page_bytes(64) == page_bytes


def test_v4_pages_without_padding() -> None:
    assert named("v4-fp8", page_align=1).page_bytes(61) == 61 * 584


@pytest.mark.parametrize(
    ("found", "row_bytes", "scales", "tail"),
    [
        (named("v32-fp8", latent=512, rope=0), 528, Field(FP32, 4, 512, 528), None),
        (named("v32-fp8", latent=128, rope=32), 208, Field(FP32, 1, 128, 208), Field(BF16, 32, 144, 208)),
        (named("v4-fp8", latent=512, rope=0), 520, Field(U8, 8, 0, 8, plane=512), None),
        (named("v4-fp8", latent=576, rope=0), 592, Field(U8, 16, 0, 16, plane=576), None),
        (named("v4-fp8", latent=128, rope=32), 200, Field(U8, 8, 0, 8, plane=192), Field(BF16, 32, 128, 192)),
        (named("plain-fp8", latent=512, rope=0), 512, None, None),
        (named("plain-fp8", latent=448, rope=64), 512, None, None),
        (named("v32-bf16", latent=512, rope=0), 1024, None, None),
        (named("v32-fp32", latent=128, rope=32), 640, None, None),
        (named("index-fp8", dim=64), 68, Field(FP32, 1, 0, 4, plane=64), None),
        (named("index-mxfp4", dim=96), 51, Field(U8, 3, 0, 3, plane=48), None),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_other_widths_are_a_parameter(found: Layout, row_bytes: int, scales: Field | None, tail: Field | None) -> None:
    assert found.row_bytes == row_bytes
    assert (found.scales, found.tail) == (scales, tail)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (named("v32-fp8", latent=128, rope=32), "v32-fp8[128+32]"),
        (named("v4-fp8", latent=512, rope=0), "v4-fp8[512+0]"),
        (named("plain-fp8", latent=512, rope=0), "plain-fp8[512+0]"),
        (named("v32-bf16", latent=128, rope=32), "v32-bf16[128+32]"),
        (named("index-fp8", dim=64), "index-fp8[64]"),
        (named("index-mxfp4", dim=64), "index-mxfp4[64]"),
        (layout.rows(FP16, latent=512, rope=64), "rows-float16[512+64]"),
    ],
)
def test_other_widths_show_in_the_name(found: Layout, name: str) -> None:
    assert found.name == name


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("widths", [{}, {"latent": 512, "rope": 0}, {"latent": 128, "rope": 32}], ids=str)
@pytest.mark.parametrize("name", [n for n in layout.NAMES if not n.startswith("index-")])
def test_fields_of_a_page_never_overlap_and_stay_inside(name: str, widths: dict[str, int], page_size: int) -> None:
    found = named(name, **widths)
    used = torch.zeros(found.page_bytes(page_size), dtype=torch.int32)
    for field in fields(found):
        for row in range(page_size):
            start = field.plane * page_size + field.offset + row * field.stride
            assert start % field.dtype.itemsize == 0
            end = start + field.count * field.dtype.itemsize
            assert end <= found.row_bytes * page_size
            used[start:end] += 1
    assert int(used.max()) == 1


def test_layouts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        named("v32-fp8").row_bytes = 1  # type: ignore[misc]


def test_a_layout_object_is_passed_through() -> None:
    found = layout.v32_fp8(scale_mode="exact")
    assert named(found) is found


def test_options_reach_the_format() -> None:
    assert named("v32-fp8", scale_mode="exact").scale_mode == "exact"
    assert named("v4-fp8", rounding="none").rounding == "none"
    assert named("index-fp8", rounding="none").rounding == "none"


@pytest.mark.parametrize("wrong", ["v32_fp8", "", None, 656, ["v32-fp8"]], ids=repr)
def test_unknown_name_lists_the_known_ones(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^layout must be one of v32-bf16, .*index-mxfp4, got .*; or pass a Layout"):
        named(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("v32-fp8", {"dim": 128}, TypeError, "options must be among latent, rope, .* for 'v32-fp8', got dim; drop"),
        ("v32-bf16", {"scale_mode": "pow2"}, TypeError, "options must be among latent, rope .*got scale_mode; "),
        (named("v32-fp8"), {"latent": 128}, TypeError, "options must be absent if .*got latent; build"),
        ("v32-fp8", {"latent": 500}, ValueError, "latent must be a multiple of 128 .*got 500; "),
        ("v4-fp8", {"latent": 500}, ValueError, "latent must be a multiple of 64 .*got 500; "),
        ("v41-fp8", {"latent": 50}, ValueError, r"latent and rope must be a multiple of 32 together .*got 50 \+ 64; "),
        ("v41-fp4", {"rope": 9}, ValueError, r"latent and rope must be a multiple of 16 together .*got 448 \+ 9; "),
        ("v32-fp8", {"latent": 0}, ValueError, "latent must be >= 1, got 0$"),
        ("plain-fp8", {"rope": -1}, ValueError, "rope must be >= 0, got -1$"),
        ("v4-bf16", {"latent": 1.5}, TypeError, "latent must be an int, got float$"),
        ("v32-fp8", {"tile": 0}, ValueError, "tile must be >= 1, got 0$"),
        ("v32-fp8", {"scale_mode": "ue8m0"}, ValueError, "scale_mode must be one of 'pow2', 'exact', got 'ue8m0'$"),
        ("v4-fp8", {"rounding": "fp16"}, ValueError, "rounding must be one of 'bf16', 'none', got 'fp16'$"),
        ("v4-fp8", {"page_align": 0}, ValueError, "page_align must be >= 1, got 0$"),
        ("index-fp8", {"dim": 130}, ValueError, "dim must be a multiple of 4 .*got 130; "),
        ("index-mxfp4", {"dim": 48}, ValueError, "dim must be a multiple of 32 .*got 48; "),
        ("index-fp8", {"rounding": "fp32"}, ValueError, "rounding must be one of .*got 'fp32'$"),
    ],
)
def test_wrong_options_are_refused(
    name: str | Layout, options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match="^" + message):
        named(name, **options)


def test_rows_refuse_dtypes_that_need_scales() -> None:
    with pytest.raises(TypeError, match=r"^dtype must be bfloat16, float16 or float32, got torch.float8_e4m3fn; use"):
        layout.rows(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("cache_dtype", "options", "row_bytes", "element"),
    [
        ("fp8_ds_mla", {}, 656, U8),
        ("fp8_ds_mla", {"latent": 448}, 584, U8),
        ("fp8", {}, 576, torch.float8_e4m3fn),
        ("fp8_e4m3", {"latent": 448}, 512, torch.float8_e4m3fn),
        ("auto", {}, 1152, BF16),
        ("auto", {"dtype": FP16}, 1152, FP16),
        ("bfloat16", {"dtype": FP16}, 1152, BF16),
        ("bfloat16", {"latent": 448}, 1024, BF16),
        ("float16", {}, 1152, FP16),
        ("float32", {"latent": 128, "rope": 32}, 640, FP32),
    ],
)
def test_engine_cache_dtype_names(
    cache_dtype: str, options: dict[str, object], row_bytes: int, element: torch.dtype
) -> None:
    found = for_engine(cache_dtype, **options)  # type: ignore[arg-type]
    assert (found.row_bytes, found.element) == (row_bytes, element)


def test_unknown_engine_cache_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^cache_dtype must be one of 'auto', .*'fp8_ds_mla'.*, got 'nvfp4'$"):
        for_engine("nvfp4")


@pytest.mark.parametrize(
    ("options", "page_size", "raw", "padded"),
    [
        ({"dim": 512, "overlapping": True}, 4, 32768, 32832),
        ({"dim": 512, "overlapping": False}, 8, 32768, 32832),
        ({"dim": 128, "overlapping": True}, 4, 8192, 8640),
    ],
)
def test_state_pages_of_compressors(options, page_size: int, raw: int, padded: int) -> None:
    found = layout.compressor_state(**options)
    assert (found.element, found.rope, found.row_bytes * page_size) == (FP32, 0, raw)
    assert found.page_bytes(page_size) == raw
    assert layout.compressor_state(**options, page_align=576).page_bytes(page_size) == padded
    assert from_key(found.key) == found
