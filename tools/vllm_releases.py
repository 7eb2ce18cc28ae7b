"""`python -m tools.vllm_releases`: other releases of vLLM for `make test-vllm VLLM=...`, and what ran under which.

    python -m tools.vllm_releases unpack 0.29.0 FOLDER    the Python files and the metadata of its wheel
    python -m tools.vllm_releases record 0.29.0 RUN RESULT    a cell of the table in docs/vllm.md

A wheel has 250 to 330 MB, nearly all of it kernels that need a GPU. RESULT is a few words, or pytest's JUnit report.
"""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from tools import records
from tools.records import Row

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "vllm" / "releases.csv"
COLUMNS = ("release", "run", "result", "date")
RELEASES = ("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Every release of the minor versions that the plugin supports."""
CPU = "tests on CPU tensors"
RUNS = (CPU, "V3.2 engine, H200", "V4 engine, H200")
"""The columns of the table."""


def unpack(release: str, folder: Path) -> None:
    """Download a release's wheel and unpack what can be imported on a machine without a GPU."""
    with TemporaryDirectory() as there:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", there, f"vllm=={release}"], check=True)
        (wheel,) = Path(there).glob("vllm-*.whl")
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(folder, names)


def summary(report: Path) -> str:
    """How many tests of a JUnit report passed. Failed ones are an error: nothing is recorded of them."""
    found = records.counts(report)
    if found.failed:
        raise SystemExit(f"{report}: {found.failed} of {sum(found)} tests failed; nothing is recorded")
    return str(found)


def read() -> list[Row]:
    """All recorded rows."""
    return records.read(RESULTS)


def record(release: str, run: str, result: str) -> None:
    """Write a row, in place of an earlier one of the same run."""
    for name, value, known in (("release", release, RELEASES), ("run", run, RUNS)):
        if value not in known:
            raise SystemExit(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")
    row = {"release": release, "run": run, "result": result, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    rows = [old for old in read() if (old["release"], old["run"]) != (release, run)]
    rows = sorted([*rows, row], key=lambda one: (RELEASES.index(one["release"]), RUNS.index(one["run"])))
    records.write(RESULTS, COLUMNS, rows)


def main(arguments: list[str]) -> None:
    """Run the command."""
    match arguments:
        case ["unpack", release, folder]:
            unpack(release, Path(folder))
        case ["record", release, run, result]:
            record(release, run, summary(Path(result)) if result.endswith(".xml") else result)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
