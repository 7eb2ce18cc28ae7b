"""The models of the demonstration: their sizes, their weights before training, and their checkpoints."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn

from tamis.lab.generation import quiet
from tamis.lab.training import task

Name = Literal["v32", "v4"]
_V32_SIZES: dict[str, Any] = {
    "vocab_size": task.VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    # Rows of 512 + 64 numbers and index keys of 128, as in DeepSeek-V3.2, so that all cache formats and kernels fit.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 64,
    "intermediate_size": 128,
    # Every layer has a plain MLP. The sizes of experts are there because a config without them is not valid.
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": task.BOS,
    "eos_token_id": task.EOS,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_V4_SIZES: dict[str, Any] = {
    "vocab_size": task.VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    # Rows and entries of 448 + 64 numbers and index keys of 128, as in DeepSeek-V4.
    "head_dim": 512,
    "partial_rotary_factor": 1 / 8,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 16,
    # V4 has no layers without experts. The fewest are two.
    "mlp_layer_types": ["moe"] * 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default"},
    "bos_token_id": task.BOS,
    "eos_token_id": task.EOS,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


@dataclass(frozen=True, eq=False)
class Demo:
    """One of the models."""

    name: Name
    model_type: str
    """In the config of transformers."""
    class_name: str
    """Of the model in transformers, without `ForCausalLM`."""
    sizes: dict[str, Any]
    folder: str
    """Where its checkpoint is, beside this module."""
    room: int
    """Tokens that a pair of key and value has to itself in prompts. An entry of V4 holds what two of its spans say, and
    cannot say it of two pairs."""

    @property
    def topk(self) -> int:
        """How many rows or entries a token selects."""
        return int(self.sizes["index_topk"])

    @property
    def recall_tokens(self) -> int:
        """The length of a prompt with eight times as many rows or entries."""
        rates = self.sizes.get("compress_rates", {"compressed_sparse_attention": 1})
        return 8 * self.topk * int(rates["compressed_sparse_attention"])


V32 = Demo("v32", "deepseek_v32", "DeepseekV32", _V32_SIZES, "recall", 2)
V4 = Demo("v4", "deepseek_v4", "DeepseekV4", _V4_SIZES, "recall_v4", 8)
DEMOS: dict[str, Demo] = {demo.name: demo for demo in (V32, V4)}
_classes: Any = transformers
"""Its classes have no types."""
_SHARED = 8
"""Elements of the embedding that begin alike for all tokens."""


def demo_of(model: Any) -> Demo:
    """Which of the models this is, by its config."""
    return next(demo for demo in DEMOS.values() if demo.model_type == model.config.model_type)


def indexers(model: Any) -> list[nn.Module]:
    """The indexers of a model."""
    attentions = [layer.self_attn for layer in model.model.layers]
    owners = attentions if demo_of(model) is V32 else [attention.compressor for attention in attentions]
    return [owner.indexer for owner in owners if owner is not None]


def new_model(generator: torch.Generator, demo: Demo = V32) -> Any:
    """A model before training."""
    config = getattr(_classes, f"{demo.class_name}Config")(**demo.sizes)
    with torch.random.fork_rng(devices=[]):
        model: Any = getattr(_classes, f"{demo.class_name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases of places begin at zero, and hyper-connections as transformers makes them.
            if parameter.ndim < 2 or "position_bias" in name or "hc" in name:
                continue
            if "embed_tokens" in name:
                parameter.normal_(0.0, 1.0, generator=generator)
                # Projections have no bias. What all tokens share lets a head look at a position whatever the token.
                parameter[:, :_SHARED] += 1.0
            else:
                # Layers add little at first, so that a token's own embedding is not lost in what attention adds.
                share = 0.5 if any(last in name for last in ("o_proj.", "o_b_proj.", "down_proj")) else 1.0
                parameter.normal_(0.0, share * parameter.shape[-1] ** -0.5, generator=generator)
    return model


def save_model(model: Any, folder: Path) -> None:
    """Write a checkpoint: weights in bf16, config and tokenizer. The model's own weights are rounded as well."""
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    model.float()


def shipped_checkpoint(demo: Demo = V32) -> Path:
    """The folder of the checkpoint that `tamis train-demo` made for this package."""
    return Path(str(files("tamis.lab.training") / demo.folder))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = task.vocabulary()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _classes.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
