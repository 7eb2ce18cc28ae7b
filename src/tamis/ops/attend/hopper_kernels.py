"""Sparse attention on Hopper: rows in FP8 and bf16 by kernels in CUDA C++, the rest by the portable ones."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from tamis.cache import Selection
from tamis.ops.attend import few_heads, items, many_heads, triton_kernels

if TYPE_CHECKING:
    from tamis.testing.offline_cuda import CudaCase


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


def kernels_for(q: Tensor, selections: Sequence[Selection], value_dim: int, splits: int | None) -> ModuleType:
    """Kernels that take such a call and are fastest at it: those for few heads, those for many, or the portable ones.

    Where the number of parts is given, the tokens have no say, so that a row's bits do not depend on the rest of the
    batch.
    """
    bf16_rows = selections[0].cache.layout.scales is None
    few = few_heads.suits(q.shape[0] if splits is None else None, q.shape[1], bf16_rows)
    order = [few_heads, many_heads] if few else [many_heads, few_heads]
    for kernels in order:
        if kernels.refusal(q, selections, value_dim) is None:
            return kernels
    return triton_kernels


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.testing.offline_cuda` compiles."""
    from tamis.testing.offline_cuda import CudaCase

    for at_once in items.MERGED_AT_ONCE:
        yield CudaCase(f"attend, merging parts, {at_once} at once", items.merge_program(at_once), 0)
    yield from few_heads.offline_cases()
    yield from many_heads.offline_cases()
