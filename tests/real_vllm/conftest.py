"""Tests inside the real vLLM, on a machine without a GPU. They run in an environment of their own: `make test-vllm`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# No device: vLLM then imports everywhere, and nothing of it starts one.
os.environ["VLLM_TARGET_DEVICE"] = "empty"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_PLUGINS"] = "tamis"
sys.path.insert(0, str(Path(__file__).parent.parent))

import engine_standin as engine
import pytest
import torch
import vllm.platforms
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum


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


def make_config(heads: int = 16, cache_dtype: str = "auto", **options: Any) -> VllmConfig:
    """vLLM's own configuration with CUSTOM chosen, around the numbers of a model that is not loaded."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    standin = engine.config(heads, cache_dtype, **options)
    model: Any = standin.model_config
    model.rswa_window = None
    config.model_config = model
    config.cache_config.cache_dtype = cache_dtype  # type: ignore[assignment]
    config.scheduler_config.max_num_batched_tokens = standin.scheduler_config.max_num_batched_tokens
    config.scheduler_config.max_num_seqs = standin.scheduler_config.max_num_seqs
    config.parallel_config.decode_context_parallel_size = standin.parallel_config.decode_context_parallel_size
    config.speculative_config = standin.speculative_config
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    return config


@pytest.fixture
def current(request: pytest.FixtureRequest) -> Iterator[VllmConfig]:
    """The configuration that vLLM's code sees during a test; parametrised with the cache dtype."""
    config = make_config(cache_dtype=getattr(request, "param", "auto"))
    with set_current_vllm_config(config):
        yield config


def layer_stub() -> SimpleNamespace:
    """What attention reads of a layer."""
    one = torch.ones(1)
    return SimpleNamespace(_q_scale_float=1.0, _k_scale_float=1.0, _k_scale=one, _q_scale=one)
