"""Whether the FP8 prefills of a step take less time if their rows are first gathered into a 16-bit workspace.

Where a device has kernels for both, attention over 16-bit rows is faster for many heads, and gathering reads every row
of the requests once. The constants were measured on an H200: 4096 queries, top-k 2048, contexts of 8K and 128K tokens,
64 and 128 heads (`benchmarks/NOTES.md`).
"""

from collections.abc import Iterable

DIRECT_HEADS = 32
"""Up to this many heads, reading FP8 rows directly is always faster."""

_SAVED_PS = 0.68
"""Picoseconds saved per query token, selected row and head: (0.607 - 0.519) us / (2048 rows * 64 heads) at 8K."""
_SAVED_MORE_PS = 0.25
"""What comes on top at long contexts, whose FP8 rows do not fit into the L2 cache: about 0.93 ps in all at 128K."""
_LONG_CONTEXT = 128 << 10
_GATHER_PS = 420.0
"""Picoseconds to gather one row: 55 us for 128K rows."""
_FIXED_PS = 40e6
"""Picoseconds for the additional launches, with part of their time on the host: translating positions, gathering, and a
second call of attention."""


def gathering_saves(requests: Iterable[tuple[int, int]], heads: int, topk: int | None) -> float:
    """Microseconds that a layer saves by gathering these prefills; negative if reading them directly is faster.

    Args:
        requests: (new tokens, tokens in all) of each prefill.
        heads: query heads on this rank.
        topk: rows that a token selects at most; all that it sees if None.
    """
    if heads <= DIRECT_HEADS:
        return -1.0
    saved, cost = 0.0, _FIXED_PS
    for new, length in requests:
        seen = length - new / 2  # by a token in the middle
        rows = seen if topk is None else min(seen, topk)
        saved += new * rows * heads * (_SAVED_PS + _SAVED_MORE_PS * min(1.0, length / _LONG_CONTEXT))
        cost += length * _GATHER_PS
    return (saved - cost) / 1e6
