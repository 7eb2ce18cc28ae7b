"""Where the fields of a row lie in a page, and what their bytes mean: the type `Layout`, and its form as text.

The formats themselves, with every offset, are in `tamis.cache.layout`, and so is the formula that places a field.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, cast

import torch

from tamis import checks
from tamis.arithmetic import round_up

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
"""The byte of e4m3's NaN."""
E2M1_MAX = 6.0
SMALLEST_NORMAL = 1.1754943508222875e-38
"""Smallest normal float32: the floor of an exact scale, so that an all-zero tile is not divided by zero."""

OUTPUT_SCALE_FLOOR = 1e-10 / E4M3_MAX
"""Smallest scale of attention's output in FP8: the largest magnitude of a tile counts as at least 1e-10."""

SMALLEST_E4M3 = 2.0**-9
"""Smallest positive e4m3 number: the floor of a scale in e4m3."""

ScaleMode = Literal["none", "tensor", "pow2", "exact", "exponent", "e4m3"]
"""How values are scaled: not at all; by one factor of the whole cache; per tile by a float32 that is a power of two or
exactly amax/448; per tile by a stored exponent byte (2**(byte - 127)); per tile by a stored e4m3 byte."""

Rounding = Literal["bf16", "none"]


@dataclass(frozen=True)
class Field:
    """The location of one field in a page; see the module's formula. FP8 and exponent bytes are `uint8` here."""

    dtype: torch.dtype
    count: int
    offset: int
    stride: int
    plane: int = 0

    def start(self, page_size: int) -> int:
        """Byte of row 0's first value, counted from the page's first byte."""
        return self.plane * page_size + self.offset

    @property
    def key(self) -> str:
        """The field as text; see `Layout.key`."""
        return f"{checks.dtype_name(self.dtype)},{self.count},{self.offset},{self.stride},{self.plane}"


@dataclass(frozen=True)
class Layout:
    """One byte format. Build it with the functions below or by name with `named`."""

    name: str
    latent: int
    rope: int
    element: torch.dtype
    """dtype of the tensor an engine allocates (uint8 for packed rows)."""
    row_bytes: int
    values: Field
    scales: Field | None = None
    tail: Field | None = None
    tile: int = 0
    """How many consecutive values share one scale (0: no tile scales)."""
    scale_mode: ScaleMode = "none"
    scale_floor: float = SMALLEST_NORMAL
    rounding: Rounding = "none"
    """How a writer rounds its input before it computes the maximum of a tile."""
    page_align: int = 1
    """Pages that this library allocates are padded to a multiple of this many bytes."""
    key: str = field(init=False, repr=False, compare=False)
    """The whole layout as text, for torch ops, whose arguments are tensors, numbers and strings; see `from_key`."""

    def __post_init__(self) -> None:
        """Compute the key once, since every call needs it."""
        fields = "/".join("" if f is None else f.key for f in (self.values, self.scales, self.tail))
        numbers = f"{self.latent}+{self.rope}/{checks.dtype_name(self.element)}/{self.row_bytes}/{fields}"
        scaling = f"{self.tile}/{self.scale_mode}/{self.scale_floor!r}/{self.rounding}/{self.page_align}"
        # The name comes last, since it may contain any character.
        object.__setattr__(self, "key", f"{numbers}/{scaling}/{self.name}")

    @property
    def width(self) -> int:
        """Numbers per row once dequantised."""
        return self.latent + self.rope

    @property
    def quantised(self) -> bool:
        """Whether values are stored in fewer than 16 bits: in e4m3, or `packed`."""
        return self.scale_mode != "none"

    @property
    def packed(self) -> bool:
        """Whether values are e2m1, two to a byte: value 2i in the low four bits of byte i, 2i + 1 in the high ones.

        A scale that is NaN (the exponent byte 255, or e4m3's NaN) then makes its whole tile NaN, since e2m1 itself has
        none.
        """
        return self.quantised and 2 * self.values.count == self.latent

    @property
    def largest(self) -> float:
        """The largest magnitude of a quantised value before its scale."""
        return E2M1_MAX if self.packed else E4M3_MAX

    @property
    def row_elements(self) -> int:
        """Size of the last axis of the storage tensor."""
        return self.row_bytes // self.element.itemsize

    @property
    def alignment(self) -> int:
        """Bytes that the storage's start and its page stride must be a multiple of."""
        fields = (self.values, self.scales, self.tail)
        return max(f.dtype.itemsize for f in fields if f is not None)

    def page_bytes(self, page_size: int) -> int:
        """Bytes from one page to the next in a cache that this library allocates."""
        return round_up(self.row_bytes * page_size, self.page_align)


@lru_cache(maxsize=256)
def from_key(key: str) -> Layout:
    """The layout whose `Layout.key` this is."""
    widths, element, row_bytes, values, scales, tail, tile, mode, floor, rounding, align, name = key.split("/", 11)
    latent, rope = widths.split("+")
    first = _field_from_key(values)
    assert first is not None
    return Layout(
        name,
        int(latent),
        int(rope),
        getattr(torch, element),
        int(row_bytes),
        values=first,
        scales=_field_from_key(scales),
        tail=_field_from_key(tail),
        tile=int(tile),
        scale_mode=cast(ScaleMode, mode),
        scale_floor=float(floor),
        rounding=cast(Rounding, rounding),
        page_align=int(align),
    )


def _field_from_key(key: str) -> Field | None:
    if not key:
        return None
    dtype, *numbers = key.split(",")
    return Field(getattr(torch, dtype), *(int(n) for n in numbers))
