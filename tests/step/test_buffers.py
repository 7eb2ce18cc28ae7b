"""Buffers of a planner: fixed addresses, and nothing left of an earlier step."""

import pytest
import torch

from tamis import Limits
from tamis.step import buffers
from tamis.step.buffers import Arena, TableBuffer, staged

CPU = torch.device("cpu")


def contents(arena: Arena) -> dict[str, list[int]]:
    return {name: view.tolist() for name, view in arena.views.items()}


@pytest.mark.parametrize("whole", [True, False])
def test_an_arena_keeps_its_views_and_fills_what_a_step_does_not_write(whole: bool, monkeypatch) -> None:
    monkeypatch.setattr(buffers, "_WHOLE_BYTES", 1000 if whole else 0)
    arena = Arena({"ids": -1, "starts": 0}, {"slots": -1}, 3, CPU)
    assert contents(arena) == {"ids": [-1, -1, -1], "starts": [0, 0, 0], "slots": [-1, -1, -1]}
    addresses = [view.data_ptr() for view in arena.views.values()]
    assert [address - addresses[0] for address in addresses] == [0, 3 * 8, 6 * 8]  # one buffer
    first, second = arena.stage(3), arena.stage(2)
    first.narrow[arena.row["ids"], :3] = [7, 8, 9]
    first.wide[arena.row["slots"], 1:3] = [2**40, 5]
    second.narrow[arena.row["starts"], 1] = 6
    arena.upload(first)
    assert contents(arena) == {"ids": [7, 8, 9], "starts": [0, 0, 0], "slots": [-1, 2**40, 5]}
    arena.upload(second)
    last = -1 if whole else 5
    # Two columns of 64 bits cover four elements of int32.
    assert contents(arena) == {"ids": [-1, -1, -1], "starts": [0, 6, 0], "slots": [-1, -1, last]}
    assert [view.data_ptr() for view in arena.views.values()] == addresses


def test_a_table_holds_one_step_and_clears_the_one_before() -> None:
    table = TableBuffer(Limits(max_tokens=6, max_requests=3, max_length=10), 4, CPU)
    assert (table.page_size, table.width) == (4, 3)
    big = table.fill(torch.full((3, 3), 7, dtype=torch.int32))
    small = table.fill(torch.full((2, 1), 9, dtype=torch.int32))
    assert small.tolist() == [[9, -1, -1], [9, -1, -1]]
    assert big.tolist() == [[9, -1, -1], [9, -1, -1], [-1, -1, -1]]
    again = table.fill(torch.full((2, 1), 8, dtype=torch.int32))
    assert again.tolist() == small.tolist() == [[8, -1, -1], [8, -1, -1]]


def test_views_that_are_kept_can_be_written_outside_of_inference_mode() -> None:
    table = TableBuffer(Limits(max_tokens=6, max_requests=3, max_length=10), 4, CPU)
    with torch.inference_mode():
        table.fill(torch.zeros(2, 3, dtype=torch.int32))
    assert not table.fill(torch.ones(2, 3, dtype=torch.int32)).is_inference()


def test_host_values_are_copied_as_they_are_where_nothing_is_asynchronous() -> None:
    value = torch.arange(3)
    assert staged(value, CPU) is value
