"""Index queries in MXFP4, the format in which indexers with MXFP4 keys exchange them."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.codec import decode_e2m1, encode_rows
from tamis.cache.fields import Rounding
from tamis.cache.layout import index_mxfp4
from tamis.model.recipe import IndexRecipe
from tamis.ops.index.prepare import factor_of_weights, rotate_index

_TILE = 32
"""Values per scale."""


class PackedQuery(NamedTuple):
    """Queries whose scales, one per 32 values, cannot be folded into the weights."""

    values: Tensor
    """uint8 [T, H, D / 2], e2m1 pairs with the even column in the low four bits."""
    scales: Tensor
    """uint8 [T, H, D / 32], exponents: 2 ** (byte - 127)."""
    weights: Tensor
    """float32 [T, H], with the constant factor folded in."""


def pack_index_query(
    q: Tensor,
    weights: Tensor,
    recipe: IndexRecipe,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    scale: float | None = None,
    rounding: Rounding = "bf16",
) -> PackedQuery:
    """Queries rotated and quantised like the keys of an `index-mxfp4` cache.

    Args:
        q: [T, H, D], the projection's output; D a multiple of 32.
        weights: [T, H], the head weights' projection.
        recipe: which rotations to apply to q; the same as for the keys it will be compared with.
        positions: integer [T], absolute; without them q is taken as rotated already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.model.rope.Rope.cos_sin_table`; goes with `positions`.
        scale: the constant factor of all weights, (H * D) ** -0.5 if not given.
        rounding: "bf16" rounds once after the rotations; "none" keeps float32.
    """
    sizes = checks.tensor("q", q, "T H D", checks.FLOATS)
    total, heads, dim = sizes["T"], sizes["H"], sizes["D"]
    checks.tensor("weights", weights, "T H", checks.FLOATS, T=total, H=heads, device=q.device)
    constant = factor_of_weights(q, scale, multiple=_TILE)
    layout = index_mxfp4(dim=dim, rounding=rounding)
    rotated = rotate_index(q, recipe, positions=positions, cos_sin=cos_sin)
    values, scales, _ = encode_rows(rotated.reshape(-1, dim), layout)
    assert scales is not None
    return PackedQuery(
        values.view(total, heads, dim // 2), scales.view(total, heads, dim // _TILE), weights.float() * constant
    )


def unpack_index_query(values: Tensor, scales: Tensor) -> Tensor:
    """The queries as bf16 [T, H, D], which holds them exactly, for `index_scores`, `index_topk` and `ragged_scores`.

    The scoring kernels multiply 4-bit keys in bf16. They would have to unpack packed queries too, once per program.
    """
    sizes = checks.tensor("values", values, "T H P", (torch.uint8,))
    if sizes["P"] == 0 or sizes["P"] % (_TILE // 2):
        wanted = f"a multiple of {_TILE // 2} bytes wide"
        raise checks.refuse("values", wanted, list(values.shape), "two values per byte, one scale per 32 values")
    expected = {"T": sizes["T"], "H": sizes["H"], "G": 2 * sizes["P"] // _TILE}
    checks.tensor("scales", scales, "T H G", (torch.uint8,), **expected, device=values.device)  # type: ignore[arg-type]
    return decode_e2m1(values, scales).bfloat16()
