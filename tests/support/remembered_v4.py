"""What the tests of remembered V4 and V4.1 layer calls share: weights, steps, and the comparison of launches."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pretended import Pretended
from torch import Tensor

from tamis import Batch, LayerSpec, PagePool, V4Caches, V4Planner, V4Weights
from tamis.step.v4_plan import V4Plan

HIDDEN, RANK = 16, 8
WINDOW = LayerSpec(64, 448, 64, 512, 0.05, window=128, sink=True, kind="window")
STEPS: list[Any] = [([1, 1, 1], [300, 20, 700]), ([1, 1, 1], [301, 21, 701]), ([1, 20], [9, 700]), ([1, 1], [9, 9])]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def attention_weights(**more: Any) -> V4Weights:
    return V4Weights(
        q_a=ones(RANK, HIDDEN),
        q_norm=ones(RANK),
        q_b=ones(64 * 512, RANK),
        kv=ones(512, HIDDEN),
        kv_norm=ones(512),
        sink=torch.ones(64),
        o_a=ones(8, 4, 8 * 512),
        o_b=ones(HIDDEN, 32),
        **more,
    )


def plan_of(planner: V4Planner, sizes: Mapping[str, int], queries: list[int], lengths: list[int]) -> V4Plan:
    pools = {name: PagePool(300, size) for name, size in sizes.items()}
    return planner.plan(Batch.build(queries, lengths, PagePool(40, 256), other_pools=pools))


def named_tensors(caches: V4Caches, plan: V4Plan) -> dict[str, Tensor]:
    """Tensors of the caches and of a plan: launches are compared by these names, since addresses differ."""
    named = {"window": caches.window.storage, "slots": plan.window.slots, "lengths": plan.window.lengths}
    for name in ("entries", "index"):
        cache = getattr(caches, name)
        named |= {} if cache is None else {name: cache.storage}
    for entries in plan.entries.values():
        named |= {"visible": entries.visible, "table": entries.block_table, "taken": entries.lengths}
    return named


def compare_launches(pretended: Pretended, make: Callable[[], Any], check: Callable[[Any, bool], None]) -> None:
    """Every step must launch the same with and without a memory.

    Args:
        pretended: the device.
        make: makes a layer with its caches, whose `run` gives what a step launches.
        check: gets what was prepared of a call, and whether calls are remembered.
    """
    found = []
    for remembers in (False, True):
        pretended.forget()
        pretended.remembers, layer = remembers, make()
        found.append([layer.run(pretended, *step) for step in STEPS for _ in range(2)])
        known = layer.layer._checks._known._known
        for prepared in known.values():
            assert (prepared.attend is not None) == remembers
            check(prepared, remembers)
        assert len(known) == 3  # two of the steps have their shapes in common
    for one, other in zip(*found, strict=True):
        assert one == other
        assert any("heads" in launch.kernel or "attend" in launch.kernel for launch in one)
