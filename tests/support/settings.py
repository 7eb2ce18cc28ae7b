"""`pytest --under SETTING`: every test runs under a torch setting that a user's program may have changed.

A setting applies to the library only. Calls of torch from a test file run as without the setting, so that its inputs
and expected results do not change: `Undisturbed` looks at the caller's file. A test for which a
setting means nothing, or which is about settings, is marked `@pytest.mark.own_settings("why")` and runs without;
`own_settings("why", without=("meta",))` leaves out the named ones alone.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TESTS, TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The dtype that factories make, and that integers become in arithmetic."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Operations without a deterministic form raise, and uninitialised memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    filled, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        True,
    )
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The precision of float32 products: "medium" allows TF32 on a GPU and bf16 on a CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def autocast(enabled: bool) -> AbstractContextManager[Any]:
    """Autocast on the host and, if there is one, on the device."""
    stack = ExitStack()
    stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled))
    if torch.cuda.is_available():
        stack.enter_context(torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled))
    return stack


@contextmanager
def another_stream() -> Iterator[None]:
    """A stream that the default one does not wait for; what fixtures have made is waited for first."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "cuda": lambda: torch.device("cuda"),
    "inference": torch.inference_mode,
    "deterministic": deterministic,
    "autocast": lambda: autocast(True),
    "tf32": lambda: matmul_precision("medium"),
    "stream": another_stream,
}
FRESH: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": lambda: default_dtype(torch.float32),
    "float64": lambda: default_dtype(torch.float32),
    "autocast": lambda: autocast(False),
    "tf32": lambda: matmul_precision("highest"),
}
"""How to undo a setting for one call. The others change no number that a test computes for itself."""
NEEDS_GPU = {"cuda", "stream"}


class Undisturbed(TorchFunctionMode):
    """Within it, calls of torch that come from a test file run as if these settings had not been made."""

    def __init__(self, names: list[str]) -> None:
        """Undo the settings with these names."""
        super().__init__()
        self.undo = [FRESH[name] for name in names if name in FRESH]
        self.factories = _device_constructors() if {"meta", "cuda"} & set(names) else set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one call, without the settings if a test file called it."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)  # a trace knows no caller
        of_ours = isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        caller = sys._getframe(1)
        while caller.f_back is not None and caller.f_code.co_filename.startswith(TORCH):
            caller = caller.f_back  # `torch.einsum` and others are Python around the call that comes here
        if of_ours or not caller.f_code.co_filename.startswith(TESTS):
            return func(*args, **kwargs)
        if func in self.factories and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        with ExitStack() as stack:
            for undo in self.undo:
                stack.enter_context(undo())
            return func(*args, **kwargs)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, which may be repeated or have commas."""
    parser.addoption("--under", action="append", default=[], metavar="SETTING", help=f"one of {', '.join(SETTINGS)}")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse unknown names before any test."""
    config.addinivalue_line("markers", "own_settings(why, without=all): runs without these settings of --under")
    names = chosen(config)
    for name in names:
        if name not in SETTINGS:
            raise pytest.UsageError(f"--under must be one of {', '.join(SETTINGS)}, got {name}")
        if name in NEEDS_GPU and not torch.cuda.is_available():
            raise pytest.UsageError(f"--under {name} needs a GPU")
    if "deterministic" in names:
        # cuBLAS reads it when its first handle is made, and torch refuses products without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def chosen(config: pytest.Config) -> list[str]:
    """The settings that were asked for."""
    return [name for given in config.getoption("--under") for name in given.split(",")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Settings hold while a test runs, not while its fixtures are made: these stand for what a program made before."""
    names = chosen(item.config)
    for mark in item.iter_markers("own_settings"):
        names = [name for name in names if name not in mark.kwargs.get("without", SETTINGS)]
    if not names:
        return (yield)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        if {*FRESH, "meta", "cuda"} & set(names):
            stack.enter_context(Undisturbed(names))
        return (yield)
