"""The output projection in FP8, in plain torch."""

import torch
from torch import Tensor

from tamis.arithmetic import float32_products
from tamis.cache.codec import divide, exponent_above, to_e4m3
from tamis.cache.fields import E4M3_MAX, OUTPUT_SCALE_FLOOR
from tamis.ops.output.operations import LowerGroups, RotateToFp8
from tamis.ops.rotate.reference import rotate_tail


def rotate_to_fp8(call: RotateToFp8) -> tuple[Tensor, Tensor]:
    """Values e4m3 [T, H, D] and exponents uint8 [T, H, D / tile]; see `tamis.ops.rotate_to_fp8`."""
    rotated = rotate_tail(call.x.float(), call.positions.unsqueeze(1), call.cos_sin, call.inverse)
    tiles = rotated.unflatten(-1, (-1, call.tile))
    amax = tiles.abs().nan_to_num_(0.0, posinf=torch.finfo(torch.float32).max).amax(-1)
    exponent = exponent_above(divide(amax, E4M3_MAX).clamp_min(OUTPUT_SCALE_FLOOR))
    values = to_e4m3(torch.ldexp(tiles, -exponent.unsqueeze(-1))).flatten(-2)
    return values.view(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


def lower_groups(call: LowerGroups) -> Tensor:
    """The product [T, G, O]; see `tamis.ops.lower_groups`."""
    x, weight = call.x, call.weight
    tile = x.shape[2] // call.scales.shape[2]
    x_scales = torch.exp2(call.scales.float() - 127).repeat_interleave(tile, dim=2)
    weight_scales = call.weight_scales.repeat_interleave(tile, dim=1)[:, : weight.shape[1]]
    weight_scales = weight_scales.repeat_interleave(tile, dim=2)
    wide = float32_products(x.device)
    factors = ((x.float() * x_scales).to(wide), (weight.float() * weight_scales).to(wide))
    return torch.einsum("tgk,gok->tgo", *factors).to(call.dtype).contiguous()
