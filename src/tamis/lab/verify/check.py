"""A check: several trials of one stage under one error bound, the device it runs on, and its result."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch

from tamis.backends import Backend, Need, backend_for_stage, compute_capability
from tamis.cache.layout import Layout
from tamis.lab.offline.cuda import KernelUse
from tamis.lab.testing import cases
from tamis.model.spec import LayerSpec

NOT_BATCH_INVARIANT = (
    "a backend whose bits may depend on the batch declares Backend(batch_invariant=False), and this check is left out"
)
"""What the author of a backend may do about a request whose bits depend on its batch."""
NOT_CAPTURABLE = (
    "a backend whose calls cannot be captured declares Backend(capturable=False), and this check is left out"
)
"""What the author of a backend may do about a captured graph that gives other bits."""
State = Literal["ok", "FAILED", "not applicable"]
T = TypeVar("T")


class Named(Protocol):
    """A case with a name for reports."""

    @property
    def name(self) -> str:
        """The name in reports."""


C = TypeVar("C", bound=Named)


class Trial(NamedTuple):
    """The outcome of one case."""

    error: float
    """A relative error, or the number of elements that differ; NaN and infinity never pass."""
    note: str = ""
    """The first difference."""
    kernels: tuple[KernelUse, ...] = ()
    """Registers and memory of the CUDA C++ kernels, if the trial checks them."""


@dataclass(frozen=True)
class CheckResult:
    """One line of the report."""

    stage: str
    check: str
    backend: str
    cases: int
    error: float | None
    """The largest error of all cases; None if none ran."""
    bound: float
    state: State
    note: str = ""
    """Why the check does not apply, or the first case that failed and how."""
    kernels: tuple[KernelUse, ...] = ()
    """Registers and memory of the CUDA C++ kernels, if the check is about them."""

    @property
    def ok(self) -> bool:
        """Whether the check did not fail; a check that does not apply is ok."""
        return self.state != "FAILED"


@dataclass(frozen=True)
class Scope:
    """The formats that a caller will run. Cases in other formats are skipped and their kernels not compiled."""

    layouts: frozenset[str]
    """Layout names, without the widths that a name may have in brackets."""
    dtypes: frozenset[torch.dtype]
    """Dtypes of queries, for stages that take queries."""


@dataclass(frozen=True)
class Target:
    """A device and a backend to check, fully or quickly, in every format or only in those of a scope."""

    device: torch.device
    backend: str = "auto"
    quick: bool = False
    scope: Scope | None = None

    def runs(self, stage: str) -> Backend | None:
        """The backend that would run a stage here; None if the named backend lacks the stage."""
        try:
            return backend_for_stage(stage, self.backend, self.device)
        except ValueError:
            return None

    def here(self, value: T) -> T:
        """The same value on the target's device."""
        return cases.to_device(value, self.device)

    def takes(
        self,
        stage: str,
        layout: Layout,
        *,
        page_size: int = 64,
        heads: int | None = None,
        dtype: torch.dtype | None = None,
        sink: bool = False,
    ) -> bool:
        """Whether the backend supports such a case; always True for "auto", which must run everything."""
        backend = self.runs(stage)
        if backend is None or not self.covers(layout, dtype):
            return False
        if self.backend == "auto":
            return True
        spec = LayerSpec(
            backend.heads[0] if heads is None else heads, layout.latent, layout.rope, layout.latent, topk=1, sink=sink
        )
        asked = backend.query_dtypes[0] if dtype is None else dtype
        return not backend.refusals(Need(spec, self.device, compute_capability(self.device), asked, layout, page_size))

    def covers(self, layout: Layout, dtype: torch.dtype | None = None) -> bool:
        """Whether a case with such rows, and such queries if any, is to be checked."""
        if self.scope is None:
            return True
        return layout.name.split("[")[0] in self.scope.layouts and (dtype is None or dtype in self.scope.dtypes)

    def not_capturable(self, stages: Sequence[str]) -> str:
        """Why these stages cannot be captured in a CUDA graph here; empty if they can."""
        if self.device.type != "cuda":
            return "graphs are captured on CUDA devices only"
        for stage in stages:
            backend = self.runs(stage)
            if backend is not None and not backend.capturable:
                return f"{backend.name} does not claim that {stage} can be captured"
        return ""

    def not_batch_invariant(self, stage: str) -> str:
        """Why a request's bits may depend on its batch here, even with fixed splits; empty if they may not."""
        backend = self.runs(stage)
        if backend is None or backend.batch_invariant:
            return ""
        return f"{backend.name} does not claim that a request's bits are independent of its batch"


@dataclass(frozen=True)
class Check:
    """Trials of one stage under one bound."""

    stage: str
    name: str
    bound: float
    trials: Sequence[tuple[str, Callable[[], Trial]]] = ()
    """The name of each case and the function that runs it."""
    reason: str = ""
    """Why the check does not apply."""
    backend: str = ""
    """The backend whose kernels are checked, if another backend runs the stage here."""
    remedy: str = ""
    """What to do if a trial fails, for a property that a backend need not have."""


def named_calls(run: Callable[[Target, C], T], target: Target, cases: Iterable[C]) -> list[tuple[str, "partial[T]"]]:
    """The name of each case and the function that runs it on the target."""
    return [(case.name, partial(run, target, case)) for case in cases]


def judge(check: Check, backend: str, done: Callable[[], None]) -> CheckResult:
    """Run all trials of a check; `done` is called after each. An exception fails its trial; the others still run."""
    if check.reason or not check.trials:
        reason = check.reason or f"{backend} does not claim any of these cases"
        return CheckResult(check.stage, check.name, backend, 0, None, check.bound, "not applicable", reason)
    worst, note, failed = 0.0, "", 0
    kernels: list[KernelUse] = []
    for name, trial in check.trials:
        try:
            found = trial()
        except Exception as error:
            text = " ".join(str(error).split())
            found = Trial(math.inf, f"{type(error).__name__}: {text[:300]}")
        kernels += found.kernels
        # Written so that NaN fails too.
        if not found.error <= check.bound:
            failed += 1
            note = note or f"{name}: {found.note or f'error {found.error:.2e}'}"
        worst = max(worst, math.inf if math.isnan(found.error) else found.error)
        done()
    if failed > 1:
        note = f"{failed} cases; {note}"
    if failed and check.remedy:
        note = f"{note}; {check.remedy}"
    state: State = "FAILED" if failed else "ok"
    count = len(check.trials)
    return CheckResult(check.stage, check.name, backend, count, worst, check.bound, state, note, tuple(kernels))
