"""vLLM's own DeepSeek-V4.1 attention layers, built on a machine without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from v4_built import configured, made_in_bf16, model_config
from v4_standin import MAX_TOKENS, TOPK
from vllm.config import VllmConfig

RATIOS = (0, 1, 1, 2, 2, 2)
"""Of the model's layers."""
KV_SOURCES, INDEX_SOURCES, CANDIDATE_SOURCE = (1, 3), (1, 3, 4), 3
BLOCKS, BLOCK_SIZE = 6, 8
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "beta_fast": 32, "beta_slow": 1}


@contextmanager
def built_layers(
    hopper: type[Any], patch: pytest.MonkeyPatch, folder: Path, cache_dtype: str = "fp8_ds_mla", **options: Any
) -> Iterator[tuple[VllmConfig, list[Any]]]:
    """vLLM's configuration, current in the block, and the model's layers, with CUSTOM chosen and these options of
    tamis."""
    from vllm.models.deepseek_v41.nvidia import model as v41

    model = model_config(
        "DeepseekV41ForCausalLM",
        model_type="deepseek_v41",
        compress_ratios=list(RATIOS),
        kv_source_layer_ids=list(KV_SOURCES),
        index_source_layer_ids=list(INDEX_SOURCES),
        candidate_source_layer_id=CANDIDATE_SOURCE,
        candidate_topk_blocks=BLOCKS,
        candidate_block_size=BLOCK_SIZE,
        rope_parameters=ROPE | {"original_max_position_embeddings": 1024},
    )
    with configured(model, cache_dtype, hopper, patch, folder, **options) as config:
        given = {
            "topk_indices_buffer": torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32),
            "candidate_block_buffer": torch.full((MAX_TOKENS, BLOCKS), 77, dtype=torch.int32),
        }
        with made_in_bf16():
            kind = v41._select_dsv4_attn_cls(config)
            layers = [kind(config, prefix=f"model.layers.{number}.attn", **given) for number in range(len(RATIOS))]
        yield config, layers
