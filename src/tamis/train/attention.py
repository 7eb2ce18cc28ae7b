"""Differentiable attention over rows of tensors, and the indexer's target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.selection import Rows
from tamis.ops.attention import MAX_HEADS, check_columns, row_operations
from tamis.ops.attention.operations import accumulator
from tamis.ops.attention.row_operations import AttendRows, IndexTarget
from tamis.ops.combine import Attended
from tamis.train.arguments import (
    DTYPES,
    detached,
    deterministic_mode,
    in_autocast,
    recorded,
    refuse_transforms,
    same_dtype,
)


def attend_rows(
    q: Tensor,
    selections: Rows | Sequence[Rows],
    *,
    scale: float,
    value_dim: int,
    sink: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Attended:
    """Attention of each query token over the rows selected for it, all selections under one softmax, with gradients.

    Invalid slots (negative, past the rows, beyond the row's length) are skipped and never read; duplicates count twice.
    There is no causal mask: a selection must not contain future rows. A token with nothing selected gives zeros, an lse
    of -inf, and no gradient.

    The result is differentiable in `q`, in the rows of every selection and in `sink`, through the output and through
    the lse, but not through `max_logits`, and once only. Sums are in float32 (float64 for float64 queries); a row's
    gradient is summed over all tokens before it is rounded to its dtype. Under autocast, q and rows are converted to
    its dtype.

    Args:
        q: [T, H, width] in bf16, fp16, fp32 or fp64, at most 128 heads.
        selections: what each of the T tokens attends to; rows have q's width and dtype.
        scale: softmax scale.
        value_dim: how many leading columns of a row are its value (512 in V3.2 and V4).
        sink: float32 [H], one extra logit per head with a zero value: scales the output, never the lse.
        deterministic: whether gradients of rows are added up in one order. Their bits are then the same in every run,
            for any chunk size, and for a request in a pack as alone. None follows
            `torch.are_deterministic_algorithms_enabled()`.
        backend: a name from `tamis backends`, or "auto".
    """
    selections = _as_list(selections)
    q, *rows = in_autocast(q, *(s.rows for s in selections))
    selections = [Rows(found, s.slots, s.lengths) for found, s in zip(rows, selections, strict=True)]
    check_rows(q, selections)
    checks.integer("value_dim", value_dim, low=1, high=q.shape[2])
    checks.positive_number("scale", scale)
    sink = _checked_sink(sink, q)
    refuse_transforms("attend_rows", q=q, sink=sink, **{f"selections[{n}].rows": found for n, found in enumerate(rows)})
    keep = recorded(q, sink, *rows)
    call = AttendRows(q, selections, scale, value_dim, sink, keep, deterministic_mode(deterministic), backend)
    row_operations.attend_rows.check(call)
    return Attended(*row_operations.attend_rows(call)[:3])


def index_target(
    q: Tensor,
    selections: Rows | Sequence[Rows],
    lse: Tensor,
    *,
    scale: float,
    sink: Tensor | None = None,
    of: int = -1,
    normalise: bool = True,
    backend: str = "auto",
) -> Tensor:
    """The distribution that an indexer learns: attention's probabilities over one selection, summed over heads.

    float32 [T, K] (float64 for float64 queries), 0 in columns that are skipped. All arguments count as constants. The
    probabilities are those of the joint softmax: with several selections or a sink, heads that attend elsewhere count
    less. Where heads are divided over ranks, take the sum of `normalise=False` over the ranks, then `normalise_target`.

    Args:
        q: [T, H, width], the queries of `attend_rows`.
        selections: the selections of `attend_rows`.
        lse: [T, H] that `attend_rows` returned for them.
        scale: softmax scale.
        sink: the sink of `attend_rows`.
        of: the number of the selection that the indexer makes; the last if not given.
        normalise: whether each token's probabilities are divided by their sum.
        backend: a name from `tamis backends`, or "auto".
    """
    selections = _as_list(selections)
    q, *rows = in_autocast(q, *(s.rows for s in selections))
    selections = [Rows(found, s.slots, s.lengths) for found, s in zip(rows, selections, strict=True)]
    check_rows(q, selections)
    checks.positive_number("scale", scale)
    checks.flag("normalise", normalise)
    checks.integer("of", of, low=-len(selections), high=len(selections) - 1)
    dtype = accumulator(q)
    checks.tensor("lse", lse, "T H", (dtype,), T=q.shape[0], H=q.shape[1], device=q.device)
    q, lse, sink = detached(q), detached(lse), _checked_sink(sink, q)
    chosen = selections[of]
    chosen = Rows(detached(chosen.rows), chosen.slots, chosen.lengths)
    call = IndexTarget(q, [chosen], lse, scale, None if sink is None else detached(sink), normalise, backend)
    row_operations.index_target.check(call)
    return row_operations.index_target(call)


def normalise_target(target: Tensor) -> Tensor:
    """Divide each row [T, K] by its sum; rows of zeros stay zeros."""
    checks.tensor("target", target, "T K", (torch.float32, torch.float64))
    total = target.sum(1, keepdim=True)
    return target / total.masked_fill(total == 0, 1.0)


def check_rows(q: Tensor, selections: list[Rows]) -> None:
    """Refuse queries and selections that do not fit each other."""
    sizes = checks.tensor("q", q, "T H D", DTYPES)
    if not 1 <= sizes["H"] <= MAX_HEADS:
        raise checks.refuse("q", f"of 1 to {MAX_HEADS} heads", sizes["H"], "split the heads over several calls")
    if sizes["D"] == 0:
        raise checks.refuse("q", "at least one number wide", list(q.shape))
    for number, selection in enumerate(selections):
        name, device, tokens = f"selections[{number}]", q.device, sizes["T"]
        remedy = "rows are as wide as q"
        checks.tensor(f"{name}.rows", selection.rows, "N D", DTYPES, D=sizes["D"], device=device, remedy=remedy)
        same_dtype("q", q, **{f"{name}.rows": selection.rows})
        check_columns(name, selection.slots, selection.lengths, tokens, device)


def _as_list(selections: Rows | Sequence[Rows]) -> list[Rows]:
    if isinstance(selections, Rows):
        return [selections]
    if not isinstance(selections, Sequence) or not all(isinstance(s, Rows) for s in selections):
        remedy = "wrap rows and slots in tamis.train.Rows; pages of a cache have no gradient"
        raise checks.refuse_type("selections", "Rows", checks.describe(selections), remedy)
    if not selections:
        raise checks.refuse("selections", "at least one Rows", "none", "pass the rows to attend to")
    return list(selections)


def _checked_sink(sink: Tensor | None, q: Tensor) -> Tensor | None:
    """The sink in the accumulator's dtype, contiguous."""
    if sink is None:
        return None
    dtype = accumulator(q)
    allowed = (torch.float32,) if dtype == torch.float32 else (torch.float64, torch.float32)
    checks.tensor("sink", sink, "H", allowed, H=q.shape[1], device=q.device, remedy="pass one per query head")
    if checks.visible(sink) and bool(sink.detach().isnan().any()):
        raise checks.refuse("sink", "free of NaN", "NaN", "use -inf for a head without a sink")
    return sink.to(dtype).contiguous()
