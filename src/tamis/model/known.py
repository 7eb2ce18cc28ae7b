"""The sizes of published models, as far as caches depend on them, for users who have no config.json at hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    """One model."""

    title: str
    source: str
    """Where the sizes are taken from."""
    config: Mapping[str, Any]
    """The fields of its config that `LayerSpec.from_hf` reads, and its longest context."""


_V32: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
}
_GLM5 = _V32 | {
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "qk_nope_head_dim": 192,
    "index_n_heads": 32,
    "max_position_embeddings": 202752,
}
_V4_FLASH: dict[str, Any] = {
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "max_position_embeddings": 1048576,
}
_V4_PRO = _V4_FLASH | {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "index_topk": 1024,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4],
}
_AX_K2 = _V32 | {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "index_n_heads": 16,
    "max_position_embeddings": 131072,
}
_HY4 = _V32 | {
    "model_type": "hy_v4",
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "qk_nope_head_dim": 192,
    "index_n_heads": 16,
    "indexer_types": ["full", *["full", "shared", "shared", "shared"] * 8, "full"],
    "max_position_embeddings": 262144,
}
_MISTRAL_LARGE_4 = _V32 | {
    "model_type": "mistral_large4_text",
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "qk_nope_head_dim": 64,
    "index_n_heads": 32,
    "no_rope_layers": [1, 1, 1, 0] * 18,
    "max_position_embeddings": 1048576,
}
_GLM5_FLASH = _GLM5 | {
    "num_hidden_layers": 45,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "index_kpool": 4,
    "layer_types": ["indexed_attention" if layer % 4 == 3 else "linear_attention" for layer in range(45)],
    "max_position_embeddings": 1048576,
}

_V4_SOURCE = "the fields of the checkpoint's config.json"

KNOWN: Mapping[str, KnownModel] = {
    "deepseek-v3.2": KnownModel(
        "DeepSeek-V3.2", "the defaults of transformers' DeepseekV32Config (deepseek-ai/DeepSeek-V3.2-Exp)", _V32
    ),
    "glm-5": KnownModel(
        "GLM-5", "the defaults of transformers' GlmMoeDsaConfig, where every layer has an indexer of its own", _GLM5
    ),
    "glm-5.3-flash": KnownModel(
        "GLM-5.3-Flash",
        "the defaults of transformers' Glm5NextTextConfig, with the checkpoint's groups of 4 tokens per index key; the "
        "states of its layers of linear attention are not counted",
        _GLM5_FLASH,
    ),
    "deepseek-v4-flash": KnownModel("DeepSeek-V4-Flash", _V4_SOURCE, _V4_FLASH),
    "deepseek-v4-pro": KnownModel("DeepSeek-V4-Pro", _V4_SOURCE, _V4_PRO),
    "a.x-k2-light": KnownModel("A.X-K2-Light", "the defaults of transformers' AXK2Config", _AX_K2),
    "hy4": KnownModel("Hy4", "the defaults of transformers' HYV4Config; checkpoints may differ", _HY4),
    "mistral-large-4": KnownModel(
        "Mistral Large 4",
        "the defaults of transformers' MistralLarge4TextConfig, where no layer reads another's rows or selection",
        _MISTRAL_LARGE_4,
    ),
}
"""Models by the names of `tamis size --model`."""
