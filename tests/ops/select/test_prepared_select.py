"""Prepared selections launch what operations launch, with the addresses of the call."""

from typing import Any

import pytest
import torch
from pretended import Pretended
from torch import Tensor

from tamis.ops.library import Operation
from tamis.ops.select.operations import SelectEntries, SelectWindow, select_entries, select_window

pytestmark = pytest.mark.own_settings("launches nothing")
INT = torch.int32


def tokens(count: int = 5) -> list[Tensor]:
    """Positions, requests, block table and own slots."""
    own = torch.zeros(count, dtype=torch.int64)
    return [torch.zeros(count, dtype=INT), torch.zeros(count, dtype=INT), torch.zeros(3, 7, dtype=INT), own]


def window(*, blocks: bool) -> SelectWindow:
    ends = (torch.zeros(3, dtype=INT), torch.zeros(3, dtype=INT)) if blocks else (None, None)
    return SelectWindow(*tokens(), *ends, 64, 128, torch.zeros(5, 192, dtype=INT), torch.zeros(5, dtype=INT), "auto")


def entries(*, every: bool) -> SelectEntries:
    rows = torch.zeros(5, 256, dtype=INT) if every else None
    lengths = torch.zeros(5, dtype=INT) if every else None
    completed, visible = torch.zeros(5, dtype=torch.int64), None if every else torch.zeros(5, dtype=INT)
    return SelectEntries(*tokens(), 4, 64, None, 3 if every else None, completed, visible, lengths, rows, "auto")


CALLS: dict[str, Any] = {
    "window": (select_window, lambda: window(blocks=False)),
    "draft blocks": (select_window, lambda: window(blocks=True)),
    "entries": (select_entries, lambda: entries(every=False)),
    "every entry": (select_entries, lambda: entries(every=True)),
}


def named(call: Any) -> dict[str, Tensor]:
    return {name: value for name, value in call._asdict().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_selection_launches_the_same(name: str, pretended: Pretended) -> None:
    operation: Operation[Any, None] = CALLS[name][0]
    first, second = CALLS[name][1](), CALLS[name][1]()
    operation(second)
    expected = pretended.launches(**named(second))
    run = operation.prepared(first)
    assert run is not None
    for call in (first, second, second):
        run(call)
        assert pretended.launches(**named(call)) == expected


def test_a_selection_that_copies_is_not_prepared(pretended: Pretended) -> None:
    call = window(blocks=False)
    assert select_window.prepared(call._replace(positions=torch.zeros(5, 2, dtype=INT)[:, 0])) is None
    nobody = [tensor[:0] for tensor in (call.positions, call.request_ids, call.own)]
    empty = call._replace(positions=nobody[0], request_ids=nobody[1], own=nobody[2], slots=call.slots[:0])
    assert select_window.prepared(empty) is None


def test_builders_launch_the_same_whether_they_remember_or_not(pretended: Pretended) -> None:
    """Steps that have their shapes in common and differ in one number, such as how many tokens are decodes."""
    from v4_standin import V4Step, main_builder, window_builder  # after the interpreter was chosen

    steps = [([1, 1, 40], [9, 9, 50]), ([1, 40, 1], [9, 50, 9]), ([42], [700]), ([1, 1], [3, 4])]
    made = [V4Step("v4-bf16", *step) for step in steps]
    pretended.launches()
    for pool, make in (
        ("main", lambda: main_builder(128)),
        ("main", lambda: main_builder(4)),
        ("window", window_builder),
    ):
        found = []
        for remembers in (False, True):
            pretended.remembers, builder = remembers, make()
            launches = []
            for step in made * 2:
                common = step.common(pool)
                builder.build(0, common)
                ours = dict(builder.tokens._arena.views) | builder._written
                launches += pretended.launches(table=common.block_table_tensor, own=common.slot_mapping, **ours)
            found.append(launches)
        assert found[0] == found[1]
        assert len(found[0]) == 2 * len(steps)
