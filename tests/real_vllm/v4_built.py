"""vLLM's own DeepSeek-V4 attention layers, built on a machine without a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Under a CUDA platform it would ask vLLM's kernels.
import vllm.model_executor.layers.quantization.fp8  # noqa: F401
from v4_standin import HEADS, MAX_LENGTH, MAX_TOKENS, PAGE, TOPK, WINDOW
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.models.deepseek_v4.nvidia import model as v4
from vllm.v1.attention.backends.registry import AttentionBackendEnum

RATIOS = (0, 4, 128)
"""Of the model's three layers, as its configuration has them."""


def model_config(architecture: str, **changes: Any) -> SimpleNamespace:
    """A tiny V4 model, as far as vLLM's attention layers look, with these changes of its config."""
    rope = {"rope_type": "deepseek_yarn", "rope_theta": 1e4, "factor": 4, "beta_fast": 32, "beta_slow": 1}
    numbers = {
        "model_type": "deepseek_v4",
        "hidden_size": 128,
        "compress_ratios": list(RATIOS),
        "num_attention_heads": HEADS,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 32,
        "o_groups": 1,
        "o_lora_rank": 16,
        "sliding_window": WINDOW,
        "index_topk": TOPK,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "compress_rope_theta": 1.6e5,
        "rope_parameters": rope | {"original_max_position_embeddings": 1024},
    } | changes
    fields = SimpleNamespace(num_hidden_layers=len(numbers["compress_ratios"]), **numbers)
    return SimpleNamespace(
        hf_config=fields,
        hf_text_config=fields,
        max_model_len=MAX_LENGTH,
        dtype=torch.bfloat16,
        quantization=None,
        enforce_eager=True,
        is_hybrid=False,
        is_diffusion=False,
        runner_type="pooling",  # which leaves the choice of a model runner early
        use_mla=True,
        architectures=[architecture],
    )


@contextmanager
def configured(
    model: SimpleNamespace, cache_dtype: str, hopper: type[Any], patch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> Iterator[VllmConfig]:
    """vLLM's configuration of a model, current in the block, with CUSTOM chosen and these options of tamis."""
    patch.setattr(hopper, "device_type", "cpu")
    patch.setattr(torch.cuda, "Event", lambda *_, **__: None)
    patch.setattr(sparse_attn_indexer, "has_deep_gemm", lambda: True)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "current_platform" in vars(module):
            patch.setattr(module, "current_platform", hopper())
    config: Any = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel()
    config.model_config = model
    config.cache_config.cache_dtype, config.cache_config.block_size = cache_dtype, PAGE
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    if hasattr(config.attention_config, "sparse_mla_prefill_workspace_factor"):
        config.attention_config.sparse_mla_prefill_workspace_factor = 5
    if hasattr(config.kernel_config, "enable_jit_warmup"):
        config.kernel_config.enable_jit_warmup = False
    config.additional_config = {"tamis": options} if options else {}
    try:
        with set_current_vllm_config(config):
            yield config
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


@contextmanager
def made_in_bf16() -> Iterator[None]:
    """The default dtype in which vLLM makes a model's layers."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def built_layers(
    cache_dtype: str, hopper: type[Any], patch: pytest.MonkeyPatch, folder: Path, heads: int = HEADS
) -> Iterator[tuple[VllmConfig, dict[int, Any]]]:
    """vLLM's configuration, current in the block, and the model's layers by ratio, with CUSTOM chosen."""
    model = model_config("DeepseekV4ForCausalLM", num_attention_heads=heads)
    with configured(model, cache_dtype, hopper, patch, folder) as config:
        buffer = torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32)
        with made_in_bf16():
            kind, layers = v4._select_dsv4_attn_cls(config), {}
            for number, ratio in enumerate(RATIOS):
                layers[max(1, ratio)] = kind(config, prefix=f"layers.{number}.attn", topk_indices_buffer=buffer)
        yield config, layers
