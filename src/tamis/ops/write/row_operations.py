"""The operation of stage `write` that trains: rows as they would be read back from a cache."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.cache.layout import Layout
from tamis.model.recipe import IndexRecipe
from tamis.ops.autograd import differentiate, refuse_second_derivatives, save_for_backward
from tamis.ops.index.rotation import unrotate_rows
from tamis.ops.library import Operation


class FakeQuantise(NamedTuple):
    """Rows rotated, encoded in a cache's format and decoded again."""

    x: Tensor
    """[T, D] or [T, H, D] in bf16, fp16, fp32 or fp64."""
    positions: Tensor | None
    """int32 or int64 [T]; None if the rope has been applied to x already."""
    cos_sin: Tensor | None
    """float32 [max_positions, rope_dim], given with the positions."""
    recipe: IndexRecipe
    """The rotations to apply to x."""
    layout: Layout
    """The row format, D wide."""
    scale: float
    """The scale of the whole cache, if the format has one."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> Tensor:
        """The rows in x's shape and dtype, contiguous."""
        return torch.empty_like(self.x, memory_format=torch.contiguous_format)


fake_quantise = Operation("write", FakeQuantise, FakeQuantise.fake, trains="fake_quantise")


def _save(ctx: Any, call: FakeQuantise, _found: Tensor) -> None:
    save_for_backward(ctx, call.positions, call.cos_sin)
    ctx.recipe, ctx.dtype = call.recipe, call.x.dtype


def _backward(ctx: Any, gradient: Tensor | None) -> dict[str, Any]:
    if gradient is None:
        return {}
    refuse_second_derivatives("fake_quantise", gradient)
    # Rounding and scales count as constant, so only the rotations are left.
    positions, cos_sin = ctx.saved_tensors
    wide = gradient if gradient.dtype == torch.float64 else gradient.float()
    return {"x": unrotate_rows(wide, positions, cos_sin, ctx.recipe).to(ctx.dtype)}


differentiate(fake_quantise, _save, _backward)
