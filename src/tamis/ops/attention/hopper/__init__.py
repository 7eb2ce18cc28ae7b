"""Sparse attention on Hopper: CUDA C++ kernels for FP8 and bf16 rows, the portable kernels for everything else."""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.cuda.device import sm_count
from tamis.ops.attention import triton_kernels
from tamis.ops.attention.hopper import few_heads, many_heads
from tamis.ops.attention.hopper.few_heads_shapes import MMA_HEADS
from tamis.ops.attention.hopper.prepared import PreparedAttend
from tamis.ops.attention.operations import Attend, AttendSlots

if TYPE_CHECKING:
    from tamis.backends import Need

FEW_TOKENS = 512
"""Explanations look at every number of tokens up to this one."""
H200_SMS = 132
"""SMs of an H200, which explanations assume, since the machine that asks may have no device."""


def attend_slots(call: AttendSlots) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`."""
    kernels = kernels_for(call.q, call.selections, call.value_dim, call.splits)
    found: tuple[Tensor, Tensor, Tensor] = kernels.attend_slots(call)
    return found


def attend(call: Attend) -> tuple[Tensor, Tensor]:
    """As `reference.attend`. Positions are looked up in the kernels, while these wait for rows."""
    kernels = kernels_for(call.q, call.selections, call.value_dim, call.splits)
    found: tuple[Tensor, Tensor] = kernels.attend(call)
    return found


def attend_with_rest(call: Attend, rest: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `attend`, for a bf16 output; `rest`, contiguous as the output, receives what rounding cuts off it. None, and
    nothing done, if the kernels that take the call do not write it."""
    kernels = kernels_for(call.q, call.selections, call.value_dim, call.splits)
    if kernels is triton_kernels or not kernels.can_keep_rest(call):
        return None
    found: tuple[Tensor, Tensor] = kernels.attend(call, rest)
    return found


def prepare_attend(call: Attend) -> PreparedAttend | None:
    """Launches for calls like this one; None for the portable kernels, and for calls that copy tensors."""
    kernels = kernels_for(call.q, call.selections, call.value_dim, call.splits)
    if kernels is triton_kernels:
        return None
    found: PreparedAttend | None = kernels.prepare_attend(call)
    return found


def check_attend(call: Attend | AttendSlots) -> None:
    """Refuse calls that neither the portable kernels nor those here take. The portable ones take the most calls, so
    their check runs first."""
    try:
        triton_kernels.check_attend(call)
    except (TypeError, ValueError):
        given = (call.q, call.selections, call.value_dim)
        if all(kernels.refusal(*given) is not None for kernels in (few_heads, many_heads)):
            raise


check_attend_slots = check_attend


def kernels_for(
    q: Tensor,
    selections: Sequence[Selection],
    value_dim: int,
    splits: int | None,
    against: dict[str, str] | None = None,
) -> ModuleType:
    """The fastest kernels that take such a call: those for few heads, those for many, or the portable ones.

    With a given number of splits the choice does not depend on the number of tokens, so that a row's bits do not depend
    on the rest of the batch. `against`, if given, receives the reason why kernels that would be preferred refuse the
    call, by their name.
    """
    given = (q, selections, value_dim)
    reasons = {kernels: kernels.refusal(*given) for kernels in (few_heads, many_heads)}
    order = [few_heads, many_heads] if _few_first(q, selections, splits, reasons) else [many_heads, few_heads]
    for kernels in order:
        reason = reasons[kernels]
        if reason is None:
            return kernels
        if against is not None:
            against[kernels.NAME] = reason
    return triton_kernels


def _few_first(
    q: Tensor, selections: Sequence[Selection], splits: int | None, reasons: dict[ModuleType, str | None]
) -> bool:
    """Whether the kernels for few heads are preferred, given the reasons why kernels refuse the call."""
    bf16_rows = selections[0].cache.layout.scales is None
    both = all(reason is None for reason in reasons.values())
    if bf16_rows or splits is not None or not both or q.shape[1] <= MMA_HEADS:
        return few_heads.suits(q.shape[0] if splits is None else None, q.shape[1], bf16_rows)
    sms = H200_SMS if q.device.type == "meta" else sm_count(q.device)
    # Up to 32 heads, kernels for 64 heads compute mostly padding, and estimates are not that exact.
    margin = 1.25 if q.shape[1] <= 2 * MMA_HEADS else 1.0
    return few_heads.estimate(q, selections, sms) <= margin * many_heads.estimate(q, selections, q.device)


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Say which source attends for a layer, by the number of tokens if that matters, and why the portable kernels do if
    they do. The answer comes from `kernels_for`, with tensors on the meta device, so that it agrees with the choice."""
    against: dict[str, str] = {}
    begins = [(1, _source(need, 1, against))]
    before = 1
    for tokens in (*range(2, FEW_TOKENS + 1), *(FEW_TOKENS * 2**power for power in range(1, 4))):
        # Estimates of small batches may prefer a kernel more than once; those of large ones change at most once.
        while _source(need, tokens, against) != begins[-1][1]:
            first, last = before, tokens
            while last - first > 1:
                middle = (first + last) // 2
                same = _source(need, middle, against) == begins[-1][1]
                first, last = (middle, last) if same else (first, middle)
            begins.append((last, _source(need, last, against)))
        before = tokens
    up_to = [f"{name} for up to {begin - 1} tokens" for (_, name), (begin, _) in pairwise(begins)]
    reasons = [f"{kernels}: {reason}" for kernels, reason in against.items()]
    portable = any(name == "triton" for _, name in begins)
    runs = ", ".join([*up_to, f"{begins[-1][1]} for more"]) if up_to else begins[0][1]
    return runs, reasons if portable else []


def _source(need: "Need", tokens: int, against: dict[str, str]) -> str:
    """The name of the source that attends for a number of tokens of a layer."""
    q = torch.empty(tokens, need.spec.heads, need.layout.width, dtype=need.dtype, device="meta")
    cache = PagedCache(need.layout, 2, need.page_size, device="meta")
    selection = Selection(cache, torch.empty(tokens, need.spec.topk or 1, dtype=torch.int32, device="meta"))
    # Layers that compress attend to entries beside their window.
    selections = [selection] * (2 if need.spec.kind in ("overlapping", "plain", "indexed") else 1)
    kernels = kernels_for(q, selections, need.spec.value_dim, None, against)
    if kernels is triton_kernels:
        return "triton"
    return str(kernels.source(q, selections, H200_SMS))
