"""Quantise and insert, in plain torch: the definition that kernels are tested against."""

import torch
from torch import Tensor

from tamis.cache.layout import E2M1_MAX, E4M3_MAX, Layout
from tamis.cache.paged import PagedCache


def to_e4m3(x: Tensor) -> Tensor:
    """Saturating round-to-nearest-even conversion to e4m3, as raw bytes. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def to_e2m1(x: Tensor) -> Tensor:
    """Saturating round-to-nearest-even conversion to e2m1, two codes to a byte, the even column in the low four bits.
    NaN, which e2m1 has not, becomes 6."""
    x = x.nan_to_num(E2M1_MAX)
    size = x.abs().clamp_max(E2M1_MAX)
    # Steps of a half below 2, of 1 below 4, of 2 above; torch.round goes to the even number, which has the even code.
    above = torch.where(size < 4, 2 + size.round(), 4 + (size / 2).round())
    code = torch.where(size < 2, (2 * size).round(), above).to(torch.uint8)
    code |= x.signbit().to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def exponent_above(x: Tensor) -> Tensor:
    """ceil(log2(x)) of positive float32 numbers, exactly: taken from exponent and mantissa, not from a logarithm."""
    mantissa, exponent = torch.frexp(x)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def divide(x: Tensor, divisor: float | Tensor) -> Tensor:
    """x / divisor, correctly rounded on every device: CUDA multiplies by the reciprocal of a plain number."""
    return x / (divisor if isinstance(divisor, Tensor) else torch.full((), divisor, dtype=x.dtype, device=x.device))


def tile_scales(values: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Scales of tiles [N, tiles, tile]: the float32 factor of each tile and what the row stores for it."""
    # A NaN stays where it is; it must not also take away the other values' scale.
    amax = values.abs().nan_to_num_(0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
    smallest = divide(amax, layout.largest).clamp_min(layout.scale_floor)
    if layout.scale_mode == "exact":
        return smallest, smallest
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


def write_kv(kv: Tensor, cache: PagedCache, slots: Tensor, rope: Tensor | None = None) -> None:
    """Insert rows, whose last columns may lie apart in `rope`; negative slots are skipped, and of rows with the same
    slot the last is written."""
    if rope is not None:
        kv = torch.cat((kv, rope), dim=1)
    # Left to index_put, a slot given twice could take its values from one row and its scales from the other.
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
