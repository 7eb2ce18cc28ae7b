"""tamis' indexer in vLLM's own layers, in processes of their own: with our attention, on two gloo ranks, in V4."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import relative_error
from rank_cases import Case
from ranks import run_on_ranks

from tamis.integrations.vllm.versions import divides_prompts

if not divides_prompts():
    pytest.skip("written for the layers of vLLM 0.32", allow_module_level=True)

CASES = (
    Case((300, 1, 165, 130), (1, 1, 30, 5), 2, tensor=2, index=True),
    Case((300, 1, 2, 129), (1, 1, 1, 1), tensor=2, index=True, cache_dtype="fp8_ds_mla"),
    Case((300, 5, 129, 90, 200, 77, 64, 31), (3,) * 8, tensor=2, index=True, drafts=2),
    Case((200,), (1,), tensor=2, index=True),
)


@pytest.mark.parametrize("share", [False, True])
def test_a_layer_of_vllm_selects_and_attends_on_two_ranks(tmp_path: Path, share: bool) -> None:
    options = {"indexer": "tamis", "share_indexer": share}
    ranks: list[Any] = run_on_ranks(2, tmp_path, "index_programs.select_and_attend", CASES, options)
    for case, *found in zip(CASES, *ranks, strict=True):
        for rank in found:
            assert rank["operator"] == "Indexer"
            # One token is not worth an exchange.
            assert rank["shared"] == (share and sum(case.queries) > 1), case
            assert torch.equal(rank["positions"], rank["selected"]), case
        whole = torch.cat([rank["output"] for rank in found], 1)
        assert relative_error(whole, found[0]["expected"]) < 2e-6, case


def test_ranks_that_divide_the_keys_select_together(tmp_path: Path) -> None:
    """Decode context parallelism: each rank has every other position, or every other sixteen, of each request."""
    cases = [replace(case, decode=2, interleave=interleave) for case in CASES for interleave in (1, 16)]
    ranks: list[Any] = run_on_ranks(2, tmp_path, "index_programs.select_and_attend", cases, {"indexer": "tamis"})
    for case, *found in zip(cases, *ranks, strict=True):
        for rank in found:
            assert torch.equal(rank["positions"], rank["selected"]), case
        whole = torch.cat([rank["output"] for rank in found], 1)
        assert relative_error(whole, found[0]["expected"]) < 2e-6, case


def test_the_operator_of_v4_selects_compressed_keys(tmp_path: Path) -> None:
    lengths, queries = [1, 700, 90, 3, 1000], [1, 1, 40, 3, 70]
    (found,) = run_on_ranks(1, tmp_path, "index_programs.select_compressed", lengths, queries)
    assert found["operator"] == "Indexer"
    assert torch.equal(found["positions"], found["selected"])
    # The compressor reads where keys go: every fourth token completes one.
    token = 0
    for request, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        for position in range(length - count, length):
            page, row = divmod(position // 4, 64)
            expected = int(found["table"][request, page]) * 64 + row if position % 4 == 3 else -1
            assert int(found["slots"][token]) == expected
            token += 1
