"""Layers whose ranks select together, over gloo: the same bits as alone, and no write if one rank refuses its call."""

from typing import Any

import pytest
import ranks_layers
from rank_processes import run_on_ranks


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; the processes run once for all tests."""
    return run_on_ranks(request.param, ranks_layers.everything, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("what", ["together", "v4"])
def test_the_same_bits_as_alone(ranks: list[dict[str, Any]], what: str) -> None:
    for found in ranks:
        assert found[what]
        assert [name for name, alike in found[what].items() if not alike] == []


FAILURES = {
    "sink": "ValueError: sink must be of shape [H=4], got [3]",
    "index queries": "ValueError: index.q must be of shape [T=20, H, D=16], got [20, 8, 15]",
    "query": "TypeError: q must be a tensor [rows, H, D], got NoneType",
    "select": "TypeError: index.weights must be a tensor [T, H], got NoneType",
    "V4": "TypeError: hidden must be bfloat16 or float16 or float32, got float64",
}


@pytest.mark.parametrize("name", FAILURES)
def test_no_rank_writes_if_one_refuses(ranks: list[dict[str, Any]], name: str) -> None:
    size = len(ranks)
    *others, refused = (found["failures"][name] for found in ranks)
    assert refused[0].startswith(FAILURES[name])
    for told, unwritten in (*others, refused):
        assert unwritten
        if told != refused[0]:
            assert told.startswith(f"RuntimeError: rank {size - 1} of {size} failed, so that no rank has a result: ")
            assert FAILURES[name] in told
    assert all(told != refused[0] for told, _ in others)


def test_ranks_are_in_step_afterwards(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["failures"]["afterwards"] == ("nothing", False)
