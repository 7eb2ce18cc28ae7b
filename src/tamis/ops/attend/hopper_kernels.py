"""Sparse attention on Hopper: few heads over FP8 rows in CUDA C++, everything else by the portable kernels."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis.cache import Selection
from tamis.ops.attend import few_heads, triton_kernels
from tamis.ops.combine.triton_kernels import combine_with_maxima

if TYPE_CHECKING:
    from tamis.testing.offline_cuda import CudaCase


def attend_slots(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`; each selection is cut into parts of its own, one launch per selection."""
    if few_heads.refusal(q, selections, value_dim) is not None:
        return triton_kernels.attend_slots(q, selections, scale=scale, value_dim=value_dim, splits=splits)
    launches = _plan(q, selections, splits)
    out = torch.empty(sum(parts for _, parts in launches), *q.shape[:2], value_dim, device=q.device)
    return out, *_launch_all(q, selections, launches, scale, None, out)


def attend_into(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    splits: int | None,
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_into`; a single part goes straight into `out`."""
    value_dim = out.shape[2]
    if few_heads.refusal(q, selections, value_dim) is not None:
        return triton_kernels.attend_into(q, selections, scale=scale, splits=splits, sink=sink, out=out)
    launches = _plan(q, selections, splits)
    parts = sum(count for _, count in launches)
    if parts == 1 and few_heads.fits_directly(out):
        lse, top = _launch_all(q, selections, launches, scale, sink, out.unsqueeze(0))
        return lse[0], top[0]
    room = torch.empty(parts, *q.shape[:2], value_dim, device=q.device)
    lse, top = _launch_all(q, selections, launches, scale, None, room)
    return combine_with_maxima(room, lse, top, sink, out)


def _plan(q: Tensor, selections: Sequence[Selection], splits: int | None) -> list[tuple[few_heads.Variant, int]]:
    """The variant and the parts of each selection."""
    tokens, heads, _ = q.shape
    cores = few_heads.multiprocessors(q.device)
    variant = few_heads.usual_variant(tokens, heads, cores)
    launches = []
    for selection in selections:
        columns = selection.slots.shape[1]
        parts = few_heads.choose_parts(tokens, columns, variant, cores) if splits is None else splits
        launches.append((variant, min(parts, max(1, columns))))
    return launches


def _launch_all(
    q: Tensor,
    selections: Sequence[Selection],
    launches: list[tuple[few_heads.Variant, int]],
    scale: float | Tensor,
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `out` [parts, T, H, V]; lse and maxima [parts, T, H]."""
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    top = torch.empty_like(lse)
    first = 0
    for selection, (variant, count) in zip(selections, launches, strict=True):
        span = slice(first, first + count)
        few_heads.attend_parts(
            q, selection, variant, scale=scale, sink=sink, out=out[span], lse=lse[span], maxima=top[span]
        )
        first += count
    return lse, top


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.testing.offline_cuda` compiles."""
    yield from few_heads.offline_cases()
