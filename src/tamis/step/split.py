"""Pure host arithmetic of a step: which requests decode, how prefills share a workspace, how work is spread."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tamis import checks

INT = NDArray[np.int32]


@dataclass(frozen=True)
class BatchSplit:
    """A decode-first batch cut in two."""

    decodes: int
    prefills: int
    decode_tokens: int
    prefill_tokens: int


def decode_threshold(
    base: int = 1, *, speculative_tokens: int = 0, parallel_drafting: bool = False, context_parallel: bool = False
) -> int:
    """The longest query that counts as decode: `base`, raised so that speculative tokens are decode.

    Context-parallel decode without support for mixed lengths allows single tokens only.
    """
    checks.integer("base", base, low=1)
    checks.integer("speculative_tokens", speculative_tokens, low=0)
    if context_parallel:
        return 1
    return max(base, 1 + speculative_tokens * (2 if parallel_drafting else 1))


def split_batch(
    query_lengths: INT, threshold: int = 1, *, uniform: bool = False, prefilling: Sequence[bool] | None = None
) -> BatchSplit:
    """Cut a decode-first batch into decodes and prefills.

    Args:
        query_lengths: new tokens per request; 0 is graph padding.
        threshold: the longest query that counts as decode.
        uniform: decodes must all have the same query length.
        prefilling: marks requests whose prompt is not finished; the first marked one starts the prefills even if its
            query is short.
    """
    count = len(query_lengths)
    total = int(query_lengths.sum())
    longest = int(query_lengths.max()) if count else 0
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
    decode_tokens = int(query_lengths[:first].sum())
    return BatchSplit(first, count - first, decode_tokens, total - decode_tokens)


def pack_chunks(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Consecutive requests, greedily in order, in groups whose lengths sum to at most `budget`: [(first, end), ...]."""
    chunks: list[tuple[int, int]] = []
    begin, used = 0, 0
    for number, length in enumerate(lengths):
        if length > budget:
            raise checks.refuse(
                "workspace_rows", f"at least the longest prefill ({length} rows)", budget, "enlarge the workspace"
            )
        if used + length > budget:
            chunks.append((begin, number))
            begin, used = number, 0
        used += length
    if begin < len(lengths):
        chunks.append((begin, len(lengths)))
    return chunks


def chunk_starts(lengths: Sequence[int], chunks: Sequence[tuple[int, int]]) -> INT:
    """First workspace row of each request, counted from 0 again in each chunk."""
    starts = np.zeros(len(lengths), np.int32)
    for begin, end in chunks:
        starts[begin:end] = np.cumsum([0, *lengths[begin : end - 1]])
    return starts


@dataclass(frozen=True)
class Group:
    """Consecutive prefills that share a workspace in equal strides: first request, end, and rows for each."""

    first: int
    end: int
    entries: int
    """Rows for compressed entries, at the front of a request's share."""
    rows: int
    """Rows of a request's whole share: entries, then raw tokens."""


def group_prefills(entries: Sequence[int], raw: Sequence[int], budget: int) -> list[Group]:
    """Prefills with so many entries and raw tokens to gather, greedily in order, in groups within `budget` rows."""
    groups: list[Group] = []
    for number, (new_entries, new_raw) in enumerate(zip(entries, raw, strict=True)):
        alone = Group(number, number + 1, new_entries, new_entries + new_raw)
        if alone.rows > budget:
            raise checks.refuse(
                "workspace_rows", f"at least the longest prefill ({alone.rows} rows)", budget, "enlarge the workspace"
            )
        if groups:
            last = groups[-1]
            most = max(last.entries, new_entries)
            joined = Group(last.first, number + 1, most, most + max(last.rows - last.entries, new_raw))
            if (joined.end - joined.first) * joined.rows <= budget:
                groups[-1] = joined
                continue
        groups.append(alone)
    return groups
