"""Choosing and describing the device that a command runs on."""

import os
import platform
from typing import TYPE_CHECKING, Any

from tamis.cli.progress import waiting

if TYPE_CHECKING:
    import torch


def let_waiting_threads_sleep() -> None:
    """Tell OpenMP not to spin at barriers, unless the user has chosen a policy. Call this before torch is imported.

    Spinning saves microseconds on an idle machine, but makes small operations several times slower while other
    processes are running (the demo: 4 to 6 times slower at a load of 5 on 2 cores).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pick_device(name: str | None) -> "torch.device":
    """The named device, or the GPU if there is one and no name is given. Refuses an absent device."""
    with waiting("loading torch"):
        import numpy  # noqa: F401  (before torch, whose C++ code would import it and swallow a Ctrl-C)
        import torch

        from tamis import checks

    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        remedy = f"torch {torch.__version__} sees no CUDA device; use --device cpu"
        raise checks.refuse("--device", "one that this machine has", "cuda", remedy)
    return torch.device(name or ("cuda" if present else "cpu"))


def check_backend(name: str, device: "torch.device") -> None:
    """Refuse a backend that does not exist, or that does not run on this type of device."""
    from tamis.backends import refuse_broken, registered

    known = {backend.name: backend for backend in registered().backends}
    if name == "auto":
        return
    refuse_broken(name)
    if name not in known:
        raise ValueError(f"--backend must be one of auto, {', '.join(known)}; got {name!r}.")
    devices = known[name].devices
    if devices is not None and device.type not in devices:
        import torch

        found = f"--device is {device.type}" if torch.cuda.is_available() else "this machine has none"
        needed = " or ".join(devices).upper()
        raise ValueError(f"backend {name!r} needs a {needed} device, but {found}. Use --backend auto or reference.")


def describe_machine(device: "torch.device") -> dict[str, Any]:
    """Versions, the device's name and its compute capability (None on a CPU)."""
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name, capability = torch.cuda.get_device_name(device), f"{major}.{minor}"
    else:
        vectors = torch.backends.cpu.get_cpu_capability()
        name, capability = f"{platform.machine()} CPU, {vectors}, {torch.get_num_threads()} threads", None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device.type,
        "name": name,
        "compute_capability": capability,
    }


def machine_line(machine: dict[str, Any]) -> str:
    """One line from `describe_machine`."""
    capability = machine["compute_capability"]
    suffix = f", compute capability {capability}" if capability else ""
    return f"torch {machine['torch']}, {machine['device']}: {machine['name']}{suffix}"
