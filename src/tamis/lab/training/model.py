"""The model of the demonstration: its sizes, its weights before training, and its checkpoint."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers

from tamis.lab.generation import quiet
from tamis.lab.training import task

TOPK = 64
SIZES: dict[str, Any] = {
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
    "index_topk": TOPK,
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
_classes: Any = transformers
"""Its classes have no types."""
_SHARED = 8
"""Elements of the embedding that begin alike for all tokens."""


def new_model(generator: torch.Generator) -> Any:
    """The model before training."""
    config = transformers.DeepseekV32Config(**SIZES)
    with torch.random.fork_rng(devices=[]):
        model: Any = _classes.DeepseekV32ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            if "embed_tokens" in name:
                parameter.normal_(0.0, 1.0, generator=generator)
                # Projections have no bias. What all tokens share lets a head look at a position whatever the token.
                parameter[:, :_SHARED] += 1.0
            else:
                # Layers add little at first, so that a token's own embedding is not lost in what attention adds.
                share = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                parameter.normal_(0.0, share * parameter.shape[1] ** -0.5, generator=generator)
    return model


def save_model(model: Any, folder: Path) -> None:
    """Write a checkpoint: weights in bf16, config and tokenizer. The model's own weights are rounded as well."""
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    model.float()


def shipped_checkpoint() -> Path:
    """The folder of the checkpoint that `tamis train-demo` made for this package."""
    return Path(str(files("tamis.lab.training") / "recall"))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = task.vocabulary()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _classes.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
