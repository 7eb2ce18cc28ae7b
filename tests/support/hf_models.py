"""Tiny random checkpoints of the models that `attach` supports, and helpers of their tests."""

import sys
from functools import cache
from typing import Any

import pytest
import torch
from seeds import reseed, seeded
from settings import default_dtype
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
AXK2 = {name: value for name, value in V32.items() if name != "first_k_dense_replace"} | {
    "qk_rope_head_dim": 12,  # of another width than the latent's half, a power of two or the index rope of others
    "v_head_dim": 24,
    "gated_norm_rank": 4,
    "n_group": None,
    "topk_group": None,
}
HY4 = {name: value for name, value in V32.items() if name != "first_k_dense_replace"} | {
    "v_head_dim": 24,
    "initializer_range": 0.02,  # the model's own default makes its attention count for little
    "rms_norm_eps": 0.01,  # also that of the norm of index keys, where another one would hardly show otherwise
    "hc_mult": 2,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "shared"],
}
MISTRAL = {name: value for name, value in V32.items() if name != "q_lora_rank"} | {
    "num_hidden_layers": 6,
    "max_position_embeddings": 2560,
    "no_rope_layers": [1, 0, 1, 0, 1, 1],
    "kv_source_layers": [0, 1, 2, 1, 2, 5],
    "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    },
}
"""Layers with and without rope, each with rows of its own and with those of an earlier layer, and both with their own
selection and with another's."""
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "image_size": 32,
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
    "axk2": ("AXK2", AXK2),
    "hy4": ("HYV4", HY4),
    "mistral-large4": ("MistralLarge4", MISTRAL),
    "glm5-next": ("Glm5Next", GLM5_NEXT | {"indexer_types": ["full", "full", "shared", "full"]}),
    "glm5-next-16": ("Glm5Next", GLM5_NEXT | {"index_kpool": 16}),
}
FAMILIES = ("v32", "glm-shared", "v4", "glm5-next")
RELATIVES = ("axk2", "hy4", "mistral-large4")
"""Models of V3.2's family whose attention modules differ from V3.2's."""


LEARNED = ("sinks", "position_bias", "k_norm.bias", "q_input_norm.bias", "softmax_scaling.scale", "rotary_emb.alpha")
"""Parameters and buffers that start as constants, which would hide whether they are used."""


def build(name: str, **changes: Any) -> Any:
    kind, numbers = MODELS[name]
    reseed(4)
    numbers = {**numbers, **changes}
    with default_dtype(torch.float32), torch.device("cpu"), torch.inference_mode(False):
        model = _model(kind, numbers).eval()
    with torch.no_grad():
        for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor_name.endswith(LEARNED):
                tensor.normal_(std=0.1)
            elif kind == "HYV4" and tensor_name.endswith(("hc.base", "hc.scale", "hc_base", "hc_scale")):
                tensor.add_(torch.randn_like(tensor), alpha=0.3)  # streams that are alike would have no gradients
            elif tensor_name.endswith(("kpool_compress_ape", "kpool_compress_gate")):
                tensor.normal_()
    return model


def _model(kind: str, numbers: dict[str, Any]) -> Any:
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    if kind == "Glm5Next":
        config = transformers.Glm5NextConfig(text_config=numbers, vision_config=VISION)
        return transformers.Glm5NextForConditionalGeneration(config)
    if kind != "MistralLarge4":
        config = getattr(transformers, f"{kind}Config")(**numbers)
        return getattr(transformers, f"{kind}ForCausalLM")(config)
    text = transformers.MistralLarge4TextConfig(**numbers)
    config = transformers.MistralLarge4Config(text_config=text, vision_config=PIXTRAL, image_token_index=0)
    return transformers.MistralLarge4ForConditionalGeneration(config)


built = cache(build)


every_model = pytest.mark.parametrize("model", MODELS, indirect=True)
every_family = pytest.mark.parametrize("model", [*FAMILIES, *RELATIVES], indirect=True)
every_kind_of_cache = pytest.mark.parametrize("model", [*FAMILIES, "mistral-large4"], indirect=True)
every_relative = pytest.mark.parametrize("model", RELATIVES, indirect=True)
v32_only = pytest.mark.parametrize("model", ["v32"], indirect=True)


def base_of(model: Any) -> Any:
    """The part of a model that has the decoder layers."""
    return getattr(model.model, "language_model", model.model)


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 128, (rows, columns), generator=seeded(7))


def own_positions(model: Any, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions without the padding, as `generate` makes them, for models in which more than distances matters."""
    own = (mask.cumsum(1) - 1).clamp_min(0).long()
    return {"position_ids": own} if type(model).__name__.startswith("Mistral") else {}


@torch.no_grad()
def logits(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return model(*args, **kwargs).logits


def greedy(model: Any, ids: torch.Tensor, new: int, **kwargs: Any) -> torch.Tensor:
    kwargs = {"attention_mask": torch.ones_like(ids)} | kwargs
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


class RowsByThemselves(TorchFunctionMode):
    """Products, sums and elementary functions of float32 are computed in float64 and rounded once: a row's bits do not
    depend on how many rows there are. Float32 sums are vectorised in another order for another number of rows."""

    products = ("linear", "matmul", "__matmul__", "bmm", "conv1d", "einsum")
    names = frozenset((*products, "sum", "mean", "softmax", "sigmoid", "silu", "exp", "softplus", "rsqrt"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        factors = [value for value in args if isinstance(value, Tensor)]
        if getattr(func, "__name__", "") not in self.names or not factors or factors[0].dtype != torch.float32:
            return func(*args, **kwargs)

        def wide(value: Any) -> Any:
            return value.double() if isinstance(value, Tensor) else value

        return func(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()}).float()


def sum_token_by_token(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let GLM-5.3-Flash's linear attention add its tokens one after another, in the model's own recurrent form, which
    gives the same bits however the tokens are divided into calls."""
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "chunk_kimi_delta_attention", module.recurrent_kimi_delta_attention)
