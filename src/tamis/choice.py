"""`choose`: which backend runs a layer, and why the others do not."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from tamis import checks
from tamis.backends import STAGES, TRAINED, Backend, Need, compute_capability, refuse_broken, registered
from tamis.cache.layout import Layout, named
from tamis.model.spec import LayerSpec


@dataclass(frozen=True)
class StageKernels:
    """The kernels that run one stage of a layer."""

    stage: str
    runs: str
    """A CUDA source file, or the backend whose kernels run the stage."""
    because: tuple[str, ...] = ()
    """The reasons why the backend's own kernels do not run the stage, if those of its base do."""

    def __str__(self) -> str:
        """The stage and its kernels in one line."""
        return f"{self.stage}: {self.runs}" + (f", because {'; '.join(self.because)}" if self.because else "")


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and every reason against each rejected one."""

    backend: Backend
    need: Need
    rejected: dict[str, list[str]]
    """The reasons, by the names of the backends that cannot run the layer."""
    passed_over: tuple[str, ...] = ()
    """Backends that could run the layer but come later in the order of preference."""

    @property
    def name(self) -> str:
        """The name of the chosen backend."""
        return self.backend.name

    @property
    def kernels(self) -> list[StageKernels]:
        """The kernels that run each stage of the layer."""
        return stage_kernels(self.backend, self.need)

    def explain(self) -> str:
        """One line per backend: chosen, possible, or rejected with the reasons. If the chosen backend leaves stages to
        its base, one line per stage follows."""
        lines = [f"{self.name}: chosen ({self.backend.summary})"]
        lines += [f"  {kernels}" for kernels in self.kernels] if self.backend.base is not None else []
        lines += [f"{name}: possible, lower preference" for name in self.passed_over]
        lines += [f"{name}: rejected: {'; '.join(reasons)}" for name, reasons in self.rejected.items()]
        return "\n".join(lines)


def choose(
    spec: LayerSpec,
    device: torch.device | str,
    *,
    layout: str | Layout | None = None,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = 64,
    prefer: str = "auto",
    capability: tuple[int, int] | None = None,
    backends: tuple[Backend, ...] | None = None,
) -> Choice:
    """Choose a backend for a layer. If none can run it, a ValueError lists all reasons.

    Args:
        spec: the layer.
        device: where its tensors are.
        layout: the latent cache's format; bf16 rows of the spec's widths if not given.
        dtype: the queries' dtype.
        page_size: the latent cache's page size.
        prefer: the name of a backend, which is then chosen or refused; "auto" takes the first that can run the layer.
        capability: the compute capability of a CUDA device, if the caller knows it; asking the device starts CUDA.
        backends: the table to choose from, in order of preference; if not given, the built-in backends and those that
            other packages register.
    """
    checks.instance("spec", spec, LayerSpec)
    checks.instance("dtype", dtype, torch.dtype)
    device = checks.device("device", device)
    if layout is None:
        layout = named("v32-bf16", latent=spec.latent_dim, rope=spec.rope_dim)
    layout = named(layout)
    checks.integer("page_size", page_size, low=1)
    if layout.width != spec.head_dim:
        raise checks.refuse("layout", f"{spec.head_dim} wide like the spec", layout.width, "choose matching widths")
    if capability is None:
        capability = compute_capability(device)
    return _first_possible(Need(spec, device, capability, dtype, layout, page_size), prefer, backends)


def _first_possible(need: Need, prefer: str, backends: tuple[Backend, ...] | None) -> Choice:
    broken: dict[str, list[str]] = {}
    if backends is None:
        refuse_broken(prefer)
        backends, failed = registered()
        broken = {one.label: [one.reason] for one in failed}
    if prefer != "auto":
        checks.option("prefer", prefer, ("auto", *(b.name for b in backends)))
    refusals = {b.name: b.refusals(need) for b in backends}
    possible = [b for b in backends if not refusals[b.name]]
    wanted = [b for b in possible if prefer in ("auto", b.name)]
    rejected = {name: reasons for name, reasons in refusals.items() if reasons} | broken
    if not wanted:
        raise _refuse(need.device, rejected, prefer, [b.name for b in possible])
    return Choice(wanted[0], need, rejected, tuple(b.name for b in possible if b is not wanted[0]))


def _refuse(device: torch.device, rejected: dict[str, list[str]], prefer: str, possible: list[str]) -> ValueError:
    if prefer in rejected:
        reasons = ", ".join(rejected[prefer])
        others = f"; {' or '.join(possible)} can" if possible else ""
        return ValueError(f"backend {prefer!r} cannot run this layer on {device}: {reasons}{others}")
    reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in rejected.items())
    return ValueError(f"no backend can run this layer on {device} ({reasons})")


def stage_kernels(backend: Backend, need: Need) -> list[StageKernels]:
    """The kernels that run each stage of a layer that this backend accepts: its own or those of its base.

    A stage module that chooses its kernel for each call has a function `explain_kernels`, which tells the choice.
    """
    found = []
    for stage in STAGES:
        runs, because = backend.name if stage in backend.stages else backend.base or "nothing", list[str]()
        name = backend.stage_module(stage)
        if runs == backend.name and backend.base is not None and find_spec(name) is not None:
            explain = getattr(import_module(name), "explain_kernels", None)
            runs, because = (runs, because) if explain is None else explain(need)
        found.append(StageKernels(stage, runs, tuple(because)))
    return found


@dataclass(frozen=True)
class TrainingKernels:
    """The functions of `tamis.train` that one backend runs."""

    backend: str
    runs: tuple[str, ...]
    """Those for which it is the first backend with kernels."""
    reasons: tuple[str, ...]
    """Why it does not run the others, if it has no kernels for them."""

    def __str__(self) -> str:
        """The backend, its functions and the reasons in one line."""
        told = ", ".join(self.runs) or "nothing"
        return f"{self.backend}: {told}" + (f" ({'; '.join(self.reasons)})" if self.reasons else "")


def training_kernels(device: torch.device, capability: tuple[int, int] | None) -> list[TrainingKernels]:
    """What each backend runs of `tamis.train` on a device, in order of preference.

    Dtypes and sizes of arguments may rule a backend out as well, which the call says.
    """
    found, left = [], list(TRAINED)
    for backend in registered().backends:
        here = [] if backend.device_refusals(device, capability) else [f for f in left if f in backend.trains]
        left = [function for function in left if function not in here]
        reasons = backend.training_refusals(device, capability)
        found.append(TrainingKernels(backend.name, tuple(here), tuple(reasons)))
    return found
