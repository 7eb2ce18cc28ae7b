"""A source is compiled once; a file on disk is used only if it is complete and was written for the same inputs."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tamis.cuda import nvrtc as library
from tamis.cuda.compiler import Program, architecture, compiled
from tamis.cuda.nvrtc import CompileError, Nvrtc, nvrtc
from tamis.lab.offline.cuda import CudaCase, compile_case, usage

ADD = Program("add.cu", 'extern "C" __global__ void add(int* x, int n) { x[threadIdx.x] += n * STEP; }', ("-DSTEP=3",))


class Counting:
    """A compiler that counts its calls."""

    def __init__(self, version: tuple[int, int] = (13, 0)) -> None:
        self.version, self.calls = version, 0

    def compile(self, program: Program, arch: str) -> bytes:
        self.calls += 1
        return f"{program.source} for {arch}".encode()


@pytest.fixture(scope="session")
def real() -> Nvrtc:
    try:
        return nvrtc()
    except ImportError:
        pytest.skip("NVRTC is not installed")


def test_a_program_is_compiled_once(tmp_path: Path) -> None:
    made = Counting()
    first = compiled(ADD, "sm_90a", folder=tmp_path / "new", compiler=made)
    assert first == f"{ADD.source} for sm_90a".encode()
    assert compiled(ADD, "sm_90a", folder=tmp_path / "new", compiler=made) == first
    assert made.calls == 1
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".cubin"]


def test_every_input_that_changes_the_result_is_part_of_the_key(tmp_path: Path) -> None:
    made = Counting()
    compiled(ADD, "sm_90a", folder=tmp_path, compiler=made)
    compiled(ADD, "sm_100a", folder=tmp_path, compiler=made)
    compiled(Program(ADD.name, ADD.source + " ", ADD.options), "sm_90a", folder=tmp_path, compiler=made)
    compiled(Program(ADD.name, ADD.source, ("-DSTEP=4",)), "sm_90a", folder=tmp_path, compiler=made)
    compiled(Program(ADD.name, ADD.source, ADD.options, (("a.cuh", "b"),)), "sm_90a", folder=tmp_path, compiler=made)
    assert made.calls == 5
    newer = Counting((13, 1))
    compiled(ADD, "sm_90a", folder=tmp_path, compiler=newer)
    assert newer.calls == 1
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"x" + b[41:]])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage) -> None:
    made = Counting()
    whole = compiled(ADD, "sm_90a", folder=tmp_path, compiler=made)
    (path,) = tmp_path.iterdir()
    stored = path.read_bytes()
    path.write_bytes(damage(stored))
    assert compiled(ADD, "sm_90a", folder=tmp_path, compiler=made) == whole
    assert made.calls == 2
    assert path.read_bytes() == stored


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert compiled(ADD, "sm_90a", folder=tmp_path / "file" / "below", compiler=Counting())


def test_a_compile_error_shows_the_log(real: Nvrtc) -> None:
    wrong = Program("wrong.cu", 'extern "C" __global__ void wrong() { nothing(); }', ("-DA=1",))
    with pytest.raises(CompileError, match=r"wrong.cu does not compile for sm_90a \(.*-DA=1\):") as caught:
        real.compile(wrong, "sm_90a")
    assert 'wrong.cu(1): error: identifier "nothing" is undefined' in str(caught.value)


def test_headers_reach_the_compiler(real: Nvrtc) -> None:
    source = '#include "one.cuh"\n#include "two.cuh"\nextern "C" __global__ void f(int* x) { *x = ONE + TWO; }'
    headers = (("one.cuh", "#define ONE 1"), ("two.cuh", "#define TWO 2"))
    assert usage(real.compile(Program("f.cu", source, (), headers), "sm_90a"))[0].function == "f"


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(library.ctypes, "CDLL", absent)
    with pytest.raises(ImportError, match=r"need NVRTC.*not found; install .* pip install nvidia-cuda-nvrtc"):
        nvrtc.__wrapped__()


def test_the_compiler_of_torch_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("cuda_nvrtc", "12"), ("cu13", "13")):
        (tmp_path / folder / "lib").mkdir(parents=True)
        for name in (f"libnvrtc.so.{version}", f"libnvrtc.alt.so.{version}", f"libnvrtc-builtins.so.{version}.0"):
            (tmp_path / folder / "lib" / name).touch()
    package = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: package)
    for ours, order in (("12.8", ("12", "13")), ("13.0", ("13", "12")), (None, ("13", "12"))):
        monkeypatch.setattr(torch.version, "cuda", ours)
        found = list(library._candidates())
        assert [Path(library).name for library, _ in found] == [f"libnvrtc.so.{v}" for v in order * 2]
        assert [b and Path(b).name for _, b in found] == [f"libnvrtc-builtins.so.{v}.0" for v in order] + [None] * 2


def test_architectures() -> None:
    assert [architecture(c) for c in ((8, 9), (9, 0), (10, 0))] == ["sm_89", "sm_90a", "sm_100a"]


def test_the_offline_check_sees_registers_stack_and_shared_memory(real: Nvrtc) -> None:
    (found,) = usage(real.compile(ADD, "sm_90a"))
    assert found.function == "add"
    assert 0 < found.registers < 32
    assert found.stack == 0
    indexed = """
    extern "C" __global__ void spill(const int* x, int* y) {
        int kept[64];
        for (int i = 0; i < 64; ++i) kept[i] = x[i];
        for (int i = 0; i < 64; ++i) y[i] = 0;
        y[0] = kept[x[64]];
    }"""
    with pytest.raises(MemoryError, match="spill has 256 bytes of stack"):
        compile_case(CudaCase("spilling", Program("spill.cu", indexed), 0), "sm_90a")
    with pytest.raises(MemoryError, match=r"add needs \d+ \+ 233472 bytes of shared memory"):
        compile_case(CudaCase("large", ADD, 228 * 1024), "sm_90a")
    assert compile_case(CudaCase("fits", ADD, 227 * 1024), "sm_90a")


def test_every_kernel_compiles_without_spills(real: Nvrtc) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tamis.lab.offline.cuda", "sm_90a"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
