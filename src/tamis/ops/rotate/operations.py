"""The operations of stage `rotate`; see `tamis.ops.library`."""

from typing import NamedTuple

from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.library import Operation, Written


class NormRows(NamedTuple):
    """RMSNorm of rows."""

    x: Tensor
    """bf16, fp16 or fp32 [T, N]."""
    weight: Tensor
    """bf16, fp16 or fp32 [N]."""
    eps: float
    """Epsilon of the norm."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("x", "weight")

    def fake(self) -> Tensor:
        """Rows [T, N] in x's dtype."""
        return self.x.new_empty(self.x.shape, dtype=self.x.dtype)


class RotateHeads(NamedTuple):
    """Rotary embedding of the last columns of each head."""

    x: Tensor
    """bf16, fp16 or fp32 [T, H, D]."""
    positions: Tensor
    """int32 or int64 [T]; heads of a token with a negative position are not rotated."""
    cos_sin: Tensor
    """float32 [P, R]; the last R columns are rotated, R/2 cosines before R/2 sines."""
    eps: float | None
    """Epsilon of an RMSNorm without weight that each head goes through first; None for no norm."""
    inverse: bool
    """Whether to rotate by the negative angle."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("x", "cos_sin")

    def fake(self) -> Tensor:
        """Heads [T, H, D] in x's dtype."""
        return self.x.new_empty(self.x.shape, dtype=self.x.dtype)


class RotateAndWrite(NamedTuple):
    """Normalise and rotate queries; normalise, rotate and write raw rows; rotate index queries."""

    q: Tensor
    """bf16, fp16 or fp32 [T, H, D]."""
    kv: Tensor
    """bf16, fp16 or fp32 [T, D]."""
    cache: Written[PagedCache]
    """The pool of raw tokens: rows of D numbers, in any layout."""
    slots: Tensor
    """int32 or int64 [T'], T' <= T; rows with a negative slot, or past T', are not written."""
    positions: Tensor
    """int32 or int64 [T]; rows of a token with a negative position are not rotated."""
    cos_sin: Tensor
    """float32 [P, R], as in `RotateHeads`."""
    norm_weight: Tensor
    """bf16, fp16 or fp32 [D], the weight of the rows' norm."""
    eps: float
    """Epsilon of both norms."""
    index_q: Tensor | None
    """bf16, fp16 or fp32 [T, index heads, index dim]."""
    index_hadamard: bool
    """Whether the rotated index queries are multiplied by the Hadamard matrix."""
    norm_q: bool
    """Whether query heads are normalised; those of V4.1 are not."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q", "kv", "index_q", "norm_weight", "cos_sin")

    def fake(self) -> tuple[Tensor, Tensor]:
        """The queries [T, H, D] and the index queries, which are empty [0] if none were given."""
        q = self.q if self.index_q is None else self.index_q
        shape = (0,) if self.index_q is None else q.shape
        return self.q.new_empty(self.q.shape, dtype=self.q.dtype), q.new_empty(shape, dtype=q.dtype)


class WriteRotated(NamedTuple):
    """Rotate rows at the first position of their span, and write them."""

    rows: Tensor
    """bf16, fp16 or fp32 [T, D]."""
    cache: Written[PagedCache]
    """Rows of D numbers, in any layout."""
    slots: Tensor
    """int32 or int64 [T'], T' <= T; rows with a negative slot, or past T', are not written."""
    positions: Tensor
    """int32 or int64 [T]; rows of a token with a negative position are not rotated."""
    cos_sin: Tensor
    """float32 [P, R], as in `RotateHeads`."""
    norm_weight: Tensor | None
    """bf16, fp16 or fp32 [D], the weight of an RMSNorm that rows go through first; None for no norm."""
    eps: float
    """Epsilon of the norm."""
    span: int
    """Tokens that a row stands for: it is rotated at position // span * span."""
    hadamard: bool
    """Whether rounded rows are multiplied by the Hadamard matrix and rounded again."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("rows", "norm_weight", "cos_sin")

    def fake(self) -> None:
        """Nothing is returned."""


norm_rows = Operation("rotate", NormRows, NormRows.fake)
rotate_heads = Operation("rotate", RotateHeads, RotateHeads.fake)
rotate_and_write = Operation("rotate", RotateAndWrite, RotateAndWrite.fake)
write_rotated = Operation("rotate", WriteRotated, WriteRotated.fake)
