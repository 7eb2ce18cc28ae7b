"""The table of hardware: what was measured, what was compiled or emulated, and what nobody has tried."""

import csv
from collections.abc import Sequence
from typing import NamedTuple

from tamis.backends import BACKENDS
from tamis.lab.offline.triton import TARGETS
from tools import records
from tools.docs.markdown import table
from tools.docs.results import RESULTS
from tools.records import Counts

PRODUCTS = {
    "sm_80": ("NVIDIA", "A100"),
    "sm_86": ("NVIDIA", "A10, RTX 30"),
    "sm_89": ("NVIDIA", "L40S, RTX 40"),
    "sm_90": ("NVIDIA", "H100, H200, H20"),
    "sm_100": ("NVIDIA", "B200"),
    "sm_120": ("NVIDIA", "RTX 50"),
    "gfx942": ("AMD", "MI300X"),
    "gfx950": ("AMD", "MI350X"),
}
"""The maker and some products of each architecture for which kernels are compiled offline."""
CAPABILITY = {"NVIDIA H200": "sm_90"}
"""The architecture of each GPU that has rows under `benchmarks/results`."""
REFERENCE = "plain torch"
ARM64 = RESULTS / "install" / "arm64.csv"
"""A row for each test file that was run on an emulated arm64 CPU. `not_run`: for want of time."""


class Measured(NamedTuple):
    """What the rows of one GPU say."""

    rows: int
    newest: str
    """The day of its last row."""


def measured() -> dict[str, Measured]:
    """GPUs that have rows of `tamis bench`, by the name that CUDA gives them."""
    found: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("gpu"):
                    found.setdefault(row["gpu"], []).append(row["time"][:10])
    return {gpu: Measured(len(days), max(days)) for gpu, days in found.items()}


def hardware() -> str:
    """Architectures of the same state in a line: which kernels run there, and how far that has been tried."""
    rows = measured()
    lines = []
    for target in (name for name in TARGETS if name in CAPABILITY.values()):
        known = [
            f"{gpu}: {rows[gpu].rows} rows, newest {rows[gpu].newest}" for gpu in rows if CAPABILITY[gpu] == target
        ]
        how = "; ".join(known) + "; other products of this architecture were not tried"
        lines.append((" ".join(PRODUCTS[target]), _kernels(target), "**measured**", how))
    lines.append(("CPU, x86-64", REFERENCE, "tested", "all tests but those that need a GPU, on every change"))
    others = [name for name in TARGETS if name not in CAPABILITY.values()]
    for maker in dict.fromkeys(PRODUCTS[name][0] for name in others):
        same = [name for name in others if PRODUCTS[name][0] == maker]
        what = f"{maker} {', '.join(PRODUCTS[name][1] for name in same)}"
        kernels = " or ".join(dict.fromkeys(_kernels(name) for name in same))
        how = f"compiled for {', '.join(same)}; run in Triton's interpreter on a CPU, never on such a GPU"
        lines.append((what, kernels, "compiled and emulated", how))
    lines.append(("CPU, arm64 (Linux)", REFERENCE, "emulated", _emulated(records.read(ARM64))))
    lines.append(("CPU, arm64 (macOS)", REFERENCE, "untested", "the same code; no such machine was tried"))
    return table(("hardware", "kernels", "state", "what that rests on"), lines, "llll")


def _emulated(rows: Sequence[records.Row]) -> str:
    """What rows of test files under an emulator say."""
    counts = Counts(*(sum(int(row[name]) for row in rows) for name in Counts._fields))
    left = sum(int(row["not_run"]) for row in rows)
    emulators, versions = (" and ".join(dict.fromkeys(row[name] for row in rows)) for name in ("emulator", "torch"))
    what = f"{counts} of {len(rows)} test files under {emulators} with torch {versions}"
    return f"{what}; {left} others of these files were not run, for want of time; no such machine was tried"


def _kernels(target: str) -> str:
    """The kernels that run on an architecture."""
    arch = TARGETS[target].arch
    own = [one for one in BACKENDS if isinstance(arch, int) and arch // 10 in (one.compute_capabilities or ())]
    return "CUDA C++ and Triton" if own else "Triton"
