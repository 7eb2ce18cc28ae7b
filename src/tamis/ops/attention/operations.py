"""The operations of stage `attend`; see `tamis.ops.library`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.cache.selection import Selection
from tamis.ops.combine.operations import CombineParts
from tamis.ops.library import Operation, Written, implementation
from tamis.ops.lse import LseForm
from tamis.ops.translate.operations import TranslatePositions, translate_positions


class AttendSlots(NamedTuple):
    """Attention in splits, each normalised separately."""

    q: Tensor
    """[T, H, width] in bf16, fp16, fp32, fp64 or e4m3."""
    selections: list[Selection]
    """The rows that each token attends to; every cache has rows of q's width."""
    scale: float
    """Softmax scale, times the query scale if that is a number."""
    q_scale: Tensor | None
    """float32 [], the query scale if it is a tensor."""
    value_dim: int
    """How many leading columns of a row are its value."""
    splits: int | None
    """How many splits the columns are divided into; None lets the backend choose."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q",)

    @property
    def factor(self) -> float | Tensor:
        """The factor of all logits: a number, or a tensor [] in the accumulator's dtype."""
        return _factor(self.q, self.scale, self.q_scale)

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        """Partial outputs [S, T, H, V], lse and max_logits [S, T, H], in the accumulator's dtype."""
        # The number of splits S that a backend chooses is not known while torch.compile traces.
        splits = torch.library.get_ctx().new_dynamic_size(min=1) if self.splits is None else self.splits
        lse = self.q.new_empty((splits, *self.q.shape[:2]), dtype=accumulator(self.q))
        return lse.new_empty((*lse.shape, self.value_dim), dtype=lse.dtype), lse, torch.empty_like(lse)

    @staticmethod
    def run(stage: Any, call: "AttendSlots") -> tuple[Tensor, Tensor, Tensor]:
        """Run a backend's kernels and return exactly as many splits as were asked for.

        A backend may split in another way, for example each selection separately. Too many splits are merged into one;
        too few are filled up with empty ones.
        """
        parts, lses, max_logits = stage.attend_slots(call)
        if call.splits is None or len(parts) == call.splits:
            return parts, lses, max_logits
        if len(parts) > call.splits:
            merged = torch.empty_like(parts[:1])
            combine = implementation("combine", call.backend, call.q.device)
            lse = combine.combine_parts(CombineParts(parts, lses, None, merged[0], call.backend))
            parts, lses, max_logits = merged, lse.unsqueeze(0), max_logits.amax(0, keepdim=True)
        missing = call.splits - len(parts)
        empty = lses.new_full((missing, *lses.shape[1:]), -torch.inf, dtype=lses.dtype)
        parts = torch.cat((parts, parts.new_zeros(missing, *parts.shape[1:], dtype=parts.dtype)))
        return parts, torch.cat((lses, empty)), torch.cat((max_logits, empty))


class Attend(NamedTuple):
    """Attention with its splits merged."""

    q: Tensor
    """[T, H, width] in bf16, fp16, fp32, fp64 or e4m3."""
    selections: list[Selection]
    """The rows that each token attends to; every cache has rows of q's width."""
    scale: float
    """Softmax scale, times the query scale if that is a number."""
    q_scale: Tensor | None
    """float32 [], the query scale if it is a tensor."""
    splits: int | None
    """How many splits the columns are divided into; None lets the backend choose."""
    sink: Tensor | None
    """float32 [H], contiguous."""
    out: Written[Tensor]
    """[T, H, value_dim] in bf16, fp16, fp32 or fp64."""
    translate_first: bool
    """Whether a separate pass may translate positions where that is faster; if False, kernels look positions up."""
    lse_form: LseForm
    """The layout and convention of the returned lse and max_logits."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return "q", "sink"

    @property
    def value_dim(self) -> int:
        """Leading columns of a row that are its value."""
        return self.out.shape[2]

    @property
    def factor(self) -> float | Tensor:
        """The factor of all logits: a number, or a tensor [] in the accumulator's dtype."""
        return _factor(self.q, self.scale, self.q_scale)

    def in_splits(self) -> AttendSlots:
        """The same attention without merging its splits, so without sink and output."""
        q, selections, scale, q_scale, splits, _, out, _, _, backend = self
        return AttendSlots(q, selections, scale, q_scale, out.shape[2], splits, backend)

    def translated(self) -> "Attend":
        """The same attention with all positions translated to slots."""
        return self._replace(selections=[_translated(selection, self.backend) for selection in self.selections])

    def fake(self) -> tuple[Tensor, Tensor]:
        """lse and max_logits in their form, in the accumulator's dtype."""
        lse = self.q.new_empty(self.lse_form.shape(*self.q.shape[:2]), dtype=accumulator(self.q))
        return lse, torch.empty_like(lse)


attend_slots = Operation("attend", AttendSlots, AttendSlots.fake)
attend = Operation("attend", Attend, Attend.fake)


def accumulator(q: Tensor) -> torch.dtype:
    """The dtype in which a query's attention is summed: float32, or float64 for exact checks."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _factor(q: Tensor, scale: float, q_scale: Tensor | None) -> float | Tensor:
    return scale if q_scale is None else scale * q_scale.to(accumulator(q))


def _translated(selection: Selection, backend: str) -> Selection:
    if selection.request_ids is None or selection.block_table is None:
        return selection
    ids, table, size = selection.request_ids, selection.block_table, selection.cache.page_size
    call = TranslatePositions(selection.slots, ids, table, size, size, None, None, (1, 0, 1), False, backend)
    return Selection(selection.cache, translate_positions(call)[0], selection.lengths)
