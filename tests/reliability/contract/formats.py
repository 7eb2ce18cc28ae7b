"""The byte formats once more, from their description in docs/formats.md: numbers to bytes and back, in numpy."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contract.calls import memory
from tamis import PagedCache
from tamis.arithmetic import ceil_div


def _e4m3_table() -> np.ndarray:
    """The number behind each of 256 codes: sign, four bits of exponent (bias 7), three of mantissa, no infinities."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size)


E4M3 = _e4m3_table()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers, the even code of two that are as near; beyond 448 saturates."""
    return _nearest(x, E4M3[:127], 127) | (np.signbit(x).astype(np.uint8) << 7)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest numbers, two to a byte, the even column in the low four bits; NaN becomes 6."""
    code = _nearest(np.where(np.isnan(x), 6.0, x), E2M1, 7) | ((np.signbit(x) & ~np.isnan(x)).astype(np.uint8) << 3)
    return code[..., 0::2] | code[..., 1::2] << 4


def _nearest(x: np.ndarray, table: np.ndarray, nan: int) -> np.ndarray:
    size = np.minimum(np.abs(np.asarray(x, np.float64)), table[-1])
    above = np.searchsorted(table, size).clip(0, len(table) - 1)
    below = np.maximum(above - 1, 0)
    far_up, far_down = table[above] - size, size - table[below]
    code = np.where((far_up < far_down) | ((far_up == far_down) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def _up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


@dataclass(frozen=True)
class Place:
    """Where one kind of value of row i lies in a page: at `start + i * stride`."""

    start: int
    stride: int
    size: int


KINDS = ("v32-fp8", "v4-fp8", "v41-fp8", "v41-fp4", "plain-fp8", "index-fp8", "index-mxfp4")
"""The formats that are not rows of plain numbers, by the beginning of their names."""
PAIRED = ("v41-fp4", "index-mxfp4")
"""Those with two values to a byte."""


@dataclass(frozen=True)
class Format:
    """A byte format as the documents describe it, for pages of one size."""

    kind: str
    latent: int
    rope: int
    tile: int
    mode: str
    rounding: str
    element: torch.dtype
    page_size: int

    @classmethod
    def of(cls, cache: PagedCache) -> "Format":
        told = cache.layout
        kind = next(
            (k for k in KINDS if told.name.startswith(k)),
            "rows",
        )
        return cls(
            kind, told.latent, told.rope, told.tile, told.scale_mode, told.rounding, told.element, cache.page_size
        )

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def floor(self) -> float:
        """The smallest scale, so that a tile of zeros divides by something."""
        if self.kind == "v32-fp8":
            return 1e-4 if self.mode == "pow2" else 2.0**-126
        return {"index-mxfp4": 2.0**-126, "v41-fp4": 2.0**-9}.get(self.kind, 1e-4 / 448)

    def places(self) -> tuple[Place, Place | None, Place | None]:
        """Values, scales, tail."""
        latent, rope, page = self.latent, self.rope, self.page_size
        if self.kind == "rows":
            size = self.width * self.element.itemsize
            return Place(0, size, size), None, None
        if self.kind == "plain-fp8":
            return Place(0, self.width, self.width), None, None
        if self.kind == "index-fp8":
            return Place(0, latent, latent), Place(latent * page, 4, 4), None
        if self.kind in PAIRED:
            half, scales = latent // 2, latent // self.tile
            return Place(0, half, half), Place(half * page, scales, scales), None
        tiles = latent // self.tile
        if self.kind == "v32-fp8":
            scales = _up(latent, 4)
            tail = _up(scales + 4 * tiles, 16)
            row = _up(tail + 2 * rope, 16)
            return Place(0, row, latent), Place(scales, row, 4 * tiles), Place(tail, row, 2 * rope)
        record, exponents = _up(latent, 2) + 2 * rope, _up(tiles, 8)
        tail = Place(_up(latent, 2), record, 2 * rope)
        return Place(0, record, latent), Place(record * page, exponents, exponents), tail


@dataclass(frozen=True)
class Encoded:
    """Rows as bytes: values, scales, tail, each [N, size]."""

    form: Format
    parts: tuple[np.ndarray, np.ndarray | None, np.ndarray | None]

    def store(self, cache: PagedCache, slots: Tensor) -> None:
        """Put row n into slots[n] of a cache; of several rows for one slot the last."""
        image = memory(cache.storage)
        assert image is not None
        changed = self.image(image.cpu().numpy().copy(), cache, slots)
        image.copy_(torch.from_numpy(changed).to(image.device))

    def image(self, image: np.ndarray, cache: PagedCache, slots: Tensor) -> np.ndarray:
        """The same on a copy of the cache's memory."""
        for place, part in zip(self.form.places(), self.parts, strict=True):
            if place is None or part is None:
                continue
            for row, slot in enumerate(slots.tolist()):
                if 0 <= slot < cache.rows:
                    start = byte_of(cache, self.form, place, slot)
                    image[start : start + place.size] = part[row]
        return image


def byte_of(cache: PagedCache, form: Format, place: Place, slot: int) -> int:
    """Where a field of a slot begins in the cache's memory."""
    item = cache.storage.element_size()
    page = slot // form.page_size
    base = cache.storage.storage_offset() * item + page * cache.storage.stride(0) * item
    return base + place.start + slot % form.page_size * place.stride


def scales_of(form: Format, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors of tiles [..., tile] float32, and what is stored for them."""
    largest = np.float32(6.0 if form.kind in PAIRED else 448.0)
    size = np.abs(tiles)
    size = np.where(np.isnan(size), np.float32(0), np.minimum(size, np.finfo(np.float32).max))
    smallest = np.maximum((size.max(-1) / largest).astype(np.float32), np.float32(form.floor))
    if form.mode == "exact":
        return smallest, smallest
    if form.mode == "e4m3":
        codes = to_e4m3(smallest)
        return E4M3[codes].astype(np.float32), np.where(np.isnan(tiles).any(-1), 127, codes).astype(np.uint8)
    mantissa, exponent = np.frexp(smallest.astype(np.float64))
    exponent = exponent - (mantissa == 0.5)
    factor = np.exp2(exponent.astype(np.float64)).astype(np.float32)
    if form.mode == "pow2":
        return factor, factor
    stored = (exponent + 127).clip(0, 255)
    if form.kind == "index-mxfp4":
        stored = np.where(np.isnan(tiles).any(-1), 255, stored)
    return factor, stored.astype(np.uint8)


def encode(form: Format, values: Tensor, scale: float | Tensor = 1.0) -> Encoded:
    """Rows [N, width] as bytes."""
    count = len(values)
    if count == 0:
        return Encoded(form, (np.zeros((0, 0), np.uint8), None, None))
    if form.kind == "rows":
        return Encoded(form, (_as_bytes(values.to(form.element)), None, None))
    if form.kind == "plain-fp8":
        factor = np.float32(float(scale))
        with np.errstate(all="ignore"):
            return Encoded(form, (to_e4m3(values.float().cpu().numpy() / factor), None, None))
    latent = values[:, : form.latent].cpu()
    latent = latent.bfloat16().float() if form.rounding == "bf16" else latent.float()
    tile = form.tile
    tiles = latent.numpy().reshape(count, form.latent // tile, tile)
    with np.errstate(all="ignore"):
        factor, stored = scales_of(form, tiles)
        scaled = (tiles / factor[..., None]).astype(np.float32)
    codes = to_e2m1(scaled) if form.kind in PAIRED else to_e4m3(scaled)
    _, scales, tail = form.places()
    assert scales is not None
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(count, -1)
    raw = np.pad(raw, ((0, 0), (0, scales.size - raw.shape[1])))
    rest = None if tail is None else _as_bytes(values[:, form.latent :].bfloat16())
    return Encoded(form, (codes.reshape(count, -1), raw, rest))


def _as_bytes(values: Tensor) -> np.ndarray:
    """Rows [N, ...] of 16- or 32-bit numbers as bytes, whatever strides axes of one element have."""
    numbers = values.detach().cpu().view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(values), values.shape[1] * values.element_size())


def decode(cache: PagedCache, slots: Tensor) -> Tensor:
    """float64 rows [N, width] of slots [N], zeros for slots that the cache does not have."""
    form = Format.of(cache)
    image = memory(cache.storage)
    assert image is not None
    raw = image.cpu().numpy()
    found = np.zeros((len(slots), form.width))
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.rows:
            parts = []
            for place in form.places():
                start = 0 if place is None else byte_of(cache, form, place, slot)
                parts.append(None if place is None else raw[start : start + place.size].copy())
            found[row] = decode_row(form, *parts, float(cache.scale))
    return torch.from_numpy(found)


def decode_row(
    form: Format, values: np.ndarray | None, scales: np.ndarray | None, tail: np.ndarray | None, scale: float = 1.0
) -> np.ndarray:
    """float64 numbers of one row."""
    assert values is not None
    if form.kind == "rows":
        return torch.from_numpy(values).view(form.element).double().numpy()
    if form.kind == "plain-fp8":
        return E4M3[values] * np.float64(np.float32(scale))
    assert scales is not None
    if form.kind in PAIRED:
        codes = np.stack((values & 15, values >> 4), -1).reshape(-1)
        numbers = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
        factor = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
        factor = E4M3[scales] if form.mode == "e4m3" else factor
        return (numbers.reshape(len(scales), -1) * factor[:, None]).reshape(-1)
    numbers = E4M3[values].reshape(form.latent // form.tile, form.tile)
    if form.kind in ("v4-fp8", "v41-fp8"):
        factor = np.exp2(scales[: len(numbers)].astype(np.float64) - 127)
    else:
        factor = scales.view(np.float32).astype(np.float64)
    latent = (numbers * factor[:, None]).reshape(-1)
    if tail is None or not form.rope:
        return latent
    return np.concatenate((latent, torch.from_numpy(tail).view(torch.bfloat16).double().numpy()))
