"""Planners go when they are dropped, and any number of steps take no more memory than a few."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step.test_v4_planner import limits as v4_limits
from step.test_v4_planner import specs
from test_stale_plans import LAYOUT, LIMITS, SPEC, v4_served

from tamis import Batch, PagedCache, PagePool, Planner, Recording, SparseMLA
from tamis.cache.layout import named
from tamis.step.v4_planner import V4Planner

STEPS = 200
"""In CI; `--steps 10000` by `make soak`."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: Planner(SPEC, LIMITS, layout=LAYOUT),
        lambda: Planner(SPEC, LIMITS, layout=named("v32-fp8"), mode="separate"),
        lambda: V4Planner(specs(), v4_limits(), layout="v4-fp8", mode="separate"),
    ],
    ids=["mixed", "separate", "V4"],
)
def test_a_dropped_planner_is_freed_at_once(make: Callable[[], Any]) -> None:
    """A cycle would keep its buffers, up to gigabytes of workspace, until a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        planner = make()
        pages, others = (
            PagePool(20, planner.limits.page_size),
            {name: PagePool(40, size) for name, size in planner.limits.other_page_sizes.items()},
        )
        plan = planner.plan(Batch.build([1, 9], [9, 9], pages, other_pools=others))
        held = [weakref.ref(planner), weakref.ref(plan)]
        del plan, planner
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


def steps_of(planner: Any, run: Callable[[Any, int], object]) -> Callable[[int], None]:
    pool = PagePool(40, planner.limits.page_size, seed=1)

    def step(number: int) -> None:
        new = [1, 1 + number % 3, 2 + number % 5][: 1 + number % 3]
        names = [number * 3 + k for k in range(len(new))]
        run(planner.plan(Batch.build(new, new, pool, requests=names)), sum(new))
        for name in names:
            pool.release(name)

    return step


def mla_steps() -> Callable[[int], None]:
    layer, cache, recording = SparseMLA(SPEC), PagedCache(LAYOUT, 40, 4), Recording(4)

    def run(plan: Any, tokens: int) -> None:
        positions = torch.full((tokens, 4), -1, dtype=torch.int32)
        for column in range(4):
            positions[:, column] = torch.where(plan.positions >= column, column, -1)
        layer(torch.randn(tokens, 2, 24), torch.randn(tokens, 24), cache, plan, positions=positions)
        names = list(range(plan.requests))
        recording.record(0, names, plan, positions)
        recording.replay(0, names, plan)
        for name in names:
            recording.forget(name)

    return steps_of(Planner(SPEC, LIMITS, layout=LAYOUT), run)


def v4_steps() -> Callable[[int], None]:
    layer, caches, plan = v4_served("separate")

    def step(number: int) -> None:
        layer(torch.randn(3, 12), caches, plan())

    return step


@pytest.mark.parametrize("make", [mla_steps, v4_steps], ids=["MLA", "V4"])
def test_memory_is_flat_over_many_steps(make: Callable[[], Callable[[int], None]], pytestconfig: pytest.Config) -> None:
    """What Python holds, what torch's allocator holds and how many objects there are, at the end as after a warm-up."""
    step, count = make(), pytestconfig.getoption("--steps", None) or STEPS

    def measure() -> tuple[int, int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        held = sum(t.nbytes for t in tensors if t.layout == torch.strided)
        return len(gc.get_objects()), held, tracemalloc.get_traced_memory()[0]

    for number in range(60):  # all shapes of steps
        step(number)
    tracemalloc.start()
    for number in range(60, 120):
        step(number)
    before = measure()
    for number in range(120, 120 + count):
        step(number)
    after = measure()
    tracemalloc.stop()
    objects, tensors, python = (now - then for now, then in zip(after, before, strict=True))
    # One object or one tensor per step would be `count` of them; what remains is the measurement's own.
    assert objects < 50
    assert tensors <= 0
    assert python < 20_000
