"""vLLM's own configuration around a model that is not loaded."""

from typing import Any

import engine_standin as engine
from vllm.config import DeviceConfig, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def make_config(heads: int = 16, cache_dtype: str = "auto", **options: Any) -> VllmConfig:
    """With CUSTOM chosen; `options` are those of `engine_standin.config`."""
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
