"""The operations of stage `attend` that train: attention over rows of a tensor, its gradients, the indexer's target."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.cache.selection import Rows
from tamis.ops.attention.operations import accumulator
from tamis.ops.autograd import differentiate, refuse_second_derivatives, save_for_backward
from tamis.ops.library import Operation


class AttendRows(NamedTuple):
    """Attention of each query token over rows of tensors, all selections under one softmax."""

    q: Tensor
    """[T, H, width] in bf16, fp16, fp32 or fp64."""
    selections: list[Rows]
    """The rows that each token attends to, in q's dtype and of its width."""
    scale: float
    """Softmax scale."""
    value_dim: int
    """How many leading columns of a row are its value."""
    sink: Tensor | None
    """[H] in the accumulator's dtype, contiguous."""
    keep_rest: bool
    """Whether to return what rounding cut off the output, which a backward pass needs for an exact delta."""
    deterministic: bool
    """Whether the backward pass adds up the gradients of rows in one order, whatever the batch."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output [T, H, V] in q's dtype, lse and max_logits [T, H] in the accumulator's, and the rest of the output:
        in q's dtype, empty if it is not kept or if q's dtype is the accumulator's."""
        tokens, heads, _ = self.q.shape
        out = self.q.new_empty((tokens, heads, self.value_dim), dtype=self.q.dtype)
        lse = self.q.new_empty((tokens, heads), dtype=accumulator(self.q))
        rest = torch.empty_like(out) if self.has_rest else out.new_empty(0, dtype=out.dtype)
        return out, lse, torch.empty_like(lse), rest

    @property
    def has_rest(self) -> bool:
        """Whether the rest of the output is returned."""
        return self.keep_rest and self.q.dtype != accumulator(self.q)


class AttendRowsBackward(NamedTuple):
    """The gradients of `AttendRows`."""

    q: Tensor
    """[T, H, width], as in the forward pass."""
    selections: list[Rows]
    """As in the forward pass."""
    scale: float
    """Softmax scale."""
    sink: Tensor | None
    """As in the forward pass."""
    out: Tensor
    """[T, H, V], the forward pass's output."""
    rest: Tensor
    """What rounding cut off the output; empty if nothing."""
    lse: Tensor
    """[T, H] of the forward pass."""
    dout: Tensor | None
    """[T, H, V], the gradient of the output, with any strides; None if it is zero."""
    dlse: Tensor | None
    """[T, H], the gradient of the lse; None if it is zero."""
    q_wanted: bool
    """Whether the queries' gradient is wanted; otherwise it is returned empty."""
    rows_wanted: bool
    """Whether the rows' gradients are wanted; otherwise they are returned empty."""
    deterministic: bool
    """Whether the gradients of rows are added up in one order, whatever the batch."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> tuple[Tensor, list[Tensor], Tensor]:
        """Gradients of the queries [T, H, width], of the rows [N, width] of every selection and of the sink [H], each
        in the dtype of its argument."""
        dq = self.q.new_empty(self.q.shape if self.q_wanted else (0,), dtype=self.q.dtype)
        shapes = [s.rows.shape if self.rows_wanted else (0,) for s in self.selections]
        drows = [s.rows.new_empty(shape, dtype=self.q.dtype) for s, shape in zip(self.selections, shapes, strict=True)]
        sink = self.lse.new_empty(0, dtype=self.lse.dtype) if self.sink is None else torch.empty_like(self.sink)
        return dq, drows, sink


class IndexTarget(NamedTuple):
    """The probabilities that attention gives to the rows of one selection, summed over heads."""

    q: Tensor
    """[T, H, width] in bf16, fp16, fp32 or fp64."""
    selection: list[Rows]
    """One member: the rows whose probabilities are asked for."""
    lse: Tensor
    """[T, H] in the accumulator's dtype, over the rows of all selections."""
    scale: float
    """Softmax scale."""
    sink: Tensor | None
    """[H] in the accumulator's dtype, contiguous."""
    normalise: bool
    """Whether to divide by the sum over the row."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> Tensor:
        """Probabilities [T, K] in the accumulator's dtype, 0 in columns that are skipped."""
        return self.lse.new_empty(self.selection[0].slots.shape, dtype=self.lse.dtype)


attend_rows = Operation("attend", AttendRows, AttendRows.fake, trains="attend_rows")
attend_rows_backward = Operation("attend", AttendRowsBackward, AttendRowsBackward.fake, trains="attend_rows")
index_target = Operation("attend", IndexTarget, IndexTarget.fake, trains="index_target")


def _save(ctx: Any, call: AttendRows, result: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    out, lse, max_logits, rest = result
    ctx.mark_non_differentiable(max_logits, rest)
    save_for_backward(ctx, call.q, call.sink, out, lse, rest, *_tensors(call.selections))
    ctx.call = call._replace(q=None, sink=None, selections=[])  # type: ignore[arg-type]


def _tensors(selections: list[Rows]) -> list[Tensor | None]:
    return [tensor for selection in selections for tensor in (selection.rows, selection.slots, selection.lengths)]


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _max_logits: None, _rest: None) -> dict[str, Any]:
    if dout is None and dlse is None:
        return {}
    saved = ctx.saved_tensors  # once: checkpointing refuses to recompute them a second time
    q, sink, out, lse, rest, *tensors = saved
    refuse_second_derivatives("attend_rows", *saved, dout, dlse)
    selections = [Rows(*tensors[at : at + 3]) for at in range(0, len(tensors), 3)]
    given, (wanted, rows_wanted, *_) = ctx.call, ctx.needs_input_grad
    rows_wanted = any(rows_wanted) if isinstance(rows_wanted, list) else rows_wanted
    dq, drows, dsink = attend_rows_backward(
        AttendRowsBackward(
            *(q, selections, given.scale, sink, out, rest, lse, dout, dlse, wanted, rows_wanted),
            *(given.deterministic, given.backend),
        )
    )
    found: dict[str, Any] = {"q": dq} if wanted else {}
    if rows_wanted:
        found["selections_rows"] = drows
    if sink is not None:
        found["sink"] = dsink
    return found


differentiate(attend_rows, _save, _backward)
