"""Divides the indexer's prefills into chunks, so that gathered keys and scores fit into vLLM's buffers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class IndexChunk:
    """Consecutive prefills whose index keys are gathered together, and the queries that are scored in one call."""

    first: int
    end: int
    keys: int
    """The number of keys of all these requests."""
    queries: slice
    """Counted from the first query of the first request. If it does not begin at 0, the chunk before this one has
    gathered the same keys already."""


def chunk_index_prefills(
    keys: Sequence[int], queries: Sequence[int], *, key_budget: int, score_budget: int
) -> list[IndexChunk]:
    """Divide prefills greedily, in order, into chunks of at most `key_budget` keys and `score_budget` scores.

    A request that exceeds a budget by itself gets chunks of its own, each with some of its queries. Prefills without
    keys have nothing to score and are left out, unless they share a chunk with others.
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
