"""vLLM's translation of positions by its own name: every rule of it, one by one, against a loop."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.integrations.vllm.sparse_utils import triton_convert_req_index_to_global_index as convert

TABLE = torch.tensor([[3, 5, -1], [9, 2, 4]], dtype=torch.int32)
IDS = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
POSITIONS = torch.tensor(
    [[0, 7, -1, 8, 30], [23, -1, 24, 1, 2], [-5, -1, -1, -1, -1], [9, 17, 15, 16, 3]], dtype=torch.int32
)


def slowly(size: int = 8, stride: int = 8, ranks: int = 1, rank: int = 0, run: int = 1) -> list[list[int]]:
    found = []
    for request, row in zip(IDS.tolist(), POSITIONS.tolist(), strict=True):
        line = []
        for position in row:
            local = position // (run * ranks) * run + position % run
            page = local // size
            mine = position >= 0 and position // run % ranks == rank and page < 3
            page_id = int(TABLE[request, page]) if mine else -1
            line.append(page_id * stride + local % size if page_id >= 0 else -1)
        found.append(line)
    return found


def call(**options: Any) -> Any:
    return convert(IDS, TABLE, POSITIONS, **({"BLOCK_SIZE": 8} | options))


@pytest.mark.parametrize("options", [{}, {"stride": 20}, {"ranks": 2, "rank": 1}, {"ranks": 3, "rank": 0, "run": 2}])
def test_every_rule(options: dict[str, int]) -> None:
    names = {"stride": "BLOCK_STRIDE_ROWS", "ranks": "dcp_size", "rank": "dcp_rank"}
    given = {names.get(name, "cp_kv_cache_interleave_size"): value for name, value in options.items()}
    expected = slowly(**options)
    found = call(**given)
    assert found.tolist() == expected
    slots, counts = call(**given, return_valid_counts=True)
    kept = [[slot for slot in row if slot >= 0] for row in expected]
    assert counts.tolist() == [len(row) for row in kept]
    assert slots.tolist() == [row + [-1] * (5 - len(row)) for row in kept]


def test_by_place_as_vllm_calls_it() -> None:
    assert convert(IDS, TABLE, POSITIONS, 8, None, 5, 128).tolist() == slowly()
    table = torch.arange(1, 5, dtype=torch.int32).view(2, 2)
    positions = torch.tensor([[63, 64]] * 4, dtype=torch.int32)
    assert convert(IDS, table, positions)[0].tolist() == [127, 128]


def test_tokens_of_prefills_get_rows_of_the_workspace() -> None:
    ids, starts = torch.tensor([-1, 0, 0, 1], dtype=torch.int32), torch.tensor([0, 100], dtype=torch.int32)
    found = call(HAS_PREFILL_WORKSPACE=True, prefill_workspace_request_ids=ids, prefill_workspace_starts=starts)
    assert found[0].tolist() == slowly()[0]
    assert found[1].tolist() == [23, -1, -1, 1, 2]
    assert found[3].tolist() == [109, 117, 115, 116, 103], "a workspace has no absent pages"
    # Without the switch they are ignored, as in vLLM.
    assert call(prefill_workspace_request_ids=ids, prefill_workspace_starts=starts).tolist() == slowly()


def test_results_in_buffers_of_the_caller() -> None:
    out, counts = torch.full((4, 5), 77, dtype=torch.int32), torch.full((4,), 77, dtype=torch.int32)
    found: tuple[Tensor, Tensor] = call(return_valid_counts=True, out=out, valid_counts_out=counts)
    assert found[0] is out
    assert found[1] is counts
    assert out.tolist() == call(return_valid_counts=True)[0].tolist()
    assert counts.tolist() == [3, 3, 0, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"NUM_TOPK_TOKENS": 2048}, "NUM_TOPK_TOKENS must be 5, token_indices' columns, got 2048"),
        ({"HAS_PREFILL_WORKSPACE": True}, "prefill_workspace_starts must be given"),
        ({"HAS_PREFILL_WORKSPACE": True, "dcp_size": 2}, "dcp_size must be 1 with HAS_PREFILL_WORKSPACE, got 2"),
        ({"out": torch.zeros(4, 4, dtype=torch.int32)}, r"out must be of shape \[T=4, K=5\], got \[4, 4\]"),
        ({"valid_counts_out": torch.zeros(3, dtype=torch.int32)}, r"valid_counts_out must be of shape \[T=4\]"),
        ({"BLOCK_SIZE": 0}, "page_size must be >= 1"),
        ({"dcp_size": 2, "dcp_rank": 2}, "rank must be between 0 and 1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_as_many_request_numbers_as_rows() -> None:
    """A longer list made vLLM's kernel write past its output (vllm#47327)."""
    with pytest.raises(ValueError, match=r"request_ids must be of shape \[T=4\]"):
        convert(torch.cat((IDS, IDS)), TABLE, POSITIONS)
    empty = convert(IDS[:0], TABLE, POSITIONS[:0])
    assert isinstance(empty, Tensor)
    assert empty.shape == (0, 5)
