"""The backends in order of preference, with the devices, formats and sizes that each supports.

Other packages register backends as entry points of the group `tamis.backends`. They are loaded when a backend is first
looked up; one that cannot be used is kept with its error, and refused when it is named.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import NamedTuple

import torch

from tamis import checks
from tamis.cache.layout import Layout
from tamis.cuda.nvrtc import INSTALL, has_nvrtc
from tamis.model.spec import LayerSpec

GROUP = "tamis.backends"
"""The group of entry points in which other packages register backends."""
STAGES = ("rotate", "compress", "write", "gather", "index", "select", "translate", "attend", "combine", "output")
TRAINED = ("attend_rows", "index_target", "index_loss", "warmup_loss", "compress_rows", "fake_quantise")
"""The functions of `tamis.train` that a backend may have kernels for. `select_rows` runs the stage `index`."""


@dataclass(frozen=True)
class Backend:
    """One set of kernels and what it can run. None means no restriction."""

    name: str
    module: str
    """The name of the backend's module in tamis' package of each stage. In a backend of another package it is a full
    name instead, in which `{stage}` stands for the stage: `my_package.{stage}`."""
    summary: str
    stages: tuple[str, ...] = STAGES
    """The stages for which the backend has its own kernels."""
    base: str | None = None
    """The built-in backend that runs the other stages."""
    trains: tuple[str, ...] = ()
    """The functions of `tamis.train` for which the backend has its own kernels, forward and backward."""
    training: str = ""
    """The name of the module with these kernels, as `module` is that of the others; the same module if not given."""
    before: str | None = None
    """For a backend of another package: the built-in backend that it is preferred to. Without it, the backend runs only
    where it is named."""
    devices: tuple[str, ...] | None = None
    """Types of devices, as torch names them."""
    compute_capabilities: tuple[int, ...] | None = None
    """Major versions of CUDA compute capability."""
    compiled_at_first_use: bool = False
    """Whether it has kernels in CUDA C++, which NVRTC compiles when they are first used."""
    direct_prefills: bool = False
    """Whether the backend's own kernels read FP8 rows at every head count. Prefills then need no 16-bit workspace, and
    are gathered into one only where that is faster (`tamis.step.gathering`)."""
    query_dtypes: tuple[torch.dtype, ...] = checks.FLOATS
    """Dtypes of queries."""
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
    """Whether the bits of a token's attention do not depend on the rest of the batch, if the number of splits is
    fixed. `tamis verify` tests it where it is declared."""

    def stage_module(self, stage: str) -> str:
        """The name of the module with this backend's kernels of a stage, if it has any."""
        return _full_name(self.module, stage)

    def training_module(self, stage: str) -> str:
        """The name of the module with this backend's kernels for training of a stage, if it has any."""
        return _full_name(self.training or self.module, stage)

    def has_kernels(self, stage: str, trains: str | None = None) -> bool:
        """Whether the backend has its own kernels for a stage, or for a function of `tamis.train`."""
        return stage in self.stages if trains is None else trains in self.trains

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

    def training_refusals(self, device: torch.device, capability: tuple[int, int] | None) -> list[str]:
        """Every reason why this backend cannot run all of `tamis.train` on a device; empty if it can."""
        missing = [function for function in TRAINED if function not in self.trains]
        lacks = f"no kernels with gradients for {', '.join(missing)}" if self.trains else "no kernels with gradients"
        return self.device_refusals(device, capability) + ([lacks] if missing else [])

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
            reasons.append(f"attention does not read {need.layout.name}, which has two values to a byte")
        if not self.heads[0] <= need.spec.heads <= self.heads[1]:
            reasons.append(f"{need.spec.heads} heads are not between {self.heads[0]} and {self.heads[1]}")
        return reasons


def _full_name(module: str, stage: str) -> str:
    if "{stage}" in module:
        return module.replace("{stage}", stage)
    # `tamis.ops.attend` is the function, so the stage's package has another name.
    return f"tamis.ops.{'attention' if stage == 'attend' else stage}.{module}"


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
        trains=("attend_rows", "index_loss"),
        training="hopper.gradients",
        devices=("cuda",),
        compute_capabilities=(9,),
        compiled_at_first_use=True,
        direct_prefills=True,
        query_dtypes=(*checks.FLOATS, torch.float8_e4m3fn),
        max_latent=512,
        max_rope=256,
        power_of_two_tiles=True,
        packed_rows=True,
    ),
    Backend(
        "triton",
        "triton_kernels",
        "portable Triton kernels for any GPU that Triton supports",
        stages=STAGES,
        trains=("attend_rows", "index_target", "index_loss"),
        training="triton_gradients",
        devices=("cuda",),  # PyTorch's name for AMD GPUs as well
        query_dtypes=(*checks.FLOATS, torch.float8_e4m3fn),
        max_latent=512,
        max_rope=256,
        power_of_two_tiles=True,
        packed_rows=True,
    ),
    Backend(
        "reference",
        "reference",
        "plain PyTorch on any device: exact, slow on GPUs",
        trains=TRAINED,
        training="gradients",
        query_dtypes=(*checks.FLOATS, torch.float8_e4m3fn),
        packed_rows=True,
        capturable=False,
        batch_invariant=False,
    ),
)
"""The built-in backends, in order of preference."""


class BrokenBackend(NamedTuple):
    """A backend of another package that cannot be used."""

    name: str
    """The name of its entry point."""
    package: str
    """The distribution that registers it, with its version."""
    reason: str
    """Why it cannot be used."""

    @property
    def label(self) -> str:
        """Its name for reports; the package tells it from others of the same name."""
        return f"{self.name} ({self.package})"


class Registered(NamedTuple):
    """Backends that are known."""

    backends: tuple[Backend, ...]
    """All that can be used, in order of preference."""
    broken: tuple[BrokenBackend, ...]
    """Those of other packages that cannot be used, by name."""


def registered() -> Registered:
    """The built-in backends and those of other packages, which the first call loads; no error of theirs leaves it.

    A backend of another package comes right before the built-in one that it names in `before`. Several before the same
    one are in alphabetical order, and those without `before` come last.
    """
    others, broken = _others()
    ordered: list[Backend] = []
    for own in BACKENDS:
        ordered += [backend for backend in others if backend.before == own.name]
        ordered.append(own)
    ordered += [backend for backend in others if backend.before is None]
    return Registered(tuple(ordered), broken)


def _others() -> Registered:
    """The backends of other packages, by name."""
    return _loaded()


# A trace of torch.compile takes the result as a constant, since it cannot look for packages itself. The decorator of
# torch.compiler that sets this would import torch._dynamo here, which takes longer than all of tamis.
_others._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _loaded() -> Registered:
    """What `_others` returns, looked up once."""
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    names = Counter(point.name for point in points)
    usable, broken = [], []
    for point in points:
        loaded = _load(point, names[point.name])
        if isinstance(loaded, Backend):
            usable.append(loaded)
        else:
            broken.append(BrokenBackend(point.name, _package(point), loaded))
    return Registered(tuple(usable), tuple(broken))


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _load(point: EntryPoint, entries: int) -> Backend | str:
    """The backend of an entry point, or the reason why it cannot be used."""
    own = [backend.name for backend in BACKENDS]
    if point.name in ("auto", *own):
        return f"the name {point.name!r} belongs to tamis; choose another"
    if entries > 1:
        return f"{entries} entry points of the group {GROUP} have this name; uninstall all packages but one of them"
    try:
        found = point.load()
        if not isinstance(found, Backend):
            return f"{point.value} is a {type(found).__name__}, not a tamis.backends.Backend"
        return _mistake(found, point.name, own) or found
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        return f"loading {point.value} failed: {type(error).__name__}: {text}"


def _mistake(backend: Backend, name: str, own: list[str]) -> str | None:
    """What is wrong with the declaration of a backend of another package."""
    if backend.name != name:
        return f"its entry point is named {name!r}, but the backend {backend.name!r}; give both one name"
    for field, value in (("base", backend.base), ("before", backend.before)):
        if value not in (None, *own):
            return f"{field} must be one of {', '.join(own)} or None, got {value!r}"
    if not backend.stages or not set(backend.stages) <= set(STAGES):
        return f"stages must be some of {', '.join(STAGES)}, got {backend.stages!r}"
    if not set(backend.trains) <= set(TRAINED):
        return f"trains must be some of {', '.join(TRAINED)}, got {backend.trains!r}"
    if "{stage}" not in backend.module:
        return f"module must be a full name with {{stage}}, such as 'my_package.{{stage}}', got {backend.module!r}"
    missing = [module for module in map(backend.stage_module, backend.stages) if find_spec(module) is None]
    return f"there is no module {' or '.join(missing)}" if missing else None


def refuse_broken(name: str) -> None:
    """Refuse the name of a backend that another package registers but that cannot be used, with the reason."""
    known, broken = registered()
    for one in broken:
        if one.name == name and name not in ("auto", *(backend.name for backend in known)):
            raise ValueError(f"backend {name!r} of {one.package} cannot be used: {one.reason}")


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, or None. On AMD GPUs torch reports other numbers under this name."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def backend_for_stage(stage: str, backend: str, device: torch.device | str, trains: str | None = None) -> Backend:
    """The backend that runs one stage on a device, or a function of `tamis.train`: the named one, or its base if it has
    no kernels for it.

    "auto" takes the first backend that has kernels for it and runs on the device.
    """
    device = torch.device(device)
    capability = compute_capability(device)
    known = registered().backends
    for candidate in known:
        if backend not in ("auto", candidate.name) or candidate.device_refusals(device, capability):
            continue
        if candidate.has_kernels(stage, trains):
            return candidate
        if backend == candidate.name and candidate.base is not None:
            return backend_for_stage(stage, candidate.base, device, trains)
    refuse_broken(backend)
    names = ", ".join(b.name for b in known if b.has_kernels(stage, trains) or b.base is not None)
    expected = f"'auto' or one of {names} that {'runs' if trains is None else f'trains {trains}'} on {device.type}"
    raise checks.refuse("backend", expected, repr(backend), "see `tamis backends`")
