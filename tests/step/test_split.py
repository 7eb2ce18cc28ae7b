"""Host arithmetic: batch splits, workspace chunks, split schedules."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tamis.arithmetic import ceil_div
from tamis.step.split import (
    BatchSplit,
    base_threshold,
    chunk_index_prefills,
    chunk_starts,
    decode_threshold,
    pack_chunks,
    part_count,
    schedule_splits,
    split_batch,
)


def split(lengths: list[int], threshold: int = 1, **options) -> tuple[int, int, int, int]:
    found = split_batch(np.array(lengths, np.int32), threshold, **options)
    return found.decodes, found.prefills, found.decode_tokens, found.prefill_tokens


@pytest.mark.parametrize(
    ("lengths", "threshold", "uniform", "expected"),
    [
        ([1, 2, 3], 128, True, (1, 2, 1, 5)),
        ([1, 1, 1], 1, True, (3, 0, 3, 0)),
        ([1, 1, 5], 1, True, (2, 1, 2, 5)),
        ([7, 9], 1, False, (0, 2, 0, 16)),
        ([2, 2, 2, 0], 2, True, (4, 0, 6, 0)),
        ([2, 2, 1, 8], 2, True, (2, 2, 4, 9)),
        ([2, 1, 2, 8], 2, False, (3, 1, 5, 8)),
        ([2, 1, 2], 2, False, (3, 0, 5, 0)),
        ([1, 0, 0], 1, True, (3, 0, 1, 0)),
        ([], 1, True, (0, 0, 0, 0)),
    ],
)
def test_split_examples(lengths, threshold, uniform, expected) -> None:
    assert split(lengths, threshold, uniform=uniform) == expected


def test_short_pieces_of_a_prompt_can_be_kept_out_of_decode() -> None:
    assert split([1, 1, 1, 9]) == (3, 1, 3, 9)
    assert split([1, 1, 1, 9], prefilling=[False, False, True, True]) == (2, 2, 2, 10)
    assert split([1, 1], prefilling=[True, True]) == (0, 2, 0, 2)


def slow_split(lengths: list[int], threshold: int, uniform: bool) -> BatchSplit:
    first = len(lengths)
    if lengths and lengths[0] > threshold:
        first = 0
    else:
        for number, length in enumerate(lengths):
            if uniform and threshold > 1:
                ends = length not in (0, lengths[0])
            else:
                ends = length > threshold
            if ends:
                first = number
                break
    done = sum(lengths[:first])
    return BatchSplit(first, len(lengths) - first, done, sum(lengths) - done)


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 6), st.booleans())
def test_split_follows_the_rule(lengths, threshold, uniform) -> None:
    assume(not lengths or lengths[0] > 0)  # padding comes last
    assert split_batch(np.array(lengths, np.int32), threshold, uniform=uniform) == slow_split(
        lengths, threshold, uniform
    )


def test_threshold_counts_speculative_tokens() -> None:
    assert decode_threshold() == 1
    assert decode_threshold(speculative_tokens=3) == 4
    assert decode_threshold(speculative_tokens=3, parallel_drafting=True) == 7
    assert decode_threshold(128, speculative_tokens=3) == 128
    assert decode_threshold(128, speculative_tokens=3, context_parallel=True) == 1
    assert [base_threshold(h, 9) for h in (8, 16, 32, 64, 128)] == [256, 128, 128, 256, 256]
    assert [base_threshold(h, 10) for h in (8, 16, 32, 64, 128)] == [128, 128, 128, 256, 1024]


def test_chunks_and_rebased_starts() -> None:
    assert pack_chunks([2, 3, 4, 2], 5) == [(0, 2), (2, 3), (3, 4)]
    chunks = [(0, 2), (2, 4)]
    assert pack_chunks([10, 15, 20, 5], 25) == chunks
    assert chunk_starts([10, 15, 20, 5], chunks).tolist() == [0, 10, 0, 20]
    assert pack_chunks([], 5) == []
    assert pack_chunks([0, 0, 5, 0], 5) == [(0, 4)]
    with pytest.raises(ValueError, match=r"workspace_rows must be at least the longest prefill \(6 rows\), got 5"):
        pack_chunks([1, 6], 5)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(9, 30))
def test_chunks_are_greedy_and_complete(lengths, budget) -> None:
    chunks = pack_chunks(lengths, budget)
    assert [i for begin, end in chunks for i in range(begin, end)] == list(range(len(lengths)))
    starts = chunk_starts(lengths, chunks)
    for number, (begin, end) in enumerate(chunks):
        assert sum(lengths[begin:end]) <= budget
        if number + 1 < len(chunks):
            assert sum(lengths[begin : end + 1]) > budget
        for i in range(begin, end):
            assert starts[i] == sum(lengths[begin:i])


def test_chunks_of_index_keys() -> None:
    def cut(keys: list[int], queries: list[int], key_budget: int, score_budget: int) -> list[tuple[int, ...]]:
        found = chunk_index_prefills(keys, queries, key_budget=key_budget, score_budget=score_budget)
        return [(c.first, c.end, c.keys, c.queries.start, c.queries.stop) for c in found]

    assert cut([10, 20, 5], [4, 4, 4], 100, 1000) == [(0, 3, 35, 0, 12)]
    assert cut([10, 20, 5], [4, 4, 4], 30, 1000) == [(0, 2, 30, 0, 8), (2, 3, 5, 0, 4)]
    assert cut([10, 20, 5], [4, 4, 4], 100, 240) == [(0, 2, 30, 0, 8), (2, 3, 5, 0, 4)]
    # A request that is too large stands alone, in pieces of queries, of which one is the least.
    assert cut([10, 20, 5], [4, 5, 4], 9, 50) == [
        (0, 1, 10, 0, 4),
        *((1, 2, 20, q, min(q + 2, 5)) for q in (0, 2, 4)),
        (2, 3, 5, 0, 4),
    ]
    assert cut([20], [3], 9, 7) == [(0, 1, 20, q, q + 1) for q in range(3)]
    # Requests without keys are carried along, and left out where there is nobody to carry them.
    assert cut([0, 4, 0], [3, 2, 3], 9, 99) == [(0, 3, 4, 0, 8)]
    assert cut([0, 0], [3, 3], 9, 99) == cut([], [], 9, 99) == []


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
    assert found.most_splits > 1


def test_number_of_parts() -> None:
    assert part_count(132, 64) == 132
    assert part_count(132, 128) == 66
    assert part_count(132, 16) == 132
    assert part_count(132, 128, 2) == 33
    assert part_count(132, 128, 100) == 1
    assert part_count(148, 128, capability_major=10) == 148
    with pytest.raises(ValueError, match="parts must be >= 1"):
        schedule_splits([5], 0)
