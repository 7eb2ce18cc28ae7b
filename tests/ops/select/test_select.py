"""Which rows a token attends to and writes in V4: the published scenarios with their numbers, and everything else
against the rules spelled out token by token."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from select_rules import chosen_rows, entry_rows, gathered_rows, int32, random_step, window_rows
from torch import Tensor

from tamis.ops import select_chosen, select_entries, select_gathered, select_window


def garbage(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """What an earlier step may have left in a buffer."""
    return torch.randint(5, 99, shape, dtype=dtype)


def test_completed_entries_of_a_chunk() -> None:
    """240 tokens computed, 40 new, ratio 4, 64 entries per page."""
    positions, ids = torch.arange(240, 280, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
    completed = garbage(40, dtype=torch.int64)
    table = int32([[5, 7]])
    select_entries(positions, ids, table, ratio=4, page_size=64, completed=completed)
    assert completed[completed >= 0].tolist() == [5 * 64 + n for n in (60, 61, 62, 63)] + [7 * 64 + n for n in range(6)]
    assert (completed >= 0).nonzero().flatten().tolist() == list(range(3, 40, 4))
    assert table.tolist() == [[5, 7]]


def test_every_entry_for_decodes_as_slots_and_for_prefills_as_numbers() -> None:
    positions, ids = int32([255, 511, 383, 639]), int32([0, 1, 0, 1])
    every, lengths = garbage(4, 4), garbage(4)
    select_entries(
        positions,
        ids,
        int32([[3], [5]]),
        ratio=128,
        page_size=512,
        every=every,
        lengths=lengths,
        own=torch.tensor([9, 9, 9, 9]),
        local_from=2,
    )
    assert every.tolist() == [[1536, 1537, -1, -1], [2560, 2561, 2562, 2563], [0, 1, 2, -1], [0, 1, 2, 3]]
    assert lengths.tolist() == [2, 4, 3, 4]


def test_a_narrower_rebuild_leaves_the_columns_beyond_alone() -> None:
    """Rows of 256 columns of which a step uses 128: the kernel must go by the width it is given, not by another."""
    buffer = torch.full((3, 256), 77, dtype=torch.int32)
    select_entries(
        int32([20000, 255, -1]), int32([0, 0, 0]), int32([[4]]), ratio=128, page_size=512, every=buffer[:, :128]
    )
    assert buffer[0, :128].tolist() == list(range(2048, 2048 + 128))
    assert buffer[1, :128].tolist() == [2048, 2049] + [-1] * 126
    assert buffer[2, :128].eq(-1).all()
    assert buffer[:, 128:].eq(77).all()


def test_tokens_without_a_slot_get_nothing_at_all() -> None:
    """Not only a length of 0: stale slot numbers in a row would be read by whoever ignores lengths."""
    positions, ids, own = int32([300, 300, -1]), int32([0, 0, 0]), torch.tensor([8, -1, -1])
    slots, lengths = garbage(3, 128), garbage(3)
    select_window(positions, ids, int32([[1] * 8]), page_size=64, window=128, slots=slots, lengths=lengths, own=own)
    assert lengths.tolist() == [128, 0, 0]
    assert slots[1:].eq(-1).all()
    every, completed, visible = garbage(3, 128), garbage(3, dtype=torch.int64), garbage(3)
    select_entries(
        int32([383, 383, -1]),
        ids,
        int32([[1, 2]]),
        ratio=128,
        page_size=2,
        own=own,
        every=every,
        completed=completed,
        visible=visible,
        lengths=lengths,
    )
    assert visible.tolist() == lengths.tolist() == [3, 0, 0]
    assert completed.tolist() == [4, -1, -1]
    assert every[0, :4].tolist() == [2, 3, 4, -1]
    assert every[1:].eq(-1).all()


@pytest.mark.parametrize(
    ("start", "new", "completes"), [(0, 127, False), (0, 128, True), (127, 1, True), (128, 127, False)]
)
def test_which_steps_complete_an_entry_of_128_tokens(start: int, new: int, completes: bool) -> None:
    positions = torch.arange(start, start + new, dtype=torch.int32)
    completed = garbage(new, dtype=torch.int64)
    select_entries(positions, torch.zeros_like(positions), int32([[6, 7]]), ratio=128, page_size=2, completed=completed)
    assert bool((completed >= 0).any()) == completes


def test_draft_blocks_see_each_other() -> None:
    """Without a causal mask: the window before the block, and the whole block, for every token of it."""
    positions, ids = int32([20, 21, 22, 3, 4]), int32([0, 0, 0, 1, 1])
    slots, lengths = garbage(5, 11), garbage(5)
    table = int32([[2, 4], [1, -1]])
    blocks = (int32([20, 3]), int32([23, 5]))
    options: dict[str, Any] = {"page_size": 16, "window": 8, "slots": slots, "lengths": lengths}
    select_window(positions, ids, table, blocks=blocks, **options)
    first = [32 + n for n in range(12, 16)] + [64 + n for n in range(7)]
    assert slots[:3].tolist() == [first] * 3
    assert slots[3:].tolist() == [[16, 17, 18, 19, 20, *[-1] * 6]] * 2
    assert lengths.tolist() == [11, 11, 11, 5, 5]


@given(random_step())
@settings(max_examples=60, deadline=None)
def test_windows(step: Any) -> None:
    slots, lengths = garbage(step.tokens, step.width), garbage(step.tokens)
    select_window(
        step.positions,
        step.ids,
        step.table,
        page_size=step.page_size,
        window=step.window,
        slots=slots,
        lengths=lengths,
        own=step.own,
    )
    expected = window_rows(step)
    assert slots.tolist() == expected.rows
    assert lengths.tolist() == expected.lengths


@given(random_step(), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_entries(step: Any, ratio: int) -> None:
    kept = step.table.clone()
    every, completed = garbage(step.tokens, step.width), garbage(step.tokens, dtype=torch.int64)
    visible, lengths = garbage(step.tokens), garbage(step.tokens)
    outputs = {"every": every, "completed": completed, "visible": visible, "lengths": lengths}
    select_entries(
        step.positions,
        step.ids,
        step.table,
        ratio=ratio,
        page_size=step.page_size,
        own=step.own,
        local_from=step.decodes,
        **outputs,
    )
    expected = entry_rows(step, ratio)
    assert every.tolist() == expected.rows
    assert lengths.tolist() == expected.lengths
    assert visible.tolist() == expected.visible
    assert completed.tolist() == expected.completed
    assert torch.equal(step.table, kept)


@given(random_step())
@settings(max_examples=40, deadline=None)
def test_chosen_entries(step: Any) -> None:
    slots, lengths = garbage(*step.chosen.shape), garbage(step.tokens)
    select_chosen(
        step.chosen, step.ids, step.table, page_size=step.page_size, slots=slots, lengths=lengths, own=step.own
    )
    expected = chosen_rows(step)
    assert slots.tolist() == expected.rows
    assert lengths.tolist() == expected.lengths


@given(random_step(prefill=True), st.integers(1, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gathered_rows(step: Any, ratio: int, indexed: bool) -> None:
    columns = step.chosen.shape[1]
    entries = max(step.lengths) // ratio
    gathered = [q + min(n - q, step.window - 1) for n, q in zip(step.lengths, step.queries, strict=True)]
    first = int32([n - g for n, g in zip(step.lengths, gathered, strict=True)])
    rows = entries + max(gathered)
    slots, lengths = garbage(step.tokens, columns + step.window + 3), garbage(step.tokens)
    options: dict[str, Any] = {"ratio": ratio, "window": step.window, "entries": entries, "rows": rows}
    select_gathered(
        step.positions,
        step.ids + 4,
        first,
        step.chosen if indexed else None,
        columns=columns,
        slots=slots,
        lengths=lengths,
        first_request=4,
        **options,
    )
    expected = gathered_rows(step, step.chosen if indexed else None, columns, first.tolist(), slots.shape[1], **options)
    assert slots.tolist() == expected.rows
    assert lengths.tolist() == expected.lengths


def test_refusals_name_what_is_wrong() -> None:
    positions, ids, table = int32([3]), int32([0]), int32([[1]])
    rows, lengths = int32([[0, 0]]), int32([0])
    wide, completed = torch.zeros(1, 4, dtype=torch.int32)[:, ::2], torch.zeros(4, dtype=torch.int64)[::2]
    options: dict[str, Any] = {"page_size": 4, "slots": rows, "lengths": lengths}
    with pytest.raises(ValueError, match=r"slots must be at least window=3 columns wide, got 2; allocate a wider one"):
        select_window(positions, ids, table, window=3, **options)
    with pytest.raises(TypeError, match=r"positions must be int32, got int64"):
        select_window(positions.long(), ids, table, window=2, **options)
    with pytest.raises(ValueError, match=r"block_table must be at least one page"):
        select_window(positions, ids, table[:, :0], window=2, **options)
    with pytest.raises(ValueError, match=r"slots must be contiguous along its rows"):
        select_window(positions, ids, table, window=2, page_size=4, slots=wide, lengths=lengths)
    with pytest.raises(ValueError, match=r"completed must be contiguous"):
        select_entries(int32([3, 4]), int32([0, 0]), table, ratio=4, page_size=4, completed=completed)
    with pytest.raises(TypeError, match="completed must be int64, got int32"):
        select_entries(positions, ids, table, ratio=4, page_size=4, completed=lengths)
    with pytest.raises(ValueError, match=r"slots must be 3 columns wide like chosen"):
        select_chosen(int32([[1, 2, 3]]), ids, table, **options)
    numbers: dict[str, Any] = {"ratio": 4, "window": 2, "entries": 1, "rows": 3, "columns": 1}
    with pytest.raises(ValueError, match=r"slots must be at least columns \+ window = 3 wide, got 2"):
        select_gathered(positions, ids, int32([0]), slots=rows, lengths=lengths, **numbers)
