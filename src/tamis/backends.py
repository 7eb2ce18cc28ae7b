"""Which implementation runs: a table of capabilities, a choice, and every reason behind it."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from tamis import checks
from tamis.cuda.compiler import INSTALL, has_nvrtc
from tamis.layout import Layout, named
from tamis.spec import LayerSpec

STAGES = ("rotate", "compress", "write", "gather", "index", "select", "translate", "attend", "combine")


@dataclass(frozen=True)
class Backend:
    """What one implementation can do. None means no restriction."""

    name: str
    module: str
    """File name inside each stage's package."""
    summary: str
    stages: tuple[str, ...] = STAGES
    """What it has kernels of its own for."""
    base: str | None = None
    """The backend that runs the other stages for it."""
    devices: tuple[str, ...] | None = None
    compute_capabilities: tuple[int, ...] | None = None
    """Major versions of CUDA compute capability."""
    compiled_at_first_use: bool = False
    """Whether it has kernels in CUDA C++, which NVRTC compiles."""
    direct_prefills: bool = False
    """Whether it has kernels of its own for FP8 rows at every head count, so that prefills need no 16-bit workspace."""
    query_dtypes: tuple[torch.dtype, ...] = checks.FLOATS
    layouts: tuple[str, ...] | None = None
    widths: tuple[int, ...] | None = None
    """Row widths (latent + rope)."""
    heads: tuple[int, int] = (1, 128)
    page_sizes: tuple[int, ...] | None = None
    """A page size is accepted if it is a multiple of one of these."""
    sinks: bool = True
    max_latent: int | None = None
    """Widest latent part of a row."""
    max_rope: int | None = None
    """Widest rope part of a row."""
    power_of_two_tiles: bool = False
    """Tiles that share a scale must have a power of two of values."""
    packed_rows: bool = False
    """Whether attention reads rows of two values to a byte; every backend reads index keys of that kind."""
    capturable: bool = True
    """Whether its calls can be captured in a CUDA graph."""
    batch_invariant: bool = True
    """Whether, with a fixed number of splits, a row's bits do not depend on what else is in the batch."""

    def device_refusals(self, device: torch.device, capability: tuple[int, int] | None) -> list[str]:
        """Every reason why it cannot run on a device."""
        if self.devices is not None and device.type not in self.devices:
            return [f"device {device.type!r} is not one of {', '.join(self.devices)}"]
        if self.compute_capabilities is not None and (capability or (None,))[0] not in self.compute_capabilities:
            wanted = ", ".join(f"{c}.x" for c in self.compute_capabilities)
            found = "unknown" if capability is None else ".".join(str(n) for n in capability)
            return [f"compute capability {found} is not one of {wanted}"]
        if self.compiled_at_first_use and not has_nvrtc():
            return [f"NVRTC was not found; {INSTALL}"]
        return []

    def refusals(self, need: "Need") -> list[str]:
        """Every reason why this backend cannot do it; empty if it can."""
        reasons = self.device_refusals(need.device, need.capability)
        if need.dtype not in self.query_dtypes:
            names = ", ".join(checks.dtype_name(d) for d in self.query_dtypes)
            reasons.append(f"query dtype {checks.dtype_name(need.dtype)} is not one of {names}")
        if self.layouts is not None and need.layout.name.split("[")[0] not in self.layouts:
            reasons.append(f"cache layout {need.layout.name} is not one of {', '.join(self.layouts)}")
        if self.widths is not None and need.layout.width not in self.widths:
            reasons.append(f"row width {need.layout.width} is not one of {', '.join(str(w) for w in self.widths)}")
        latent, tile = need.layout.latent, need.layout.tile
        if self.max_latent is not None and latent > self.max_latent:
            reasons.append(f"latent width {latent} is more than {self.max_latent}")
        if self.max_rope is not None and need.layout.rope > self.max_rope:
            reasons.append(f"rope width {need.layout.rope} is more than {self.max_rope}")
        if self.power_of_two_tiles and tile & (tile - 1):
            reasons.append(f"tiles of {tile} values are not a power of two")
        if need.layout.packed and not self.packed_rows:
            reasons.append(f"cache layout {need.layout.name} has two values to a byte, which only index keys may have")
        if not self.heads[0] <= need.spec.heads <= self.heads[1]:
            reasons.append(f"{need.spec.heads} heads are not between {self.heads[0]} and {self.heads[1]}")
        if self.page_sizes is not None and not any(need.page_size % size == 0 for size in self.page_sizes):
            sizes = ", ".join(str(s) for s in self.page_sizes)
            reasons.append(f"page size {need.page_size} is not a multiple of one of {sizes}")
        if need.spec.sink and not self.sinks:
            reasons.append("attention sinks are not supported")
        return reasons

    def stage_kernels(self, need: "Need") -> list["StageKernels"]:
        """What runs each stage of a layer that this backend does not refuse: kernels of its own or its base's. Of those
        that decide by the call, the function that decides is asked."""
        found = []
        for stage in STAGES:
            runs, because = self.name if stage in self.stages else self.base or "nothing", list[str]()
            name = f"tamis.ops.{stage}.{self.module}"
            if runs == self.name and self.base is not None and find_spec(name) is not None:
                explain = getattr(import_module(name), "explain_kernels", None)
                runs, because = (runs, because) if explain is None else explain(need)
            found.append(StageKernels(stage, runs, tuple(because)))
        return found


@dataclass(frozen=True)
class StageKernels:
    """What runs one stage of a layer."""

    stage: str
    runs: str
    """A source in CUDA C++, or the backend whose kernels run it."""
    because: tuple[str, ...] = ()
    """Where that is the base's: why kernels of the backend's own do not."""

    def __str__(self) -> str:
        """One line."""
        return f"{self.stage}: {self.runs}" + (f", because {'; '.join(self.because)}" if self.because else "")


BACKENDS = (
    Backend(
        "hopper",
        "hopper_kernels",
        "CUDA C++ for NVIDIA's Hopper, compiled at first use; the portable kernels where it has none",
        stages=("index", "attend"),
        base="triton",
        devices=("cuda",),
        compute_capabilities=(9,),
        compiled_at_first_use=True,
        direct_prefills=True,
        query_dtypes=(*checks.FLOATS, torch.float8_e4m3fn),
        max_latent=512,
        max_rope=256,
        power_of_two_tiles=True,
    ),
    Backend(
        "triton",
        "triton_kernels",
        "portable Triton kernels for any GPU that Triton supports",
        stages=STAGES,
        devices=("cuda",),  # PyTorch's name for AMD GPUs as well
        query_dtypes=(*checks.FLOATS, torch.float8_e4m3fn),
        max_latent=512,
        max_rope=256,
        power_of_two_tiles=True,
    ),
    Backend(
        "reference",
        "reference",
        "plain PyTorch on any device: exact, slow on GPUs",
        query_dtypes=(*checks.FLOATS, torch.float8_e4m3fn),
        packed_rows=True,
        capturable=False,
        batch_invariant=False,
    ),
)
"""In order of preference."""


@dataclass(frozen=True)
class Need:
    """What a choice is made for."""

    spec: LayerSpec
    device: torch.device
    capability: tuple[int, int] | None
    dtype: torch.dtype
    layout: Layout
    page_size: int


@dataclass(frozen=True)
class Choice:
    """The chosen backend and, for each one passed over, every reason."""

    backend: Backend
    need: Need
    rejected: dict[str, list[str]]
    """By backend name, only backends that cannot do it."""
    passed_over: tuple[str, ...] = ()
    """Backends that could do it but come later in the order of preference."""

    @property
    def name(self) -> str:
        """Name of the chosen backend."""
        return self.backend.name

    @property
    def kernels(self) -> list[StageKernels]:
        """What runs each stage."""
        return self.backend.stage_kernels(self.need)

    def explain(self) -> str:
        """One line per backend: chosen, possible, or rejected and why. If the chosen one leaves stages to another, a
        line per stage follows it."""
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
    backends: tuple[Backend, ...] = BACKENDS,
) -> Choice:
    """Choose a backend for a layer, with reasons; a ValueError with all reasons if none fits.

    Args:
        spec: the layer.
        device: where its tensors are.
        layout: of the latent cache; bf16 rows of the spec's widths if not given.
        dtype: of the queries.
        page_size: of the latent cache.
        prefer: a backend's name makes it that one or an error; "auto" takes the first that fits.
        capability: of a CUDA device, where the caller knows it; asking the device itself starts CUDA.
        backends: the table to choose from.
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
    need = Need(spec, device, capability, dtype, layout, page_size)
    names = [b.name for b in backends]
    if prefer != "auto":
        checks.option("prefer", prefer, ("auto", *names))
    refusals = {b.name: b.refusals(need) for b in backends}
    possible = [b for b in backends if not refusals[b.name]]
    wanted = [b for b in possible if prefer in ("auto", b.name)]
    rejected = {name: reasons for name, reasons in refusals.items() if reasons}
    if not wanted:
        told = {prefer: rejected[prefer]} if prefer in rejected else rejected
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in told.items())
        raise ValueError(f"no backend can run this layer on {device} ({reasons}); change what the reasons name")
    return Choice(wanted[0], need, rejected, tuple(b.name for b in possible if b is not wanted[0]))


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None for everything else. (AMD's GPUs have numbers of their own under the same name.)"""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def backend_for_stage(stage: str, backend: str, device: torch.device | str) -> Backend:
    """The backend that runs one stage: the named one or its base, or with "auto" the first that knows stage and
    device."""
    device = torch.device(device)
    capability = compute_capability(device)
    for candidate in BACKENDS:
        if backend not in ("auto", candidate.name) or candidate.device_refusals(device, capability):
            continue
        if stage in candidate.stages:
            return candidate
        if backend == candidate.name and candidate.base is not None:
            return backend_for_stage(stage, candidate.base, device)
    names = ", ".join(b.name for b in BACKENDS if stage in b.stages or b.base is not None)
    raise checks.refuse(
        "backend", f"'auto' or one of {names} that runs on {device.type}", repr(backend), "see `tamis backends`"
    )
