"""How `many_heads.cu` splits a batch: whole tokens, splits that a second kernel merges, or splits merged in clusters.

Durations are estimated in steps, each a block of 64 rows (about 2.4 us on an H200). The constants are fitted to
measurements in benchmarks/NOTES.md.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tamis.arithmetic import ceil_div
from tamis.cuda.launch import MAX_CLUSTER
from tamis.ops.attention.hopper.splits import SplitPlan

STEP_US = 2.4
ITEM_STEPS = 3.0
"""The cost of a work item outside its loop, with its share of a launch."""
MERGE_STEPS, EARLY_ROWS, FEW_ROWS, MANY_ROWS = 0.75, 4096, 5700, 2050
"""A second kernel: its cost, the splits of a head up to which it starts early (see `merge_splits.cu`), and how many of
them it merges in one step if it starts early and if not."""
CLUSTER_STEPS, RANK_STEPS = 0.55, 0.08
"""The cost of merging in a cluster, and that of each CTA of the cluster."""
H200_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)
"""Clusters of 1 to 16 CTAs that an H200 runs at a time; CTAs of a cluster share a GPC."""


class ClusterPlan(NamedTuple):
    """Tokens in parts, one launch each: numbers of tokens, and CTAs of the cluster that merges a token's splits.

    One CTA means whole tokens; only the first part has such.
    """

    parts: tuple[tuple[int, int], ...]


class Timed(NamedTuple):
    """A plan and its estimated duration in steps."""

    plan: SplitPlan | ClusterPlan
    steps: float


@lru_cache(1024)
def choose_plan(tokens: int, heads: int, steps: int, clusters: tuple[int, ...], *, merges: bool) -> Timed:
    """Choose the plan with the shortest estimated duration.

    Args:
        tokens: query tokens.
        heads: heads of a token, at most 128.
        steps: steps of a token if every column is selected. Lengths are on the device, so they are not known.
        clusters: how many clusters of 1, 2, ... CTAs the device runs at a time.
        merges: whether splits can be merged in clusters.
    """
    found = list(_split_plans(tokens, heads, steps, clusters[0]))
    if merges:
        found += _cluster_plans(tokens, 1 if heads <= 64 else 2, steps, clusters)
    return min(found, key=lambda timed: timed.steps)


def _split_plans(tokens: int, heads: int, steps: int, sms: int) -> Iterator[Timed]:
    """Whole tokens fill whole waves; the others are split, and a second kernel merges them."""
    capacity = max(1, sms // ceil_div(heads, 64))
    yield Timed(SplitPlan(tokens, 1), ceil_div(tokens, capacity) * (steps + ITEM_STEPS))
    for whole in sorted({0, tokens // capacity * capacity}):
        left = tokens - whole
        waves = ceil_div(whole, capacity) * (steps + ITEM_STEPS)
        for splits in range(2, steps + 1) if left else ():
            duration = waves + ceil_div(left * splits, capacity) * (ceil_div(steps, splits) + ITEM_STEPS)
            yield Timed(SplitPlan(whole, splits), duration + _merge(left * splits * heads))


def _merge(rows: int) -> float:
    """The duration of a second kernel that merges splits, given the number of heads of all splits."""
    return MERGE_STEPS + rows / FEW_ROWS if rows <= EARLY_ROWS else rows / MANY_ROWS


def _cluster_plans(tokens: int, groups: int, steps: int, clusters: tuple[int, ...]) -> Iterator[Timed]:
    """Clusters of one size for all tokens, or one size for whole waves of clusters and another one for the rest."""
    sizes = range(2, min(len(clusters), MAX_CLUSTER, steps) + 1)

    def duration(count: int, size: int) -> float:
        merge = CLUSTER_STEPS + RANK_STEPS * size if size > 1 else 0.0
        return ceil_div(count * groups, clusters[size - 1]) * (ceil_div(steps, size) + ITEM_STEPS + merge)

    for size in sizes:
        if clusters[size - 1]:
            yield Timed(ClusterPlan(((tokens, size),)), duration(tokens, size))
    for first in (1, *sizes):
        capacity = clusters[first - 1] // groups
        count = tokens // capacity * capacity if capacity else 0
        for size in sizes if 0 < count < tokens else ():
            if clusters[size - 1]:
                total = duration(count, first) + duration(tokens - count, size)
                yield Timed(ClusterPlan(((count, first), (tokens - count, size))), total)
