"""The walk through the library's functions in one call of a layer stays short."""

import pytest

from tamis.arithmetic import ceil_div, round_up
from tools.walk import BOUNDS, Walk, walk, walks


def test_a_walk_counts_calls_files_and_returns() -> None:
    found = walk(lambda: (round_up(5, 4), ceil_div(5, 4)))
    assert [name for _, name in found.steps] == ["round_up", "ceil_div", "ceil_div"]
    assert (found.files, found.switches, found.returns, found.depth) == (1, 0, 0, 2)
    there_and_back = Walk([("a", ""), ("b", ""), ("a", ""), ("c", ""), ("b", "")], 1)
    assert (there_and_back.files, there_and_back.switches, there_and_back.returns) == (3, 4, 2)


@pytest.mark.own_settings("counts calls, of which a mode makes more")
def test_layers_take_a_short_way() -> None:
    for name, found in walks().items():
        calls, returns = BOUNDS[name]
        assert len(found.steps) <= calls, name
        assert found.returns <= returns, name
