"""Tests inside the real vLLM, on a machine without a GPU. They run in an environment of their own: `make test-vllm`."""

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# No device: vLLM then imports everywhere, and nothing of it starts one.
os.environ["VLLM_TARGET_DEVICE"] = "empty"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_PLUGINS"] = "tamis"

import pytest
import vllm.platforms
from configured import make_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins


@pytest.fixture(autouse=True, scope="session")
def plugins() -> None:
    """What vLLM does first in every process."""
    load_general_plugins()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A CUDA platform that claims an H200. Its module wants vLLM's kernels, which need a driver."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

    monkeypatch.setattr(vllm.platforms, "_current_platform", Hopper())
    return Hopper


@pytest.fixture
def current(request: pytest.FixtureRequest) -> Iterator[VllmConfig]:
    """The configuration that vLLM's code sees during a test; parametrised with the cache dtype."""
    config = make_config(cache_dtype=getattr(request, "param", "auto"))
    with set_current_vllm_config(config):
        yield config
