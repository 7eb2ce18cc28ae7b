"""How the kernel for many heads splits a batch, with the clusters that an H200 runs at a time."""

from itertools import pairwise

import pytest
import torch

from tamis import PagedCache, Selection
from tamis.ops.attention.hopper import many_heads
from tamis.ops.attention.hopper.clusters import H200_CLUSTERS, ITEM_STEPS, ClusterPlan, choose_plan
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


@pytest.mark.parametrize("steps", [3, 10, 32])
def test_one_more_token_never_costs_one_more_wave(steps: int) -> None:
    """Whole tokens alone would cost a wave more, `steps + ITEM_STEPS`, after each full one."""
    durations = [choose_plan(tokens, 64, steps, H200_CLUSTERS, merges=True).steps for tokens in range(1, 400)]
    assert all(after - before < steps + ITEM_STEPS for before, after in pairwise(durations))


def test_given_splits_are_merged_in_a_cluster_where_the_device_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = torch.empty(2, 64, 512, dtype=torch.bfloat16), PagedCache("v4-fp8", 1, 4)
    selections, out = [Selection(cache, torch.empty(2, 512, dtype=torch.int32))], torch.empty_like(q)
    for clusters, splits, out_dtype, expected in (
        (H200_CLUSTERS, 5, torch.bfloat16, ClusterPlan(((2, 5),))),
        (H200_CLUSTERS, 9, torch.bfloat16, SplitPlan(0, 9)),  # not every GPU runs clusters of 9
        (H200_CLUSTERS, 5, torch.float32, SplitPlan(0, 5)),
        ((14, 7, 0, 0, 0), 5, torch.bfloat16, SplitPlan(0, 5)),
        (H200_CLUSTERS, 1, torch.bfloat16, SplitPlan(2, 1)),
    ):
        monkeypatch.setattr(many_heads, "active_clusters", lambda *given, found=clusters: found)
        assert many_heads._plan(q, selections, splits, out.to(out_dtype)) == expected
