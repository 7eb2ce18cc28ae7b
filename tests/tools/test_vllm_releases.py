"""The releases of vLLM that the plugin was tested with: unpacked, recorded, and shown in a table."""

import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

from tamis.integrations.vllm.versions import SUPPORTED, version_refusal
from tools import vllm_releases
from tools.docs import vllm
from tools.vllm_releases import CPU, RELEASES, main, read


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "vllm_releases.csv"
    monkeypatch.setattr(vllm_releases, "RESULTS", path)
    return path


def test_every_supported_version_has_been_run() -> None:
    assert {release.rpartition(".")[0] for release in RELEASES} == set(SUPPORTED)
    assert all(version_refusal(release) is None for release in RELEASES)
    run = {row["release"] for row in read() if row["run"] == CPU}
    assert run == set(RELEASES), "run make test-vllm-releases"


def report(path: Path, **counts: int) -> str:
    found = " ".join(f'{name}="{count}"' for name, count in counts.items())
    path.write_text(f"<testsuites><testsuite {found}></testsuite></testsuites>")
    return str(path)


def test_results_are_recorded_and_shown(results: Path, tmp_path: Path) -> None:
    assert "| 0.25.0 | - | - | - |" in vllm.releases()
    path = report(tmp_path / "report.xml", tests=12, failures=0, errors=0, skipped=2)
    main(["record", "0.29.0", CPU, path])
    main(["record", "0.25.0", "V4 engine, H200", "tokens equal"])
    main(["record", "0.29.0", CPU, report(tmp_path / "report.xml", tests=12, failures=0, errors=0, skipped=0)])
    assert [row["release"] for row in read()] == ["0.25.0", "0.29.0"]
    today = read()[0]["date"]
    assert f"| 0.29.0 | 12 passed ({today}) | - | - |" in vllm.releases()
    assert f"| 0.25.0 | - | - | tokens equal ({today}) |" in vllm.releases()
    main(["record", "0.29.0", CPU, report(tmp_path / "report.xml", tests=12, skipped=2)])
    assert "10 passed, 2 skipped" in results.read_text()


def test_what_is_not_recorded(results: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 of 12 tests failed; nothing is recorded"):
        main(["record", "0.29.0", CPU, report(tmp_path / "report.xml", tests=12, failures=0, errors=1)])
    with pytest.raises(SystemExit, match=r"release must be one of .*; got '0\.24\.0'"):
        main(["record", "0.24.0", CPU, "fine"])
    with pytest.raises(SystemExit, match=r"run must be one of .*; got 'elsewhere'"):
        main(["record", "0.29.0", "elsewhere", "fine"])
    with pytest.raises(SystemExit, match=r"unpack 0\.29\.0 FOLDER"):
        main(["unpack"])
    assert not results.exists()


def test_only_python_and_metadata_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(command: list[str], check: bool) -> None:
        assert check
        asked.append(command[-1])
        with ZipFile(Path(command[command.index("--dest") + 1]) / "vllm-0.29.0-cp38-abi3-any.whl", "w") as archive:
            for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/a/b.py", "vllm-0.29.0.dist-info/METADATA"):
                archive.writestr(name, "")

    monkeypatch.setattr(subprocess, "run", download)
    main(["unpack", "0.29.0", str(tmp_path / "there")])
    assert asked == ["vllm==0.29.0"]
    found = {str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*") if path.is_file()}
    assert found == {"vllm/__init__.py", "vllm/a/b.py", "vllm-0.29.0.dist-info/METADATA"}
