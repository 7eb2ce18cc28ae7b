"""Context parallelism inside the real vLLM: its groups, its division of batches and its layers, on two gloo ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import relative_error
from rank_cases import Case
from ranks import run_on_ranks

from tamis.integrations.vllm.versions import divides_prompts

if not divides_prompts():
    pytest.skip("written for the division of batches in vLLM 0.32", allow_module_level=True)

MIXED = {"lengths": (300, 1, 65, 130), "queries": (1, 1, 30, 5), "prompts": 2}
DECODES = {"lengths": (300, 1, 2, 129), "queries": (1, 1, 1, 1)}
DRAFTS = {"lengths": (300, 5, 129), "queries": (3, 3, 3), "drafts": 2}
SHARED = {"tensor": 2, "decode": 2}
"""Ranks that share heads and cached rows."""
DIVIDED = {"prefill": 2}
BOTH = {"prefill": 2, "decode": 2}


def attend(where: Path, *cases: Case) -> list[list[dict[str, Any]]]:
    """What each rank saw of each case, after the output was compared with float64 attention of one rank."""
    ranks = cases[0].ranks
    seen = [list(of_case) for of_case in zip(*run_on_ranks(ranks, where, "rank_programs.attend", cases), strict=True)]
    for case, found in zip(cases, seen, strict=True):
        # Ranks count over tensor parallelism first. Those that divide prompts must agree about all tokens.
        for first in range(0, ranks, case.tensor):
            whole = torch.cat([rank["output"] for rank in found[first : first + case.tensor]], 1)
            assert relative_error(whole, found[0]["expected"]) < 2e-6, case
    return seen


def test_ranks_share_rows(tmp_path: Path) -> None:
    cases = (
        Case(**MIXED, **SHARED),
        Case(**MIXED, **SHARED, interleave=16, cache_dtype="fp8_ds_mla"),
        Case(**MIXED, **SHARED, cache_dtype="fp8"),
        Case(**DECODES, **SHARED, cache_dtype="fp8_ds_mla"),
        Case(**DECODES, **SHARED, interleave=64),
        Case(**DECODES, **SHARED, interleave=16, late_interleave=True),
        Case(**DRAFTS, **SHARED, interleave=16),
        Case(**DRAFTS, **SHARED, cache_dtype="fp8_ds_mla"),
        Case(**MIXED, **SHARED, options={"dcp_comm_backend": "a2a"}),
        Case(**MIXED, **SHARED, generic=True),
        Case(**DECODES, **SHARED, generic=True),
    )
    for case, found in zip(cases, attend(tmp_path, *cases), strict=True):
        for rank in found:
            assert rank["out"].shape[:2] == rank["lse"].shape == (sum(case.queries), case.heads), case


def test_a_rank_that_owns_nothing_of_a_row_does_not_count(tmp_path: Path) -> None:
    """Its output is zero and its lse -inf, also where no rank owns anything: then the output of all is zero."""
    step = {"lengths": (300, 70, 9), "queries": (1, 2, 1), "first_only": 0, "nothing": 2}
    cases = [Case(**step, **SHARED, cache_dtype=dtype) for dtype in ("bfloat16", "fp8_ds_mla")]
    for holder, other in attend(tmp_path, *cases):
        for rank, empty in ((holder, [2]), (other, [0, 2])):
            for token in range(4):
                if token in empty:
                    assert not rank["out"][token].any()
                    assert torch.all(rank["lse"][token] == -torch.inf)
                else:
                    assert rank["out"][token].any()
                    assert rank["lse"][token].isfinite().all()
        assert not holder["output"][2].any()


def test_ranks_divide_prompts(tmp_path: Path) -> None:
    cases = (
        Case(**MIXED, **DIVIDED),
        Case(**MIXED, **DIVIDED, cache_dtype="fp8_ds_mla", nothing=20),
        # One decode, so that the second rank has no tokens at all, and a prompt of which it gets one token.
        Case((300,), (1,), **DIVIDED),
        Case((300, 2), (1, 2), 1, **DIVIDED),
        Case(**DRAFTS, **DIVIDED),
        # More parts of prompts than requests, and so many heads that prefills are gathered into a workspace.
        Case((90,) * 8, (8,) * 8, 8, **DIVIDED, cache_dtype="fp8_ds_mla", heads=64),
        Case(**MIXED, **DIVIDED, generic=True),
    )
    for case, (first, second) in zip(cases, attend(tmp_path, *cases), strict=True):
        assert first["tokens"] + second["tokens"] == sum(case.queries), case
        assert first["lse"] is None
        assert second["lse"] is None


def test_ranks_divide_prompts_and_share_rows(tmp_path: Path) -> None:
    """Decodes are merged by their lse, and prefills attend to the pages of all ranks."""
    cases = {
        Case(**MIXED, **BOTH): 1,
        Case(**MIXED, **BOTH, interleave=16, cache_dtype="fp8_ds_mla", first_only=0, nothing=20): 1,
        Case(**MIXED, **BOTH, interleave=64, cache_dtype="fp8"): 1,
        Case(**DECODES, **BOTH): None,
        Case(**DRAFTS, **BOTH, interleave=16): None,
        # Drafts, and the last token of a prompt, which cannot be divided.
        Case((300, 5, 129), (3, 2, 1), 1, **BOTH, drafts=2, interleave=16, late_interleave=True): 1,
        # Prompts whose pages do not fit into the buffers at once.
        Case((9, 1000, 900, 1100), (1, 6, 7, 8), 3, **BOTH, interleave=16): 2,
        Case((64, 40), (64, 40), 2, **BOTH): 1,
    }
    for case, found in zip(cases, attend(tmp_path, *cases), strict=True):
        decode_tokens = sum(case.queries[: len(case.queries) - case.prompts])
        for rank in found:
            assert rank["decode_tokens"] == decode_tokens, case
            assert rank["chunks"] == cases[case], case
            assert rank["lse"].shape == (decode_tokens, case.heads), case


def test_four_ranks(tmp_path: Path) -> None:
    """Two groups of two share rows and divide prompts; heads are divided between the groups."""
    attend(tmp_path, Case(**MIXED, tensor=2, prefill=2, decode=2))


def test_why_rows_are_not_shared_over_both_axes(tmp_path: Path) -> None:
    """vLLM numbers these ranks in another order than torch, which gathers their lse: it merges with the wrong ones."""
    found = run_on_ranks(4, tmp_path, "rank_programs.order", Case((1,), (1,), tensor=2, prefill=2, decode=4))
    assert found == [(0, 0), (2, 1), (1, 2), (3, 3)]
