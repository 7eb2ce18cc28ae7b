"""The cases of `hostile_gpu.py`, one test each, on a GPU; without one, that they can be made and reach every source."""

import pytest
import torch
from hostile_gpu import TOPK, Case, attend, attend_cases, reduced_cases, topk

from tamis import PagedCache, Selection
from tamis.ops.attention import hopper, triton_kernels


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(attend_cases()), ids=str)
def test_attention_between_guard_zones(case: Case) -> None:
    attend(case)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", TOPK)
def test_topk_between_guard_zones(shape: tuple[int, int, int, bool]) -> None:
    topk(*shape)


@pytest.mark.parametrize("cases", [attend_cases, reduced_cases])
def test_cases_reach_every_source(cases: object) -> None:
    found = set()
    for case in cases():  # type: ignore[operator]
        cache = PagedCache(case.layout, 2, 61, device="meta")
        q = torch.empty(case.tokens, case.heads, cache.layout.width, dtype=case.dtype, device="meta")
        slots = torch.empty(case.tokens, case.columns, dtype=torch.int32, device="meta")
        selections = [Selection(cache, slots)]
        kernels = hopper.kernels_for(q, selections, 512, case.splits)
        found.add("triton" if kernels is triton_kernels else kernels.source(q, selections, 132))
    assert found == {"few_heads.cu", "heads_as_columns.cu", "many_heads.cu", "many_heads_bf16.cu", "triton"}
