"""Result rows: the measurement, its machine and the commit, written as CSV and as plain data."""

import csv
import io
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import torch

import tamis
from tamis import checks
from tamis.lab.html import write_whole

FLASH_MLA = ("flashmla-sgl", "flashmla-vllm", "flashmla-plain")
"""The peers that are builds of FlashMLA. A table shows all of their times, and the ratio against the fastest."""


@dataclass(frozen=True)
class Machine:
    """The device and the versions of a measurement."""

    gpu: str
    """Name of the GPU, or of the CPU's architecture."""
    driver: str
    torch: str
    triton: str
    tamis: str
    commit: str
    """Commit of the checkout that tamis is imported from, with +changes if files differ; empty without a checkout."""


@dataclass(frozen=True)
class MachineRow:
    """The first columns of every result row: when and on which machine it was measured."""

    time: str
    gpu: str
    driver: str
    torch: str
    triton: str
    tamis: str
    commit: str


@dataclass(frozen=True)
class Row(MachineRow):
    """One measurement, compared with at most one peer. Fields without a value are empty."""

    backend: str
    suite: str
    stage: str
    shape: str
    heads: int | None
    topk: int | None
    window: int
    layout: str
    page_size: int
    method: str
    """How it was timed: see `tamis.lab.bench.timing.Spread`."""
    repeats: int
    sets: int
    """Input sets that the calls rotate over."""
    median_us: float
    p10: float
    p90: float
    bytes: int
    flops: int
    roofline_us: float
    error: float
    """Error of tamis on these inputs: the number of wrong slots for translate and select, `selection_error` for top-k,
    and the relative error against float64 for all other stages."""
    peer: str = ""
    peer_us: float | None = None
    peer_p10: float | None = None
    peer_p90: float | None = None
    peer_error: float | None = None
    ratio: float | None = None
    """The peer's time divided by that of tamis: above 1, tamis is faster."""
    note: str = ""
    """The reason why a peer has no time."""
    peer_build: str = ""
    """The peer's distribution and version, where it is known."""
    host_us: float | None = None
    """The time until a call of tamis returns, on a GPU that had nothing to do; empty on a CPU."""
    peer_host_us: float | None = None

    @property
    def of_roofline(self) -> float:
        """The roofline's time divided by the measured one: 1 means that the limit is reached."""
        return self.roofline_us / self.median_us

    def as_data(self) -> dict[str, Any]:
        """The row as plain data for JSON."""
        return asdict(self) | {"of_roofline": self.of_roofline}


def slower_builds(rows: Sequence[Row]) -> list[Row]:
    """The rows of builds of FlashMLA than which another build was faster in the same measurement."""
    timed = [row for row in rows if row.peer in FLASH_MLA and row.peer_us is not None]

    def same(row: Row) -> tuple[object, ...]:
        return (row.backend, row.stage, row.shape, row.heads, row.topk, row.window, row.layout, row.page_size)

    fastest: dict[tuple[object, ...], float] = {}
    for row in timed:
        fastest[same(row)] = min(row.peer_us or 0.0, fastest.get(same(row), inf))
    return [row for row in timed if (row.peer_us or 0.0) > fastest[same(row)]]


COLUMNS = [field.name for field in fields(Row)]


def timestamp() -> str:
    """The current time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe(device: torch.device, name: str) -> Machine:
    """The machine of a device; `name` is used if the device is not a GPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else name
    driver = _driver() if device.type == "cuda" else ""
    return Machine(gpu, driver, str(torch.__version__), _installed("triton"), tamis.__version__, _commit())


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _driver() -> str:
    found = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return found.splitlines()[0] if found else ""


def _commit() -> str:
    package = Path(tamis.__file__).resolve().parent
    git = ["git", "-C", str(package)]
    root = _output([*git, "rev-parse", "--show-toplevel"])
    # A package installed inside another project's checkout must not report that project's commit.
    if not root or package != Path(root).resolve() / "src" / "tamis":
        return ""
    changes = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    return _output([*git, "rev-parse", "HEAD"]) + ("+changes" if changes else "")


def _output(command: list[str]) -> str:
    """The output of a program; empty if the program is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class CsvFile:
    """Appends rows to a file after each job, so that an interrupted run keeps its measurements."""

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        """Refuse a file with other columns, or one in a missing folder. Nothing is written yet."""
        self._path, self._columns = path, list(columns)
        if path.is_dir() or not path.parent.is_dir():
            raise checks.refuse("csv", "a file in an existing folder", str(path), "choose another place")
        self._new = not path.exists() or path.stat().st_size == 0
        if not self._new:
            with path.open(newline="", encoding="utf-8", errors="replace") as file:
                header = file.readline().rstrip("\r\n").split(",")
            if header != self._columns:
                raise checks.refuse("csv", "a new file, or one with the same columns", str(path), "choose another name")

    def add(self, rows: Sequence[Any]) -> None:
        """Write the rows, dataclasses with these columns, now: all of them, or none if the disk is full."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        if self._new:
            writer.writeheader()
        for row in rows:
            cells = asdict(row).items()
            writer.writerow({name: f"{v:.6g}" if isinstance(v, float) else v for name, v in cells})
        before = b"" if self._new else self._path.read_bytes()
        write_whole(self._path, before + text.getvalue().encode("utf-8"))
        self._new = False
