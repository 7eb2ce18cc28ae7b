"""Compiles the Triton kernels without a GPU: `python -m tamis.lab.offline.triton [--few] sm_90 [gfx942 ...]`.

Each stage's module here, `tamis.lab.offline.<stage>`, may have `triton_cases()`, which yields launches as the library
makes them. Each launch is compiled for a target, and its shared memory is checked against what a CTA may have there:
Triton compiles a kernel that does not fit without an error, and only its launch on the device fails. `--few` compiles
one launch of each kernel; `--every` compiles every program of dtypes, formats and widths that the library's checks
admit (`every_triton_case()`), which takes minutes per target.
"""

import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tamis import checks
from tamis.backends import STAGES


@dataclass(frozen=True)
class Target:
    """An architecture to compile for."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    """Bytes of shared memory that one CTA may use, opt-in included."""


def _targets(*targets: Target) -> dict[str, Target]:
    return {target.name: target for target in targets}


TARGETS = _targets(
    Target("sm_80", "cuda", 80, 32, 163 * 1024),
    Target("sm_86", "cuda", 86, 32, 99 * 1024),
    Target("sm_89", "cuda", 89, 32, 99 * 1024),
    Target("sm_90", "cuda", 90, 32, 227 * 1024),
    Target("sm_100", "cuda", 100, 32, 227 * 1024),
    Target("sm_120", "cuda", 120, 32, 99 * 1024),
    Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
    Target("gfx950", "hip", "gfx950", 64, 160 * 1024),
)
NATIVE_E4M3 = ("sm_89", "sm_90", "sm_100", "sm_120")
"""Targets for which kernels convert e4m3 in hardware; see `tamis.ops.rows.triton_rows.has_native_e4m3`."""


@dataclass(frozen=True)
class OfflineCase:
    """One launch, with everything that `triton.compile` needs."""

    kernel: Any
    signature: Mapping[str, str]
    """Triton's name of every argument's type, `constexpr` included, in the kernel's order."""
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    """`num_warps`, `num_stages` and the like."""
    label: str
    aligned: tuple[str, ...] | None = None
    """Arguments that are multiples of 16 (pointers: bytes); every pointer if not given."""
    targets: tuple[str, ...] = tuple(TARGETS)
    """The targets on which this launch occurs."""
    most_shared: int = 0
    """The library's estimate of shared memory when it chooses blocks; 0 if it makes none."""

    @classmethod
    def of_launch(
        cls,
        kernel: Any,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
        label: str,
        targets: Iterable[str] = tuple(TARGETS),
        *,
        most_shared: int = 0,
    ) -> "OfflineCase":
        """The case of a call `kernel[grid](**arguments, **options)`, specialised as Triton's launcher would.

        Tensors may be on the host; their memory counts as aligned, as device memory is.
        """
        signature, constexprs, aligned = {}, {}, []
        for parameter in kernel.params:
            name, value = parameter.name, arguments[parameter.name]
            number = type(value) is int and not parameter.do_not_specialize
            # As in the launcher, absent arguments and the integer 1 become constants.
            if parameter.is_constexpr or value is None or (number and value == 1):
                signature[name], constexprs[name] = "constexpr", value
                continue
            signature[name] = _type_name(name, value)
            if isinstance(value, Tensor) or (number and value % 16 == 0):
                aligned.append(name)
        return cls(kernel, signature, constexprs, dict(options), label, tuple(aligned), tuple(targets), most_shared)


def _type_name(name: str, value: object) -> str:
    if isinstance(value, Tensor):
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}
        dtype = checks.dtype_name(value.dtype)
        return "*" + short.get(dtype, dtype.replace("uint", "u").replace("int", "i"))
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise checks.refuse_type(name, "a tensor or a number", checks.describe(value), "make other arguments constexpr")


@dataclass(frozen=True)
class Compiled:
    """A compiled case and its resources."""

    label: str
    target: str
    shared: int
    """Bytes of shared memory per CTA."""
    registers: int | None
    """Registers per thread; None where they are unknown."""
    spills: int | None
    """Bytes of stack per thread on NVIDIA, registers spilled on AMD."""
    seconds: float
    kernel: Any
    """Triton's compiled kernel; `kernel.asm` has the code of every stage."""


def compile_case(case: OfflineCase, target: str) -> Compiled:
    """Compile one case, and refuse it if it needs more shared memory than the target has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.interpreter import InterpretedFunction

    checks.option("target", target, tuple(TARGETS))
    if isinstance(case.kernel, InterpretedFunction):
        raise checks.refuse(
            "kernel", "compilable", "an interpreted function", "unset TRITON_INTERPRET before Triton is imported"
        )
    where = TARGETS[target]
    names = list(case.signature)
    aligned = case.aligned
    if aligned is None:
        aligned = tuple(name for name in names if case.signature[name].startswith("*"))
    begin = time.perf_counter()
    source = ASTSource(
        case.kernel,
        dict(case.signature),
        dict(case.constexprs),
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    gpu = GPUTarget(where.backend, where.arch, where.warp_size)
    compiled = triton.compile(source, target=gpu, options=dict(case.options))
    seconds = time.perf_counter() - begin
    shared = int(compiled.metadata.shared)
    if shared > where.shared_limit:
        raise MemoryError(
            f"{case.label} needs {shared} bytes of shared memory, but a block on {target} may have "
            f"{where.shared_limit}; use smaller blocks or fewer stages there"
        )
    if case.most_shared and shared > case.most_shared:
        raise MemoryError(
            f"{case.label} needs {shared} bytes of shared memory on {target}, but its blocks were chosen as if it were "
            f"at most {case.most_shared}; mend the bound"
        )
    registers, spills = _usage(compiled, where)
    return Compiled(case.label, target, shared, registers, spills, seconds, compiled)


def _usage(compiled: Any, target: Target) -> tuple[int | None, int | None]:
    """Registers and spills of a compiled kernel; None where they are unknown."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found = [re.search(rf"\.vgpr_{what}:\s+(\d+)", text) for what in ("count", "spill_count")]
        return found[0] and int(found[0][1]), found[1] and int(found[1][1])
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=False).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    return (int(usage[1]), int(usage[2])) if usage else (None, None)


def all_cases(*, every: bool = False) -> Iterator[OfflineCase]:
    """The cases of every stage; with `every`, one case per program, for stages with `every_triton_case`."""
    for stage in STAGES:
        module = importlib.import_module(f"tamis.lab.offline.{stage}")
        if every and hasattr(module, "every_triton_case"):
            yield from module.every_triton_case()
        elif hasattr(module, "triton_cases"):
            yield from module.triton_cases()


def few_cases(cases: Iterable[OfflineCase]) -> list[OfflineCase]:
    """The largest case of each kernel and set of targets, since it is the most likely not to fit.

    The largest case has the highest estimate of shared memory, then the most stages and warps.
    """

    def size(case: OfflineCase) -> tuple[int, int, int]:
        return case.most_shared, case.options.get("num_stages", 0), case.options.get("num_warps", 0)

    found: dict[object, OfflineCase] = {}
    for case in cases:
        key = case.kernel, case.targets
        if key not in found or size(case) > size(found[key]):
            found[key] = case
    return list(found.values())


def main(arguments: list[str]) -> int:
    """Compile every case for the named targets and print a line for each; 1 if one of them failed."""
    options = {argument for argument in arguments if argument in ("--few", "--every")}
    names = [argument for argument in arguments if argument not in options]
    if not names or len(options) > 1 or any(name not in TARGETS for name in names):
        usage = "usage: python -m tamis.lab.offline.triton [--few | --every] TARGET..."
        print(f"{usage}; targets: {' '.join(TARGETS)}", file=sys.stderr)
        return 2
    cases, failures = list(all_cases(every="--every" in options)), 0
    if "--few" in options:
        cases = few_cases(cases)
    print(f"{'target':7} {'shared':>7} {'regs':>5} {'spill':>5} {'s':>5}  case")
    for name in names:
        for case in cases:
            if name not in case.targets:
                continue
            try:
                done = compile_case(case, name)
            except Exception as error:
                failures += 1
                print(f"{name:7} FAILED  {case.label}: {type(error).__name__}: {error}", flush=True)
            else:
                numbers = [("-" if n is None else n) for n in (done.registers, done.spills)]
                print(f"{name:7} {done.shared:7} {numbers[0]:>5} {numbers[1]:>5} {done.seconds:5.1f}  {case.label}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
