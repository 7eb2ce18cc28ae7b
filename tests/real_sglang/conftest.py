"""Tests inside the real SGLang, on a machine without a GPU, in an environment of their own: `make test-sglang`."""

import os

os.environ["SGLANG_PLUGINS"] = "tamis"
# SGLang builds metadata in Triton, whose interpreter needs no GPU.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import shims  # noqa: F401  before the first import of SGLang
from sglang.srt.plugins import load_plugins


@pytest.fixture(autouse=True, scope="session")
def plugins() -> None:
    """What SGLang does first in every process."""
    load_plugins()
