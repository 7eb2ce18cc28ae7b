"""Pure host arithmetic of a step: which requests decode, how prefills share a workspace, how work is spread."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tamis import checks
from tamis.arithmetic import ceil_div

INT = NDArray[np.int32]
PART_FIELDS = 8
"""int32 values per part of a split schedule, as FlashMLA lays them out."""

BLOCK = 64
"""Selected rows per unit of work."""

MIN_HEADS_FOR_WORKSPACE = 32
"""From this many heads on a rank, FP8 prefills are gathered into a 16-bit workspace by default."""


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


def base_threshold(heads: int, capability_major: int) -> int:
    """The base that engines use for sparse MLA, by heads on this rank: up to it, decode kernels beat prefill ones."""
    if capability_major >= 10:
        return {8: 128, 16: 128, 32: 128, 64: 256}.get(heads, 1024)
    return {16: 128, 32: 128}.get(heads, 256)


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


@dataclass(frozen=True)
class IndexChunk:
    """Consecutive prefills whose index keys are gathered together, and which of their queries are scored at once."""

    first: int
    end: int
    keys: int
    """Of all these requests."""
    queries: slice
    """Counted from the first request's first; a chunk whose queries begin later finds the keys gathered already."""


def chunk_index_prefills(
    keys: Sequence[int], queries: Sequence[int], *, key_budget: int, score_budget: int
) -> list[IndexChunk]:
    """Prefills with so many index keys and queries, greedily in order, within so many keys and scores at a time.

    A request that is too large by itself stands alone and is cut between queries. Prefills without any key are in no
    chunk unless others share it: there is nothing to score.
    """
    chunks: list[IndexChunk] = []
    end = 0
    while end < len(keys):
        first, total, rows = end, keys[end], queries[end]
        end += 1
        while (
            end < len(keys)
            and total + keys[end] <= key_budget
            and (total + keys[end]) * (rows + queries[end]) <= score_budget
        ):
            total, rows = total + keys[end], rows + queries[end]
            end += 1
        if total:
            step = max(1, score_budget // total)
            cuts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
            chunks += [IndexChunk(first, end, total, cut) for cut in cuts]
    return chunks


def part_count(cores: int, heads: int, query_tokens: int = 1, *, capability_major: int = 9) -> int:
    """How many parts a FlashMLA-style schedule has: cores shared by query tokens and by groups of 64 heads (Hopper)."""
    groups = max(1, heads // 64) if capability_major < 10 else 1
    return max(1, cores // query_tokens // groups)


@dataclass(frozen=True)
class SplitSchedule:
    """Work of many rows spread evenly over parts; a row may be cut between parts."""

    parts: INT
    """[parts, 8]: first row, last row (inclusive), first block, end block (exclusive), split number of the first row,
    whether the first row is cut before this part, whether the last row is cut after it, padding."""
    splits: INT
    """[rows + 1]: running sum of how many pieces each row is cut into."""

    @cached_property
    def most_splits(self) -> int:
        """Pieces of the most divided row."""
        return int(np.diff(self.splits).max()) if len(self.splits) > 1 else 1


def schedule_splits(
    columns: Sequence[int] | INT, parts: int, *, overhead: int = 5, block: int = BLOCK
) -> SplitSchedule:
    """Spread rows with these many selected columns over `parts` cores.

    Starting or finishing a row costs about `overhead` blocks, so each part gets the same sum of blocks and overheads.
    A row without columns counts as one block.
    """
    checks.integer("parts", parts, low=1)
    blocks = np.maximum(1, ceil_div(np.asarray(columns, np.int64), block))
    ends = np.cumsum(blocks + overhead)
    rows = len(blocks)
    payload = ceil_div(int(ends[-1] if rows else 0), parts) + overhead
    records = np.zeros((parts, PART_FIELDS), np.int32)
    pieces = np.ones(rows, np.int32)
    row, at, piece = 0, 0, 0
    for part in range(parts):
        begin, room = (row, at, piece), payload
        if at and room >= blocks[row] - at + overhead:
            room -= int(blocks[row]) - at + overhead
            row, at, piece = row + 1, 0, 0
        if not at:
            # As many whole rows as fit, found by a search: a step may have thousands of rows.
            done = int(ends[row - 1]) if row else 0
            row = int(np.searchsorted(ends, done + room, side="right"))
            room -= (int(ends[row - 1]) if row else 0) - done
        if row < rows and room > overhead:
            at, piece = at + room - overhead, piece + 1
            pieces[row] = piece + 1
        last = row if at else row - 1
        end = at if at else int(blocks[row - 1]) if row else 0
        records[part, :7] = (begin[0], last, begin[1], end, begin[2], begin[1] > 0, at > 0)
    return SplitSchedule(records, np.concatenate(([0], np.cumsum(pieces))).astype(np.int32))
