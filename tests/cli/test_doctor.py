"""`tamis doctor`: its findings on this machine, and on others that are simulated."""

import json
import os
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tamis.cli import doctor, main
from tamis.cli.doctor import Gpu, judge_gpu, judge_version
from tamis.cli.versions import minimums


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found | {"findings": {finding["name"]: finding for finding in found["findings"]}}


def test_json_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = report(capsys)
    assert found["ok"]
    assert found["findings"]["torch"]["found"] == metadata.version("torch")
    assert set(doctor.PURPOSES) <= set(found["findings"])
    for verdicts in found["choices"].values():
        assert [v["state"] for v in verdicts].count("chosen") == 1
        assert all(v["reasons"] for v in verdicts if v["state"] == "rejected")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "DeepSeek-V4 layer: 64 heads, v4-fp8 pages of 64, top-k 512" in text
    assert ": chosen: " in text
    assert text.splitlines()[-1] == "OK: tamis is ready (backend: reference, CPU only)"


def test_without_torch_it_still_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = metadata.version

    def version(name: str) -> str:
        if name in ("torch", "transformers"):
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--json"]) == 1
    found = report(capsys)
    assert found["findings"]["torch"]["state"] == "WRONG"
    assert found["findings"]["torch"]["advice"] == "required, for everything: pip install 'torch>=2.11'"
    assert found["findings"]["transformers"]["state"] == "missing"
    assert "pip install 'transformers>=5.18'" in found["findings"]["transformers"]["advice"]
    assert found["choices"] == {}


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "import torch  ModuleNotFoundError  WRONG" in text
    assert text.splitlines()[-1] == "FAILED: tamis is not usable here: import torch"


def test_without_the_packages_of_the_command_line_it_still_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known, absent = metadata.version, ("packaging", "platformdirs", "rich")

    def version(name: str) -> str:
        if name in absent:
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    for name in [name for name in sys.modules if name.split(".")[0] in absent]:
        monkeypatch.delitem(sys.modules, name)
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "rich - WRONG required, for tables and progress: pip install 'rich'\n" in text
    assert text.splitlines()[-1] == "FAILED: tamis is not usable here: packaging, platformdirs, rich"


def test_no_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tamis.backends.BACKENDS", ())
    assert main(["doctor", "--json"]) == 1
    assert report(capsys)["findings"]["backend for DeepSeek-V4"]["state"] == "WRONG"


@pytest.mark.parametrize("usable", [None, "NVIDIA H200"])
def test_triton_is_needed_where_a_gpu_is(
    usable: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "look_at_gpu", lambda: Gpu("13.0", usable, None, None))
    known = metadata.version
    missing = metadata.PackageNotFoundError("triton")

    def version(name: str) -> str:
        if name == "triton":
            raise missing
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor", "--json"]) == (0 if usable is None else 1)
    assert report(capsys)["findings"]["triton"]["state"] == ("missing" if usable is None else "WRONG")


@pytest.mark.parametrize(
    ("version", "minimum", "need", "state", "words"),
    [
        ("2.13.0+cu130", "2.11", "required", "ok", ""),
        ("2.9.1", "2.11", "required", "WRONG", "2.11 or newer"),
        ("2.9.1", "2.11", "optional", "too old", "2.11 or newer is needed for rows: pip install x"),
        ("2.9.1", None, "required", "ok", ""),
        (None, "2.11", "required", "WRONG", "required, for rows: pip install x"),
        (None, None, "optional", "missing", "optional, for rows: pip install x"),
        ("2.11.0.dev20260101+cu130", "2.11", "required", "ok", ""),
        ("2.11rc1", "2.11", "required", "ok", ""),
        ("2.100", "2.11", "required", "ok", ""),
        ("unknown", "2.11", "required", "WRONG", "2.11 or newer"),
    ],
)
def test_versions(version: str | None, minimum: str | None, need: str, state: str, words: str) -> None:
    found = judge_version("x", version, minimum, need, "rows", "pip install x")
    assert found.state == state
    assert words in found.advice


@pytest.mark.parametrize(
    ("gpu", "state", "words"),
    [
        (Gpu("13.0", "NVIDIA H200, compute capability 9.0", "580.1", (13, 0)), "ok", ""),
        (Gpu("HIP 7.0", "AMD Instinct", None, None), "ok", ""),
        (Gpu(None, None, None, None), "ok", "no NVIDIA driver"),
        (Gpu(None, None, "580.1", (13, 0)), "WRONG", "install one for CUDA"),
        (Gpu("13.0", None, None, None), "ok", "install its driver"),
        (Gpu("13.0", None, "535.2", (12, 2)), "WRONG", "up to 12.2, torch is built for 13.0: update the driver, or"),
        (Gpu("12.8", None, "535.2", (12, 2)), "WRONG", "CUDA_VISIBLE_DEVICES"),
        (Gpu("13.0", None, "580.1", (13, 0)), "WRONG", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus(gpu: Gpu, state: str, words: str) -> None:
    found = judge_gpu(gpu)
    assert found.state == state
    assert words in found.advice


def test_the_lowest_versions_are_those_of_the_package() -> None:
    found = minimums()
    assert found["python"] == "3.11"
    assert {"torch", "numpy", "triton", "transformers", "vllm", "matplotlib"} <= set(found)
    assert found["vllm"] == "0.25"  # whatever else is said about its versions


def _vllm(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(folder, "vllm", source, monkeypatch)


def _package(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path of this process and of its child processes, with this module `version`."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(
        "import sys\nprint('a line of its own')\nassert sys.stdin.read() == ''\n"
    )
    (folder / name / "version.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


@pytest.mark.parametrize(
    ("source", "found", "state", "words"),
    [
        ("__version__ = '0.25.1'", "0.25.1", "ok", ""),
        ("__version__ = '0.32'", "0.32", "ok", ""),
        ("__version__ = '0.33.0'", "0.33.0", "refused", "tamis supports vLLM 0.25.x to 0.32.x, and this is 0.33.0"),
        ("__version__ = '0.9.2'", "0.9.2", "refused", "--attention-backend CUSTOM does not work with it"),
        ("__version__ = 'dev'", "dev", "refused", "this is dev"),
        ("raise ImportError('libcudart.so.13: \\x1b[31m')", "-", "broken", "ImportError: libcudart.so.13"),
        ("import os; os._exit(7)", "-", "broken", "it ended with status 7"),
    ],
)
def test_vllm_is_judged_as_the_plugin_judges_it(
    source: str,
    found: str,
    state: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _vllm(tmp_path, source, monkeypatch)
    (told,) = [finding for finding in doctor._packages() if finding.name == "vllm"]
    assert (told.found, told.state) == (found, state)
    assert words in told.advice
    doctor._print_report([told], {}, True)
    assert "\x1b" not in capsys.readouterr().out


def test_a_folder_that_was_imported_as_vllm_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(tmp_path, "__version__ = '0.32.0'", monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    (told,) = [finding for finding in doctor._packages() if finding.name == "vllm"]
    assert (told.found, told.state) == ("0.32.0", "ok")


def test_a_vllm_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(tmp_path, "import threading; threading.Event().wait()", monkeypatch)
    monkeypatch.setattr(doctor, "ENGINE_SECONDS", 1)
    assert doctor.judge_vllm(*doctor._import_engine("vllm")).state == "broken"


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that installs a package sglang, and gives what doctor finds about it."""

    def found(source: str, entry: str | None = doctor.SGLANG_PLUGIN, plugins: str | None = None) -> dict[str, Any]:
        _package(tmp_path, "sglang", source, monkeypatch)
        points = metadata.EntryPoints([metadata.EntryPoint("other", "other:plugin", doctor.SGLANG_GROUP)])
        if entry is not None:
            points = metadata.EntryPoints([*points, metadata.EntryPoint("tamis", entry, doctor.SGLANG_GROUP)])
        monkeypatch.setattr(metadata, "entry_points", lambda **wanted: points.select(**wanted))
        monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
        if plugins is not None:
            monkeypatch.setenv("SGLANG_PLUGINS", plugins)
        return {finding.name: finding for finding in doctor._packages()}

    return found


@pytest.mark.parametrize(
    ("source", "version", "state", "words"),
    [
        ("__version__ = '0.5.17'", "0.5.17", "ok", ""),
        ("__version__ = '0.5.23.post1'", "0.5.23.post1", "ok", ""),
        ("__version__ = '0.5.20'", "0.5.20", "refused", "tamis supports SGLang 0.5.17 and 0.5.23, and this is 0.5.20"),
        ("raise ImportError('no libcuda')", "-", "broken", "ImportError: no libcuda"),
    ],
)
def test_sglang_is_judged_as_the_plugin_judges_it(
    sglang: Any, source: str, version: str, state: str, words: str
) -> None:
    told = sglang(source)["sglang"]
    assert (told.found, told.state) == (version, state)
    assert words in told.advice


@pytest.mark.parametrize(
    ("entry", "plugins", "state", "words"),
    [
        (doctor.SGLANG_PLUGIN, None, "ok", ""),
        (doctor.SGLANG_PLUGIN, "", "ok", ""),
        (doctor.SGLANG_PLUGIN, "other, tamis", "ok", ""),
        (doctor.SGLANG_PLUGIN, "other, more", "left out", "SGLANG_PLUGINS=other,more leaves tamis out"),
        (None, None, "missing", "SGLang would not find tamis"),
        ("tamis.elsewhere:register", None, "missing", "or again if it is an older one"),
    ],
)
def test_whether_sglang_would_find_the_plugin(
    sglang: Any, entry: str | None, plugins: str | None, state: str, words: str
) -> None:
    told = sglang("__version__ = '0.5.23'", entry, plugins)["SGLang plugin"]
    assert told.state == state
    assert words in told.advice


def test_without_sglang_nothing_is_said_about_its_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its name, as its own repository has, is not the package."""
    (tmp_path / "sglang").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = {finding.name: finding for finding in doctor._packages()}
    assert found["sglang"].state == "missing"
    assert "pip install 'sglang==0.5.23'" in found["sglang"].advice
    assert "SGLang plugin" not in found


def test_the_entry_point_of_the_package_is_the_one_that_is_looked_for() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]
    assert points[doctor.SGLANG_GROUP] == {"tamis": doctor.SGLANG_PLUGIN}


def test_a_place_where_kernels_cannot_be_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    assert doctor._cubins().state == "ok"
    (tmp_path / ".cache/tamis/cubin").mkdir(parents=True)
    (tmp_path / ".cache/tamis/cubin").chmod(0o777)
    found = doctor._cubins()
    assert found.state == "not kept"
    assert "other users can write to it (its mode is 777): kernels in CUDA C++ are compiled again" in found.advice
