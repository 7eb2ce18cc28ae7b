"""vLLM's own DeepSeek-V4.1 attention layers, built on a machine without a GPU."""

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
from vllm.v1.attention.backends.registry import AttentionBackendEnum

RATIOS = (0, 1, 1, 2, 2, 2)
"""Of the model's layers."""
KV_SOURCES, INDEX_SOURCES, CANDIDATE_SOURCE = (1, 3), (1, 3, 4), 3
BLOCKS, BLOCK_SIZE = 6, 8


def model_config() -> SimpleNamespace:
    """A tiny V4.1 model, as far as vLLM's attention layers look."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "beta_fast": 32, "beta_slow": 1}
    fields = SimpleNamespace(
        model_type="deepseek_v41",
        hidden_size=128,
        num_hidden_layers=len(RATIOS),
        compress_ratios=list(RATIOS),
        kv_source_layer_ids=list(KV_SOURCES),
        index_source_layer_ids=list(INDEX_SOURCES),
        candidate_source_layer_id=CANDIDATE_SOURCE,
        candidate_topk_blocks=BLOCKS,
        candidate_block_size=BLOCK_SIZE,
        num_attention_heads=HEADS,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=16,
        sliding_window=WINDOW,
        index_topk=TOPK,
        index_n_heads=2,
        index_head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_theta=1e4,
        compress_rope_theta=1.6e5,
        rope_parameters=rope | {"original_max_position_embeddings": 1024},
    )
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
        architectures=["DeepseekV41ForCausalLM"],
    )


@contextmanager
def built_layers(
    hopper: type[Any], patch: pytest.MonkeyPatch, folder: Path, cache_dtype: str = "fp8_ds_mla", **options: Any
) -> Iterator[tuple[VllmConfig, list[Any]]]:
    """vLLM's configuration, current in the block, and the model's layers, with CUSTOM chosen and these options of
    tamis."""
    from vllm.models.deepseek_v41.nvidia import model

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
    config.model_config = model_config()
    config.cache_config.cache_dtype, config.cache_config.block_size = cache_dtype, PAGE
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.kernel_config.enable_jit_warmup = False
    config.additional_config = {"tamis": options} if options else {}
    with set_current_vllm_config(config):
        buffer = torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32)
        blocks = torch.full((MAX_TOKENS, BLOCKS), 77, dtype=torch.int32)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            kind = model._select_dsv4_attn_cls(config)
            given = {"topk_indices_buffer": buffer, "candidate_block_buffer": blocks}
            layers = [kind(config, prefix=f"model.layers.{number}.attn", **given) for number in range(len(RATIOS))]
            torch.set_default_dtype(default)
            yield config, layers
        finally:
            torch.set_default_dtype(default)
            destroy_model_parallel()
            destroy_distributed_environment()
