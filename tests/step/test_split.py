"""Host arithmetic: batch splits and workspace chunks."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tamis.step.split import (
    BatchSplit,
    chunk_starts,
    decode_threshold,
    pack_chunks,
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
