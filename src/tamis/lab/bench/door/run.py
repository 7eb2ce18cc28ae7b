"""Measures a cell: every function and every peer on the same inputs, each result checked before its times."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tamis.lab.bench.door.attention import attention_versions
from tamis.lab.bench.door.cells import DOORS, Cell, Kind
from tamis.lab.bench.door.record import DoorRow, compared, processor
from tamis.lab.bench.door.steps import index_versions, layer_versions, plan_versions, write_versions
from tamis.lab.bench.door.timing import Times, time_doors
from tamis.lab.bench.door.v4_step import v4_layer_versions
from tamis.lab.bench.door.versions import Version, Versions
from tamis.lab.bench.peers import Peer
from tamis.lab.bench.random_inputs import SharedInputs
from tamis.lab.bench.record import Machine, timestamp

MAKERS: dict[Kind, Callable[[Cell, Sequence[str], SharedInputs, Sequence[Peer]], Versions]] = {
    "attend": attention_versions,
    "layer": layer_versions,
    "index": index_versions,
    "v4-layer": v4_layer_versions,
    "write": write_versions,
    "plan": plan_versions,
}


@dataclass(frozen=True)
class DoorMeasured:
    """The results of one cell."""

    rows: list[DoorRow]
    wrong: list[str]
    """A line for each function of ours that failed or whose result is wrong; it has no row."""
    missing: dict[str, str]
    """Reasons by the name of each peer that cannot do this work."""


@dataclass(frozen=True, eq=False)
class DoorBench:
    """The settings and inputs that all cells of a run share."""

    device: torch.device
    repeats: int
    machine: Machine
    peers: Sequence[Peer]
    drawn: SharedInputs
    doors: Sequence[str] = DOORS
    """The functions to be timed."""
    cpu: str = field(default_factory=processor)

    def measure(self, cell: Cell) -> DoorMeasured:
        """Check and time all versions of a cell."""
        try:
            versions = MAKERS[cell.kind](cell, self.doors, self.drawn, self.peers)
        except Exception as failure:  # such as a lack of memory: the other cells are measured all the same
            return DoorMeasured([], [f"{', '.join(cell.doors)} on {cell.title}: {short(failure)}"], {})
        wrong: list[str] = []
        rows: list[DoorRow] = []
        ready: list[tuple[Version, float]] = []
        for version in versions.found:
            error, reason = _checked(version)
            if not reason and error is not None:
                ready.append((version, error))
            elif version.ours:
                wrong.append(f"{version.door} ({version.name}) on {cell.title}: {reason}")
            else:
                rows.append(self._row(cell, version, versions.sets, error, None, reason))
        for (version, error), times in zip(ready, self._timed([one for one, _ in ready]), strict=True):
            if isinstance(times, Times):
                rows.append(self._row(cell, version, versions.sets, error, times, version.note))
            elif version.ours:
                wrong.append(f"{version.door} ({version.name}) on {cell.title}: {times}")
            else:
                rows.append(self._row(cell, version, versions.sets, error, None, times))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the graphs' memory
        return DoorMeasured(compared(rows), wrong, versions.missing)

    def _timed(self, versions: Sequence[Version]) -> list[Times | str]:
        """The times of all versions, or the reason why one has none. If they fail together, each is timed alone."""
        each = [(version.calls, version.capturable) for version in versions]
        try:
            return list(time_doors(each, self.device, self.repeats))
        except RuntimeError as failure:
            if len(versions) == 1:
                return [short(failure)]
            return [found for version in versions for found in self._timed([version])]

    def _row(
        self, cell: Cell, version: Version, sets: int, error: float | None, times: Times | None, note: str
    ) -> DoorRow:
        job = cell.job
        graph = times.graph if times else None
        return DoorRow(
            timestamp(),
            **asdict(self.machine),
            cpu=self.cpu,
            door=version.door,
            shape=job.shape,
            heads=job.heads,
            topk=job.topk,
            window=job.window,
            layout=job.layout,
            page_size=job.page_size,
            version=version.name,
            build=version.build,
            sets=sets,
            repeats=self.repeats,
            error=error,
            graph_us=graph.median_us if graph else None,
            graph_p10=graph.p10 if graph else None,
            graph_p90=graph.p90 if graph else None,
            eager_us=times.eager.median_us if times else None,
            host_us=times.host.median_us if times else None,
            host_p10=times.host.p10 if times else None,
            host_p90=times.host.p90 if times else None,
            kernels=times.launches.kernels if times and times.launches else None,
            copies=times.launches.copies if times and times.launches else None,
            note=note,
        )


def _checked(version: Version) -> tuple[float | None, str]:
    """The error of the first call's result, and why no time may be shown; empty if one may."""
    try:
        result: Any = version.calls[0]()
        error = version.error(result)
    except Exception as failure:  # in another library, or a bug of ours: the other versions are measured all the same
        return None, short(failure)
    if not error <= version.bound:
        return None, f"its result is wrong: error {error:.2e}"
    return error, ""


def short(failure: Exception) -> str:
    """One line about an exception."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
