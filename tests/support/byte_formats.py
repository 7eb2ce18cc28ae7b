"""A second implementation of the byte formats in plain Python, which shares no code with the library."""

import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis import PagedCache
from tamis.cache.layout import Layout, named

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLT_MIN = 2.0**-126
PAGE_SIZES = (1, 2, 61, 64, 69, 256)


def _e4m3_magnitude(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


MAGNITUDES = [_e4m3_magnitude(byte) for byte in range(127)]
"""0x00 ... 0x7e; 0x7f is NaN."""


def e4m3(x: float) -> int:
    """Round to the nearest code, ties to the even mantissa, saturating at 448."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    if math.isnan(x):
        return sign | 0x7F
    size = min(abs(x), 448.0)
    low = bisect_right(MAGNITUDES, size) - 1
    if low < 126:
        below, above = size - MAGNITUDES[low], MAGNITUDES[low + 1] - size
        low += above < below or (above == below and low % 2 == 1)
    return sign | low


def e4m3_value(byte: int) -> float:
    if byte & 0x7F == 0x7F:
        return math.nan
    return math.copysign(MAGNITUDES[byte & 0x7F], -1.0 if byte & 0x80 else 1.0)


def f32(x: float) -> float:
    """Round to float32. (A float64 quotient or product of two float32 numbers rounds to the right float32.)"""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def bf16_bits(x: float) -> int:
    bits = int(struct.unpack("<I", struct.pack("<f", x))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bf16_bits(x) << 16))[0])


def pack_bf16(row: Iterable[float]) -> bytes:
    return b"".join(struct.pack("<H", bf16_bits(x)) for x in row)


def exponent_above(ratio: Fraction) -> int:
    """The smallest e with 2**e >= ratio, exactly."""
    e = 0
    while Fraction(2) ** e < ratio:
        e += 1
    while Fraction(2) ** (e - 1) >= ratio:
        e -= 1
    return e


def amax_of(tile: list[float]) -> Fraction:
    return max(Fraction(abs(x)) for x in tile)


def quantised(tile: list[float], scale: float) -> bytes:
    return bytes(e4m3(f32(x / scale)) for x in tile)


def tiles_of(row: list[float], tile: int) -> list[list[float]]:
    return [row[i : i + tile] for i in range(0, len(row), tile)]


Patches = list[tuple[int, bytes]]
"""(byte from the page's start, bytes) of one row."""


def v32_pow2(row: list[float], index: int, page_size: int) -> Patches:
    scales = [2.0 ** exponent_above(max(amax_of(t) / 448, Fraction(1, 10**4))) for t in tiles_of(row[:512], 128)]
    return _v32(row, index, scales)


def v32_exact(row: list[float], index: int, page_size: int) -> Patches:
    scales = [max(f32(float(amax_of(t)) / 448), FLT_MIN) for t in tiles_of(row[:512], 128)]
    return _v32(row, index, scales)


def _v32(row: list[float], index: int, scales: list[float]) -> Patches:
    values = b"".join(quantised(t, s) for t, s in zip(tiles_of(row[:512], 128), scales, strict=True))
    packed = values + struct.pack("<4f", *scales) + pack_bf16(row[512:])
    assert len(packed) == 656
    return [(656 * index, packed)]


def v4_fp8(row: list[float], index: int, page_size: int) -> Patches:
    tiles = tiles_of([bf16(x) for x in row[:448]], 64)
    exponents = [exponent_above(max(amax_of(t), Fraction(1, 10**4)) / 448) for t in tiles]
    values = b"".join(quantised(t, 2.0**e) for t, e in zip(tiles, exponents, strict=True))
    record = values + pack_bf16(row[448:])
    assert len(record) == 576
    return [(576 * index, record), (576 * page_size + 8 * index, bytes([e + 127 for e in exponents] + [0]))]


def index_fp8(row: list[float], index: int, page_size: int) -> Patches:
    row = [bf16(x) for x in row]
    scale = 2.0 ** exponent_above(max(amax_of(row), Fraction(1, 10**4)) / 448)
    return [(128 * index, quantised(row, scale)), (128 * page_size + 4 * index, struct.pack("<f", scale))]


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1(x: float) -> int:
    """Round to the nearest code, ties to even, saturating at 6."""
    size = min(abs(x), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1[c] - size), c % 2))
    return code | (8 if math.copysign(1.0, x) < 0 else 0)


def index_mxfp4(row: list[float], index: int, page_size: int) -> Patches:
    tiles = tiles_of([bf16(x) for x in row], 32)
    exponents = [exponent_above(max(amax_of(t) / 6, Fraction(1, 2**126))) for t in tiles]
    codes = [e2m1(x / 2.0**e) for t, e in zip(tiles, exponents, strict=True) for x in t]
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    return [(64 * index, packed), (64 * page_size + 4 * index, bytes(e + 127 for e in exponents))]


def plain_fp8(scale: float) -> Callable[[list[float], int, int], Patches]:
    return lambda row, index, page_size: [(576 * index, quantised(row, f32(scale)))]


def rows_bf16(row: list[float], index: int, page_size: int) -> Patches:
    return [(2 * len(row) * index, pack_bf16(row))]


def rows_fp16(row: list[float], index: int, page_size: int) -> Patches:
    return [(2 * len(row) * index, struct.pack(f"<{len(row)}e", *row))]


def rows_fp32(row: list[float], index: int, page_size: int) -> Patches:
    return [(4 * len(row) * index, struct.pack(f"<{len(row)}f", *row))]


@dataclass(frozen=True)
class Format:
    layout: Layout
    encode: Callable[[list[float], int, int], Patches]
    scale: float = 1.0


FORMATS = {
    "v32-fp8-pow2": Format(named("v32-fp8"), v32_pow2),
    "v32-fp8-exact": Format(named("v32-fp8", scale_mode="exact"), v32_exact),
    "v4-fp8": Format(named("v4-fp8"), v4_fp8),
    "v4-fp8-512": Format(named("v4-fp8", page_align=512), v4_fp8),
    "index-fp8": Format(named("index-fp8"), index_fp8),
    "index-mxfp4": Format(named("index-mxfp4"), index_mxfp4),
    "plain-fp8": Format(named("plain-fp8"), plain_fp8(1.0)),
    "plain-fp8-scaled": Format(named("plain-fp8"), plain_fp8(0.037), 0.037),
    "v32-bf16": Format(named("v32-bf16"), rows_bf16),
    "v32-fp16": Format(named("v32-fp16"), rows_fp16),
    "v32-fp32": Format(named("v32-fp32"), rows_fp32),
    "v4-bf16": Format(named("v4-bf16"), rows_bf16),
    "v4-fp32": Format(named("v4-fp32"), rows_fp32),
}
all_formats = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


# --- Inputs -----------------------------------------------------------------------------------------------------------


def engine_cache(
    layout: Layout, pages: int, page_size: int, *, gap: int = 0, lead: int = 0, scale: float = 1.0, seed: int = 0
) -> tuple[Tensor, PagedCache]:
    """A cache inside a buffer of random bytes, uint8 [pages, bytes]: `lead` bytes before each page, `gap` after it."""
    used = layout.row_bytes * page_size
    stride = lead + layout.page_bytes(page_size) + gap
    generator = seeded(seed)
    buffer = torch.randint(0, 256, (pages, stride), dtype=torch.uint8, generator=generator)
    storage = buffer[:, lead : lead + used].unflatten(1, (page_size, layout.row_bytes)).view(layout.element)
    return buffer, PagedCache.wrap(storage, layout, scale=scale)


def hostile_rows(width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Five rows whose tiles (of 64 values) cover ordinary sizes, zeros, tiny and large values, ties and boundaries."""
    generator = seeded(seed)
    rows = torch.randn(5, width, generator=generator)
    rows[1] *= torch.logspace(-7, 4, width)
    rows[2, :64] = 0.0
    rows[2, 64:128] = torch.tensor([-0.0, 1e-9] * 32)
    rows[2, 128:] *= 1e-6
    ties = torch.tensor([448.0, 17.0, 19.0, -17.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -0.0, 432.0, 416.0])
    rows[3] = ties.repeat(width // len(ties) + 1)[:width]
    rows[4] = torch.randint(-9, 10, (width,), generator=generator) * 56.0
    rows[4, 0] = 448.0 + 2.0**-15 if dtype == FP32 else 450.0
    return rows.to(dtype)


def expected_bytes(
    form: Format, before: Tensor, cache: PagedCache, kv: Tensor, slots: Iterable[int], lead: int
) -> Tensor:
    after = before.clone().numpy()
    for row, slot in zip(kv.float().tolist(), slots, strict=False):
        if slot < 0:
            continue
        page, index = divmod(slot, cache.page_size)
        for at, data in form.encode(row, index, cache.page_size):
            after[page, lead + at : lead + at + len(data)] = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(after)
