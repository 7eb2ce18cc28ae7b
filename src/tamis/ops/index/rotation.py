"""Rope and Hadamard rotation of index queries and keys, in plain torch, and back."""

import torch
from torch import Tensor

from tamis.cache.fields import Rounding
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import hadamard, rotate


def rotate_rows(
    x: Tensor, positions: Tensor | None, cos_sin: Tensor | None, recipe: IndexRecipe, rounding: Rounding
) -> Tensor:
    """Rows [T, D] or heads [T, H, D] after the recipe's rotations, computed in float32.

    Without positions, or with a recipe without rope columns, only the Hadamard rotation is left. Rows whose position
    is not in the table are not rotated by the rope.
    """
    if positions is not None and cos_sin is not None and recipe.rope_dim:
        x = _apply_rope(x.float(), positions, cos_sin, recipe, inverse=False)
    if not recipe.hadamard:
        return x
    return hadamard(x.bfloat16() if rounding == "bf16" else x)


def unrotate_rows(x: Tensor, positions: Tensor | None, cos_sin: Tensor | None, recipe: IndexRecipe) -> Tensor:
    """The transpose of `rotate_rows`, without its rounding: rows after the recipe's rotations are undone, if the
    table's cosines and sines have a length of one. The Hadamard matrix is its own transpose."""
    if recipe.hadamard:
        x = hadamard(x)
    if positions is not None and cos_sin is not None and recipe.rope_dim:
        x = _apply_rope(x, positions, cos_sin, recipe, inverse=True)
    return x


def _apply_rope(x: Tensor, positions: Tensor, cos_sin: Tensor, recipe: IndexRecipe, *, inverse: bool) -> Tensor:
    rope, width = recipe.rope_dim, x.shape[-1]
    start = 0 if recipe.rope_first else width - rope
    before, columns, after = x.split([start, rope, width - start - rope], dim=-1)
    position = positions.long().view(-1, *[1] * (x.dim() - 2))
    angles = cos_sin[position.clamp(0, len(cos_sin) - 1)]
    known = ((position >= 0) & (position < len(cos_sin))).unsqueeze(-1)
    turned = rotate(columns, angles, interleaved=recipe.interleaved, inverse=inverse)
    return torch.cat((before, torch.where(known, turned, columns), after), dim=-1)
