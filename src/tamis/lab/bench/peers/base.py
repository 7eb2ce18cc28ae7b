"""The interface of a peer, and helpers that load its library."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
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
        """The name on the command line."""

    @property
    def build(self) -> str:
        """The distribution and version that runs, for the rows; empty where the name says it all."""

    @property
    def capturable(self) -> bool:
        """Whether its calls can be captured in a CUDA graph."""

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Padding and other preparation is done here and not timed. May raise `Unsupported`."""


def load(name: str) -> ModuleType:
    """Import a module; raise `Unsupported` for any error, since broken extensions raise more than ImportError."""
    try:
        # Some libraries log to stdout from their import on, but stdout is for the result of the command.
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


def build_of(distribution: str) -> str:
    """The name of a distribution and its installed version; empty if it is not installed as a package."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return ""


def need_gpu(device: torch.device) -> None:
    """Raise `Unsupported` if the device is not a GPU."""
    if device.type != "cuda":
        raise Unsupported(f"no kernels for {device.type}")
