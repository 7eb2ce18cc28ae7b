"""Sparse attention on Hopper: rows in FP8 and bf16 by kernels in CUDA C++, the rest by the portable ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops.attention import triton_kernels
from tamis.ops.attention.hopper import few_heads, many_heads
from tamis.ops.attention.hopper import splits as split_kv

if TYPE_CHECKING:
    from tamis.backends import Need
    from tamis.lab.testing.offline_cuda import CudaCase

H200_MULTIPROCESSORS = 132
"""What an explanation reckons with: it may be asked for on a machine without the device."""


def attend_slots(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`."""
    kernels = kernels_for(q, selections, value_dim, splits)
    found: tuple[Tensor, Tensor, Tensor] = kernels.attend_slots(
        q, selections, scale=scale, value_dim=value_dim, splits=splits
    )
    return found


def attend_into(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    splits: int | None,
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_into`."""
    kernels = kernels_for(q, selections, out.shape[2], splits)
    found: tuple[Tensor, Tensor] = kernels.attend_into(q, selections, scale=scale, splits=splits, sink=sink, out=out)
    return found


def check_attend(q: Tensor, selections: Sequence[Selection], value_dim: int) -> None:
    """Refuse what neither the portable kernels nor those here can do. The former take the most and say it soonest."""
    try:
        triton_kernels.check_attend(q, selections, value_dim)
    except (TypeError, ValueError):
        if all(kernels.refusal(q, selections, value_dim) is not None for kernels in (few_heads, many_heads)):
            raise


def translates_freely(q: Tensor, selections: Sequence[Selection], *, value_dim: int) -> bool:
    """Those for few heads fetch pages while they wait for rows."""
    return kernels_for(q, selections, value_dim, None) is few_heads


def kernels_for(
    q: Tensor,
    selections: Sequence[Selection],
    value_dim: int,
    splits: int | None,
    against: dict[str, str] | None = None,
) -> ModuleType:
    """Kernels that take such a call and are fastest at it: those for few heads, those for many, or the portable ones.

    Where the number of parts is given, the tokens have no say, so that a row's bits do not depend on the rest of the
    batch. `against`, if given, is told why each of those that come first does not take the call.
    """
    bf16_rows = selections[0].cache.layout.scales is None
    few = few_heads.suits(q.shape[0] if splits is None else None, q.shape[1], bf16_rows)
    order = [few_heads, many_heads] if few else [many_heads, few_heads]
    for kernels in order:
        reason = kernels.refusal(q, selections, value_dim)
        if reason is None:
            return kernels
        if against is not None:
            against[kernels.NAME] = reason
    return triton_kernels


def explain_kernels(need: "Need") -> tuple[str, list[str]]:
    """Which source attends for a layer, by the number of tokens where that matters, and where it is the portable one,
    why. Tensors without memory are put to `kernels_for`, so that an explanation is the decision."""
    against: dict[str, str] = {}
    begins = [(1, _source(need, 1, against))]
    for power in range(1, 13):
        first, last = 2 ** (power - 1), 2**power
        while _source(need, last, against) != begins[-1][1]:
            while last - first > 1:
                middle = (first + last) // 2
                same = _source(need, middle, against) == begins[-1][1]
                first, last = (middle, last) if same else (first, middle)
            begins.append((last, _source(need, last, against)))
            first, last = last, 2**power
    up_to = [f"{name} for up to {begin - 1} tokens" for (_, name), (begin, _) in pairwise(begins)]
    reasons = [f"{kernels}: {reason}" for kernels, reason in against.items()]
    portable = any(name == "triton" for _, name in begins)
    runs = ", ".join([*up_to, f"{begins[-1][1]} for more"]) if up_to else begins[0][1]
    return runs, reasons if portable else []


def _source(need: "Need", tokens: int, against: dict[str, str]) -> str:
    """The file that attends for so many tokens of a layer."""
    q = torch.empty(tokens, need.spec.heads, need.layout.width, dtype=need.dtype, device="meta")
    cache = PagedCache(need.layout, 2, need.page_size, device="meta")
    selection = Selection(cache, torch.empty(tokens, need.spec.topk or 1, dtype=torch.int32, device="meta"))
    # Layers that compress attend to entries beside their window.
    selections = [selection] * (2 if need.spec.kind in ("overlapping", "plain") else 1)
    kernels = kernels_for(q, selections, need.spec.value_dim, None, against)
    if kernels is triton_kernels:
        return "triton"
    return str(kernels.source(q, selections, H200_MULTIPROCESSORS))


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.lab.testing.offline_cuda` compiles."""
    from tamis.lab.testing.offline_cuda import CudaCase

    for batch in split_kv.MERGE_BATCHES:
        yield CudaCase(f"attend, merging splits, {batch} at once", split_kv.merge_program(batch), 0)
    yield from few_heads.offline_cases()
    yield from many_heads.offline_cases()
