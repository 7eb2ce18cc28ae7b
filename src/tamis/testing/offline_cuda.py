"""Compile the CUDA C++ kernels for GPUs that are not there: `python -m tamis.testing.offline_cuda sm_90a`.

Every `tamis.ops.<stage>.hopper_kernels` module offers `offline_cases()`, which yields its programs as the library
compiles them. A kernel that spills registers, or that needs more shared memory than a block may have, is refused.
"""

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tamis import checks
from tamis.backends import STAGES
from tamis.cuda.compiler import Program, nvrtc

SHARED_LIMITS = {"sm_90a": 228 * 1024, "sm_100a": 228 * 1024}
"""Bytes of shared memory that one block may use, with those that the system keeps in each block."""
SYSTEM_SHARED = 1024
"""What the system keeps; the tool counts it only in kernels that use shared memory by themselves."""


@dataclass(frozen=True)
class CudaCase:
    """A program as it is compiled and launched."""

    label: str
    program: Program
    shared: int
    """Bytes of dynamic shared memory of the largest launch."""
    architectures: tuple[str, ...] = ("sm_90a",)


@dataclass(frozen=True)
class Usage:
    """What one kernel of a cubin needs."""

    function: str
    registers: int
    stack: int
    """Bytes per thread; spilled registers go there."""
    shared: int
    """Bytes of static shared memory, the system's included."""


def usage(cubin: bytes) -> list[Usage]:
    """What the kernels of a cubin need, from the tool that comes with Triton; empty where it is not installed."""
    triton = find_spec("triton")
    tool = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else None
    if tool is None or not tool.exists():
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    return [Usage(name, int(regs), int(stack), max(int(shared), SYSTEM_SHARED)) for name, regs, stack, shared in found]


def compile_case(case: CudaCase, arch: str) -> list[Usage]:
    """Compile a case and return what its kernels need; refuse stack memory and too much shared memory."""
    checks.option("arch", arch, tuple(SHARED_LIMITS))
    found = usage(nvrtc().compile(case.program, arch))
    for one in found:
        if one.stack:
            raise MemoryError(f"{case.label}: {one.function} has {one.stack} bytes of stack; use fewer registers")
        if one.shared + case.shared > SHARED_LIMITS[arch]:
            raise MemoryError(
                f"{case.label}: {one.function} needs {one.shared} + {case.shared} bytes of shared memory, but a block "
                f"on {arch} may have {SHARED_LIMITS[arch]}; use less"
            )
    return found


def all_cases() -> Iterator[CudaCase]:
    """The cases of every stage that has CUDA C++ kernels."""
    for stage in STAGES:
        name = f"tamis.ops.{stage}.hopper_kernels"
        if find_spec(name) is not None:
            yield from importlib.import_module(name).offline_cases()


def main(names: list[str]) -> int:
    """Compile every case for the named architectures and print a line for each kernel; 1 if one of them failed."""
    if not names or any(name not in SHARED_LIMITS for name in names):
        print(f"usage: python -m tamis.testing.offline_cuda {'|'.join(SHARED_LIMITS)}...", file=sys.stderr)
        return 2
    failures = 0
    print(f"{'target':8} {'regs':>5} {'static':>7} {'dynamic':>7}  case")
    for name in names:
        for case in all_cases():
            if name not in case.architectures:
                continue
            try:
                for one in compile_case(case, name):
                    print(f"{name:8} {one.registers:5} {one.shared:7} {case.shared:7}  {case.label}: {one.function}")
            except Exception as error:
                failures += 1
                print(f"{name:8} FAILED  {case.label}: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
