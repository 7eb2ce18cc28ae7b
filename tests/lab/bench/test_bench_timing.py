"""Timing of `tamis bench`: the number of input sets for cold calls, and the spread of replays."""

from contextlib import nullcontext

import pytest
import torch

from tamis.lab.bench import timing


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
