"""Tests of the Triton kernels: compiled on a GPU where there is one, else interpreted on the host."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if "triton" in sys.modules:
        # Triton decides when its own functions are defined, so the variable comes too late.
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(sys.modules["triton.language"].max, InterpretedFunction):
            raise RuntimeError("triton was imported before tests/kernels: set TRITON_INTERPRET=1 for the whole run")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
