"""Timing with cold caches: calls on rotated inputs, versions interleaved, medians and percentiles.

On a GPU the calls on all input sets are captured in one CUDA graph and its replays are timed by events, which leaves
out the host. The input sets together exceed the last-level cache several times over, so that no call finds its rows
there. Versions to be compared are replayed in turn, so that clocks and temperature are the same for all.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from time import perf_counter
from typing import TypeAlias

import torch

from tamis.arithmetic import ceil_div

Calls: TypeAlias = Sequence[Callable[[], object]]
WARM_UPS = 3
COLD_FACTOR = 4
"""How many times the size of the cache all input sets have together."""
FALLBACK_CACHE = 50 * 2**20
QUEUE_SECONDS = 0.004
"""The calls of a round on the host may keep the device busy for about this long."""
MOST_ISSUED = 16
"""Calls of a round on the host."""


@dataclass(frozen=True)
class Spread:
    """Microseconds per call: median, 10th and 90th percentile."""

    median_us: float
    p10: float
    p90: float
    method: str
    """graph: replays of a CUDA graph; events: around eager launches; clock: the host's clock."""


def cache_bytes(device: torch.device) -> int:
    """The size of the GPU's last-level cache; 1 on a CPU, where two sets are enough since times need not be cold."""
    if device.type != "cuda":
        return 1
    properties = torch.cuda.get_device_properties(device)
    return max(int(getattr(properties, "L2_cache_size", 0)), FALLBACK_CACHE)


def set_count(touched: int, device: torch.device, *, most: int = 256) -> int:
    """The number of input sets of `touched` bytes with which every call finds a cold cache; at least two."""
    return min(most, max(2, ceil_div(COLD_FACTOR * cache_bytes(device), max(1, touched))))


def time_in_turn(versions: Sequence[tuple[Calls, bool]], device: torch.device, repeats: int) -> list[Spread]:
    """The spread of each version, from `repeats` rounds in which all versions run one after the other.

    Args:
        versions: the calls of each version, one per input set, and whether they can be captured in a CUDA graph.
        device: where they run.
        repeats: timed rounds, after a few untimed ones.
    """
    if device.type != "cuda":
        rounds = [[_clock(calls) for calls, _ in versions] for _ in range(1 + repeats)]
        return [spread([r[n] for r in rounds[1:]], "clock") for n in range(len(versions))]
    runs = [_captured(calls) if capturable else _eager(calls) for calls, capturable in versions]
    rounds = [[_events(run) for run in runs] for _ in range(WARM_UPS + repeats)]
    return [
        spread([r[n] / len(calls) for r in rounds[WARM_UPS:]], "graph" if capturable else "events")
        for n, (calls, capturable) in enumerate(versions)
    ]


def host_in_turn(
    versions: Sequence[Calls], seconds: Sequence[float], device: torch.device, repeats: int
) -> list[Spread]:
    """The time until a call returns, on a device that had nothing to do: rounds of all versions alternate.

    Args:
        versions: the calls of each version, one per input set, which ran before.
        seconds: how long a call of each version keeps the device busy.
        device: where they run.
        repeats: rounds.
    """
    runs = [host_run(calls, each, MOST_ISSUED) for calls, each in zip(versions, seconds, strict=True)]
    with no_collection():
        rounds = [[issue(run, device) * 1e6 / len(run) for run in runs] for _ in range(repeats)]
    return [spread([r[n] for r in rounds], "host") for n in range(len(runs))]


def host_run(calls: Calls, seconds: float, most: int) -> list[Callable[[], object]]:
    """At most so many calls, over all sets in turn, that the driver's queue does not fill; at least two."""
    count = max(2, min(MOST_ISSUED, most, int(QUEUE_SECONDS / max(seconds, 1e-9))))
    return list(islice(cycle(calls), count))


def issue(calls: Calls, device: torch.device) -> float:
    """Seconds until the last call has returned."""
    wait(device)
    start = perf_counter()
    for call in calls:
        call()
    return perf_counter() - start


def wait(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector, which would interrupt some calls, out of the times."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _clock(calls: Calls) -> float:
    start = perf_counter()
    for call in calls:
        call()
    return (perf_counter() - start) * 1e6 / len(calls)


def _eager(calls: Calls) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Calls) -> Callable[[], None]:
    # Compile kernels, fill schedules and allocate workspaces before the capture.
    _eager(calls)()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _eager(calls)()
    return graph.replay


def _events(run: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def spread(samples: Sequence[float], method: str) -> Spread:
    """The median and the percentiles of samples in microseconds."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return Spread(at(0.5), at(0.1), at(0.9), method)
