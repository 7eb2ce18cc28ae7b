"""Rotary embedding: frequencies (plain and YaRN), tables, both pair layouts, and the softmax scale behind them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tamis import checks


@dataclass(frozen=True)
class Rope:
    """The rotary settings of one layer. `factor` 1 means no YaRN."""

    dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dim: int) -> Self:
        """From a Hugging Face config dict: `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)
        kind = found.get("rope_type", found.get("type", "default"))
        if kind == "default":
            return cls(dim, theta)
        if kind not in ("yarn", "deepseek_yarn"):
            raise checks.refuse("rope_type", "'default' or 'yarn'", repr(kind), "this rope is not implemented")
        return cls(
            dim,
            theta,
            factor=float(found.get("factor", 1.0)),
            original_length=int(found.get("original_max_position_embeddings", 4096)),
            beta_fast=float(found.get("beta_fast", 32)),
            beta_slow=float(found.get("beta_slow", 1)),
            mscale=float(found.get("mscale", 0.0)),
            mscale_all_dim=float(found.get("mscale_all_dim", 0.0)),
        )

    @classmethod
    def from_hf_v4(cls, config: Mapping[str, Any], dim: int, *, compressed: bool) -> Self:
        """From a V4 config dict: the compressed layers' settings, or those of layers with a window only, which have
        another theta and no YaRN. V4 never scales cosines and sines."""
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not compressed:
            nested = found.get("main") or {}
            return cls(dim, float(nested.get("rope_theta") or config.get("rope_theta") or 10000.0))
        # Flat settings may name the other layers' theta; nested ones name each their own.
        own = (found.get("compress") or {}).get("rope_theta") or config.get("compress_rope_theta") or 160000.0
        scaling = {**(found.get("compress") or found), "rope_theta": own, "mscale": 0.0, "mscale_all_dim": 0.0}
        return cls.from_hf({"rope_parameters": scaling}, dim)

    def frequencies(self) -> Tensor:
        """float32 [dim / 2]: the angle per position of each pair, with YaRN's ramp where configured."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu")
        plain = self.theta ** (-steps / self.dim)
        if self.factor <= 1.0:
            return plain.float()

        def correction(rotations: float) -> float:
            turns = self.original_length / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low = max(math.floor(correction(self.beta_fast)), 0)
        high = min(math.ceil(correction(self.beta_slow)), self.dim - 1)
        ramp = ((steps / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
        return (plain / self.factor * ramp + plain * (1 - ramp)).float()

    def softmax_scale(self, query_dim: int) -> float:
        """query_dim ** -0.5, times YaRN's squared magnitude where `mscale_all_dim` is set."""
        return float(query_dim**-0.5 * _magnitude(self.factor, self.mscale_all_dim) ** 2)

    def cos_sin_table(self, positions: int, device: torch.device | str = "cpu") -> Tensor:
        """float32 [positions, dim]: cosines of all pairs, then their sines."""
        checks.integer("positions", positions, low=1)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32, device="cpu"), self.frequencies())
        ratio = _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return (torch.cat((angles.cos(), angles.sin()), dim=1) * ratio).to(device)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(x: Tensor, cos_sin: Tensor, *, interleaved: bool, inverse: bool = False) -> Tensor:
    """Rotate the last axis of x by rows of a table from `Rope.cos_sin_table`, in float32; the layout of x is kept.

    Args:
        x: [..., R].
        cos_sin: [..., R], broadcast against x (add a head axis with `.unsqueeze(1)`).
        interleaved: pairs (2i, 2i+1); otherwise pairs (i, i + R/2).
        inverse: rotate back.
    """
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    if inverse:
        sin = -sin
    wide = x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return joined.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / rms(x) over the last axis, times `weight` where there is one."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def hadamard(x: Tensor) -> Tensor:
    """x times the orthonormal Hadamard matrix over its last axis (a power of two wide), in float32."""
    dim = x.shape[-1]
    turned = x.float()
    span = 1
    while span < dim:
        pairs = turned.unflatten(-1, (-1, 2, span))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        turned = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        span *= 2
    return turned.mul(dim**-0.5)
