"""Weight absorption: `kv_b_proj` is applied to queries and outputs instead of to cached rows.

Its key half multiplies the query, so that attention reads one latent row per token for all heads. Its value half
multiplies the latent output.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, float32_products, without_autocast

_DTYPES = (*checks.FLOATS, torch.float64)
WEIGHT_NAMES = ("weight", "qweight", "weight_packed")


@dataclass(frozen=True, eq=False)
class AbsorbedWeights:
    """The two halves of `kv_b_proj` per head."""

    key: Tensor
    """[H, P, L]: query nope dims to latent."""
    value: Tensor
    """[H, L, V]: latent to value dims."""

    @classmethod
    def split(
        cls,
        weight: Tensor,
        *,
        heads: int,
        nope_dim: int,
        value_dim: int,
        latent_dim: int,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """From `kv_b_proj.weight` [H * (P + V), L]: of each head's rows, the first P are for keys and the last V for
        values."""
        sizes = {"heads": heads, "nope_dim": nope_dim, "value_dim": value_dim, "latent_dim": latent_dim}
        for name, size in sizes.items():
            checks.integer(name, size, low=1)
        if dtype is not None:
            checks.option("dtype", dtype, _DTYPES)
        out = heads * (nope_dim + value_dim)
        if tuple(checks.dense("weight", weight, _DTYPES).shape) != (out, latent_dim):
            raise checks.refuse(
                "weight",
                f"of shape [{out}, {latent_dim}] for {', '.join(f'{k}={v}' for k, v in sizes.items())}",
                list(weight.shape),
                "pass kv_b_proj's weight for this rank, dequantised with dense_weight if it is quantised",
            )
        per_head = weight.to(dtype or weight.dtype).view(heads, nope_dim + value_dim, latent_dim)
        key, value = per_head.split([nope_dim, value_dim], dim=1)
        return cls(key.contiguous(), value.transpose(1, 2).contiguous())

    @classmethod
    def from_layer(
        cls,
        layer: Any,
        *,
        heads: int,
        nope_dim: int,
        value_dim: int,
        latent_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Self:
        """From a plain or quantised linear layer; see `dense_weight`."""
        checks.option("dtype", dtype, _DTYPES)
        weight = dense_weight(layer, dtype)
        return cls.split(
            weight, heads=heads, nope_dim=nope_dim, value_dim=value_dim, latent_dim=latent_dim, dtype=dtype
        )

    def absorb_query(self, q_nope: Tensor) -> Tensor:
        """[T, H, P] -> [T, H, L]."""
        heads, nope, _ = self.key.shape
        checks.tensor("q_nope", q_nope, "T H P", checks.FLOATS, H=heads, P=nope, device=self.key.device)
        return _per_head(q_nope, self.key)

    def project_value(self, latent: Tensor) -> Tensor:
        """[T, H, L] -> [T, H, V]."""
        heads, width, _ = self.value.shape
        checks.tensor("latent", latent, "T H L", checks.FLOATS, H=heads, L=width, device=self.value.device)
        return _per_head(latent, self.value)


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    # On a CPU, products are computed in float32 or better: not every CPU has 16-bit products, and a reference should
    # round only once. On a GPU they follow the program's settings, like those of the model's other linear layers.
    wide = float32_products(x.device) if x.device.type == "cpu" else x.dtype
    with without_autocast(x.device):
        return torch.bmm(x.transpose(0, 1).to(wide), weight.to(wide)).transpose(0, 1).to(x.dtype)


def layer_weight(layer: Any) -> Tensor:
    """The stored weight of a linear layer, under any of the names that engines use."""
    for name in WEIGHT_NAMES:
        weight = getattr(layer, name, None)
        if isinstance(weight, Tensor):
            return weight
    raise checks.refuse("layer", f"one with {', '.join(WEIGHT_NAMES)}", layer, "load its weights first")


def dense_weight(layer: Any, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The [out, in] weight of a plain or quantised linear layer.

    A quantised layer (one with a `quant_method` other than `UnquantizedLinearMethod`) is dequantised by applying it to
    an identity matrix. That is exact for any scheme; its cost is cubic, so it is meant for load time.
    """
    checks.option("dtype", dtype, _DTYPES)
    method = getattr(layer, "quant_method", None)
    if method is None or type(method).__name__ == "UnquantizedLinearMethod":
        return layer_weight(layer)
    weight = layer_weight(layer)
    size = getattr(layer, "input_size_per_partition", None)
    checks.integer("layer.input_size_per_partition", size, low=1)
    identity = torch.eye(int(size), dtype=dtype, device=weight.device)  # type: ignore[arg-type]
    dense: Tensor = method.apply(layer, identity, bias=None)
    return dense.to(dtype).T.contiguous()


def dequantise_blocks(
    weight: Tensor, scale_inv: Tensor, *, block: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """A block-scaled e4m3 weight [N, K] with factors [ceil(N/block), ceil(K/block)], as checkpoints store it."""
    checks.integer("block", block, low=1)
    checks.option("dtype", dtype, _DTYPES)
    sizes = checks.tensor("weight", weight, "N K", (torch.float8_e4m3fn,))
    down, across = ceil_div(sizes["N"], block), ceil_div(sizes["K"], block)
    checks.tensor("scale_inv", scale_inv, "R C", (torch.float32,), device=weight.device, R=down, C=across)
    # A block may be larger than the weight, so a factor is repeated at most as often as the weight has rows or columns.
    rows, columns = min(block, sizes["N"]), min(block, sizes["K"])
    factors = scale_inv.repeat_interleave(rows, 0)[: sizes["N"]].repeat_interleave(columns, 1)[:, : sizes["K"]]
    return (weight.float() * factors).to(dtype)
