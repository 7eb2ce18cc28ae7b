"""Measures a job: tamis and its peers interleaved, on the same inputs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from tamis.backends import backend_for_stage
from tamis.lab.bench.inputs import InputSet, Prepared, prepare, worst_error
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers import Peer, Unsupported
from tamis.lab.bench.record import Machine, Row, timestamp
from tamis.lab.bench.roofline import Ceiling
from tamis.lab.bench.timing import Calls, Spread, host_in_turn, time_in_turn
from tamis.lab.verify.check import Target


class WrongResult(Exception):
    """The result of tamis on the inputs to be timed is wrong, so that no time is measured."""


class Measured(NamedTuple):
    """The results of one job."""

    rows: list[Row]
    """One row per peer that was timed or failed; a single row without a peer if there is none."""
    unsuited: dict[str, str]
    """Reasons by the name of each peer that lacks the stage or format; empty if all peers lack it."""


@dataclass(frozen=True)
class Bench:
    """The settings that all measurements of a run share."""

    device: torch.device
    backend: str
    repeats: int
    ceiling: Ceiling
    machine: Machine
    peers: Sequence[Peer]

    def measure(self, job: Job) -> Measured:
        """Time a job in tamis and in its peers."""
        prepared = prepare(job, self.device)
        first = prepared.sets[0]
        error = worst_error(first, first.run(self.backend))
        if not error <= first.bound:
            raise WrongResult(f"{job.stage} {job.shape} is wrong on the inputs to be timed: error {error:.2e}")
        backend = backend_for_stage(job.stages[0], self.backend, self.device)
        runners = [_ready(peer, job, prepared.sets) for peer in self.peers]
        ours, runners, theirs = self._timed(prepared, runners)
        row = partial(self._row, prepared, backend.name, ours, error)
        # A peer that lacks the stage gets no row; a peer that failed does.
        rows = [row(r, t) for r, t in zip(runners, theirs, strict=True) if t is not None or not r.foreign]
        unsuited = {runner.peer.name: runner.note for runner in runners if runner.foreign}
        if rows:
            return Measured(rows, unsuited)
        return Measured([replace(row(None, None), note="; ".join(": ".join(pair) for pair in unsuited.items()))], {})

    def _timed(
        self, prepared: Prepared, runners: "list[_Runner]"
    ) -> "tuple[_Times, list[_Runner], list[_Times | None]]":
        """The times of tamis, the peers, and their times. If a peer fails in the capture, tamis is timed alone."""
        capturable = not Target(self.device, self.backend).not_capturable(prepared.job.stages)
        ours = ([partial(item.run, self.backend) for item in prepared.sets], capturable)
        able = [runner for runner in runners if runner.calls]
        versions = [(runner.calls, runner.peer.capturable) for runner in able]
        try:
            found, *others = self._times([ours, *versions])
        except RuntimeError as failure:
            if not able:
                raise
            found, *others = self._times([ours])
            runners = [replace(r, calls=[], note=_short(failure)) if r.calls else r for r in runners]
        rest = iter(others)
        return found, runners, [next(rest) if runner.calls else None for runner in runners]

    def _times(self, versions: Sequence[tuple[Calls, bool]]) -> "list[_Times]":
        spreads = time_in_turn(versions, self.device, self.repeats)
        if self.device.type != "cuda":
            return [_Times(spread) for spread in spreads]
        busy = [spread.median_us * 1e-6 for spread in spreads]
        hosts = host_in_turn([calls for calls, _ in versions], busy, self.device, self.repeats)
        return [_Times(spread, host.median_us) for spread, host in zip(spreads, hosts, strict=True)]

    def _row(
        self,
        prepared: Prepared,
        backend: str,
        ours: "_Times",
        error: float,
        runner: "_Runner | None",
        theirs: "_Times | None",
    ) -> Row:
        job, spread = prepared.job, ours.spread
        other = theirs.spread if theirs else None
        return Row(
            time=timestamp(),
            **asdict(self.machine),
            backend=backend,
            suite=job.suite,
            stage=job.stage,
            shape=job.shape,
            heads=job.heads,
            topk=job.topk,
            window=job.window,
            layout=job.layout,
            page_size=job.page_size,
            method=spread.method,
            repeats=self.repeats,
            sets=len(prepared.sets),
            median_us=spread.median_us,
            p10=spread.p10,
            p90=spread.p90,
            bytes=prepared.cost.bytes,
            flops=prepared.cost.flops,
            roofline_us=self.ceiling.seconds(prepared.cost) * 1e6,
            error=error,
            peer=runner.peer.name if runner else "",
            peer_us=other.median_us if other else None,
            peer_p10=other.p10 if other else None,
            peer_p90=other.p90 if other else None,
            peer_error=runner.error if runner else None,
            ratio=other.median_us / spread.median_us if other else None,
            note=runner.note if runner else "",
            peer_build=runner.peer.build if runner else "",
            host_us=ours.host_us,
            peer_host_us=theirs.host_us if theirs else None,
        )


class _Times(NamedTuple):
    """The times of one version of a call."""

    spread: Spread
    host_us: float | None = None
    """The time until a call returns; None on a CPU, where that is the whole time."""


@dataclass(frozen=True)
class _Runner:
    """A peer's checked calls; no calls if the peer cannot do the job or its result is wrong."""

    peer: Peer
    calls: list[Callable[[], Any]]
    error: float | None = None
    note: str = ""
    foreign: bool = False
    """The peer has no such stage or format."""


def _ready(peer: Peer, job: Job, sets: Sequence[InputSet]) -> _Runner:
    try:
        calls = peer.calls(job, sets)
        error = worst_error(sets[0], calls[0]())
    except Unsupported as reason:
        return _Runner(peer, [], note=str(reason), foreign=True)
    except Exception as failure:
        # An error inside another library must not end the measurements.
        return _Runner(peer, [], note=_short(failure))
    if not error <= sets[0].bound:
        shown = None if math.isinf(error) else error
        return _Runner(peer, [], shown, f"its result differs: error {error:.2e}")
    return _Runner(peer, calls, error)


def _short(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:200]}"
