"""FlashMLA's tile schedule against its rule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.arithmetic import ceil_div
from tamis.integrations.flash_mla.schedule import part_count, schedule_splits


def slow_schedule(columns: list[int], parts: int, overhead: int) -> tuple[list[list[int]], list[int]]:
    """The schedule as its rule reads, one row at a time."""
    blocks = [max(1, ceil_div(c, 64)) for c in columns]
    payload = ceil_div(sum(b + overhead for b in blocks), parts) + overhead
    records, splits = [], [0]
    row = at = piece = 0
    for _ in range(parts):
        record = [row, 0, at, 0, piece, int(at > 0), 0, 0]
        room = payload
        while row < len(blocks):
            rest = blocks[row] - at
            if room >= rest + overhead:
                splits.append(splits[-1] + piece + 1)
                room -= rest + overhead
                row, at, piece = row + 1, 0, 0
            else:
                if room - overhead > 0:
                    at += room - overhead
                    piece += 1
                break
        record[1] = row if at else row - 1
        record[3] = at if at else (blocks[row - 1] if row else 0)
        record[6] = int(at > 0)
        records.append(record)
    return records, splits


@settings(max_examples=200)
@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 140), st.sampled_from([3, 5]))
def test_schedule_follows_the_rule(columns, parts, overhead) -> None:
    found = schedule_splits(columns, parts, overhead=overhead)
    records, splits = slow_schedule(columns, parts, overhead)
    assert found.splits.tolist() == splits
    assert found.parts.tolist() == records


def test_every_block_is_scheduled_once() -> None:
    columns = [2048, 0, 100, 64, 65, 4096]
    found = schedule_splits(columns, 16)
    blocks = [32, 1, 2, 1, 2, 64]
    seen = [[0] * n for n in blocks]
    for first, last, begin, end, *_ in found.parts.tolist():
        for row in range(first, last + 1):
            start = begin if row == first else 0
            stop = end if row == last else blocks[row]
            for b in range(start, stop):
                seen[row][b] += 1
    assert all(count == 1 for row in seen for count in row)
    assert max(np.diff(found.splits)) > 1


def test_number_of_parts() -> None:
    assert part_count(132, 64) == 132
    assert part_count(132, 128) == 66
    assert part_count(132, 16) == 132
    assert part_count(132, 128, 2) == 33
    assert part_count(132, 128, 100) == 1
    assert part_count(148, 128, capability_major=10) == 148
    with pytest.raises(ValueError, match="parts must be >= 1"):
        schedule_splits([5], 0)
