"""Host arithmetic of a step: which requests decode, and how prefills share a workspace."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tamis import checks

INT = NDArray[np.int32]


@dataclass(frozen=True)
class BatchSplit:
    """How many requests and tokens of a decode-first batch are decode, and how many are prefill."""

    decodes: int
    prefills: int
    decode_tokens: int
    prefill_tokens: int


def decode_threshold(
    base: int = 1, *, speculative_tokens: int = 0, parallel_drafting: bool = False, context_parallel: bool = False
) -> int:
    """The longest query that counts as decode: `base`, or more if a request verifies more speculative tokens at once.

    With context parallelism it is 1: ranks that share requests cannot decode queries of several lengths.
    """
    checks.integer("base", base, low=1)
    checks.integer("speculative_tokens", speculative_tokens, low=0)
    if context_parallel:
        return 1
    return max(base, 1 + speculative_tokens * (2 if parallel_drafting else 1))


def split_batch(
    query_lengths: INT, threshold: int = 1, *, uniform: bool = False, prefilling: Sequence[bool] | None = None
) -> BatchSplit:
    """Split a decode-first batch into decodes and prefills.

    Args:
        query_lengths: new tokens per request; 0 for the padding of a captured graph.
        threshold: the longest query that counts as decode.
        uniform: whether all decodes must have the same query length.
        prefilling: which requests have an unfinished prompt. The first of them is the first prefill, even if its query
            is short.
    """
    count = len(query_lengths)
    longest = int(np.maximum.reduce(query_lengths)) if count else 0
    first = count
    if count and not (longest <= threshold and (not uniform or threshold <= 1)):
        if query_lengths[0] > threshold:
            first = 0
        elif uniform:
            others = (query_lengths != query_lengths[0]) & (query_lengths != 0)
            first = int(others.argmax()) if others.any() else count
        else:
            first = int((query_lengths > threshold).argmax()) if longest > threshold else count
    if prefilling is not None and any(prefilling[:first]):
        first = list(prefilling).index(True)
    total = int(np.add.reduce(query_lengths))
    decode_tokens = total if first == count else int(np.add.reduce(query_lengths[:first]))
    return BatchSplit(first, count - first, decode_tokens, total - decode_tokens)


def pack_chunks(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Divide requests greedily, in order, into chunks whose lengths sum to at most `budget`: [(first, end), ...]."""
    chunks: list[tuple[int, int]] = []
    begin, used = 0, 0
    for number, length in enumerate(lengths):
        if length > budget:
            raise _refuse_budget(length, budget)
        if used + length > budget:
            chunks.append((begin, number))
            begin, used = number, 0
        used += length
    if begin < len(lengths):
        chunks.append((begin, len(lengths)))
    return chunks


def chunk_starts(lengths: Sequence[int], chunks: Sequence[tuple[int, int]]) -> INT:
    """The first workspace row of each request. Every chunk starts again at row 0."""
    starts = np.zeros(len(lengths), np.int32)
    for begin, end in chunks:
        starts[begin:end] = np.cumsum([0, *lengths[begin : end - 1]])
    return starts


@dataclass(frozen=True)
class Group:
    """Consecutive prefills that share a workspace, each with the same number of rows."""

    first: int
    end: int
    entries: int
    """Rows for compressed entries, which come first in a request's share."""
    rows: int
    """Rows of a request's share: its entries, then its raw tokens."""


def group_prefills(entries: Sequence[int], raw: Sequence[int], budget: int) -> list[Group]:
    """Divide prefills greedily, in order, into groups of at most `budget` rows.

    Args:
        entries: compressed entries to gather, for each prefill.
        raw: raw tokens to gather, for each prefill.
        budget: rows of the workspace.
    """
    groups: list[Group] = []
    for number, (new_entries, new_raw) in enumerate(zip(entries, raw, strict=True)):
        alone = Group(number, number + 1, new_entries, new_entries + new_raw)
        if alone.rows > budget:
            raise _refuse_budget(alone.rows, budget)
        if groups:
            last = groups[-1]
            most = max(last.entries, new_entries)
            joined = Group(last.first, number + 1, most, most + max(last.rows - last.entries, new_raw))
            if (joined.end - joined.first) * joined.rows <= budget:
                groups[-1] = joined
                continue
        groups.append(alone)
    return groups


def _refuse_budget(rows: int, budget: int) -> ValueError:
    expected = f"at least the longest prefill ({rows} rows)"
    return checks.refuse("workspace_rows", expected, budget, "enlarge the workspace")
