"""The operations of stage `index` that train: the indexer's losses. The loss is a scalar, so the forward pass computes
the gradients for an upstream gradient of one, and the backward pass multiplies them: nothing of T x K or T x N is kept.
"""

from typing import Any, NamedTuple

from torch import Tensor

from tamis.ops.attention.operations import accumulator
from tamis.ops.autograd import differentiate, refuse_second_derivatives
from tamis.ops.library import Operation


class IndexLoss(NamedTuple):
    """KL divergence of the indexer's distribution from a target, both over the selected rows, summed over tokens."""

    index_q: Tensor
    """[T, H, D] in bf16, fp16, fp32 or fp64."""
    index_keys: Tensor
    """[N, D] in the same dtype."""
    weights: Tensor
    """[T, H] in bf16, fp16, fp32 or fp64."""
    slots: Tensor
    """int32 [T, K], row numbers of keys; others are skipped."""
    target: Tensor
    """[T, K] in the accumulator's dtype, not negative."""
    token_weights: Tensor | None
    """[T] in the accumulator's dtype, the factor of each token's divergence."""
    gradients: bool
    """Whether gradients are wanted; otherwise they are returned empty."""
    deterministic: bool
    """Whether the keys' gradient is added up in one order, whatever the batch."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss [] in the accumulator's dtype, and the gradients of `index_q`, `index_keys` and `weights`."""
        return _results(self)


class WarmupLoss(NamedTuple):
    """KL divergence of the indexer's distribution from dense attention's, both over all keys that a token sees."""

    index_q: Tensor
    """[T, H_I, D_I] in bf16, fp16, fp32 or fp64."""
    index_keys: Tensor
    """[N, D_I] in the same dtype."""
    weights: Tensor
    """[T, H_I] in bf16, fp16, fp32 or fp64."""
    q: Tensor
    """[T, H, D] in bf16, fp16, fp32 or fp64, attention's queries."""
    keys: Tensor
    """[N, D], keys that all heads share, or [N, H, D]; in q's dtype."""
    lse: Tensor | None
    """[T, H] in the accumulator's dtype: the logarithm of attention's denominator; None: that of these keys alone."""
    starts: Tensor
    """int32 [T], the first key that a token sees."""
    ends: Tensor
    """int32 [T], one past the last."""
    token_weights: Tensor | None
    """[T] in the accumulator's dtype, the factor of each token's divergence."""
    scale: float
    """Softmax scale of attention."""
    gradients: bool
    """Whether gradients are wanted; otherwise they are returned empty."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss [] in the accumulator's dtype, and the gradients of `index_q`, `index_keys` and `weights`."""
        return _results(self)


def _results(call: IndexLoss | WarmupLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = call.index_q.new_empty((), dtype=accumulator(call.index_q))
    inputs = (call.index_q, call.index_keys, call.weights)
    dq, dk, dw = (x.new_empty(x.shape if call.gradients else 0, dtype=x.dtype) for x in inputs)
    return loss, dq, dk, dw


index_loss = Operation("index", IndexLoss, IndexLoss.fake, trains="index_loss")
warmup_loss = Operation("index", WarmupLoss, WarmupLoss.fake, trains="warmup_loss")


def _save(ctx: Any, call: IndexLoss | WarmupLoss, result: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*result[1:])
    ctx.save_for_backward(*result[1:])


def _backward(ctx: Any, dloss: Tensor | None, *_: None) -> dict[str, Any]:
    if dloss is None:
        return {}
    # The saved gradients have no graph of their own, so the inputs' would be missing in a second derivative.
    refuse_second_derivatives("an index loss")
    names, wanted = ("index_q", "index_keys", "weights"), ctx.needs_input_grad
    found = zip(names, ctx.saved_tensors, wanted, strict=False)
    # A 16-bit gradient is multiplied in the loss's precision and rounded again.
    return {name: (unit * dloss).to(unit.dtype) for name, unit, needed in found if needed}


differentiate(index_loss, _save, _backward)
differentiate(warmup_loss, _save, _backward)
