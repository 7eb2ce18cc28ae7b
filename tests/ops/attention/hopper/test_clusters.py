"""How the kernel for many heads splits a batch, with the clusters that an H200 runs at a time."""

from itertools import pairwise

import pytest

from tamis.arithmetic import ceil_div
from tamis.ops.attention.hopper.clusters import H200_CLUSTERS, ClusterPlan, choose_plan
from tamis.ops.attention.hopper.splits import SplitPlan


def plan(tokens: int, heads: int, steps: int, *, merges: bool = True) -> SplitPlan | ClusterPlan:
    return choose_plan(tokens, heads, steps, H200_CLUSTERS, merges=merges).plan


def test_measured_batches_get_the_plan_that_was_fastest() -> None:
    assert plan(8, 128, 10) == ClusterPlan(((8, 5),))
    assert plan(8, 64, 10) == ClusterPlan(((8, 5),))
    assert plan(8, 128, 32) == ClusterPlan(((8, 6),))
    assert plan(32, 128, 32) == ClusterPlan(((32, 2),))
    assert plan(64, 64, 32) == ClusterPlan(((64, 2),))
    assert plan(37, 128, 34) == ClusterPlan(((33, 2), (4, 9)))
    assert plan(128, 64, 32) == SplitPlan(128, 1)
    assert plan(64, 128, 32) == SplitPlan(64, 1)
    assert plan(1, 64, 18) == SplitPlan(0, 18)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("steps", [1, 2, 10, 34])
@pytest.mark.parametrize("tokens", [1, 3, 66, 67, 132, 133, 1000])
def test_every_token_is_in_exactly_one_part(tokens: int, heads: int, steps: int) -> None:
    found = plan(tokens, heads, steps)
    if isinstance(found, SplitPlan):
        assert 0 <= found.whole <= tokens
        return
    assert sum(count for count, _ in found.parts) == tokens
    assert all(count > 0 and 1 <= size <= min(16, steps) for count, size in found.parts)
    assert all(size > 1 for _, size in found.parts[1:])


def test_without_merging_in_clusters_a_second_kernel_merges() -> None:
    for tokens in (1, 8, 32, 133):
        assert isinstance(plan(tokens, 128, 32, merges=False), SplitPlan)


def test_clusters_that_the_device_cannot_run_are_not_chosen() -> None:
    only_pairs = (132, 66, *[0] * 14)
    for tokens in (1, 8, 37, 200):
        found = choose_plan(tokens, 128, 32, only_pairs, merges=True).plan
        assert isinstance(found, SplitPlan) or all(size <= 2 for _, size in found.parts)


def test_one_more_token_never_costs_much_more() -> None:
    """More tokens may need a second wave, but never as long as all of one more wave of whole tokens."""
    for steps in (3, 10, 32):
        durations = [choose_plan(t, 64, steps, H200_CLUSTERS, merges=True).steps for t in range(1, 400)]
        for before, after in pairwise(durations):
            assert after - before <= ceil_div(steps, 2) + 5
