"""Timing of `tamis bench`: the number of input sets for cold calls, and the spread of replays."""

from contextlib import nullcontext

import pytest
import torch

from tamis.lab.bench import run, timing
from tamis.lab.bench.record import Machine
from tamis.lab.bench.roofline import Ceiling


def test_cold_caches_need_enough_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 50 * 2**20)
    gpu = torch.device("cuda")
    assert timing.set_count(172_000_000, gpu) == 2
    assert timing.set_count(1_386_496, gpu) == 152
    assert timing.set_count(1, gpu) == 256
    assert timing.set_count(0, gpu) == 256


def test_gpu_times_are_of_replays_in_turn_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA: a graph is captured per version, replays alternate, time is divided by the calls."""
    log: list[str] = []
    now = [0.0]

    class Graph:
        count = 0

        def __init__(self) -> None:
            Graph.count += 1
            self.name = f"replay {Graph.count}"

        def replay(self) -> None:
            log.append(self.name)
            now[0] += 0.4 if self.name == "replay 1" else 1.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def eager() -> None:
        now[0] += 0.01

    versions = [([lambda: None] * 4, True), ([lambda: None] * 2, True), ([eager] * 10, False)]
    ours, peer, plain = timing.time_in_turn(versions, torch.device("cuda"), 20)
    assert log == ["replay 1", "replay 2"] * 23
    assert ours == timing.Spread(pytest.approx(100.0), pytest.approx(100.0), pytest.approx(100.0), "graph")
    assert peer.median_us == pytest.approx(500.0)
    assert plain.method == "events"
    assert plain.median_us == pytest.approx(10.0)


def test_spread_is_of_the_samples() -> None:
    spread = timing.spread([float(n) for n in range(100, -1, -1)], "clock")
    assert (spread.p10, spread.median_us, spread.p90) == (10, 50, 90)


@pytest.mark.parametrize("work", [10e-6, 5e-3])
def test_host_time_ends_when_the_call_returns(work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for CUDA: a call takes 30 us of the host and then keeps the device busy for `work` seconds."""
    now, busy_until, queued, most = [0.0], [0.0], [0], [0]

    def synchronize(device: object) -> None:
        now[0] = max(now[0], busy_until[0])
        queued[0] = 0

    def call() -> None:
        now[0] += 30e-6
        busy_until[0] = max(now[0], busy_until[0]) + work
        queued[0] += 1
        most[0] = max(most[0], queued[0])

    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    (found,) = timing.host_in_turn([[call] * 3], [work], torch.device("cuda"), 5)
    assert found.median_us == pytest.approx(30.0)
    assert found.method == "host"
    # Long calls are issued two at a time, so that the driver's queue never makes the host wait.
    assert most[0] == (16 if work < 1e-3 else 2)


def test_rows_on_a_gpu_have_the_host_time_beside_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def host(versions: object, seconds: list[float], device: object, repeats: int) -> list[timing.Spread]:
        asked.append((versions, seconds, repeats))
        return [timing.Spread(7.0, 6.0, 8.0, "host"), timing.Spread(9.0, 8.0, 10.0, "host")]

    spreads = [timing.Spread(100.0, 90.0, 110.0, "graph"), timing.Spread(200.0, 190.0, 210.0, "graph")]
    monkeypatch.setattr(run, "time_in_turn", lambda versions, device, repeats: spreads)
    monkeypatch.setattr(run, "host_in_turn", host)
    ceiling, machine = Ceiling(1.0, None, ""), Machine("", "", "", "", "", "")
    calls = [lambda: None]
    for device, hosts in (("cuda", [7.0, 9.0]), ("cpu", [None, None])):
        bench = run.Bench(torch.device(device), "auto", 4, ceiling, machine, [])
        found = bench._times([(calls, True), (calls, True)])
        assert [times.spread for times in found] == spreads
        assert [times.host_us for times in found] == hosts
    assert asked == [([calls, calls], [pytest.approx(100e-6), pytest.approx(200e-6)], 4)]
