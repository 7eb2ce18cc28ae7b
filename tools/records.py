"""What tools share to keep results of test runs: CSV files of texts, and the counts of pytest's JUnit reports."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

Row = dict[str, str]


class Counts(NamedTuple):
    """How many tests of a run ended in which way."""

    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        """Such as "3 failed, 120 passed, 2 skipped"; what there is none of is left out, except for what passed."""
        told = {"failed": self.failed, "passed": self.passed, "skipped": self.skipped}
        return ", ".join(f"{count} {name}" for name, count in told.items() if count or name == "passed")


def read(path: Path) -> list[Row]:
    """All rows of a file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a file anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def counts(report: Path) -> Counts:
    """The counts of a JUnit report; errors count as failures."""
    told = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in told:
            told[name] += int(suite.get(name, 0))
    failed = told["failures"] + told["errors"]
    return Counts(told["tests"] - failed - told["skipped"], failed, told["skipped"])
