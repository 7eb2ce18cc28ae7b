"""Faults of what lies below: the compiler, the driver, memory, disk, a process that is killed. What fails says so, and
the next call works."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tamis import Batch, LayerSpec, Limits, PagedCache, PagePool, Planner, SparseMLA
from tamis.cuda import nvrtc
from tamis.cuda.compiler import Program, compiled
from tamis.cuda.launch import Driver, Kernel, Launch
from tamis.cuda.nvrtc import CompileError, Nvrtc
from tamis.cuda.params import Pointer

PROGRAM = Program("add.cu", 'extern "C" __global__ void add(int* x) { *x += 1; }')
CONTEXT, OTHER = 0x1000, 0x3000
CALLS = (
    *("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute", "cuCtxPushCurrent_v2"),
    *("cuThreadExchangeStreamCaptureMode", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute"),
    "cuFuncSetAttribute",
)


class Cuda:
    """The driver's functions without a device. One call of one function fails, if told so."""

    def __init__(self) -> None:
        self.contexts, self.modules, self.launches = [OTHER], 0, 0
        self.failing: dict[str, int] = {}
        """Functions that fail, and after how many calls that work."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            left = self.failing.get(name)
            if left is not None:
                self.failing[name] = left - 1
                if left == 0:
                    del self.failing[name]
                    return 999
            return getattr(self, f"_{name}", lambda *_: 0)(*arguments)

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = CONTEXT
        return 0

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = 200_000
        return 0

    def _cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.contexts[-1]
        return 0

    def _cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.contexts.append(context.value)
        return 0

    def _cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.contexts.pop()
        return 0

    def _cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        self.modules += 1
        return 0

    def _cuModuleUnload(self, module: Any) -> int:
        self.modules -= 1
        return 0

    def _cuLaunchKernelEx(self, *arguments: Any) -> int:
        assert self.contexts[-1] == CONTEXT
        self.launches += 1
        return 0


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x700, raising=False)


class Address(NamedTuple):
    """The parameters of a kernel that takes one."""

    at: Pointer


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_cannot_be_loaded_leaves_nothing_behind(name: str) -> None:
    cuda = Cuda()
    cuda.failing = {name: 0}
    with pytest.raises(RuntimeError, match=f"{name} failed with CUDA status 999"):
        Kernel(Driver(cuda), b"cubin", "add", 0)
    assert cuda.contexts == [OTHER]
    assert cuda.modules == 0
    Launch(Kernel(Driver(cuda), b"cubin", "add", 0), Address, threads=32)((1, 1, 1), Address(1))
    assert (cuda.contexts, cuda.modules, cuda.launches) == ([OTHER], 1, 1)


def test_a_capture_mode_that_cannot_be_given_back_still_gives_back_the_context() -> None:
    cuda = Cuda()
    cuda.failing = {"cuThreadExchangeStreamCaptureMode": 1}
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode"):
        Kernel(Driver(cuda), b"cubin", "add", 0)
    assert cuda.contexts == [OTHER]


@pytest.mark.parametrize("current", [CONTEXT, OTHER])
@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuThreadExchangeStreamCaptureMode", "cuCtxPushCurrent_v2"])
def test_a_launch_that_fails_can_be_tried_again(name: str, current: int) -> None:
    cuda = Cuda()
    launch = Launch(Kernel(Driver(cuda), b"cubin", "add", 0), Address, threads=32, shared=100_000)
    cuda.contexts = [current]
    cuda.failing = {name: 0}
    if name == "cuLaunchKernelEx" or current == OTHER:
        with pytest.raises(RuntimeError, match=f"{name} failed with CUDA status 999"):
            launch((1, 1, 1), Address(1))
    assert cuda.contexts == [current]
    cuda.failing = {}
    launch((1, 1, 1), Address(1))
    assert cuda.contexts == [current]
    assert cuda.launches >= 1


@pytest.mark.parametrize("error", [OSError("not found"), AttributeError("nvrtcVersion"), RuntimeError("status 1")])
def test_an_nvrtc_that_does_not_work_is_like_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(nvrtc, "Nvrtc", broken)
    with pytest.raises(ImportError, match="need NVRTC"):
        nvrtc.nvrtc.__wrapped__()


class Library:
    """An NVRTC of which one function fails."""

    def __init__(self, failing: str) -> None:
        self.failing, self.open = failing, 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 11
            self.open += {"nvrtcCreateProgram": 1, "nvrtcDestroyProgram": -1}.get(name, 0)
            if name.endswith("Size"):
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_size_t))[0] = 4
            return 0

        return call


@pytest.mark.parametrize(
    "failing", ["nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN", "nvrtcGetProgramLog"]
)
def test_a_compiler_that_fails_keeps_nothing(failing: str, tmp_path: Path) -> None:
    library = Library(failing)
    if failing == "nvrtcGetProgramLog":
        library.nvrtcCompileProgram = lambda *arguments: 6
    with pytest.raises((CompileError, RuntimeError), match=r"NVRTC status 11|does not compile"):
        compiled(PROGRAM, "sm_90a", folder=tmp_path, compiler=Nvrtc(library))
    assert library.open == 0
    assert list(tmp_path.iterdir()) == []
    assert compiled(PROGRAM, "sm_90a", folder=tmp_path, compiler=Nvrtc(Library(""))) == b"\0" * 4


KILLED = """
import os, signal, sys
from pathlib import Path
from tamis.cuda.compiler import Program, compiled

class Compiler:
    version = (13, 0)
    def compile(self, program, arch):
        return b"cubin" * 100_000

def killed(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(*{"replace": (os, "replace", killed), "write": (os, "fdopen", killed)}[sys.argv[2]])
compiled(Program("add.cu", "source"), "sm_90a", folder=Path(sys.argv[1]), compiler=Compiler())
"""


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_a_process_killed_while_it_keeps_a_cubin_costs_the_next_one_a_compilation(tmp_path: Path, moment: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    made = Nvrtc(Library(""))
    assert compiled(Program("add.cu", "source"), "sm_90a", folder=tmp_path, compiler=made) == b"\0" * 4
    assert not left.exists()
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


class Failing(TorchDispatchMode):
    """Memory that runs out at the n-th operation of torch."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return func(*args, **(kwargs or {}))


def test_a_step_that_ran_out_of_memory_can_be_run_again() -> None:
    """Wherever it stops: other requests' rows are as they were, and the same step again gives the same bits."""
    spec = LayerSpec(heads=2, topk=8)
    pool, planner = PagePool(8, 16), Planner(spec, Limits(max_tokens=16, max_requests=2, max_length=64, page_size=16))
    cache = PagedCache("v32-fp8", pages=8, page_size=16)
    layer, torch_seed = SparseMLA(spec), torch.Generator().manual_seed(3)

    def step(shape: str) -> Any:
        plan = planner.plan(Batch.parse(shape, pool))
        q, kv = (torch.randn(plan.rows, *more, generator=torch_seed) for more in ((2, 576), (576,)))
        positions = torch.arange(8, dtype=torch.int32).expand(plan.rows, 8).clone()
        positions[positions > plan.positions.unsqueeze(1)] = -1
        return lambda: layer(q, kv, cache, plan, positions=positions)

    step("q9_q7")()
    before = cache.storage.clone()
    again = step("q1s10_q1s8")
    with Failing() as counted:
        expected = again()
    after = cache.storage.clone()
    changed = (after != before).any(-1)
    for at in sorted({1 + counted.calls * part // 24 for part in range(24)}):
        cache.storage.copy_(before)
        with Failing(at), pytest.raises(RuntimeError, match="can't allocate memory"):
            again()
        assert torch.equal(cache.storage[~changed], before[~changed])
        found = again()
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)
        assert torch.equal(cache.storage, after)
