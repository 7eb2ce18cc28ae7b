"""`python -m tools.vllm_releases`: other releases of vLLM for `make test-vllm VLLM=...`, and what ran under which.

    python -m tools.vllm_releases unpack 0.29.0 FOLDER    the Python files and the metadata of its wheel
    python -m tools.vllm_releases record 0.29.0 RUN RESULT    a cell of the table in docs/vllm.md

A wheel has 250 to 330 MB, nearly all of it kernels that need a GPU. RESULT is a few words, or pytest's JUnit report.
"""

import csv
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree
from zipfile import ZipFile

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "vllm" / "releases.csv"
COLUMNS = ("release", "run", "result", "date")
RELEASES = ("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Every release of the minor versions that the plugin supports."""
CPU = "tests on CPU tensors"
RUNS = (CPU, "V3.2 engine, H200", "V4 engine, H200")
"""The columns of the table."""

Row = dict[str, str]


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
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    failed, skipped = counts["failures"] + counts["errors"], counts["skipped"]
    if failed:
        raise SystemExit(f"{report}: {failed} of {counts['tests']} tests failed; nothing is recorded")
    passed = f"{counts['tests'] - skipped} passed"
    return f"{passed}, {skipped} skipped" if skipped else passed


def read() -> list[Row]:
    """All recorded rows."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def record(release: str, run: str, result: str) -> None:
    """Write a row, in place of an earlier one of the same run."""
    for name, value, known in (("release", release, RELEASES), ("run", run, RUNS)):
        if value not in known:
            raise SystemExit(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")
    row = {"release": release, "run": run, "result": result, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    rows = [old for old in read() if (old["release"], old["run"]) != (release, run)]
    rows = sorted([*rows, row], key=lambda one: (RELEASES.index(one["release"]), RUNS.index(one["run"])))
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
