"""Cache writes and reads, byte by byte, against an encoder written from the format definitions."""

import math
import struct

import pytest
import torch
from byte_formats import (
    BF16,
    FLT_MIN,
    FORMATS,
    FP16,
    FP32,
    MAGNITUDES,
    Format,
    all_formats,
    e4m3,
    e4m3_value,
    engine_cache,
    expected_bytes,
    f32,
    hostile_rows,
)
from seeds import seeded

from tamis import PagedCache, ops
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, named

# --- Bytes ------------------------------------------------------------------------------------------------------------


def test_the_encoder_of_this_file_knows_the_landmarks_of_e4m3() -> None:
    assert (len(MAGNITUDES), MAGNITUDES[1], MAGNITUDES[8], MAGNITUDES[-1]) == (127, 2.0**-9, 2.0**-6, 448.0)
    assert [e4m3(x) for x in (0.0, -0.0, 1.0, -1.5, 448.0, 1e9)] == [0x00, 0x80, 0x38, 0xBC, 0x7E, 0x7E]
    assert [e4m3(x) for x in (17.0, 19.0, 2.0**-10, 3 * 2.0**-10)] == [0x58, 0x5A, 0x00, 0x02]


@all_formats
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("page_size", "lead", "gap"), [(4, 0, 0), (1, 0, 128), (2, 64, 0), (61, 16, 576)])
def test_written_bytes_and_only_those(form: Format, dtype: torch.dtype, page_size: int, lead: int, gap: int) -> None:
    pages = ceil_div(12, page_size) + 1
    buffer, cache = engine_cache(form.layout, pages, page_size, lead=lead, gap=gap, scale=form.scale)
    before = buffer.clone()
    kv = hostile_rows(form.layout.width, dtype)
    slots = [pages * page_size - 1, 3, 11, 0, page_size]
    ops.write_kv(kv, cache, torch.tensor(slots))
    assert torch.equal(buffer, expected_bytes(form, before, cache, kv, slots, lead))


@pytest.mark.parametrize("page_size", [64, 256, 69])
@all_formats
def test_written_bytes_in_larger_pages(form: Format, page_size: int) -> None:
    buffer, cache = engine_cache(form.layout, 3, page_size, gap=64, scale=form.scale)
    before = buffer.clone()
    kv = hostile_rows(form.layout.width, BF16, seed=1)
    slots = [2 * page_size, page_size - 1, 3 * page_size - 1, 0, page_size + 17]
    ops.write_kv(kv, cache, torch.tensor(slots))
    assert torch.equal(buffer, expected_bytes(form, before, cache, kv, slots, 0))


def test_v32_row_against_literal_bytes() -> None:
    kv = torch.zeros(1, 576)
    kv[0, 0:3] = torch.tensor([448.0, -1.0, 0.5])
    kv[0, 128:130] = torch.tensor([3.0, -896.0])
    kv[0, 384] = 450.0
    kv[0, 512:514] = torch.tensor([1.0, -2.0])
    cache = PagedCache("v32-fp8", 1, 2)
    ops.write_kv(kv, cache, torch.tensor([1]))
    assert not cache.storage[0, 0].any()
    row = bytes(cache.storage[0, 1].tolist())
    assert row[0:4] == bytes([0x7E, 0xB8, 0x30, 0x00])
    assert row[128:130] == bytes([0x3C, 0xFE])
    assert row[384] == 0x76
    assert row[512:528] == struct.pack("<4f", 1.0, 2.0, 2.0**-13, 2.0)
    assert row[528:532] == bytes([0x80, 0x3F, 0x00, 0xC0])


def test_v32_exact_row_against_literal_bytes() -> None:
    kv = torch.zeros(1, 576)
    kv[0, 0:2] = torch.tensor([3.0, -1.5])
    cache = PagedCache(named("v32-fp8", scale_mode="exact"), 1, 1)
    ops.write_kv(kv, cache, torch.tensor([0]))
    row = bytes(cache.storage[0, 0].tolist())
    assert row[0:3] == bytes([0x7E, 0xF6, 0x00])
    assert row[512:528] == struct.pack("<f", 3.0 / 448) + bytes([0x00, 0x00, 0x80, 0x00]) * 3


def test_v4_page_against_literal_bytes() -> None:
    kv = torch.zeros(2, 512)
    kv[0, 0:2] = torch.tensor([448.0, -1.0])
    kv[0, 64] = 449.0  # bf16 rounds this to 448 before the scale is taken
    kv[0, 128] = 450.0
    kv[0, 448] = 1.0
    kv[1, 384] = -0.25
    kv[1, 511] = -2.0
    cache = PagedCache("v4-fp8", 2, 2)
    ops.write_kv(kv, cache, torch.tensor([2, 3]))
    page = bytes(torch.as_strided(cache.storage, (1728,), (1,), 1728).tolist())
    assert page[0:2] == bytes([0x7E, 0xB8])
    assert (page[64], page[128]) == (0x7E, 0x76)
    assert page[448:450] == bytes([0x80, 0x3F])
    assert page[576 + 384] == 0xF8
    assert page[1150:1152] == bytes([0x00, 0xC0])
    assert page[1152:1160] == bytes([127, 127, 128, 105, 105, 105, 105, 0])
    assert page[1160:1168] == bytes([105, 105, 105, 105, 105, 105, 117, 0])
    assert page[1168:] == bytes(560)
    assert not cache.storage[0].any()


def test_mxfp4_page_against_literal_bytes() -> None:
    """Values of e2m1, its ties, saturation inside a tile, and a tile of zeros."""
    kv = torch.zeros(2, 128)
    kv[0, 0:8] = torch.tensor([0.0, 0.5, 1.0, 1.5, -2.0, -3.0, -4.0, -6.0])
    kv[0, 32:41] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, 4.5])
    kv[0, 64] = 6.0625  # the next power of two: 3.03 over 2 is 3
    kv[1, 127] = -0.0625
    cache = PagedCache("index-mxfp4", 2, 3)
    ops.write_kv(kv, cache, torch.tensor([3, 5]))
    page = bytes(cache.storage[1].flatten().tolist())
    assert page[0:4] == bytes([0x10, 0x32, 0xDC, 0xFE])
    assert page[16:21] == bytes([0x20, 0x42, 0x64, 0x86, 0x06])
    assert page[32] == 0x05
    assert page[2 * 64 + 63] == 0xE0
    assert page[192:204] == bytes([127, 127, 128, 1]) + bytes(4) + bytes([1, 1, 1, 121])


def test_a_packed_tile_with_a_nan_is_nan() -> None:
    kv = torch.ones(1, 128)
    kv[0, 40] = torch.nan
    kv[0, 64] = torch.inf
    cache = PagedCache("index-mxfp4", 1, 1)
    ops.write_kv(kv, cache, torch.tensor([0]))
    assert cache.storage[0, 0, 64:].tolist() == [125, 255, 253, 125]
    found = cache.read(torch.tensor([0]))[0]
    assert found[32:64].isnan().all()
    assert found[torch.tensor([0, 127])].tolist() == [1.0, 1.0]
    assert found[64].isinf()


def test_index_page_against_literal_bytes() -> None:
    kv = torch.zeros(2, 128)
    kv[0, 0:2] = torch.tensor([448.0, -1.0])
    kv[1, 127] = 0.25
    cache = PagedCache("index-fp8", 2, 3)
    ops.write_kv(kv, cache, torch.tensor([3, 5]))
    page = bytes(cache.storage[1].flatten().tolist())
    assert page[0:2] == bytes([0x7E, 0xB8])
    assert page[2 * 128 + 127] == 0x78
    assert page[384:396] == struct.pack("<3f", 1.0, 0.0, 2.0**-10)


def test_plain_row_against_literal_bytes() -> None:
    cache = PagedCache("plain-fp8", 1, 2, scale=0.5)
    kv = torch.zeros(1, 576)
    kv[0, 0:4] = torch.tensor([0.5, -224.0, 1e6, 0.25])
    ops.write_kv(kv, cache, torch.tensor([1]))
    assert cache.storage[0, 1, :5].view(torch.uint8).tolist() == [0x38, 0xFE, 0x7E, 0x30, 0x00]


def test_v4_without_bf16_rounding_keeps_fp32_maxima() -> None:
    kv = torch.zeros(1, 512)
    kv[0, 0] = 448.5
    exponents = {}
    for rounding in ("bf16", "none"):
        cache = PagedCache(named("v4-fp8", rounding=rounding), 1, 1)
        ops.write_kv(kv, cache, torch.tensor([0]))
        exponents[rounding] = int(cache.storage[0, 0, 576])
    assert exponents == {"bf16": 127, "none": 128}


# --- Zeros, small, large and broken values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "at", "stored"),
    [
        (named("v32-fp8"), 512, struct.pack("<f", 2.0**-13) * 4),
        (named("v32-fp8", scale_mode="exact"), 512, struct.pack("<f", FLT_MIN) * 4),
        (named("v4-fp8"), 576, bytes([105] * 7 + [0])),
        (named("index-fp8"), 128, struct.pack("<f", 2.0**-22)),
    ],
    ids=["v32-pow2", "v32-exact", "v4", "index"],
)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_all_zero_tiles_give_zeros_and_the_smallest_scale(layout: Layout, at: int, stored: bytes, zero: float) -> None:
    _, cache = engine_cache(layout, 1, 1)
    ops.write_kv(torch.full((1, layout.width), zero), cache, torch.tensor([0]))
    row = bytes(cache.storage[0, 0].tolist())
    assert row[at : at + len(stored)] == stored
    assert set(row[: layout.latent]) == {0x80 if math.copysign(1, zero) < 0 else 0x00}
    assert torch.equal(cache.read(torch.tensor([0])), torch.zeros(1, layout.width))


@pytest.mark.parametrize("largest", [0.0, 1e-30, 1e-9, 9.9e-5, 1e-4, 448 * 2.0**-22])
def test_v4_near_zero_tiles_have_exponent_minus_22(largest: float) -> None:
    cache = PagedCache("v4-fp8", 1, 1)
    ops.write_kv(torch.full((1, 512), largest), cache, torch.tensor([0]))
    assert cache.storage[0, 0, 576:].tolist() == [105] * 7 + [0]


def test_v4_exponent_grows_just_above_the_boundary() -> None:
    cache = PagedCache("v4-fp8", 1, 1)
    ops.write_kv(torch.full((1, 512), 450 * 2.0**-22), cache, torch.tensor([0]))
    assert cache.storage[0, 0, 576:].tolist() == [106] * 7 + [0]


@pytest.mark.parametrize("power", [-12, 0, 1, 100])
def test_pow2_scale_at_and_just_above_a_boundary(power: int) -> None:
    kv = torch.zeros(2, 576)
    kv[0, 0] = 448.0 * 2.0**power
    kv[1, 0] = (448.0 + 2.0**-15) * 2.0**power
    cache = PagedCache("v32-fp8", 1, 2)
    ops.write_kv(kv, cache, torch.arange(2))
    scales = cache.storage[0, :, 512:516].contiguous().view(FP32).flatten().tolist()
    assert scales == [2.0**power, 2.0 ** (power + 1)]


@pytest.mark.parametrize("value", [449.0, 464.0, 480.0, 500.0, 3e38, math.inf])
def test_values_beyond_the_range_saturate(value: float) -> None:
    cache = PagedCache("plain-fp8", 1, 2)
    ops.write_kv(torch.tensor([[value], [-value]]).expand(2, 576), cache, torch.arange(2))
    assert set(cache.storage[0, 0].view(torch.uint8).tolist()) == {0x7E}
    assert set(cache.storage[0, 1].view(torch.uint8).tolist()) == {0xFE}


@pytest.mark.parametrize("name", ["v32-fp8-pow2", "v32-fp8-exact", "v4-fp8", "index-fp8"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e38])
def test_huge_and_infinite_values_stay_in_their_tile(name: str, value: float) -> None:
    layout = FORMATS[name].layout
    kv = torch.ones(1, layout.width)
    kv[0, 5] = value
    cache = PagedCache(layout, 1, 1)
    ops.write_kv(kv, cache, torch.tensor([0]))
    row = cache.read(torch.tensor([0]))[0]
    assert not row.isnan().any()
    assert math.copysign(1.0, value) * float(row[5]) > 9e37
    assert torch.equal(row[layout.tile :], kv[0, layout.tile :])
    if math.isinf(value):
        assert int(cache.storage[0, 0, 5]) & 0x7F == 0x7E


@pytest.mark.parametrize("name", ["v32-fp8-pow2", "v32-fp8-exact", "v4-fp8", "index-fp8"])
def test_one_nan_leaves_every_other_value_alone(name: str) -> None:
    layout = FORMATS[name].layout
    kv = torch.randn(1, layout.width)
    kv[0, 0] = 0.0
    clean, broken = PagedCache(layout, 1, 1), PagedCache(layout, 1, 1)
    ops.write_kv(kv, clean, torch.tensor([0]))
    kv[0, 0] = math.nan
    ops.write_kv(kv, broken, torch.tensor([0]))
    assert int(broken.storage[0, 0, 0]) & 0x7F == 0x7F
    assert torch.equal(broken.storage[0, 0, 1:], clean.storage[0, 0, 1:])
    assert broken.read(torch.tensor([0]))[0].isnan().nonzero().flatten().tolist() == [0]


def test_a_tile_of_nans_keeps_a_scale_that_is_a_number() -> None:
    cache = PagedCache("v32-fp8", 1, 1)
    ops.write_kv(torch.full((1, 576), math.nan), cache, torch.tensor([0]))
    assert bytes(cache.storage[0, 0, 512:528].tolist()) == struct.pack("<f", 2.0**-13) * 4


# --- Reading bytes that somebody else wrote ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale_mode", ["pow2", "exact"])
def test_v32_reader_uses_the_stored_scale_exactly(scale_mode: str) -> None:
    generator = seeded(3)
    storage = torch.randint(0, 256, (2, 3, 656), dtype=torch.uint8, generator=generator)
    storage[..., :512].masked_fill_((storage[..., :512] & 0x7F) == 0x7F, 0x11)
    scales = [[f32(math.exp(0.7 * i + 0.13 * j - 2)) for j in range(4)] for i in range(6)]
    for slot, row in enumerate(scales):
        storage[slot // 3, slot % 3, 512:528] = torch.tensor(list(struct.pack("<4f", *row)), dtype=torch.uint8)
    cache = PagedCache.wrap(storage, named("v32-fp8", scale_mode=scale_mode))
    found = cache.read(torch.arange(6))
    for slot, row in enumerate(scales):
        stored = storage[slot // 3, slot % 3].tolist()
        wanted = [f32(e4m3_value(byte) * row[i // 128]) for i, byte in enumerate(stored[:512])]
        assert found[slot, :512].tolist() == wanted


def test_v4_reader_takes_every_exponent_byte() -> None:
    storage = torch.zeros(255, 1, 584, dtype=torch.uint8)
    storage[..., :448] = 0x38
    storage[:, 0, 576:583] = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    storage[..., 583] = 0xAB  # the pad byte means nothing to a reader
    found = PagedCache.wrap(storage, "v4-fp8").read(torch.arange(255))
    assert found[:, 0].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert torch.equal(found[:, :448], found[:, :1].expand(255, 448))


def test_every_e4m3_byte_reads_as_its_value() -> None:
    storage = torch.zeros(1, 1, 576, dtype=torch.uint8)
    storage[0, 0, :256] = torch.arange(256)
    found = PagedCache.wrap(storage, "plain-fp8", scale=3.0).read(torch.tensor([0]))[0, :256]
    wanted = torch.tensor([3 * e4m3_value(byte) for byte in range(256)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_index_reader_takes_any_scale() -> None:
    storage = torch.zeros(1, 2, 132, dtype=torch.uint8)
    flat = storage.view(-1)
    flat[:256] = 0x3C
    flat[256:264] = torch.tensor(list(struct.pack("<2f", 0.3, 1.7)), dtype=torch.uint8)
    found = PagedCache.wrap(storage, "index-fp8").read(torch.arange(2))
    assert found[:, 0].tolist() == [f32(1.5 * f32(0.3)), f32(1.5 * f32(1.7))]
