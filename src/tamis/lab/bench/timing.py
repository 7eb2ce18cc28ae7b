"""Timing with cold caches: calls on rotated inputs, versions interleaved, medians and percentiles.

On a GPU the calls on all input sets are captured in one CUDA graph and its replays are timed by events, which leaves
out the host. The input sets together exceed the last-level cache several times over, so that no call finds its rows
there. Versions to be compared are replayed in turn, so that clocks and temperature are the same for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

import torch

from tamis.arithmetic import ceil_div

Calls: TypeAlias = Sequence[Callable[[], object]]
WARM_UPS = 3
COLD_FACTOR = 4
"""How many times the size of the cache all input sets have together."""
FALLBACK_CACHE = 50 * 2**20


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
