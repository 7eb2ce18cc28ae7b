"""Tiny random checkpoints of the models that `attach` supports, and helpers of their tests."""

from functools import cache
from typing import Any

import pytest
import torch
from seeds import reseed, seeded
from settings import default_dtype

transformers = pytest.importorskip("transformers")

V4_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "index_topk": 32,
    "index_n_heads": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
    "pad_token_id": None,  # its embedding would be zero, and then all index scores of the first layer equal
    "eos_token_id": None,
}
V32 = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
V4 = SMALL | {
    "index_topk": 16,
    "head_dim": 32,
    "partial_rotary_factor": 8 / 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_head_dim": 16,
    "sliding_window": 8,
    "compress_rates": {V4_KINDS[1]: 4, V4_KINDS[2]: 16},
    "layer_types": list(V4_KINDS),
    "mlp_layer_types": ["moe"] * 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
GLM5_NEXT = V32 | {
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 0,
    "index_kpool": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "dense"],
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "projection_intermediate_size": 32,
    "image_size": 28,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("DeepseekV32", V32),
    "v32-yarn": ("DeepseekV32", V32 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm": ("GlmMoeDsa", V32),
    "glm-shared": ("GlmMoeDsa", V32 | {"indexer_types": ["full", "shared", "full"]}),
    "v4": ("DeepseekV4", V4),
    "glm5-next": ("Glm5Next", GLM5_NEXT | {"indexer_types": ["full", "full", "shared", "full"]}),
    "glm5-next-16": ("Glm5Next", GLM5_NEXT | {"index_kpool": 16}),
}
FAMILIES = ("v32", "glm-shared", "v4", "glm5-next")


def build(name: str, **changes: Any) -> Any:
    kind, numbers = MODELS[name]
    reseed(4)
    numbers, suffix = {**numbers, **changes}, "ForCausalLM"
    if kind == "Glm5Next":
        numbers, suffix = {"text_config": numbers, "vision_config": VISION}, "ForConditionalGeneration"
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, f"{kind}Config")(**numbers)
    with default_dtype(torch.float32), torch.device("cpu"), torch.inference_mode(False):
        model = getattr(transformers, f"{kind}{suffix}")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "position_bias", "k_norm.bias")):
                parameter.normal_(std=0.1)
            if parameter_name.endswith(("kpool_compress_ape", "kpool_compress_gate")):
                parameter.normal_()
    return model


built = cache(build)


every_model = pytest.mark.parametrize("model", MODELS, indirect=True)
every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)
v32_only = pytest.mark.parametrize("model", ["v32"], indirect=True)


def base_of(model: Any) -> Any:
    """The part of a model that has the decoder layers."""
    return getattr(model.model, "language_model", model.model)


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 128, (rows, columns), generator=seeded(7))


@torch.no_grad()
def logits(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return model(*args, **kwargs).logits


def greedy(model: Any, ids: torch.Tensor, new: int, **kwargs: Any) -> torch.Tensor:
    kwargs = {"attention_mask": torch.ones_like(ids)} | kwargs
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)
