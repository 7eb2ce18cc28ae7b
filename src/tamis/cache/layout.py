"""Byte formats of paged caches. Every offset, stride and padding rule of the library is in this file.

A page holds `page_size` rows. A row is made of up to three *fields*: the values, the tile scales, and a 16-bit tail
for the rope part that the FP8 formats do not quantise. Counted from the page's first byte, a field of row `i` begins at

    field.plane * page_size + field.offset + i * field.stride

so one description covers formats whose rows are contiguous (`plane` 0) and formats that keep values and scales in
separate planes of the page.

=============  ==========================================================================  =========
name           a row                                                                       bytes
=============  ==========================================================================  =========
v32-bf16       512 latent + 64 rope (also v32-fp16, v32-fp32)                              1152
v32-fp8        512 e4m3, 4 float32 scales (128 values each), 64 bf16                       656
v4-bf16        448 latent + 64 rope (also v4-fp16, v4-fp32)                                1024
v4-fp8         planar: rows of 448 e4m3 + 64 bf16, then per row 7 exponent bytes + 1 pad   584
plain-fp8      576 e4m3, one scale for the whole cache (also 512 wide)                     576
v41-fp8        planar: rows of 512 e4m3, then per row 16 exponent bytes (32 values each)   528
v41-fp4        planar: rows of 256 bytes of e2m1 pairs, then per row 32 e4m3 scales        288
index-fp8      planar: rows of 128 e4m3, then one float32 scale per row                    132
index-mxfp4    planar: rows of 64 bytes of e2m1 pairs, then 4 exponent bytes per row       68
state-fp32     a compressor's carried state: values, then scores (`compressor_state`)      8 per value
=============  ==========================================================================  =========
"""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, Literal

import torch

from tamis import checks
from tamis.arithmetic import round_up
from tamis.cache.fields import E4M3_MAX, SMALLEST_E4M3, SMALLEST_NORMAL, Field, Layout, Rounding

__all__ = [
    "NAMES",
    "Field",
    "Layout",
    "compressor_state",
    "for_engine",
    "index_fp8",
    "index_mxfp4",
    "named",
    "plain_fp8",
    "rows",
    "v4_fp8",
    "v32_fp8",
    "v41_fp4",
    "v41_fp8",
]


def _widths(latent: int, rope: int, tile: int = 1) -> None:
    checks.integer("latent", latent, low=1)
    checks.integer("rope", rope, low=0)
    if latent % tile:
        raise checks.refuse("latent", f"a multiple of {tile} (one scale per tile)", latent, "choose such a width")


def _whole_width(latent: int, rope: int, tile: int) -> int:
    """The width of rows whose rope part is quantised like the rest."""
    _widths(latent, rope)
    if (latent + rope) % tile:
        expected = f"a multiple of {tile} together (one scale per tile)"
        raise checks.refuse("latent and rope", expected, f"{latent} + {rope}", "choose such widths")
    return latent + rope


def rows(dtype: torch.dtype = torch.bfloat16, *, latent: int = 512, rope: int = 64, name: str | None = None) -> Layout:
    """Unquantised rows: latent then rope, in bf16, fp16 or fp32."""
    _widths(latent, rope)
    if not isinstance(dtype, torch.dtype) or dtype not in checks.FLOATS:
        received = dtype if isinstance(dtype, torch.dtype) else checks.describe(dtype)
        raise checks.refuse_type("dtype", "bfloat16, float16 or float32", received, "use an FP8 layout for FP8")
    if name is not None:
        checks.instance("name", name, str)
    size = (latent + rope) * dtype.itemsize
    name = name or f"rows-{checks.dtype_name(dtype)}[{latent}+{rope}]"
    return Layout(name, latent, rope, dtype, size, values=Field(dtype, latent + rope, 0, size))


def v32_fp8(
    *, latent: int = 512, rope: int = 64, scale_mode: Literal["pow2", "exact"] = "pow2", tile: int = 128
) -> Layout:
    """Contiguous rows: e4m3 values, float32 tile scales, bf16 rope. 656 bytes at 512+64.

    At other widths the scales and the row end are padded to 16 bytes, which changes nothing at 512+64.
    """
    checks.integer("tile", tile, low=1)
    _widths(latent, rope, tile)
    checks.option("scale_mode", scale_mode, ("pow2", "exact"))
    scales = latent // tile
    scale_at = round_up(latent, 4)
    tail_at = round_up(scale_at + 4 * scales, 16)
    size = round_up(tail_at + 2 * rope, 16)
    return Layout(
        "v32-fp8" if (latent, rope, tile) == (512, 64, 128) else f"v32-fp8[{latent}+{rope}]",
        latent,
        rope,
        torch.uint8,
        size,
        values=Field(torch.uint8, latent, 0, size),
        scales=Field(torch.float32, scales, scale_at, size),
        tail=Field(torch.bfloat16, rope, tail_at, size) if rope else None,
        tile=tile,
        scale_mode=scale_mode,
        scale_floor=1e-4 if scale_mode == "pow2" else SMALLEST_NORMAL,
    )


def v4_fp8(
    *, latent: int = 448, rope: int = 64, rounding: Rounding = "bf16", tile: int = 64, page_align: int | None = None
) -> Layout:
    """Planar pages: all rows' values and rope first, then all rows' exponent bytes. 584 bytes at 448+64.

    Exponent bytes take a multiple of 8 per row. Pages are padded to a multiple of the value row (576), as FlashMLA
    asks; pass `page_align` for an engine that pads otherwise.
    """
    checks.integer("tile", tile, low=1)
    _widths(latent, rope, tile)
    checks.option("rounding", rounding, ("bf16", "none"))
    record = round_up(latent, 2) + 2 * rope
    tiles = latent // tile
    exponents = round_up(tiles, 8)
    return Layout(
        "v4-fp8" if (latent, rope, tile) == (448, 64, 64) else f"v4-fp8[{latent}+{rope}]",
        latent,
        rope,
        torch.uint8,
        record + exponents,
        values=Field(torch.uint8, latent, 0, record),
        scales=Field(torch.uint8, exponents, 0, exponents, plane=record),
        tail=Field(torch.bfloat16, rope, round_up(latent, 2), record) if rope else None,
        tile=tile,
        scale_mode="exponent",
        scale_floor=1e-4 / E4M3_MAX,
        rounding=rounding,
        page_align=checks.integer("page_align", page_align, low=1) if page_align is not None else record,
    )


def v41_fp8(*, latent: int = 448, rope: int = 64, rounding: Rounding = "none", page_align: int = 512) -> Layout:
    """DeepSeek-V4.1's rows of 528 bytes: e4m3 values, then an exponent byte per 32 of them, in planes as in `v4_fp8`.

    The rope part is quantised like the rest, so that the whole row counts as latent. Engines have these rows on
    compute capability 10.x, in pages of a multiple of 512 bytes.
    """
    width = _whole_width(latent, rope, 32)
    built = v4_fp8(latent=width, rope=0, rounding=rounding, tile=32, page_align=page_align)
    return replace(built, name="v41-fp8" if (latent, rope) == (448, 64) else f"v41-fp8[{latent}+{rope}]")


def v41_fp4(*, latent: int = 448, rope: int = 64, rounding: Rounding = "none", page_align: int = 256) -> Layout:
    """DeepSeek-V4.1's entries of 288 bytes: e2m1 pairs, then an e4m3 scale per 16 values, in planes.

    A scale is amax / 6, rounded to e4m3 and at least its smallest number. The rope part is quantised like the rest.
    Engines have these rows on compute capability 10.x, in pages of a multiple of 256 bytes (SGLang) or 512 (vLLM).
    """
    tile = 16
    width = _whole_width(latent, rope, tile)
    checks.option("rounding", rounding, ("bf16", "none"))
    size, scales = width // 2, width // tile
    return Layout(
        "v41-fp4" if (latent, rope) == (448, 64) else f"v41-fp4[{latent}+{rope}]",
        width,
        0,
        torch.uint8,
        size + scales,
        values=Field(torch.uint8, size, 0, size),
        scales=Field(torch.uint8, scales, 0, scales, plane=size),
        tile=tile,
        scale_mode="e4m3",
        scale_floor=SMALLEST_E4M3,
        rounding=rounding,
        page_align=checks.integer("page_align", page_align, low=1),
    )


def plain_fp8(*, latent: int = 512, rope: int = 64) -> Layout:
    """e4m3 rows under one scale for the whole cache, which `PagedCache.scale` carries."""
    _widths(latent, rope)
    width = latent + rope
    return Layout(
        "plain-fp8" if (latent, rope) == (512, 64) else f"plain-fp8[{latent}+{rope}]",
        latent,
        rope,
        torch.float8_e4m3fn,
        width,
        values=Field(torch.uint8, width, 0, width),
        scale_mode="tensor",
    )


def index_fp8(*, dim: int = 128, rounding: Rounding = "bf16") -> Layout:
    """Index keys in planar pages: all rows' e4m3 values first, then one float32 power-of-two scale per row."""
    checks.integer("dim", dim, low=1)
    if dim % 4:
        raise checks.refuse("dim", "a multiple of 4 (float32 scales follow the values)", dim, "choose such a width")
    checks.option("rounding", rounding, ("bf16", "none"))
    return Layout(
        "index-fp8" if dim == 128 else f"index-fp8[{dim}]",
        dim,
        0,
        torch.uint8,
        dim + 4,
        values=Field(torch.uint8, dim, 0, dim),
        scales=Field(torch.float32, 1, 0, 4, plane=dim),
        tile=dim,
        scale_mode="pow2",
        scale_floor=1e-4 / E4M3_MAX,
        rounding=rounding,
    )


def index_mxfp4(*, dim: int = 128, rounding: Rounding = "bf16", page_align: int = 1) -> Layout:
    """Index keys in planar pages: all rows' e2m1 values, two to a byte, then one exponent byte per 32 values.

    Pass `page_align` for an engine that lays index pages over those of another format (576 for `v4-fp8`).
    """
    tile = 32
    checks.integer("dim", dim, low=1)
    if dim % tile:
        raise checks.refuse("dim", f"a multiple of {tile} (one scale per tile)", dim, "choose such a width")
    checks.option("rounding", rounding, ("bf16", "none"))
    size, exponents = dim // 2, dim // tile
    return Layout(
        "index-mxfp4" if dim == 128 else f"index-mxfp4[{dim}]",
        dim,
        0,
        torch.uint8,
        size + exponents,
        values=Field(torch.uint8, size, 0, size),
        scales=Field(torch.uint8, exponents, 0, exponents, plane=size),
        tile=tile,
        scale_mode="exponent",
        rounding=rounding,
        page_align=checks.integer("page_align", page_align, low=1),
    )


def compressor_state(*, dim: int = 512, overlapping: bool = True, page_align: int = 1) -> Layout:
    """The state that a KV compressor carries from token to token: float32 rows, first values, then pooling scores.

    Both are `dim` numbers wide, or twice that where spans overlap: a token then contributes to two entries of `dim`
    numbers. Pass `page_align` for an engine that lays state pages over those of another format (576 for `v4-fp8`).
    """
    checks.integer("dim", dim, low=1, high=checks.INT32_MAX // 16)
    size = 2 * dim * (2 if checks.flag("overlapping", overlapping) else 1)
    built = rows(torch.float32, latent=size, rope=0, name=f"state-fp32[{dim}{' x 2' if overlapping else ''}]")
    return replace(built, page_align=checks.integer("page_align", page_align, low=1))


def _plain(dtype: torch.dtype, standard: int, name: str) -> Callable[..., Layout]:
    def build(*, latent: int = standard, rope: int = 64) -> Layout:
        label = name if (latent, rope) == (standard, 64) else f"{name}[{latent}+{rope}]"
        return rows(dtype, latent=latent, rope=rope, name=label)

    return build


_BUILDERS: dict[str, Callable[..., Layout]] = {
    "v32-bf16": _plain(torch.bfloat16, 512, "v32-bf16"),
    "v32-fp16": _plain(torch.float16, 512, "v32-fp16"),
    "v32-fp32": _plain(torch.float32, 512, "v32-fp32"),
    "v32-fp8": v32_fp8,
    "v4-bf16": _plain(torch.bfloat16, 448, "v4-bf16"),
    "v4-fp16": _plain(torch.float16, 448, "v4-fp16"),
    "v4-fp32": _plain(torch.float32, 448, "v4-fp32"),
    "v4-fp8": v4_fp8,
    "v41-fp8": v41_fp8,
    "v41-fp4": v41_fp4,
    "plain-fp8": plain_fp8,
    "index-fp8": index_fp8,
    "index-mxfp4": index_mxfp4,
}

NAMES = tuple(_BUILDERS)


def named(layout: str | Layout, **options: Any) -> Layout:
    """The layout of that name; `options` are those of the function behind it, e.g. `latent=128, rope=32`."""
    if isinstance(layout, Layout):
        if options:
            given = ", ".join(options)
            raise checks.refuse_type(
                "options", "absent if the layout is a Layout object", given, "build the layout with them"
            )
        return layout
    if not isinstance(layout, str) or layout not in _BUILDERS:
        received = repr(layout) if isinstance(layout, str) else checks.describe(layout)
        raise checks.refuse("layout", f"one of {', '.join(NAMES)}", received, "or pass a Layout object")
    known = tuple(signature(_BUILDERS[layout]).parameters)
    if unknown := ", ".join(o for o in options if o not in known):
        raise checks.refuse_type("options", f"among {', '.join(known)} for {layout!r}", unknown, "drop the others")
    return _BUILDERS[layout](**options)


def for_engine(cache_dtype: str, *, latent: int = 512, rope: int = 64, dtype: torch.dtype = torch.bfloat16) -> Layout:
    """The layout that a serving engine's `--kv-cache-dtype` names for a model of these widths.

    `fp8_ds_mla` is the packed format of the model family: 584-byte rows for 448+64 and 656-byte rows otherwise.
    """
    named_dtypes = ("auto", "bfloat16", "float16", "float32")
    checks.option("cache_dtype", cache_dtype, (*named_dtypes, "fp8_ds_mla", "fp8", "fp8_e4m3"))
    checks.option("dtype", dtype, checks.FLOATS)
    if cache_dtype == "fp8_ds_mla":
        return v4_fp8(latent=latent, rope=rope) if latent == 448 else v32_fp8(latent=latent, rope=rope)
    if cache_dtype in ("fp8", "fp8_e4m3"):
        return plain_fp8(latent=latent, rope=rope)
    plain = dict(zip(named_dtypes, (dtype, torch.bfloat16, torch.float16, torch.float32), strict=True))
    return rows(plain[cache_dtype], latent=latent, rope=rope)
