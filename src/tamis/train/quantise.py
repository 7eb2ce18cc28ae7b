"""Fake quantisation: numbers as a cache would give them back, with the gradient passed straight through."""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout, named
from tamis.model.recipe import IndexRecipe
from tamis.ops.index.prepare import check_rotations
from tamis.ops.write import row_operations
from tamis.ops.write.row_operations import FakeQuantise
from tamis.train.arguments import DTYPES, refuse_transforms


def fake_quantise(
    x: Tensor,
    layout: str | Layout,
    recipe: IndexRecipe | None = None,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """x as it would be read back from a cache of this format, after the recipe's rotations; in x's shape and dtype.

    The numbers are exactly those that `write_index_keys`, `quantise_index_query` and `write_kv` store, rounded to x's
    dtype (bf16 holds all of index keys and of rows with power-of-two scales). Backward passes the gradient through the
    rounding as if there were none, also where a value saturates, and through the transposed rotations; scales count as
    constant. Fake-quantised queries and keys give the scores of quantised ones: a query's scale, which serving folds
    into the weights, is in its numbers here.

    Args:
        x: [T, D] or [T, H, D] in bf16, fp16, fp32 or fp64 (which is rounded to fp32 first).
        layout: the cache's format: `index-fp8` and `index-mxfp4` take x's width; others are D wide as they are.
        recipe: the rotations of index queries and keys; none if not given, as for rows.
        positions: integer [T], absolute, -1 for padding; without them x is taken as rotated by the rope already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.model.rope.Rope.cos_sin_table`; goes with `positions`.
        scale: the scale of the whole cache, for `plain-fp8`.
        backend: a name from `tamis backends`, or "auto".
    """
    dense = isinstance(x, Tensor) and x.dtype in DTYPES and x.layout is torch.strided
    if not dense or x.dim() not in (2, 3):
        raise checks.refuse_type("x", "a float tensor [T, D] or [T, H, D]", checks.describe(x), "convert it")
    layout = layout_of_width(layout, x.shape[-1])
    recipe = IndexRecipe(rope_dim=0) if recipe is None else recipe
    check_rotations(recipe, positions, cos_sin, x.shape[0], x.shape[-1], x.device)
    checks.positive_number("scale", scale)
    refuse_transforms("fake_quantise", x=x)
    call = FakeQuantise(x, positions, cos_sin, recipe, layout, scale, backend)
    row_operations.fake_quantise.check(call)
    return row_operations.fake_quantise(call)


def layout_of_width(layout: str | Layout, width: int) -> Layout:
    """A layout of rows of this width, by name or as it is."""
    by_name = isinstance(layout, str) and layout in ("index-fp8", "index-mxfp4")
    found = named(layout, dim=width) if by_name else named(layout)
    if found.width != width:
        remedy = "build it with named(name, latent=..., rope=...)"
        raise checks.refuse("layout", f"{width} wide like the numbers", f"{found.name}, {found.width} wide", remedy)
    return found
