"""`tamis verify` lists the resources of CUDA C++ kernels, and fails if one spills or needs too much shared memory."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tamis.backends
import tamis.lab.verify.run
from tamis.cli import main
from tamis.cuda import compiler
from tamis.cuda.compiler import Program
from tamis.cuda.nvrtc import has_nvrtc
from tamis.lab.offline.cuda import CudaCase, all_cases, cuobjdump, stage_cases
from tamis.lab.verify import CheckResult, Scope, resources
from tamis.lab.verify.check import Check, Target, Trial, judge
from tamis.lab.verify.resources import resource_checks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ADD = Program("add.cu", 'extern "C" __global__ void add(int* x, int n) { x[threadIdx.x] += n; }')
SPILL = Program(
    "spill.cu",
    """
    extern "C" __global__ void spill(const int* x, int* y) {
        int kept[64];
        for (int i = 0; i < 64; ++i) kept[i] = x[i];
        for (int i = 0; i < 64; ++i) y[i] = 0;
        y[0] = kept[x[64]];
    }""",
)
FITS, SPILLS = CudaCase("fits", ADD, 227 * 1024), CudaCase("spills", SPILL, 0)
LARGE, NEWER = CudaCase("large", ADD, 228 * 1024), CudaCase("newer", ADD, 0, ("sm_100a",))
needs_compiler = pytest.mark.skipif(not has_nvrtc() or cuobjdump() is None, reason="NVRTC or cuobjdump is missing")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CudaCase]:
    """Replaces the kernels of stage `index`, and leaves no other check; cubins stay in a folder of the test."""
    found: list[CudaCase] = []
    monkeypatch.setattr(resources, "stage_cases", lambda stage: iter(found))
    monkeypatch.setattr(compiler.cubins, "default_folder", lambda: tmp_path)
    right = Check("index", "values", 0.0, [("one", lambda: Trial(0.0))])
    monkeypatch.setitem(tamis.lab.verify.run._CHECKS, "index", lambda target: iter([right]))
    return found


def found_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Simulate a GPU."""
    monkeypatch.setattr(tamis.backends, "compute_capability", lambda device: capability)
    monkeypatch.setattr(resources, "compute_capability", lambda device: capability)


def judged(target: Target) -> CheckResult:
    (check,) = resource_checks("index", target)
    return judge(check, check.backend, lambda: None)


@needs_compiler
def test_kernels_are_listed_with_what_they_need(cases: list[CudaCase], capsys: pytest.CaptureFixture[str]) -> None:
    cases += [FITS, NEWER]
    assert main(["verify", "--device", "cpu", "--stage", "index", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fits, newer = found["kernels"]
    assert 0 < fits.pop("registers") < 32
    assert fits == {
        "program": "fits",
        "function": "add",
        "target": "sm_90a",
        "stack_bytes": 0,
        "static_shared_bytes": 1024,
        "dynamic_shared_bytes": 227 * 1024,
        "shared_limit_bytes": 228 * 1024,
        "early_uses": [],
    }
    assert newer["target"] == "sm_100a"
    assert [(c["check"], c["backend"], c["cases"], c["state"]) for c in found["checks"]] == [
        ("values", "reference", 1, "ok"),
        (resources.NAME, "hopper", 2, "ok"),
    ]
    assert main(["verify", "--device", "cpu", "--stage", "index"]) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith("fits: add")]
    assert line.split()[2:] == ["sm_90a", line.split()[3], "0", "1024", str(227 * 1024), str(228 * 1024)]
    assert text.splitlines()[-1] == "ok: 2 checks, 3 cases; 0 do not apply"


@needs_compiler
@pytest.mark.parametrize(
    ("case", "words", "error"),
    [
        (SPILLS, "spills: spill has 256 bytes of stack; use fewer registers", 256),
        (LARGE, "large: add needs 1024 + 233472 bytes of shared memory, but a block on sm_90a may have 233472", 1024),
        (CudaCase("wrong", Program("wrong.cu", "nothing();"), 0), "wrong: CompileError: wrong.cu does not comp", None),
        (CudaCase("empty", Program("empty.cu", ""), 0), "empty: RuntimeError: cuobjdump found no kernel in emp", None),
    ],
)
def test_a_kernel_that_needs_too_much_fails_the_run(
    case: CudaCase, words: str, error: float | None, cases: list[CudaCase], capsys: pytest.CaptureFixture[str]
) -> None:
    cases += [FITS, case]
    assert main(["verify", "--device", "cpu", "--stage", "index", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    failed = [c for c in found["checks"] if c["state"] == "FAILED"]
    assert [(c["check"], c["error"]) for c in failed] == [(resources.NAME, error)]
    assert failed[0]["note"].startswith(words)
    assert found["kernels"][0]["program"] == "fits"


@needs_compiler
def test_on_a_gpu_the_programs_for_it_are_looked_at(cases: list[CudaCase], monkeypatch: pytest.MonkeyPatch) -> None:
    cases += [FITS, SPILLS, NEWER]
    found_on(monkeypatch, (9, 0))
    for quick in (False, True):
        result = judged(Target(GPU, "auto", quick))
        assert (result.state, result.cases, result.error) == ("FAILED", 2, 256)
        assert [(k.program, k.target) for k in result.kernels] == [("fits", "sm_90a"), ("spills", "sm_90a")]
    # Before a timing only numbers are checked.
    assert not list(resource_checks("index", Target(GPU, scope=Scope(frozenset(), frozenset()))))


def test_where_it_does_not_apply_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(resource_checks("write", Target(CPU)))
    assert not list(resource_checks("layer", Target(CPU)))
    assert "leave out --quick" in judged(Target(CPU, quick=True)).note
    assert judged(Target(CPU, "reference")).note == "reference has no kernels in CUDA C++"
    found_on(monkeypatch, (8, 0))
    assert judged(Target(GPU)).note == "triton has no kernels in CUDA C++"
    monkeypatch.setattr(resources, "cuobjdump", lambda: None)
    monkeypatch.setattr(resources, "has_nvrtc", lambda: True)
    assert judged(Target(CPU)).note.startswith("cuobjdump, which reads registers")
    monkeypatch.setattr(resources, "has_nvrtc", lambda: False)
    result = judged(Target(CPU))
    assert result.note.startswith("NVRTC was not found; install")
    assert (result.state, result.ok, result.kernels) == ("not applicable", True, ())


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which is not installed")
def test_every_stage_with_kernels_is_looked_at() -> None:
    stages = ("index", "attend")
    assert [case.label for stage in stages for case in stage_cases(stage)] == [case.label for case in all_cases()]
    assert not list(stage_cases("write"))
    assert not list(stage_cases("layer"))
