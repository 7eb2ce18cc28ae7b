"""The operations of stage `output`; see `tamis.ops.library`."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.ops.library import Operation


class RotateToFp8(NamedTuple):
    """Rotate heads as `RotateHeads` does, without a norm, and quantise them."""

    x: Tensor
    """bf16, fp16 or fp32 [T, H, D]."""
    positions: Tensor
    """int32 or int64 [T]; heads of a token with a negative position are not rotated."""
    cos_sin: Tensor
    """float32 [P, R]; the last R columns are rotated, R/2 cosines before R/2 sines."""
    tile: int
    """Columns that share a scale, a power of two from 32 on that divides D."""
    inverse: bool
    """Whether to rotate by the negative angle."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("x", "cos_sin")

    def fake(self) -> tuple[Tensor, Tensor]:
        """Values e4m3 [T, H, D] and exponents uint8 [T, H, D / tile]."""
        tokens, heads, width = self.x.shape
        values = self.x.new_empty(self.x.shape, dtype=torch.float8_e4m3fn)
        return values, self.x.new_empty((tokens, heads, width // self.tile), dtype=torch.uint8)


class LowerGroups(NamedTuple):
    """A grouped GEMM of e4m3 values with block scales."""

    x: Tensor
    """e4m3 [T, G, K]."""
    scales: Tensor
    """uint8 [T, G, K / tile], exponents: 2 ** (byte - 127)."""
    weight: Tensor
    """e4m3 [G, O, K]."""
    weight_scales: Tensor
    """float32 [G, ceil(O / tile), K / tile], of square blocks."""
    dtype: torch.dtype
    """The dtype of the result: bf16, fp16 or fp32."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("weight_scales",)

    def fake(self) -> Tensor:
        """The product [T, G, O]."""
        return self.x.new_empty((self.x.shape[0], *self.weight.shape[:2]), dtype=self.dtype)


rotate_to_fp8 = Operation("output", RotateToFp8, RotateToFp8.fake)
lower_groups = Operation("output", LowerGroups, LowerGroups.fake)
