"""The three times of a call and its launches, with stand-ins for CUDA."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.lab.bench.door import launches, timing
from tamis.lab.bench.door.launches import Launches
from tamis.lab.bench.timing import Spread

GPU = torch.device("cuda")


class Machine:
    """A host on which a call takes `host` seconds, and a device on which its work takes `work` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: float, work: float) -> None:
        self.now = self.busy_until = 0.0
        self.host, self.work = host, work
        self.issued: list[int] = []
        self.queued = 0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)
        monkeypatch.setattr("tamis.lab.bench.timing.perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(timing, "count_launches", lambda call, device, *, capturable: Launches(40, 2))
        monkeypatch.setattr(timing, "time_in_turn", self.replay)

    def call(self) -> None:
        self.now += self.host
        self.busy_until = max(self.busy_until, self.now) + self.work
        self.queued += 1

    def wait(self, device: object = None) -> None:
        self.now = max(self.now, self.busy_until)
        self.issued.append(self.queued)
        self.queued = 0

    def replay(self, versions: Any, device: object, repeats: int) -> list[Spread]:
        return [Spread(self.work * 1e6, 0, 0, "graph") for _ in versions]


@pytest.mark.parametrize(("host", "work"), [(50e-6, 10e-6), (20e-6, 200e-6)])
def test_host_time_leaves_out_the_work_and_back_to_back_has_the_longer_of_the_two(
    host: float, work: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, host, work)
    (found,) = timing.time_doors([([machine.call] * 4, True)], GPU, 5)
    assert found.graph == Spread(work * 1e6, 0, 0, "graph")
    assert found.host.median_us == pytest.approx(host * 1e6)
    assert found.eager.median_us == pytest.approx(max(host, work) * 1e6, rel=0.15)
    assert found.launches == Launches(40, 2)
    # With 42 launches a call, a round of the host is 12 calls: the driver's queue never fills.
    *_, last = (count for count in machine.issued if count)
    assert last * 42 <= timing.MOST_QUEUED


def test_calls_that_cannot_be_captured_have_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 50e-6, 10e-6)
    first, second = timing.time_doors([([machine.call], False), ([machine.call], True)], GPU, 2)
    assert first.graph is None
    assert second.graph is not None


def test_long_calls_are_issued_a_few_at_a_time() -> None:
    def call() -> None: ...

    assert len(timing._host_run([call], 5e-3, Launches(2, 0))) == 2
    assert len(timing._host_run([call], 20e-6, Launches(2, 0))) == timing.MOST_ISSUED
    assert len(timing._host_run([call], 20e-6, Launches(100, 0))) == 5
    assert len(timing._eager_run([call] * 2, 5e-3)) == 4
    assert len(timing._eager_run([call] * 200, 5e-3)) == 200


def test_collections_of_garbage_stay_out_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    calls: list[Callable[[], None]] = [lambda: inside.append(gc.isenabled())]
    timing.time_doors([(calls, True)], torch.device("cpu"), 2)
    assert not any(inside)
    assert gc.isenabled()


class FakeGraph:
    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def raw_cuda_graph(self) -> int:
        return 7


def fake_driver(types: list[int]) -> SimpleNamespace:
    def call(name: str, handle: Any, *rest: Any) -> None:
        if name == "cuGraphGetNodes":
            assert handle.value == 7
            nodes, count = rest
            count._obj.value = len(types)
            if nodes is not None:
                for n in range(len(types)):
                    nodes[n] = 100 + n
        else:
            assert name == "cuGraphNodeGetType"
            rest[0]._obj.value = types[handle.value - 100]

    return SimpleNamespace(call=call)


def test_launches_are_the_nodes_of_a_captured_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "driver", lambda: fake_driver([0, 0, 2, 1, 0, 5]))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called: list[int] = []
    found = launches.count_launches(lambda: called.append(1), GPU, capturable=True)
    assert found == Launches(kernels=3, copies=2)
    # The first call compiles and fills schedules outside of the capture.
    assert len(called) == 2
    monkeypatch.delattr(FakeGraph, "raw_cuda_graph")
    assert launches.count_launches(lambda: None, GPU, capturable=True) is None


def test_launches_are_not_counted_on_a_cpu() -> None:
    assert launches.count_launches(lambda: None, torch.device("cpu"), capturable=True) is None
