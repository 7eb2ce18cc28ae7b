"""Environments with other versions: which there are, how one is tested, what is recorded, and what the table shows."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from tools import records, versions_matrix
from tools.docs import install
from tools.versions_matrix import (
    COLUMNS,
    LOWEST,
    PINNED,
    TESTS,
    Environment,
    environments,
    lower_bound,
    main,
    needed,
    newest_patches,
    pins,
)

INDEX = {
    "torch": ["2.12.1", "2.13.0+cpu", "2.12.0", "2.13.0", "2.11.0", "2.10.0"],
    "triton": ["3.8.0", "3.7.1", "3.7.0", "3.6.0", "3.5.1"],
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "versions.csv"
    monkeypatch.setattr(versions_matrix, "RESULTS", path)
    monkeypatch.setattr(install, "RESULTS", path)
    return path


def row(environment: str, **values: str) -> records.Row:
    versions = {"python": "3.11.7", "torch": "2.12.1", "triton": "3.7.1", "numpy": "2.3.5", "transformers": "5.22.2"}
    more = {"nvidia-cuda-nvrtc": "13.0.88", "passed": "9", "failed": "0", "skipped": "1", "gigabytes": "5.2"}
    return {"environment": environment, **versions, **more, "date": "2026-01-02"} | values


def test_the_newest_patch_of_every_minor_version_within_the_range() -> None:
    assert newest_patches(INDEX["torch"], SpecifierSet(">=2.11")) == {
        "2.11": "2.11.0",
        "2.12": "2.12.1",
        "2.13": "2.13.0",
    }
    versions = ["3.10.0", "3.9.1", "3.9.0", "3.11.0rc1"]
    assert list(newest_patches(versions, SpecifierSet(">=3.6"))) == ["3.9", "3.10"]


def test_which_environments_there_are() -> None:
    found = {one.name: one for one in environments(INDEX.__getitem__)}
    every = [LOWEST, PINNED, "torch 2.11", "torch 2.12", "torch 2.13", "triton 3.6", "triton 3.8"]
    assert list(found) == [*every, "Python 3.12", "Python 3.13"]
    lowest = found[LOWEST].requirements
    assert {"torch==2.11", "triton==3.6", "numpy==1.26", "transformers==5.18"} <= set(lowest)
    assert len(lowest) == len(needed())
    assert f"torch=={pins()['torch']}" in found[PINNED].requirements
    assert f"pytest=={pins()['pytest']}" in found[PINNED].tools
    assert found["torch 2.12"].requirements == ("torch==2.12.1",)
    assert found["triton 3.6"].requirements == found[PINNED].requirements
    assert found["triton 3.6"].replaced == ("triton==3.6.0",)
    assert found["Python 3.13"].requirements == ("torch==2.13.0",)
    assert found["Python 3.13"].python == "3.13"


def test_the_index_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[2:5] == ["pip", "index", "versions"]
        return subprocess.CompletedProcess(
            command, 0, f"{command[-1]} (2)\nAvailable versions: 2, 1.1, 1.0\nINSTALLED: 1.0\n"
        )

    monkeypatch.setattr(subprocess, "run", told)
    assert versions_matrix.offered("torch") == ["2", "1.1", "1.0"]


def test_every_test_exists() -> None:
    for name in TESTS:
        path, _, test = name.partition("::")
        text = (versions_matrix.ROOT / path).read_text()
        assert f"def {test.partition('[')[0]}" in text


def test_an_environment_is_made_tested_and_removed(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions_matrix, "BUILD", tmp_path / "build")
    monkeypatch.setattr(versions_matrix, "wheel", lambda: tmp_path / "tamis.whl")
    monkeypatch.setenv("PYTHONPATH", "src")
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        assert command[0].startswith(("python3.12", str(tmp_path / "build" / "triton-3-7" / "bin")))
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
            (Path(command[-1]) / "file").write_bytes(bytes(200_000_000))
        if "pytest" in command[:4]:
            assert "PYTHONPATH" not in options["env"]
            assert options["cwd"] == versions_matrix.ROOT
            report = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'
            Path(command[command.index("--junitxml") + 1]).write_text(report)
        told = json.dumps(dict.fromkeys(("python", *versions_matrix.PACKAGES), "1.0"))
        return subprocess.CompletedProcess(command, 0, told)

    monkeypatch.setattr(subprocess, "run", run)
    environment = Environment("triton 3.7", ("torch==2.13.0",), ("pytest",), ("triton==3.7.1",), python="3.12")
    found = versions_matrix.test(environment)
    assert set(found) == set(COLUMNS)
    assert [found[name] for name in ("passed", "failed", "skipped", "gigabytes")] == ["5", "2", "2", "0.2"]
    installs = [command[7:] for command in asked if "install" in command]
    assert installs == [[str(tmp_path / "tamis.whl"), "torch==2.13.0"], ["--no-deps", "triton==3.7.1"], ["pytest"]]
    assert not environment.folder.exists()
    assert asked[-1][-len(TESTS) :] == list(TESTS)


def test_what_is_run_and_what_ends_it(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [Environment(name, (), python=python) for name, python in (("a", "3.11"), ("b", "3.12"), ("c", "3.11"))]
    monkeypatch.setattr(versions_matrix, "environments", lambda: known)
    monkeypatch.setattr(versions_matrix.shutil, "which", lambda name: name if name == "python3.11" else None)

    def test(environment: Environment) -> records.Row:
        if environment.name == "c":
            raise subprocess.CalledProcessError(1, ["pip"])
        return row(environment.name)

    monkeypatch.setattr(versions_matrix, "test", test)
    with pytest.raises(SystemExit, match="0"):
        main(["run", "a", "b"])
    assert "b: left out, because there is no python3.12 on the PATH" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        main(["run"])
    assert "c: nothing is recorded, because" in capsys.readouterr().out
    assert [one["environment"] for one in records.read(results)] == ["a"]
    monkeypatch.setattr(versions_matrix, "test", lambda environment: row(environment.name, failed="3"))
    with pytest.raises(SystemExit, match="1"):
        main(["run", "a"])
    assert [one["failed"] for one in records.read(results)] == ["3"]
    with pytest.raises(SystemExit, match="environments must be among 'a', 'b', 'c'; got 'd'"):
        main(["run", "d"])
    with pytest.raises(SystemExit, match=r"versions_matrix run \[NAME \.\.\.\]"):
        main([])


def test_without_a_wheel_it_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions_matrix, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="dist/ must hold one wheel of tamis, got 0; run `make wheel`"):
        versions_matrix.wheel()


def test_rows_are_sorted_by_versions_and_shown_with_failures(results: Path) -> None:
    versions_matrix.record(row("torch 2.15", torch="2.15.0+cu132", triton="3.10.0", failed="2"))
    versions_matrix.record(row("b", torch="2.15.0+cu132", triton="3.9.0", gigabytes="5.0"))
    versions_matrix.record(row(LOWEST, torch="2.9.0+cpu", gigabytes="0.9"))
    assert [one["environment"] for one in records.read(results)] == [LOWEST, "b", "torch 2.15"]
    *_, low, middle, high = install.tested().splitlines()
    assert low.endswith("| 9 passed, 1 skipped | 2026-01-02 | the lowest versions that tamis admits |")
    assert "| 9 passed, 1 skipped | 2026-01-02 |  |" in middle
    assert "| **2 failed, 9 passed, 1 skipped** |" in high
    plain, cpu = install.sizes().splitlines()
    assert plain.endswith("a plain install takes 5.2 GB on disk (torch 2.15.0+cu132, Triton 3.10.0).")
    assert cpu == "With torch's build for CPUs it takes 0.9 GB on disk (torch 2.9.0+cpu, Triton 3.7.1)."


def test_the_bounds_and_the_pins_have_been_run() -> None:
    """What pyproject.toml admits at the least, and what CI runs, is in the table, without a failure."""
    recorded = {one["environment"]: one for one in records.read(versions_matrix.RESULTS)}
    for name in ("torch", "triton", "numpy", "transformers"):
        low = SpecifierSet(f"=={lower_bound(needed()[name])}")
        assert low.contains(recorded[LOWEST][name].partition("+")[0]), "run `make test-matrix`"
        assert recorded[PINNED][name].partition("+")[0] == pins()[name], "run `make test-matrix`"
    assert {one["failed"] for one in (recorded[LOWEST], recorded[PINNED])} == {"0"}
