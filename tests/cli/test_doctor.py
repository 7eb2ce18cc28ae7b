"""`tamis doctor`: its findings on this machine, and on others that are simulated."""

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.cli import doctor, main
from tamis.cli.doctor import Gpu, judge_gpu, judge_version


def report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found | {"findings": {finding["name"]: finding for finding in found["findings"]}}


def test_json_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = report(capsys)
    assert found["ok"]
    assert found["findings"]["torch"]["found"] == torch.__version__
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
    assert found["findings"]["torch"]["advice"] == "required, for everything: pip install 'torch'"
    assert found["findings"]["transformers"]["state"] == "missing"
    assert "pip install 'tamis[transformers]'" in found["findings"]["transformers"]["advice"]
    assert found["choices"] == {}


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "import torch  ModuleNotFoundError  WRONG" in text
    assert text.splitlines()[-1] == "FAILED: tamis is not usable here: import torch"


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
    found = doctor._minimums()
    assert found["python"] == "3.11"
    assert {"torch", "numpy", "triton", "transformers", "vllm", "matplotlib"} <= set(found)
    assert found["vllm"] == "0.25"  # whatever else is said about its versions


def _vllm(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package named vllm on the path of this process and of its child processes."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(
        "import sys\nprint('a line of its own')\nassert sys.stdin.read() == ''\n"
    )
    (folder / "vllm" / "version.py").write_text(source)
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


def test_a_vllm_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _vllm(tmp_path, "import threading; threading.Event().wait()", monkeypatch)
    monkeypatch.setattr(doctor, "VLLM_SECONDS", 1)
    assert doctor.judge_vllm(*doctor._import_vllm()).state == "broken"


def test_a_place_where_kernels_cannot_be_kept_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert doctor._cubins().state == "ok"
    (tmp_path / ".cache/tamis/cubin").mkdir(parents=True)
    (tmp_path / ".cache/tamis/cubin").chmod(0o777)
    found = doctor._cubins()
    assert found.state == "not kept"
    assert "other users can write to it (its mode is 777): kernels in CUDA C++ are compiled again" in found.advice
