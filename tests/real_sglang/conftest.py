"""Tests inside the real SGLang, on a machine without a GPU, in an environment of their own: `make test-sglang`."""

import os

os.environ["SGLANG_PLUGINS"] = "tamis"

import pytest
import shims  # noqa: F401  before the first import of SGLang
from sglang.srt.plugins import load_plugins


@pytest.fixture(autouse=True, scope="session")
def plugins() -> None:
    """What SGLang does first in every process."""
    load_plugins()
