"""What a peer is, and how its library is loaded."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch

from tamis.lab.bench.inputs import InputSet
from tamis.lab.bench.jobs import Job


class Unsupported(Exception):
    """A peer does not do this job; the message says why."""


class Peer(Protocol):
    """Makes the peer's calls for input sets. A call returns a result of the same kind as ours."""

    @property
    def name(self) -> str:
        """As on the command line."""

    @property
    def capturable(self) -> bool:
        """Whether its calls can be captured in a CUDA graph."""

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set; padding and other preparation is done here and not timed. Raises `Unsupported`."""


def load(name: str) -> ModuleType:
    """A module, or `Unsupported` with what went wrong: a broken extension raises more than ImportError."""
    try:
        # Some libraries log to the standard output while they load, and go on doing so; it belongs to our result.
        with redirect_stdout(sys.stderr):
            return import_module(name)
    except Exception as error:
        text = " ".join(str(error).split())
        raise Unsupported(f"cannot import {name} ({type(error).__name__}: {text[:120]})") from error


def load_first(names: Sequence[str], function: str) -> ModuleType:
    """The first module of these that can be imported, has the function, and is not tamis's own drop-in for it."""
    reasons = []
    for name in names:
        try:
            module = load(name)
        except Unsupported as reason:
            reasons.append(str(reason))
            continue
        if module.__name__.startswith("tamis."):
            reasons.append(f"{name} is tamis's own drop-in")
        elif hasattr(module, function):
            return module
        else:
            reasons.append(f"{name} has no {function}")
    raise Unsupported("; ".join(reasons))


def need_gpu(device: torch.device) -> None:
    """Raise `Unsupported` elsewhere."""
    if device.type != "cuda":
        raise Unsupported(f"its kernels do not run on {device.type}")
