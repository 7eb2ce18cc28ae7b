"""Plans of one planner share its buffers: only the latest may be used, and by one thread at a time."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_v4 import WINDOW as V4_WINDOW
from small_v4 import weights
from torch._dynamo.testing import CompileCounter

from tamis import Batch, LayerSpec, Limits, PagedCache, PagePool, Planner, Recording, SparseMLA, SparseV4, V4Caches
from tamis.cache.layout import named, rows
from tamis.layers.v4_gathered import attend_gathered
from tamis.model.rope import Rope
from tamis.step.lease import Lease
from tamis.step.v4_planner import V4Planner

SPEC = LayerSpec(2, 16, 8, 16, 0.1, topk=4)
LAYOUT = rows(torch.float32, latent=16, rope=8)
LIMITS = Limits(16, 4, 64, 4)
STALE = r"^plan must be the planner's latest, got generation 1 of 2; call plan\(\) again, or finish all layers"


class Served:
    """One request after another through one planner."""

    def __init__(self, planner: Planner | None = None) -> None:
        self.planner = planner or Planner(SPEC, LIMITS, layout=LAYOUT)
        self.pool, self.cache = PagePool(40, 4, seed=1), PagedCache(LAYOUT, 40, 4)
        self.layer = SparseMLA(SPEC)

    def plan(self, new: int = 3, request: object = 0) -> Any:
        return self.planner.plan(Batch.build([new], [new], self.pool, requests=[request]))

    def run(self, plan: Any, kv: torch.Tensor) -> torch.Tensor:
        n = len(kv)
        positions = torch.where(torch.arange(4) <= torch.arange(n).unsqueeze(1), torch.arange(4), -1).int()
        return self.layer(kv.unsqueeze(1).expand(n, 2, 24), kv, self.cache, plan, positions=positions).out


def test_a_stale_plan_is_refused_and_writes_nothing() -> None:
    served = Served()
    first, second = served.plan(3, "a"), served.plan(3, "b")
    kv = torch.randn(3, 24)
    with pytest.raises(ValueError, match=STALE):
        served.run(first, kv)
    with pytest.raises(ValueError, match=STALE):
        served.layer.write(kv, served.cache, first)
    assert not served.cache.storage.any()
    served.run(second, kv)
    assert served.cache.storage.any()


def v4_served(mode: str = "mixed") -> tuple[SparseV4, V4Caches, Callable[[], Any]]:
    sizes = {"window": 8}
    layout = named("v4-fp8", latent=24, rope=8, tile=8)
    planner = V4Planner([V4_WINDOW], Limits(16, 4, 64, 16, sizes), layout=layout, mode=mode)
    pool, others = PagePool(20, 16), {"window": PagePool(20, 8)}
    caches = V4Caches.allocate(
        V4_WINDOW, pages=20, window_pages=20, state_pages=1, page_size=16, window_page_size=8, layout=layout
    )
    layer = SparseV4(V4_WINDOW, weights("window"), Rope(8).cos_sin_table(64))
    return layer, caches, lambda: planner.plan(Batch.build([3], [3], pool, other_pools=others))


def test_a_stale_v4_plan_is_refused() -> None:
    layer, caches, plan = v4_served("separate")
    first, second = plan(), plan()
    hidden = torch.randn(3, 12)
    with pytest.raises(ValueError, match=STALE):
        layer(hidden, caches, first)
    with pytest.raises(ValueError, match=STALE):
        layer.write(hidden, caches, first)
    with pytest.raises(ValueError, match=STALE):
        attend_gathered(torch.randn(3, 4, 32), first, caches.window, scale=0.1, value_dim=32)
    assert not caches.window.storage.any()
    assert layer(hidden, caches, second).any()


def test_recordings_refuse_stale_plans() -> None:
    served, recording = Served(), Recording(4)
    positions = torch.tensor([[0, -1, -1, -1], [0, 1, -1, -1]], dtype=torch.int32)
    first = served.plan(2)
    recording.record(0, ["a"], first, positions)
    second = served.plan(2)
    with pytest.raises(ValueError, match=STALE):
        recording.record(0, ["b"], first, positions)
    with pytest.raises(ValueError, match=STALE):
        recording.replay(0, ["a"], first)
    assert torch.equal(recording.replay(0, ["a"], second), positions)
    with pytest.raises(ValueError, match="got 0 tokens of 'b'"):
        recording.replay(0, ["b"], second)


def test_a_recording_forgets_a_request_in_all_layers() -> None:
    served, recording = Served(), Recording(4)
    positions = torch.tensor([[0, -1, -1, -1]], dtype=torch.int32)
    for name in "ab":
        plan = served.plan(1)
        for layer in (0, 3):
            recording.record(layer, [name], plan, positions)
    recording.forget("a")
    recording.forget("nobody")
    for layer in (0, 3):
        with pytest.raises(ValueError, match="got 0 tokens of 'a'"):
            recording.replay(layer, ["a"], plan)
        assert torch.equal(recording.replay(layer, ["b"], plan), positions)


def test_what_is_no_plan_is_refused_by_name() -> None:
    served = Served()
    with pytest.raises(TypeError, match=r"^plan must be what a planner's plan\(\) returns, got NoneType"):
        served.run(None, torch.randn(3, 24))
    with pytest.raises(TypeError, match=r"^plan must be what a planner's plan\(\) returns"):
        served.layer(torch.zeros(3, 2, 24), None, served.cache, plan=object())


def spoil(batch: Batch) -> Batch:
    return replace(batch, lengths=torch.tensor([65], dtype=torch.int32))


def test_a_refused_batch_leaves_the_latest_plan_and_its_buffers() -> None:
    served = Served()
    plan = served.plan(3)
    kept = {name: v.clone() for name, v in vars(plan).items() if isinstance(v, torch.Tensor)}
    good = Batch.build([5], [9], served.pool, requests=[0])
    with pytest.raises(ValueError, match="lengths"):
        served.planner.plan(spoil(good))
    for name, value in kept.items():
        assert torch.equal(getattr(plan, name), value)
    served.run(plan, torch.randn(3, 24))


def test_a_prefill_that_does_not_fit_leaves_a_v4_plan_as_it_was() -> None:
    """The workspace of V4 was looked at after the buffers had been filled."""
    sizes = {"window": 8}
    limits = Limits(16, 4, 64, 16, sizes, workspace_rows=12)
    planner = V4Planner([V4_WINDOW], limits, layout=named("v4-fp8", latent=24, rope=8, tile=8), mode="separate")
    pool, others = PagePool(20, 16), {"window": PagePool(20, 8)}
    plan = planner.plan(Batch.build([3], [3], pool, other_pools=others))
    kept = plan.window.slots.clone(), plan.step.positions.clone()
    with pytest.raises(ValueError, match=r"workspace_rows must be at least the longest prefill"):
        planner.plan(Batch.build([16], [16], pool, requests=[1], other_pools=others))
    assert torch.equal(plan.window.slots, kept[0])
    assert torch.equal(plan.step.positions, kept[1])
    with plan.using():
        pass


def test_planning_is_refused_while_a_layer_runs_and_possible_after() -> None:
    served = Served()
    plan = served.plan()
    message = "^planner must be used by one thread at a time, got a layer still running"
    with plan.using(), plan.using(), pytest.raises(ValueError, match=message):
        served.plan()
    with plan.using():
        pass  # a refused plan() leaves the latest one valid
    served.plan()
    with pytest.raises(ValueError, match=STALE), plan.using():
        pass
    served.plan()  # a refused block does not count as one


def test_an_error_in_a_block_ends_it() -> None:
    served = Served()
    plan = served.plan()
    with pytest.raises(RuntimeError, match="inside"), plan.using():
        raise RuntimeError("inside")
    served.plan()


def test_planning_that_fails_half_way_leaves_no_valid_plan() -> None:
    lease = Lease()
    with lease.renewed() as use:
        pass
    with pytest.raises(RuntimeError, match="half"), lease.renewed():
        raise RuntimeError("half")
    with pytest.raises(ValueError, match="generation 1 of 2"), use:
        pass
    with lease.renewed() as use, pytest.raises(ValueError, match=r"got another plan\(\) under way"), lease.renewed():
        pass
    with use:
        pass


def test_a_deep_copy_has_buffers_and_a_validity_of_its_own() -> None:
    served = Served()
    plan = served.plan(3, "a")
    own = copy.deepcopy(plan)
    served.plan(2, "b")
    expected = Served()
    kv = torch.randn(3, 24)
    assert torch.equal(served.run(own, kv), expected.run(expected.plan(3, "a"), kv))


def test_compiled_code_does_not_look_and_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    served = Served()

    def run(plan: Any, x: torch.Tensor) -> torch.Tensor:
        with plan.using():
            return plan.positions + x

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for _ in range(4):
        plan = served.plan(3)
        assert torch.equal(compiled(plan, torch.ones(1)), plan.positions + 1.0)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_four_threads_on_one_planner_are_refused_or_right() -> None:
    """Each thread has its own caches and requests; only the planner is shared, which was wrong in 223 steps of 240."""
    planner = Planner(SPEC, LIMITS, layout=LAYOUT)
    wrong: list[str] = []
    right: list[int] = []
    refused: list[int] = []
    begin = threading.Barrier(4)

    def serve(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        served, alone = Served(planner), Served()
        begin.wait()
        for step in range(60):
            new = 1 + (number + step) % 4
            kv = torch.randn(new, 24, generator=generator)
            expected = alone.run(alone.plan(new, step), kv)
            try:
                found = served.run(served.plan(new, step), kv)
            except ValueError as error:
                refused.append(step)
                if not str(error).startswith(("plan must be the planner's latest", "planner must be used by one")):
                    wrong.append(str(error))
            else:
                right.append(step)
                if not torch.equal(found, expected):
                    wrong.append(f"thread {number}, step {step}")
            for side in (served, alone):
                side.pool.release(step)

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) + len(refused) == 240
    assert not wrong
