"""Whether FP8 prefills read the cache directly or are first gathered into a 16-bit workspace, by what takes less time.

Where a device has kernels for both, attention over 16-bit rows is faster for many heads, and gathering reads every row
of the requests once. The constants were measured on an H200: 4096 queries, top-k 2048, contexts of 8K and 128K tokens,
64 and 128 heads (`benchmarks/NOTES.md`).
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

MIN_HEADS_FOR_WORKSPACE = 32
"""From this many heads on a rank, FP8 prefills are gathered by default, unless the device's backend has kernels of its
own for FP8 rows at every head count."""
DIRECT_HEADS = 32
"""Up to this many heads, such kernels are always faster than gathering."""

_SAVED_PS = 1.66
"""Picoseconds saved per query token, selected row and head: (0.661 - 0.443) us / (2048 rows * 64 heads) at 8K."""
_SAVED_LESS_PS = 0.14
"""How much less is saved at long contexts, whose 16-bit rows do not fit into the L2 cache: 1.52 ps in all at 128K."""
_LONG_CONTEXT = 128 << 10
_GATHER_PS = 550.0
"""Picoseconds to gather one row: 67 to 76 us for 128K rows."""
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
        saved += new * rows * heads * (_SAVED_PS - _SAVED_LESS_PS * min(1.0, length / _LONG_CONTEXT))
        cost += length * _GATHER_PS
    return (saved - cost) / 1e6


def automatic_mode(quantised: bool, heads: int, direct: bool) -> Literal["auto", "mixed", "separate"]:
    """How steps are divided if nothing was asked for: all alike, or ("auto") each as is faster for it.

    Args:
        quantised: whether the cache is of FP8 rows.
        heads: query heads on this rank.
        direct: whether the device's backend has kernels of its own for FP8 rows at every head count.
    """
    if not quantised or heads < MIN_HEADS_FOR_WORKSPACE or (direct and heads <= DIRECT_HEADS):
        return "mixed"
    return "auto" if direct else "separate"


def explain_prefills(quantised: bool, heads: int, topk: int | None, direct: bool) -> str:
    """What `automatic_mode` means for prefills, in words."""
    mode = automatic_mode(quantised, heads, direct)
    if mode != "auto":
        return "read the cache directly" if mode == "mixed" else "gathered into a 16-bit workspace"
    short, long = (_fewest(length, heads, topk) for length in (8 << 10, _LONG_CONTEXT))
    return (
        f"gathered into a 16-bit workspace from {short} new tokens on in a request of 8K tokens, "
        f"and from {long} in one of 128K; fewer read the cache directly"
    )


def _fewest(length: int, heads: int, topk: int | None) -> int:
    """The fewest new tokens for which a request of this length is gathered."""
    return bisect_left(range(length), True, key=lambda new: gathering_saves([(new, length)], heads, topk) > 0)
