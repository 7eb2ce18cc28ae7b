"""Sparse attention on Hopper: few heads over FP8 rows in CUDA C++, everything else by the portable kernels."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tamis.cache import Selection
from tamis.ops.attend import few_heads, triton_kernels
from tamis.ops.attend.few_heads import Target
from tamis.ops.combine.triton_kernels import combine_with_maxima

if TYPE_CHECKING:
    from tamis.testing.offline_cuda import CudaCase


def attend_slots(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`; each selection is cut into parts of its own, one launch per selection."""
    if few_heads.refusal(q, selections, value_dim) is not None:
        return triton_kernels.attend_slots(q, selections, scale=scale, value_dim=value_dim, splits=splits)
    variant, cores = _variant(q, splits)
    counts = [_parts(q, s, variant, cores, splits) for s in selections]
    found = Target.empty(sum(counts), *q.shape[:2], device=q.device)
    _attend_in_parts(q, selections, counts, variant, scale, found)
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
    """As `reference.attend_into`; tokens that are not cut go straight into `out`."""
    value_dim = out.shape[2]
    if few_heads.refusal(q, selections, value_dim) is not None:
        return triton_kernels.attend_into(q, selections, scale=scale, splits=splits, sink=sink, out=out)
    variant, cores = _variant(q, splits)
    tokens, heads, _ = q.shape
    if len(selections) == 1 and few_heads.fits_directly(out):
        cut = few_heads.choose_cut(tokens, selections[0].slots.shape[1], variant, cores)
        if splits is not None:
            parts = _parts(q, selections[0], variant, cores, splits)
            cut = few_heads.Cut(tokens, 1) if parts == 1 else few_heads.Cut(0, parts)
        lse = torch.empty(tokens, heads, device=q.device)
        whole = Target(out, lse, torch.empty_like(lse))
        cut_up = Target.empty(cut.parts, tokens - cut.whole, heads, device=q.device)
        few_heads.attend_items(q, selections[0], variant, scale=scale, sink=sink, whole=whole, parts=cut_up)
        if cut.whole < tokens:
            rest = slice(cut.whole, tokens)
            combine_with_maxima(*cut_up, sink, out[rest], into=(whole.lse[rest], whole.maxima[rest]))
        return whole.lse, whole.maxima
    counts = [_parts(q, s, variant, cores, splits) for s in selections]
    found = Target.empty(sum(counts), tokens, heads, device=q.device)
    _attend_in_parts(q, selections, counts, variant, scale, found)
    return combine_with_maxima(*found, sink, out)


def _variant(q: Tensor, splits: int | None) -> tuple[few_heads.Variant, int]:
    """How blocks are laid out, and the multiprocessors they run on; the former is part of what fixes a row's bits."""
    tokens, heads, _ = q.shape
    cores = few_heads.multiprocessors(q.device)
    return few_heads.usual_variant(tokens if splits is None else None, heads, cores), cores


def _parts(q: Tensor, selection: Selection, variant: few_heads.Variant, cores: int, splits: int | None) -> int:
    columns = selection.slots.shape[1]
    if splits is None:
        return few_heads.choose_cut(q.shape[0], columns, variant, cores, direct=False).parts
    return min(splits, max(1, columns))


def _attend_in_parts(
    q: Tensor,
    selections: Sequence[Selection],
    counts: list[int],
    variant: few_heads.Variant,
    scale: float | Tensor,
    found: Target,
) -> None:
    """Every selection in parts of its own, one after the other in `found` [P, T, ...]."""
    first = 0
    for selection, count in zip(selections, counts, strict=True):
        part = Target(*(tensor[first : first + count] for tensor in found))
        few_heads.attend_items(q, selection, variant, scale=scale, sink=None, whole=None, parts=part)
        first += count


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.testing.offline_cuda` compiles."""
    yield from few_heads.offline_cases()
