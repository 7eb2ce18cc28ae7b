"""Helpers for the checks of V4's stages: rotations and norms in float64, layouts, bounds."""

import torch
from torch import Tensor

from tamis.cache.layout import Layout, index_fp8, named, plain_fp8
from tamis.lab.verify.check import Trial
from tamis.model.rope import Rope

ROTARY = Rope(64, theta=160000.0, factor=16.0, original_length=65536)
LENGTH = 320
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Relative error of a single rounding, by dtype."""
FP8_BOUND = 4e-2
PIECES = ((0, 125, 0), (125, 126, 0), (126, 131, 3), (128, 131, 0), (131, LENGTH, 0))
"""First token, end, and drafts to be rejected of the steps of a request: a prompt, a decode, drafts, and a chunk."""


def rotated(x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """`x` with its last columns rotated by its positions, in float64; rows of negative positions stay as they are."""
    angles = positions.double().unsqueeze(1) * ROTARY.frequencies().double()
    factor = torch.polar(torch.ones_like(angles), -angles if inverse else angles)
    factor = torch.where((positions >= 0).unsqueeze(1), factor, 1.0)
    while factor.dim() < x.dim():
        factor = factor.unsqueeze(1)
    tail = torch.view_as_complex(x[..., -ROTARY.dim :].double().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., : -ROTARY.dim].double(), torch.view_as_real(tail * factor).flatten(-2)), dim=-1)


def normed(x: Tensor) -> Tensor:
    """`x` over its root mean square, in float64."""
    return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()


def norm_error(found: Tensor, expected: Tensor) -> Trial:
    """The relative error of a whole tensor, by its norm."""
    return Trial(float((found.cpu().double() - expected).norm() / expected.norm()))


def layouts() -> list[Layout]:
    """The layouts that V4's stages write."""
    return [named("v4-fp8"), named("v4-bf16"), named("v4-fp32"), plain_fp8(latent=448), index_fp8()]
