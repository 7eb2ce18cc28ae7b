"""Checks of stage `combine`, against float64."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.lab.testing import cases, oracle
from tamis.lab.testing.cases import CombineCase
from tamis.lab.verify.attend import SIXTEEN_BITS, attention_error
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import graph_check, repeat_check
from tamis.ops import Partials, combine_parts

MERGED = 1e-5


def combine_checks(target: Target) -> Iterator[Check]:
    """Merging by lse, against float64."""
    if target.runs("combine") is None:
        yield Check("combine", "values", MERGED, reason=f"{target.backend} does not have this stage")
        return
    found = list(cases.combine_cases(quick=target.quick))
    for dtype, bound in ((torch.float32, MERGED), (torch.bfloat16, SIXTEEN_BITS)):
        some = [case for case in found if case.dtype == dtype]
        label = f"values, to {str(dtype).removeprefix('torch.')}"
        yield Check("combine", label, bound, named_calls(_combine, target, some))
    yield repeat_check("combine", named_calls(_combined, target, found))
    replays = named_calls(_combine_again, target, found)
    yield graph_check(target, "combine", ["combine"], replays)


def _combine_call(target: Target, case: CombineCase, out: Tensor, lse: Tensor) -> list[Tensor]:
    room = torch.full(out.shape[1:], torch.nan, dtype=case.dtype, device=out.device)
    found = combine_parts(Partials(out, lse), sink=case.sink, out=room, backend=target.backend)
    return [room, found.lse]


def _combined(target: Target, case: CombineCase) -> list[Tensor]:
    moved = target.here(case)
    return _combine_call(target, moved, moved.out, moved.lse)


def _combine(target: Target, case: CombineCase) -> Trial:
    found, lse = _combined(target, case)
    expected, true_lse = oracle.combine(case.out, case.lse, case.sink)
    return attention_error(found, lse, expected, true_lse)


def _combine_again(target: Target, case: CombineCase) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    moved = target.here(case)
    first, second = [moved.out, moved.lse], [moved.out.flip(1), moved.lse.flip(1)]
    return first, second, partial(_combine_call, target, moved)
