"""Encodes and decodes cache rows in plain torch.

This is the definition of every byte format, which kernels are tested against. `PagedCache.read` and the reference
backend use it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.fields import E2M1_MAX, E4M3_MAX, E4M3_NAN, Field
from tamis.cache.layout import Layout

if TYPE_CHECKING:
    from tamis.cache.paged import PagedCache


def to_e4m3(x: Tensor) -> Tensor:
    """Saturating round-to-nearest-even conversion to e4m3, as raw bytes. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def to_e2m1(x: Tensor) -> Tensor:
    """Saturating round-to-nearest-even conversion to e2m1, two codes to a byte, the even column in the low four bits.
    NaN becomes 6, since e2m1 has no NaN."""
    x = x.nan_to_num(E2M1_MAX)
    size = x.abs().clamp_max(E2M1_MAX)
    # Codes are 0.5 apart below 2, 1 apart below 4 and 2 apart above. torch.round breaks ties towards the even number,
    # which has the even code.
    above = torch.where(size < 4, 2 + size.round(), 4 + (size / 2).round())
    code = torch.where(size < 2, (2 * size).round(), above).to(torch.uint8)
    code |= x.signbit().to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def decode_e2m1(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 values [..., D] of packed rows [..., D / 2] under exponent bytes [..., tiles]; see `Layout.packed`."""
    return scaled_e2m1(codes, torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, torch.nan))


def scaled_e2m1(codes: Tensor, factors: Tensor) -> Tensor:
    """float32 values [..., D] of packed rows [..., D / 2] times the factors [..., tiles] of their tiles."""
    code = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device=codes.device)
    values = torch.cat((size, -size))[code.long()].unflatten(-1, (factors.shape[-1], -1))
    rows: Tensor = (values * factors.unsqueeze(-1)).flatten(-2)
    return rows


def exponent_above(x: Tensor) -> Tensor:
    """ceil(log2(x)) of positive float32 numbers, exactly: taken from exponent and mantissa, not from a logarithm."""
    mantissa, exponent = torch.frexp(x)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def divide(x: Tensor, divisor: float | Tensor) -> Tensor:
    """x / divisor, correctly rounded on every device. (By a Python number, CUDA multiplies with the reciprocal.)"""
    return x / (divisor if isinstance(divisor, Tensor) else torch.full((), divisor, dtype=x.dtype, device=x.device))


def tile_scales(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Scales of tiles [N, tiles, tile]: the float32 factor of each tile, and the same in the form that rows store."""
    # NaN is left out of the maximum, so that the other values of its tile keep their scale.
    amax = values.abs().nan_to_num_(0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
    smallest = divide(amax, layout.largest).clamp_min(layout.scale_floor)
    if layout.scale_mode == "exact":
        return smallest, smallest
    if layout.scale_mode == "e4m3":
        bytes_ = to_e4m3(smallest)
        return bytes_.view(torch.float8_e4m3fn).float(), bytes_.masked_fill(values.isnan().any(-1), E4M3_NAN)
    exponent = exponent_above(smallest)
    scale = torch.ldexp(torch.ones_like(smallest), exponent)
    if layout.scale_mode == "pow2":
        return scale, scale
    stored = (exponent + 127).clamp(0, 255)
    if layout.packed:
        stored = stored.masked_fill(values.isnan().any(-1), 255)
    return scale, stored.to(torch.uint8)


def encode_rows(kv: Tensor, layout: Layout, scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The values, scales and tail fields of rows [N, width], in the field dtypes of the layout."""
    if layout.scale_mode == "none":
        return kv.to(layout.element), None, None
    if layout.scale_mode == "tensor":
        return to_e4m3(divide(kv.float(), scale)), None, None
    latent = kv[:, : layout.latent]
    if layout.rounding == "bf16":
        latent = latent.to(torch.bfloat16)
    tiles = latent.float().unflatten(1, (-1, layout.tile))
    factors, stored = tile_scales(tiles, layout)
    scaled = tiles / factors.unsqueeze(-1)
    values = (to_e2m1(scaled) if layout.packed else to_e4m3(scaled)).flatten(1)
    assert layout.scales is not None
    if stored.shape[1] < layout.scales.count:
        stored = torch.nn.functional.pad(stored, (0, layout.scales.count - stored.shape[1]))
    tail = kv[:, layout.latent :].to(layout.tail.dtype) if layout.tail is not None else None
    return values, stored, tail


def write_rows(kv: Tensor, cache: "PagedCache", slots: Tensor) -> None:
    """Insert rows [N, width] at slots [N', N' <= N]; slots outside the cache are skipped, and of rows with the same
    slot the last is written."""
    # index_put could take the values of one row and the scales of another where a slot is given twice.
    ordered, row_of = torch.sort(slots, stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    wanted = row_of[last & (ordered >= 0) & (ordered < cache.rows)]
    slots = slots[wanted].long()
    encoded = encode_rows(kv[wanted], cache.layout, cache.scale)
    page, row = slots // cache.page_size, slots % cache.page_size
    for field, data in zip((cache.layout.values, cache.layout.scales, cache.layout.tail), encoded, strict=True):
        if field is not None and data is not None:
            cache.field(field)[page, row] = data


def fetch_field(cache: "PagedCache", field: Field, slots: Tensor) -> Tensor:
    """Raw values [N, count] of one field; slots [N] must be inside the cache."""
    view = cache.field(field)
    span, rest = divmod(cache.page_stride, field.stride)
    if rest:
        return view[slots // cache.page_size, slots % cache.page_size]
    # If pages are a whole number of rows apart, they form one strided list of rows, and one index is faster than two.
    if span != cache.page_size:
        slots = slots // cache.page_size * span + slots % cache.page_size
    shape = ((cache.pages - 1) * span + cache.page_size, field.count)
    return torch.as_strided(view, shape, (view.stride(1), 1)).index_select(0, slots)


def decode_rows(cache: "PagedCache", slots: Tensor) -> Tensor:
    """Dequantised float32 rows [N, width]; slots [N] int64 must be inside the cache."""
    layout = cache.layout
    raw = fetch_field(cache, layout.values, slots)
    if layout.scale_mode == "none":
        return raw.float()
    if layout.packed:
        assert layout.scales is not None
        scales = fetch_field(cache, layout.scales, slots)
        if layout.scale_mode == "e4m3":
            return scaled_e2m1(raw, scales.view(torch.float8_e4m3fn).float())
        return decode_e2m1(raw, scales)
    values = raw.view(torch.float8_e4m3fn)
    if layout.scale_mode == "tensor":
        return values.float().mul_(cache.scale)
    assert layout.scales is not None
    scales = fetch_field(cache, layout.scales, slots)
    if layout.scale_mode == "exponent":
        scales = torch.exp2(scales[:, : layout.latent // layout.tile].float() - 127)
    out = torch.empty(slots.shape[0], layout.width, dtype=torch.float32, device=cache.device)
    latent = out[:, : layout.latent].unflatten(1, (-1, layout.tile))
    latent.copy_(values.view(latent.shape)).mul_(scales.unsqueeze(-1))
    if layout.tail is not None:
        out[:, layout.latent :] = fetch_field(cache, layout.tail, slots)
    return out


def read_rows(cache: "PagedCache", slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantised rows [..., width] of slots [...], with zeros where a slot is negative or past the end."""
    flat = slots.reshape(-1).long()
    invalid = (flat < 0) | (flat >= cache.rows)
    rows = decode_rows(cache, flat.masked_fill(invalid, 0))
    rows.masked_fill_(invalid.unsqueeze(-1), 0.0)
    return rows.to(dtype).view(*slots.shape, cache.layout.width)


def check_read(cache: "PagedCache", slots: Tensor, dtype: torch.dtype) -> None:
    """Refuse slots and dtypes with which rows cannot be read."""
    if not isinstance(slots, Tensor) or slots.dtype not in checks.INTS or slots.layout is not torch.strided:
        raise checks.refuse_type("slots", "an int32 or int64 tensor", checks.describe(slots), "convert it with .int()")
    if slots.device != cache.device:
        raise checks.refuse("slots", f"on {cache.device}", f"a tensor on {slots.device}", "move it to the cache")
    checks.option("dtype", dtype, checks.FLOATS)
