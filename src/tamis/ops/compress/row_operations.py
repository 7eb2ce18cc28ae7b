"""The operations of stage `compress` that train: pooling of packed requests' tokens, and its gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.ops.attention.operations import accumulator
from tamis.ops.autograd import differentiate, refuse_second_derivatives, save_for_backward
from tamis.ops.library import Operation


class CompressRows(NamedTuple):
    """Pool spans of tokens into entries by a softmax per channel."""

    values: Tensor
    """[T, C] in bf16, fp16, fp32 or fp64; C is D, or 2D where spans overlap."""
    scores: Tensor
    """[T, C] in the same dtype, without the bias."""
    bias: Tensor
    """[ratio, C] in bf16, fp16, fp32 or fp64."""
    spans: Tensor
    """int32 [E], the first token of each entry's span, whose tokens follow each other; -1 for an entry of zeros."""
    before: Tensor | None
    """int32 [E], the first token of the span before, -1 where a request begins and for an entry of zeros; None if spans
    do not overlap."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def width(self) -> int:
        """Channels of an entry, D."""
        return self.values.shape[1] // (1 if self.before is None else 2)

    def fake(self) -> Tensor:
        """Entries [E, D] in the accumulator's dtype."""
        return self.values.new_empty((len(self.spans), self.width), dtype=accumulator(self.values))


class CompressRowsBackward(NamedTuple):
    """The gradients of `CompressRows`."""

    values: Tensor
    """As in the forward pass."""
    scores: Tensor
    """As in the forward pass."""
    bias: Tensor
    """As in the forward pass."""
    spans: Tensor
    """As in the forward pass."""
    before: Tensor | None
    """As in the forward pass."""
    dentries: Tensor
    """[E, D] in the accumulator's dtype, the gradient of the entries, with any strides."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of values, scores and bias, contiguous, each in the dtype of its argument."""
        values, scores, bias = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.values, self.scores, self.bias)
        )
        return values, scores, bias


compress_rows = Operation("compress", CompressRows, CompressRows.fake, trains="compress_rows")
compress_rows_backward = Operation("compress", CompressRowsBackward, CompressRowsBackward.fake, trains="compress_rows")


def _save(ctx: Any, call: CompressRows, _entries: Tensor) -> None:
    *tensors, ctx.backend = call
    save_for_backward(ctx, *tensors)


def _backward(ctx: Any, dentries: Tensor | None) -> dict[str, Any]:
    if dentries is None:
        return {}
    values, scores, bias, spans, before = ctx.saved_tensors
    refuse_second_derivatives("compress_rows", values, scores, bias, dentries)
    call = CompressRowsBackward(values, scores, bias, spans, before, dentries, ctx.backend)
    found = compress_rows_backward(call)
    return dict(zip(("values", "scores", "bias"), found, strict=True))


differentiate(compress_rows, _save, _backward)
