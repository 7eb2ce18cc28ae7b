"""Buffers of a planner: fixed addresses, and nothing left of an earlier step."""

import torch

from tamis import Limits, PageMap
from tamis.step.buffers import Arena, PageBuffers, staged

CPU = torch.device("cpu")


def test_an_arena_keeps_its_views_and_fills_what_a_step_does_not_write() -> None:
    arena = Arena({"ids": (3, -1), "starts": (2, 0)}, CPU)
    assert {name: view.tolist() for name, view in arena.views.items()} == {"ids": [-1, -1, -1], "starts": [0, 0]}
    addresses = [view.data_ptr() for view in arena.views.values()]
    assert addresses[1] - addresses[0] == 3 * 4  # one buffer
    first, second = arena.blank(), arena.blank()
    arena.array(first, "ids")[:2] = [7, 8]
    arena.array(second, "starts")[1] = 5
    arena.upload(first)
    assert arena.views["ids"].tolist() == [7, 8, -1]
    arena.upload(second)
    assert {name: view.tolist() for name, view in arena.views.items()} == {"ids": [-1, -1, -1], "starts": [0, 5]}
    assert [view.data_ptr() for view in arena.views.values()] == addresses


def test_page_buffers_hold_one_step_and_clear_the_one_before() -> None:
    buffers = PageBuffers(Limits(max_tokens=6, max_requests=3, max_length=10), 4, CPU)
    assert (buffers.page_size, buffers.width) == (4, 3)
    big = buffers.fill(PageMap(torch.full((3, 3), 7, dtype=torch.int32), torch.arange(5)), 3, 6)
    assert big.slots.tolist() == [0, 1, 2, 3, 4, -1]
    small = buffers.fill(PageMap(torch.full((2, 1), 9, dtype=torch.int32), torch.arange(2)), 2, 4)
    assert small.block_table.tolist() == [[9, -1, -1], [9, -1, -1]]
    assert small.slots.tolist() == [0, 1, -1, -1]
    assert big.block_table.tolist() == [[9, -1, -1], [9, -1, -1], [-1, -1, -1]]
    assert big.slots.tolist() == [0, 1, -1, -1, -1, -1]


def test_host_values_are_copied_as_they_are_where_nothing_is_asynchronous() -> None:
    value = torch.arange(3)
    assert staged(value, CPU) is value
