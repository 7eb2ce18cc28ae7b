"""FlashMLA's tile schedule: which SM part runs which blocks of which request.

tamis' own kernels choose their splits themselves and never read it. `metadata` returns it to callers of FlashMLA's
interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tamis import checks
from tamis.arithmetic import ceil_div

PART_FIELDS = 8
"""int32 values per SM part, as FlashMLA lays them out."""

BLOCK = 64
"""Selected KV rows per block of work."""


@dataclass(frozen=True)
class SplitSchedule:
    """The work of all requests, spread evenly over SM parts. A request may be split between several parts."""

    parts: NDArray[np.int32]
    """[SM parts, 8]: first request, last request (inclusive), first block, end block (exclusive), split number of the
    first request, whether the first request began in an earlier part, whether the last one goes on in a later part,
    padding."""
    splits: NDArray[np.int32]
    """[requests + 1]: running sum of the number of splits of each request."""


def part_count(sms: int, heads: int, query_tokens: int = 1, *, capability_major: int = 9) -> int:
    """The number of SM parts. The SMs are divided among the query tokens and, before Blackwell, groups of 64 heads."""
    groups = max(1, heads // 64) if capability_major < 10 else 1
    return max(1, sms // query_tokens // groups)


def schedule_splits(columns: Sequence[int] | NDArray[np.int32], parts: int, *, overhead: int = 5) -> SplitSchedule:
    """Spread requests with these numbers of selected columns over `parts` SM parts.

    Starting or finishing a request costs about as much as `overhead` blocks, so every part gets the same sum of blocks
    and overheads. A request without columns counts as one block.
    """
    checks.integer("parts", parts, low=1)
    blocks = np.maximum(1, ceil_div(np.asarray(columns, np.int64), BLOCK))
    ends = np.cumsum(blocks + overhead)
    requests = len(blocks)
    payload = ceil_div(int(ends[-1] if requests else 0), parts) + overhead
    records = np.zeros((parts, PART_FIELDS), np.int32)
    splits = np.ones(requests, np.int32)
    request, at, split = 0, 0, 0
    for part in range(parts):
        begin, room = (request, at, split), payload
        if at and room >= blocks[request] - at + overhead:
            room -= int(blocks[request]) - at + overhead
            request, at, split = request + 1, 0, 0
        if not at:
            # A binary search finds how many whole requests fit: a step may have thousands of them.
            done = int(ends[request - 1]) if request else 0
            request = int(np.searchsorted(ends, done + room, side="right"))
            room -= (int(ends[request - 1]) if request else 0) - done
        if request < requests and room > overhead:
            at, split = at + room - overhead, split + 1
            splits[request] = split + 1
        last = request if at else request - 1
        end = at if at else int(blocks[request - 1]) if request else 0
        records[part, :7] = (begin[0], last, begin[1], end, begin[2], begin[1] > 0, at > 0)
    return SplitSchedule(records, np.concatenate(([0], np.cumsum(splits))).astype(np.int32))
