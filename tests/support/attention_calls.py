"""The tuples of stages `attend` and `combine`, for tests that call an implementation without its door."""

from collections.abc import Sequence

from torch import Tensor

from tamis import Selection
from tamis.ops.attention.operations import Attend, AttendSlots
from tamis.ops.combine.operations import CombineParts
from tamis.ops.lse import LseForm


def attend_call(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    out: Tensor,
    splits: int | None = None,
    sink: Tensor | None = None,
    translate_first: bool = False,
    lse_form: LseForm = LseForm(),  # noqa: B008
) -> Attend:
    return Attend(q, list(selections), *_scales(scale), splits, sink, out, translate_first, lse_form, "auto")


def attend_slots_call(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> AttendSlots:
    return AttendSlots(q, list(selections), *_scales(scale), value_dim, splits, "auto")


def combine_call(parts: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor) -> CombineParts:
    return CombineParts(parts, lses, sink, out, "auto")


def _scales(scale: float | Tensor) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)
