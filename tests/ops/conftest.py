"""Tests of the Triton kernels: compiled on a GPU where there is one, else interpreted on the host."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from guarded import Guards
    from pretended import Pretended

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if "triton" in sys.modules:
        # Triton decides when its own functions are defined, so the variable comes too late.
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(sys.modules["triton.language"].max, InterpretedFunction):
            raise RuntimeError("triton was imported before tests/ops: set TRITON_INTERPRET=1 for the whole run")

HAS_TRITON = find_spec("triton") is not None
"""Without Triton, the tests of its kernels are skipped and those of the references run."""


@pytest.fixture(autouse=HAS_TRITON, scope="session")
def language_patched_once() -> Iterator[None]:
    """Functions that an interpreted kernel calls do not look for what to patch in a language that is patched.

    Triton's interpreter lists the whole language at each call of a helper, `tl.sum` included, to find nothing.
    """
    from triton.runtime import interpreter

    patch, first_builtins = interpreter._patch_builtin, {}

    def patch_once(package: Any, builder: Any, scope: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in first_builtins:
            first_builtins[package] = next((n for n in dir(package) if is_builtin(getattr(package, n))), None)
        first = first_builtins[package]
        if first is not None and is_builtin(getattr(package, first)):
            patch(package, builder, scope)

    interpreter._patch_builtin = patch_once
    yield
    interpreter._patch_builtin = patch


@pytest.fixture(autouse=HAS_TRITON, scope="session")
def masks_that_are_boolean() -> Iterator[None]:
    """A scalar condition stays boolean when it is combined with a block of conditions.

    Triton's interpreter notes for a comparison the dtype of what was compared, so that a scalar one is spread over a
    block as int32, and from 3.9 on its loads and stores refuse such masks. Compiled kernels have int1 throughout.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(builder: Any, shape: Any, scalar: Any) -> Any:
        found = spread(builder, shape, scalar)
        if scalar.data.dtype == bool:
            found.data = found.data.astype(bool)
        return found

    InterpreterBuilder.create_splat = create_splat
    yield
    InterpreterBuilder.create_splat = spread


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def guards(device: torch.device) -> "Guards":
    """Guard zones around everything that a test hands over."""
    from guarded import Guards  # imports tamis, which must not come before the variable above

    return Guards(device)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Pretended]":
    """A device that is not there; see `pretended.Pretended`."""
    from pretended import Pretended

    made = Pretended(monkeypatch)
    yield made
    monkeypatch.undo()
    made.forget()
