"""Result rows of `tamis bench door`: one per cell, function and version."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tamis.lab.bench.record import MachineRow


@dataclass(frozen=True)
class DoorRow(MachineRow):
    """The times of one version of a function on one cell. Fields without a value are empty."""

    cpu: str
    """The processor, on which the times of the host depend."""
    door: str
    """The function of tamis; a peer's row names the function that it stands for."""
    shape: str
    heads: int | None
    topk: int | None
    window: int
    layout: str
    page_size: int
    version: str
    """`tamis`, with the way that it takes where there are two, or the peer."""
    build: str
    """The peer's distribution and version."""
    sets: int
    repeats: int
    error: float | None
    graph_us: float | None = None
    graph_p10: float | None = None
    graph_p90: float | None = None
    eager_us: float | None = None
    host_us: float | None = None
    host_p10: float | None = None
    host_p90: float | None = None
    kernels: int | None = None
    copies: int | None = None
    against: str = ""
    """The build of the peer whose replay is the fastest on this cell; empty in a peer's row."""
    ratio: float | None = None
    """That peer's time by replay divided by ours: above 1, tamis is faster."""
    eager_ratio: float | None = None
    """The same for the fastest peer back to back."""
    note: str = ""
    """Why there is no time, or what a reader must know about the work."""

    @property
    def ours(self) -> bool:
        """Whether tamis was timed."""
        return not self.build and self.version.startswith("tamis")


DOOR_COLUMNS = [field.name for field in fields(DoorRow)]


def compared(rows: Iterable[DoorRow]) -> list[DoorRow]:
    """The rows of one cell, ours with their ratios against the fastest peer."""
    rows = list(rows)
    peers = [row for row in rows if not row.ours]
    replayed = [row for row in peers if row.graph_us is not None]
    if not replayed:
        return rows
    fastest = min(replayed, key=lambda row: row.graph_us or 0.0)
    eager = min(row.eager_us for row in peers if row.eager_us is not None)
    return [
        row
        if not row.ours or row.graph_us is None or row.eager_us is None or fastest.graph_us is None
        else replace(
            row,
            against=fastest.build or fastest.version,
            ratio=fastest.graph_us / row.graph_us,
            eager_ratio=eager / row.eager_us,
        )
        for row in rows
    ]


def processor() -> str:
    """The name of this machine's processor; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else ""
