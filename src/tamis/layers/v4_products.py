"""What layers of V4 and V4.1 have in common: matrix products, the rotation before attention, the output after it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tamis.arithmetic import float32_products, without_autocast
from tamis.cache.v4_caches import V4Caches
from tamis.layers.v4_weights import V4Weights
from tamis.model.spec import LayerSpec
from tamis.ops.compress import has_hadamard
from tamis.ops.output.operations import LowerGroups, RotateToFp8, lower_groups, rotate_to_fp8
from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads, norm_rows, rotate_heads
from tamis.step.v4_plan import V4Plan


class Queries(NamedTuple):
    """The products of hidden states that every layer needs."""

    low: Tensor
    """[rows, rank], normalised; the indexer's queries are projected from it as well."""
    q: Tensor
    """[rows, H, D]"""
    kv: Tensor
    """[rows, D]"""


def project_queries(
    hidden: Tensor, weights: V4Weights, spec: LayerSpec, eps: float, backend: str, wide: torch.dtype
) -> Queries:
    """Project hidden states to queries and raw rows, neither of them rotated, with products computed in `wide`."""
    low = norm_rows(NormRows(product(hidden, weights.q_a, wide), weights.q_norm, eps, backend))
    q = product(low, weights.q_b, wide)
    return Queries(low, q.view(q.shape[0], spec.heads, spec.head_dim), product(hidden, weights.kv, wide))


def rotate_and_write(
    made: Queries,
    index_q: Tensor | None,
    weights: V4Weights,
    caches: V4Caches,
    plan: V4Plan,
    cos_sin: Tensor,
    eps: float,
    norm_q: bool,
    backend: str,
) -> RotateAndWrite:
    """The rotation of queries and raw rows, which writes the rows to the window's cache."""
    positions, slots, hadamard = plan.step.positions, plan.window.pages.slots, has_hadamard(caches.index)
    where = (caches.window, slots, positions, cos_sin, weights.kv_norm)
    return RotateAndWrite(made.q, made.kv, *where, eps, index_q, hadamard, norm_q, backend)


def output_rotation(
    weights: V4Weights, cos_sin: Tensor, attended: Tensor, plan: V4Plan, backend: str
) -> RotateHeads | RotateToFp8:
    """The rotation of attention's output back, with quantisation if the weights of the output projection are FP8."""
    tile, positions = weights.output_tile, plan.step.positions
    if tile is None:
        return RotateHeads(attended, positions, cos_sin, None, True, backend)
    return RotateToFp8(attended, positions, cos_sin, tile, True, backend)


def project_output(weights: V4Weights, attended: Tensor, call: RotateHeads | RotateToFp8) -> Tensor:
    """The grouped output projection: each group of heads to a low rank, then all of them to hidden states."""
    wide, groups = product_dtype(attended), weights.o_a.shape[0]
    with without_autocast(attended.device):
        if isinstance(call, RotateToFp8):
            assert weights.o_a_scales is not None
            parts = rotate_to_fp8(call._replace(x=attended))
            values, scales = (_grouped(part, groups) for part in parts)
            lower = LowerGroups(values, scales, weights.o_a, weights.o_a_scales, attended.dtype, call.backend)
            return product(lower_groups(lower).flatten(1), weights.o_b, wide)
        rotated = rotate_heads(call._replace(x=attended))
        grouped = _grouped(rotated, groups).transpose(0, 1)
        lowered = torch.bmm(grouped.to(wide), weights.o_a.to(wide).transpose(1, 2))
        return product(lowered.transpose(0, 1).to(rotated.dtype).flatten(1), weights.o_b, wide)


def project(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T in x's dtype or in float32; on a CPU the product runs in float32."""
    with without_autocast(x.device):
        multiply = float_product if dtype == torch.float32 else product
        return multiply(x, weight, product_dtype(x))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[rows, H, D] as [rows, groups, H / groups * D]. There may be no row, so that no size can be left to torch."""
    rows, heads, width = x.shape
    return x.reshape(rows, groups, heads * width // groups)


def product(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """x @ weight.T, computed in `wide`, in x's dtype."""
    if x.dtype is wide and weight.dtype is wide:  # `to` takes longer than comparing, even if it does nothing
        return linear(x, weight)
    return linear(x.to(wide), weight.to(wide)).to(x.dtype)


def float_product(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """x @ weight.T in float32. A product of 16-bit factors is summed in float32 anyway, and not rounded afterwards."""
    if wide in (torch.bfloat16, torch.float16):
        weight = weight if weight.dtype is wide else weight.to(wide)
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return linear(x.to(wide), weight.to(wide)).to(torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products with `x` are computed."""
    # 16-bit matrix products are not usable on every CPU, and a reference should not round twice. On a device, float32
    # products follow what the program allows, as those of every other linear layer of the model do.
    return float32_products(x.device) if x.device.type == "cpu" else x.dtype
