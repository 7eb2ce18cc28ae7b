"""Checks a stage's CUDA C++ kernels as they are compiled here: registers, stack, shared memory, operands."""

from collections.abc import Iterator
from functools import partial

from tamis.backends import compute_capability
from tamis.cuda.compiler import architecture, compiled
from tamis.cuda.nvrtc import INSTALL, has_nvrtc
from tamis.lab.offline.cuda import HOPPER, CudaCase, cuobjdump, has_cases, kernel_uses, stage_cases
from tamis.lab.verify.check import Check, Target, Trial

NAME = "no register spills; shared memory within limits; operands kept"


def resource_checks(stage: str, target: Target) -> Iterator[Check]:
    """No kernel of the stage spills registers, needs more shared memory than a CTA may have, or overwrites registers of
    products that still run.

    On a GPU that runs the kernels, the cubins of the launches are checked; without a GPU, the same programs are
    compiled for their architectures. The check is left out for a target with a scope, whose caller is about to time a
    few kernels and need not wait for the others.
    """
    if not has_cases(stage) or target.scope is not None:
        return
    reason = _not_applicable(stage, target)
    if reason:
        yield Check(stage, NAME, 0.0, reason=reason)
        return
    capability = compute_capability(target.device)
    wanted = None if capability is None else architecture(capability)
    trials = [
        (case.label, partial(_trial, case, arch))
        for case in stage_cases(stage)
        for arch in case.architectures
        if wanted in (None, arch)
    ]
    yield Check(stage, NAME, 0.0, trials, backend="hopper")


def _not_applicable(stage: str, target: Target) -> str:
    backend = target.runs(stage)
    here = backend == HOPPER
    offline = target.device.type == "cpu" and target.backend == "auto"
    if not here and not offline:
        return f"{target.backend if backend is None else backend.name} has no kernels in CUDA C++"
    if not here and target.quick:
        return "without a GPU, kernels are compiled for this check alone: leave out --quick"
    if not has_nvrtc():
        return f"NVRTC was not found; {INSTALL}"
    if cuobjdump() is None:
        return "cuobjdump, which reads registers off a kernel and comes with Triton, was not found"
    return ""


def _trial(case: CudaCase, arch: str) -> Trial:
    found = kernel_uses(case, arch, compiled(case.program, arch))
    if not found:
        raise RuntimeError(f"cuobjdump found no kernel in {case.program.name}")
    refusals = "; ".join(one.refusal for one in found if one.refusal)
    return Trial(float(sum(one.excess for one in found)), refusals, tuple(found))
