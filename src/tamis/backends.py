"""The backends in order of preference, with the devices, formats and sizes that each supports."""

from dataclasses import dataclass

import torch

from tamis import checks
from tamis.cache.layout import Layout
from tamis.cuda.compiler import INSTALL, has_nvrtc
from tamis.model.spec import LayerSpec

STAGES = ("rotate", "compress", "write", "gather", "index", "select", "translate", "attend", "combine", "output")


@dataclass(frozen=True)
class Backend:
    """One set of kernels and what it can run. None means no restriction."""

    name: str
    module: str
    """The name of the backend's module in the package of each stage."""
    summary: str
    stages: tuple[str, ...] = STAGES
    """The stages for which the backend has its own kernels."""
    base: str | None = None
    """The backend that runs the other stages."""
    devices: tuple[str, ...] | None = None
    compute_capabilities: tuple[int, ...] | None = None
    """Major versions of CUDA compute capability."""
    compiled_at_first_use: bool = False
    """Whether it has kernels in CUDA C++, which NVRTC compiles when they are first used."""
    direct_prefills: bool = False
    """Whether the backend's own kernels read FP8 rows at every head count. Prefills then need no 16-bit workspace, and
    are gathered into one only where that is faster (`tamis.step.gathering`)."""
    query_dtypes: tuple[torch.dtype, ...] = checks.FLOATS
    heads: tuple[int, int] = (1, 128)
    """Fewest and most heads."""
    max_latent: int | None = None
    """The widest latent part of a row."""
    max_rope: int | None = None
    """The widest rope part of a row."""
    power_of_two_tiles: bool = False
    """Whether the number of values that share a scale must be a power of two."""
    packed_rows: bool = False
    """Whether attention reads rows with two values to a byte. Every backend reads such index keys."""
    capturable: bool = True
    """Whether its calls can be captured in a CUDA graph."""
    batch_invariant: bool = True
    """Whether a row's bits do not depend on the rest of the batch, if the number of splits is fixed."""

    def stage_module(self, stage: str) -> str:
        """The name of the module with this backend's kernels of a stage, if it has any."""
        # `tamis.ops.attend` is the function, so the stage's package has another name.
        return f"tamis.ops.{'attention' if stage == 'attend' else stage}.{self.module}"

    def device_refusals(self, device: torch.device, capability: tuple[int, int] | None) -> list[str]:
        """Every reason why this backend cannot run on a device; empty if it can."""
        if self.devices is not None and device.type not in self.devices:
            return [f"needs a {' or '.join(self.devices)} device, not {device.type}"]
        if self.compute_capabilities is not None and (capability or (None,))[0] not in self.compute_capabilities:
            wanted = ", ".join(f"{c}.x" for c in self.compute_capabilities)
            found = "unknown" if capability is None else ".".join(str(n) for n in capability)
            return [f"compute capability {found} is not one of {wanted}"]
        if self.compiled_at_first_use and not has_nvrtc():
            return [f"NVRTC was not found; {INSTALL}"]
        return []

    def refusals(self, need: "Need") -> list[str]:
        """Every reason why this backend cannot run a layer; empty if it can."""
        reasons = self.device_refusals(need.device, need.capability)
        if need.dtype not in self.query_dtypes:
            names = ", ".join(checks.dtype_name(d) for d in self.query_dtypes)
            reasons.append(f"query dtype {checks.dtype_name(need.dtype)} is not one of {names}")
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
        return reasons


@dataclass(frozen=True)
class Need:
    """The layer and the device for which a backend is chosen."""

    spec: LayerSpec
    device: torch.device
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""
    dtype: torch.dtype
    """The queries' dtype."""
    layout: Layout
    """The latent cache's format."""
    page_size: int
    """The latent cache's page size."""


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
"""All backends, in order of preference."""


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, or None. On AMD GPUs torch reports other numbers under this name."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def backend_for_stage(stage: str, backend: str, device: torch.device | str) -> Backend:
    """The backend that runs one stage on a device: the named one, or its base if it has no kernels for the stage.

    "auto" takes the first backend that has kernels for the stage and runs on the device.
    """
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
    expected = f"'auto' or one of {names} that runs on {device.type}"
    raise checks.refuse("backend", expected, repr(backend), "see `tamis backends`")
