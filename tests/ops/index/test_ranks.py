"""Selections by 2 and 4 processes over gloo: the same bits as alone, and one rank's failure is everyone's."""

from pathlib import Path
from typing import Any

import pytest
import ranks_select
from rank_processes import run_on_ranks


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found; the processes run once for all tests."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(request.param, ranks_select.everything, folder)


@pytest.mark.parametrize("what", ["shared", "sharded", "odd_keys"])
def test_the_same_bits_as_alone(ranks: list[dict[str, Any]], what: str) -> None:
    for found in ranks:
        assert found[what]
        assert [name for name, alike in found[what].items() if not alike] == []


FAILURES = {
    "wrong shape": "ValueError: weights must be of shape [T=37, H=4], got [36, 4]",
    "no tensor": "TypeError: q must be a tensor [T, H, D], got NoneType",
    "no option": "ValueError: share must be one of 'auto', 'always', got 'sometimes'",
    "other shard": "ValueError: shard must be that of rank",
    "lengths past the table": "ValueError: lengths must be between 0 and 96",
    "while selecting": "MemoryError: no room for scores",
    "while selecting another part": "MemoryError: no room for scores",
    "while placing a part": "MemoryError: no room for scores",
    "divided keys": "TypeError: lengths must be int32, got int64",
}


PARTLY_WRITTEN = ("while selecting another part", "while placing a part")


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails_makes_all_fail(ranks: list[dict[str, Any]], name: str) -> None:
    size = len(ranks)
    *others, failed = (found["failures"][name] for found in ranks)
    assert failed[0].startswith(FAILURES[name])
    for told, unwritten in others:  # a rank that waits for the group's timeout is told something else
        prefix = f"RuntimeError: rank {size - 1} of {size} failed, so that no rank has a result: "
        assert told.startswith(prefix + FAILURES[name])
        assert unwritten or name in PARTLY_WRITTEN
    assert failed[1] or name in PARTLY_WRITTEN


def test_other_lengths_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """Ranks with other lengths would make one result of two selections. Values are seen on the host."""
    for told, unwritten in (found["failures"]["other lengths"] for found in ranks):
        assert told.startswith("ValueError: a call over ranks must be the same on all, with lengths with digest ")
        assert unwritten


def test_calls_of_other_sizes_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    *others, last = (found["failures"]["other sizes"][0] for found in ranks)
    assert last.startswith("ValueError: a call over ranks must be the same on all, with k 12, got k 11; ")
    for told in others:
        assert told.startswith("ValueError: a call over ranks must be the same on all, with k 11, got k 12; ")


def test_ranks_are_in_step_after_failures(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        told, written = found["failures"]["afterwards"]
        assert told == "nothing"
        assert written


def test_what_travels(ranks: list[dict[str, Any]]) -> None:
    """Messages and positions; where sharing does not pay, messages alone."""
    for found in ranks:
        assert found["messages"] == {"shared": 2, "by the rule": 1}
