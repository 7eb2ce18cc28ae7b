"""What each implementation can do, in order of preference: the table that `tamis.choose` and every stage look into."""

from dataclasses import dataclass

import torch

from tamis import checks
from tamis.cache.layout import Layout
from tamis.cuda.compiler import INSTALL, has_nvrtc
from tamis.model.spec import LayerSpec

STAGES = ("rotate", "compress", "write", "gather", "index", "select", "translate", "attend", "combine", "output")


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

    def stage_module(self, stage: str) -> str:
        """The module with this backend's kernels of a stage, where it has some."""
        # `tamis.ops.attend` is the function, so the stage's package has another name.
        return f"tamis.ops.{'attention' if stage == 'attend' else stage}.{self.module}"

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


@dataclass(frozen=True)
class Need:
    """What a choice is made for."""

    spec: LayerSpec
    device: torch.device
    capability: tuple[int, int] | None
    dtype: torch.dtype
    layout: Layout
    page_size: int


BACKENDS = (
    Backend(
        "hopper",
        "hopper",
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
