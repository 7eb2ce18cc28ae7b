"""Runs the checks of all stages, or of some."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tamis import backends, checks
from tamis.lab.verify.attend import attend_checks
from tamis.lab.verify.check import Check, CheckResult, Scope, Target, judge
from tamis.lab.verify.combine import combine_checks
from tamis.lab.verify.compress import compress_checks
from tamis.lab.verify.gather import gather_checks
from tamis.lab.verify.index import index_checks
from tamis.lab.verify.layer import LAYER_STAGES, layer_checks
from tamis.lab.verify.output import output_checks
from tamis.lab.verify.planner import planner_checks
from tamis.lab.verify.resources import resource_checks
from tamis.lab.verify.rotate import rotate_checks
from tamis.lab.verify.select import select_checks
from tamis.lab.verify.translate import translate_checks
from tamis.lab.verify.v4_layer import V4_LAYER_STAGES, v4_layer_checks
from tamis.lab.verify.write import write_checks

_CHECKS: dict[str, Callable[[Target], Iterator[Check]]] = {
    "rotate": rotate_checks,
    "compress": compress_checks,
    "write": write_checks,
    "gather": gather_checks,
    "select": select_checks,
    "translate": translate_checks,
    "index": index_checks,
    "attend": attend_checks,
    "combine": combine_checks,
    "output": output_checks,
    "planner": planner_checks,
    "layer": layer_checks,
    "v4-layer": v4_layer_checks,
}
STAGES = tuple(_CHECKS)
_STAGES_OF = {"layer": LAYER_STAGES, "v4-layer": V4_LAYER_STAGES}


def stage_checks(stage: str, target: Target) -> Iterator[Check]:
    """The checks of one stage."""
    yield from _CHECKS[stage](target)
    yield from resource_checks(stage, target)


def run_checks(
    device: torch.device | str = "cpu",
    backend: str = "auto",
    stages: Sequence[str] | None = None,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
    scopes: Mapping[str, Scope] | None = None,
) -> list[CheckResult]:
    """Check stages on a device; the results come in the order of `STAGES`.

    Args:
        device: where the stages run; the expected results are computed on the host.
        backend: a backend's name, or "auto" for the one that a caller would get.
        stages: names from `STAGES`; all if not given.
        quick: check fewer shapes, which takes seconds on a CPU.
        progress: called with the number of cases done and of all cases.
        scopes: per stage, the formats to check; a stage without a scope is checked in all.
    """
    target = Target(torch.device(device), backend, quick)
    _check_backend(backend, target.device)
    for stage in stages or ():
        checks.option("stage", stage, STAGES)
    wanted = [stage for stage in STAGES if stages is None or stage in stages]
    within = scopes or {}
    found = [check for stage in wanted for check in stage_checks(stage, replace(target, scope=within.get(stage)))]
    total, count = sum(len(check.trials) for check in found), 0

    def done() -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, total)

    return [judge(check, check.backend or _backend_names(target, check.stage), done) for check in found]


def _check_backend(backend: str, device: torch.device) -> None:
    backends.refuse_broken(backend)
    known = {b.name: b for b in backends.registered().backends}
    checks.option("backend", backend, ("auto", *known))
    devices = None if backend == "auto" else known[backend].devices
    if devices is not None and device.type not in devices:
        raise checks.refuse("device", f"{' or '.join(devices)} for {backend}", device.type, "choose another backend")


def _backend_names(target: Target, stage: str) -> str:
    """The backend that runs a stage here; a layer call may use several."""
    if stage == "planner":
        return "host"
    runs = [target.runs(name) for name in _STAGES_OF.get(stage, (stage,))]
    return " + ".join(dict.fromkeys(target.backend if b is None else b.name for b in runs))
