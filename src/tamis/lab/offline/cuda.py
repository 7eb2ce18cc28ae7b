"""Compiles the CUDA C++ kernels without a GPU: `python -m tamis.lab.offline.cuda sm_90a`.

A stage with CUDA C++ kernels has `cuda_cases()` in its module here, `tamis.lab.offline.<stage>`, which yields its
programs as the library compiles them. A kernel that spills registers, that needs more shared memory than a CTA may
have, or whose machine code writes registers of products that still run, is refused.
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
from tamis.backends import BACKENDS, STAGES
from tamis.cuda.compiler import Program, compiled
from tamis.lab.offline.operands import disassembled, early_uses, functions

SHARED_LIMITS = {"sm_90a": 228 * 1024, "sm_100a": 228 * 1024}
"""Bytes of shared memory per CTA, including those reserved by the system."""
SYSTEM_SHARED = 1024
"""Bytes reserved by the system; cuobjdump counts them only for kernels with static shared memory."""
HOPPER = BACKENDS[0]


@dataclass(frozen=True)
class CudaCase:
    """A program with its compile options and its largest launch."""

    label: str
    program: Program
    shared: int
    """Bytes of dynamic shared memory of the largest launch."""
    architectures: tuple[str, ...] = ("sm_90a",)


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel in a cubin."""

    function: str
    registers: int
    stack: int
    """Bytes per thread; spilled registers go there."""
    shared: int
    """Bytes of static shared memory, including those of the system."""


@dataclass(frozen=True)
class KernelUse:
    """The resources of one kernel, compiled for an architecture and launched as in its case."""

    program: str
    """The case's label."""
    function: str
    target: str
    """The architecture."""
    registers: int
    """Registers per thread."""
    stack: int
    """Bytes of stack per thread."""
    static_shared: int
    """Bytes per CTA, including those of the system."""
    dynamic_shared: int
    """Bytes per CTA in the largest launch."""
    shared_limit: int
    """The most bytes of both per CTA."""
    early_uses: tuple[str, ...] = ()
    """Instructions that use registers of a product which may still run (see `operands`)."""

    @property
    def excess(self) -> int:
        """Bytes of stack, bytes of shared memory beyond the limit and early uses of registers; must be 0."""
        return self.stack + max(0, self.static_shared + self.dynamic_shared - self.shared_limit) + len(self.early_uses)

    @property
    def refusal(self) -> str:
        """The reason why the kernel is refused; empty if it is not."""
        if self.stack:
            return f"{self.function} has {self.stack} bytes of stack; use fewer registers"
        if self.early_uses:
            return (
                f"{self.function} has {len(self.early_uses)} instructions that use registers of products too early, "
                f"{self.early_uses[0]}; use another version of NVRTC, such as that of CUDA 13.3"
            )
        if self.excess:
            return (
                f"{self.function} needs {self.static_shared} + {self.dynamic_shared} bytes of shared memory, but a "
                f"block on {self.target} may have {self.shared_limit}; use less"
            )
        return ""


def cuobjdump() -> Path | None:
    """The tool that prints the resources of a cubin, part of Triton; None where it is not installed."""
    triton = find_spec("triton")
    tool = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton and triton.origin else None
    return tool if tool is not None and tool.exists() else None


def usage(cubin: bytes) -> list[Usage]:
    """The resources of the kernels in a cubin; empty without cuobjdump."""
    tool = cuobjdump()
    if tool is None:
        return []
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", report)
    return [Usage(name, int(regs), int(stack), max(int(shared), SYSTEM_SHARED)) for name, regs, stack, shared in found]


def kernel_uses(case: CudaCase, arch: str, cubin: bytes) -> list[KernelUse]:
    """The resources of the kernels of a case, from its cubin."""
    checks.option("arch", arch, tuple(SHARED_LIMITS))
    tool, early = cuobjdump(), dict[str, tuple[str, ...]]()
    if tool is not None and "wgmma_rs" in case.program.source:  # products with an operand in registers
        early = {name: tuple(early_uses(code)) for name, code in functions(disassembled(tool, cubin))}
    found = []
    for one in usage(cubin):
        memory = one.registers, one.stack, one.shared, case.shared, SHARED_LIMITS[arch]
        found.append(KernelUse(case.label, one.function, arch, *memory, early.get(one.function, ())))
    return found


def compile_case(case: CudaCase, arch: str) -> list[KernelUse]:
    """Compile a case and return its kernels' resources; refuse what `KernelUse.refusal` refuses."""
    checks.option("arch", arch, tuple(SHARED_LIMITS))
    found = kernel_uses(case, arch, compiled(case.program, arch))
    for one in found:
        if one.refusal:
            raise (RuntimeError if one.early_uses else MemoryError)(f"{case.label}: {one.refusal}")
    return found


def has_cases(stage: str) -> bool:
    """Whether a stage has CUDA C++ kernels."""
    return stage in HOPPER.stages


def stage_cases(stage: str) -> Iterator[CudaCase]:
    """The cases of a stage; none where it has no CUDA C++ kernels."""
    if has_cases(stage):
        yield from importlib.import_module(f"tamis.lab.offline.{stage}").cuda_cases()


def all_cases() -> Iterator[CudaCase]:
    """The cases of every stage that has CUDA C++ kernels."""
    for stage in STAGES:
        yield from stage_cases(stage)


def main(names: list[str]) -> int:
    """Compile every case for the named architectures and print a line for each kernel; 1 if one of them failed."""
    if not names or any(name not in SHARED_LIMITS for name in names):
        print(f"usage: python -m tamis.lab.offline.cuda {'|'.join(SHARED_LIMITS)}...", file=sys.stderr)
        return 2
    failures = 0
    print(f"{'target':8} {'regs':>5} {'static':>7} {'dynamic':>7}  case")
    for name in names:
        for case in all_cases():
            if name not in case.architectures:
                continue
            try:
                for one in compile_case(case, name):
                    shared = f"{one.static_shared:7} {one.dynamic_shared:7}"
                    print(f"{name:8} {one.registers:5} {shared}  {case.label}: {one.function}")
            except Exception as error:
                failures += 1
                print(f"{name:8} FAILED  {case.label}: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
