"""Three times of a call: replayed from a graph, back to back as a program calls it, and on the host alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from tamis.lab.bench.door.launches import Launches, count_launches
from tamis.lab.bench.timing import (
    MOST_ISSUED,
    Calls,
    Spread,
    host_run,
    issue,
    no_collection,
    spread,
    time_in_turn,
    wait,
)

EAGER_SECONDS = 0.02
"""A round of calls back to back takes about this long, so that the wait at its end does not count."""
EAGER_ROUNDS = 5
MOST_EAGER = 512
MOST_QUEUED = 512
"""Launches of a round on the host. The driver's queue holds about a thousand; a full one makes the host wait."""


@dataclass(frozen=True)
class Times:
    """The times of one version of a call."""

    graph: Spread | None
    """Replays of a CUDA graph; None on a CPU and for calls that cannot be captured."""
    eager: Spread
    """Wall time per call of many calls in a row, up to the end of the last one's work."""
    host: Spread
    """Time until a call returns, on a device that had nothing to do."""
    launches: Launches | None


def time_doors(versions: Sequence[tuple[Calls, bool]], device: torch.device, repeats: int) -> list[Times]:
    """The times of each version; rounds of all versions alternate.

    Args:
        versions: the calls of each version, one per input set, and whether they can be captured in a CUDA graph.
        device: where they run.
        repeats: rounds of replays, and of calls on the host.
    """
    launches = [count_launches(calls[0], device, capturable=capturable) for calls, capturable in versions]
    graphs: list[Spread | None] = [None] * len(versions)
    captured = [n for n, (_, capturable) in enumerate(versions) if capturable and device.type == "cuda"]
    for n, found in zip(captured, time_in_turn([versions[n] for n in captured], device, repeats), strict=True):
        graphs[n] = found
    with no_collection():
        for calls, _ in versions:
            _wall(calls, device)
        seconds = [_wall(calls, device) / len(calls) for calls, _ in versions]
        rows = zip(versions, seconds, launches, strict=True)
        runs = [(_eager_run(calls, each), _host_run(calls, each, count)) for (calls, _), each, count in rows]
        eager = [[_wall(run, device) / len(run) for run, _ in runs] for _ in range(EAGER_ROUNDS)]
        host = [[issue(run, device) / len(run) for _, run in runs] for _ in range(repeats)]
    return [
        Times(graphs[n], _microseconds(eager, n, "eager"), _microseconds(host, n, "host"), launches[n])
        for n in range(len(versions))
    ]


def _eager_run(calls: Calls, seconds: float) -> list[Callable[[], object]]:
    """All sets as often as fits in a round, at least once."""
    rounds = min(EAGER_SECONDS / max(seconds, 1e-9), MOST_EAGER) // len(calls)
    return list(calls) * max(1, int(rounds))


def _host_run(calls: Calls, seconds: float, launches: Launches | None) -> list[Callable[[], object]]:
    """As many calls as the driver's queue takes for certain."""
    fits = MOST_QUEUED // max(1, sum(launches)) if launches else MOST_ISSUED
    return host_run(calls, seconds, fits)


def _microseconds(rounds: Sequence[Sequence[float]], version: int, method: str) -> Spread:
    return spread([found[version] * 1e6 for found in rounds], method)


def _wall(calls: Calls, device: torch.device) -> float:
    """Seconds from the first call to the end of the last one's work."""
    wait(device)
    start = perf_counter()
    for call in calls:
        call()
    wait(device)
    return perf_counter() - start
