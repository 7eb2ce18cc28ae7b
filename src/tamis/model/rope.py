"""Rotary embedding: frequencies (plain and YaRN), tables, rotation, and the softmax scale that YaRN changes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.model import hf_config


@dataclass(frozen=True)
class Rope:
    """The rotary settings of one layer. A `factor` of 1 means no YaRN."""

    dim: int
    theta: float = 10000.0
    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        """Refuse settings whose table would not be finite."""
        if checks.integer("dim", self.dim, low=0) % 2:
            raise checks.refuse("dim", "even", self.dim, "a rope rotates pairs")
        checks.integer("original_length", self.original_length, low=1)
        for field in fields(self):
            if field.name in ("mscale", "mscale_all_dim"):
                checks.number(field.name, getattr(self, field.name), low=0.0)
            elif field.name not in ("dim", "original_length"):
                checks.positive_number(field.name, getattr(self, field.name))
        if self.theta <= 1:
            raise checks.refuse("theta", "> 1", self.theta, "frequencies must fall from pair to pair")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dim: int) -> Self:
        """From a Hugging Face config dict: `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
        config = hf_config.fields_of(config)
        found = _settings(config)
        theta = hf_config.real(found, "rope_theta", hf_config.real(config, "rope_theta", 10000.0))
        kind = found.get("rope_type", found.get("type", "default"))
        if kind is None or (isinstance(kind, str) and kind == "default"):
            return cls(dim, theta)
        if not isinstance(kind, str) or kind not in ("yarn", "deepseek_yarn"):
            received = repr(kind) if isinstance(kind, str) else checks.describe(kind)
            raise checks.refuse("config.rope_type", "'default' or 'yarn'", received, "this rope is not implemented")
        return cls(
            dim,
            theta,
            factor=hf_config.real(found, "factor", 1.0),
            original_length=hf_config.whole(found, "original_max_position_embeddings", default=4096),
            beta_fast=hf_config.real(found, "beta_fast", 32.0),
            beta_slow=hf_config.real(found, "beta_slow", 1.0),
            mscale=hf_config.real(found, "mscale", 0.0, low=0.0),
            mscale_all_dim=hf_config.real(found, "mscale_all_dim", 0.0, low=0.0),
        )

    @classmethod
    def from_hf_v4(cls, config: Mapping[str, Any], dim: int, *, compressed: bool) -> Self:
        """From a V4 config dict: the settings of compressed layers, or those of layers with only a window.

        The latter have another theta and no YaRN. V4 never scales cosines and sines.
        """
        config = hf_config.fields_of(config)
        found = _settings(config)
        if not checks.flag("compressed", compressed):
            nested = hf_config.group(found, "main")
            theta = hf_config.real(config, "rope_theta", 10000.0)
            return cls(dim, hf_config.real(nested, "rope_theta", theta))
        # Nested settings have a theta for each kind of layer. A flat theta may be that of the other kind.
        nested = hf_config.group(found, "compress")
        own = hf_config.real(nested, "rope_theta", hf_config.real(config, "compress_rope_theta", 160000.0))
        scaling = {**(nested or found), "rope_theta": own, "mscale": 0.0, "mscale_all_dim": 0.0}
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
        checks.integer("query_dim", query_dim, low=1)
        return float(query_dim**-0.5 * _magnitude(self.factor, self.mscale_all_dim) ** 2)

    def cos_sin_table(self, positions: int, device: torch.device | str = "cpu") -> Tensor:
        """float32 [positions, dim]: cosines of all pairs, then their sines."""
        checks.integer("positions", positions, low=1)
        device = checks.device("device", device, usable=True)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32, device="cpu"), self.frequencies())
        ratio = _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return (torch.cat((angles.cos(), angles.sin()), dim=1) * ratio).to(device)


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings under either name that configs use."""
    return hf_config.group(config, "rope_parameters") or hf_config.group(config, "rope_scaling")


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
    """x / rms(x) over the last axis, times `weight` if it is given."""
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
