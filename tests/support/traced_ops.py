"""The torch op that a function calls while torch.compile traces it, with its arguments."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Called(Exception):
    """Carries an op and its arguments out of the code that called it."""


class Catcher(TorchDispatchMode):
    """Stops at the first call of a `tamis` op, before anything is written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tamis":
            assert not kwargs
            raise Called(func, args)
        return func(*args, **(kwargs or {}))


def traced(run: Callable[[], object]) -> tuple[torch._ops.OpOverload, tuple]:
    """The op that a piece of code calls while it is traced, and its arguments."""
    with Catcher(), patch("torch.compiler.is_compiling", return_value=True), pytest.raises(Called) as found:
        run()
    return found.value.args
