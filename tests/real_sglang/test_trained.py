"""The trained model of the package, whose attention runs in SGLang's backend on tamis, over SGLang's own pools.

transformers computes everything else, the selection included, which tamis leaves to SGLang's indexer.
"""

from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from steps import LATENT, TOPK, make_step
from torch import Tensor
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb_interleave

from tamis.lab.generation import load_model
from tamis.lab.training.model import shipped_checkpoint
from tamis.lab.training.outcome import ANSWERS_BAR
from tamis.lab.training.task import make_batch

pytestmark = pytest.mark.usefixtures("hopper")
TOKENS = 512


class Served:
    """A layer's attention in SGLang, in place of transformers' own."""

    def __init__(self, module: Any, fp8: bool) -> None:
        self.module, sizes = module, module.config
        self.step = make_step(
            ForwardMode.EXTEND, heads=sizes.num_attention_heads, fp8=fp8, prefix=(0,), new=TOKENS, longest=2 * TOKENS
        )
        self.step.layer.scaling = module.scaling
        up = module.kv_b_proj.weight.view(sizes.num_attention_heads, -1, LATENT)
        self.keys, self.values = up.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=1)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        module, sizes, step = self.module, self.module.config, self.step
        residual = module.q_a_layernorm(module.q_a_proj(hidden_states))
        q = module.q_b_proj(residual).view(1, TOKENS, sizes.num_attention_heads, -1).transpose(1, 2)
        q, q_rope = q.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        latent, rope = module.kv_a_proj_with_mqa(hidden_states).split([LATENT, sizes.qk_rope_head_dim], dim=-1)
        q_rope, rope = apply_rotary_pos_emb_interleave(q_rope, rope.unsqueeze(1), *position_embeddings)
        absorbed = torch.einsum("bhtp,hpl->bthl", q, self.keys)
        step.q = torch.cat((absorbed, q_rope.transpose(1, 2)), dim=-1)[0].bfloat16()
        step.k = module.kv_a_layernorm(latent)[0].unsqueeze(1).bfloat16()
        step.k_rope = rope[0].transpose(0, 1).bfloat16()
        chosen = module.indexer(hidden_states, residual, position_embeddings, attention_mask[:, 0], None)[0]
        seen = torch.arange(TOKENS).unsqueeze(1)
        step.positions = [row[row <= end].tolist() for row, end in zip(chosen, seen, strict=True)]
        assert max(map(len, step.positions)) <= min(sizes.index_topk, TOPK)
        out = step.run().float()
        found = torch.einsum("thl,hvl->thv", out, self.values).flatten(1)
        return module.o_proj(found.unsqueeze(0)), None


@pytest.mark.parametrize("fp8", [False, True])
def test_the_trained_model_answers_questions(fp8: bool) -> None:
    model = load_model(shipped_checkpoint(), torch.device("cpu"))[0]
    batch = make_batch(torch.Generator().manual_seed(23), 1, TOKENS, far=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.forward = Served(layer.self_attn, fp8)
        logits = model(batch.tokens, use_cache=False).logits
    assert float(batch.right(logits).float().mean()) >= ANSWERS_BAR
