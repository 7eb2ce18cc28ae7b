"""The trained model of the package, whose every layer selects and attends in vLLM's own layers, on CPU tensors.

transformers computes what lies between: projections, norms, rotations and MLPs. A prompt comes in pieces and single
tokens, as an engine serves it, and all context is in vLLM's caches.
"""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import index_standin as index
import pytest
import torch
import vllm.model_executor.layers.quantization.fp8  # noqa: F401  (see test_layer)
from configured import make_config
from index_standin import DIM, PAGE, ROW
from test_layer import alone, bind_cache, dense_prefill, write_rows  # noqa: F401  (fixtures)
from torch import Tensor
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tamis.integrations.vllm.indexer_plugin import Indexer
from tamis.integrations.vllm.plugin import Backend
from tamis.lab.generation import load_model
from tamis.lab.training.model import shipped_checkpoint
from tamis.lab.training.outcome import ANSWERS_BAR, RANDOM_BAR
from tamis.lab.training.task import make_batch

TOKENS = 1024
PIECES = [500, 300, 1, 1, 200, *[1] * 22]
"""New tokens of each step."""
LONGEST = 2048


@pytest.fixture
def model() -> Any:
    """The trained model, in float32."""
    return load_model(shipped_checkpoint(), torch.device("cpu"))[0]


@pytest.fixture(autouse=True)
def kernels(hopper: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform with an H200, as far as vLLM looks, and a function in place of its kernel that writes index keys."""
    monkeypatch.setattr(sparse_attn_indexer, "current_platform", hopper())
    monkeypatch.setattr(sparse_attn_indexer, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(
        _custom_ops, "indexer_k_quant_and_cache", lambda k, pages, slots, *_: index.write_keys(k, pages, slots)
    )


def configure(model: Any, cache_dtype: str) -> VllmConfig:
    """vLLM's configuration around the model, with tamis' attention and indexer."""
    sizes = model.config
    options = {"topk": sizes.index_topk, "max_tokens": TOKENS, "max_length": LONGEST, "dtype": torch.float32}
    config = make_config(sizes.num_attention_heads, cache_dtype, **options)
    text = config.model_config.hf_text_config
    for name in ("q_lora_rank", "qk_nope_head_dim", "v_head_dim"):
        setattr(text, name, getattr(sizes, name))
    config.cache_config.block_size = PAGE
    config.additional_config = {"tamis": {"indexer": "tamis"}}
    return config


class Served:
    """A layer's selection and attention in vLLM, in place of transformers' own. Its results are those of new tokens."""

    def __init__(self, module: Any, config: VllmConfig, number: int, random: torch.Generator | None) -> None:
        self.module, self.config, self.random = module, config, random
        sizes = module.config
        self.topk, self.attention_name, self.index_name = sizes.index_topk, f"layers.{number}", f"layers.{number}.index"
        pages = LONGEST // PAGE + 1
        buffer = torch.full((TOKENS, sizes.index_topk), -1, dtype=torch.int32)
        cache = DeepseekV32IndexerCache(ROW, torch.uint8, self.index_name, config.cache_config)
        self.operator: Any = SparseAttnIndexer(
            cache,
            topk_indices_buffer=buffer,
            quant_block_size=DIM,
            scale_fmt="ue8m0",
            topk_tokens=sizes.index_topk,
            head_dim=DIM,
            max_model_len=LONGEST,
            max_total_seq_len=2 * LONGEST,
        )
        assert type(self.operator) is Indexer
        cache.kv_cache = torch.zeros(pages, PAGE, ROW, dtype=torch.uint8)
        self.layer = self._attention(buffer)
        assert self.layer.attn_backend is Backend
        self.spec = self.layer.get_kv_cache_spec(config)
        width = 656 if config.cache_config.cache_dtype == "fp8_ds_mla" else engine.LATENT + engine.ROPE
        bind_cache(self.layer, torch.zeros(pages, 1, PAGE, width, dtype=self.spec.dtype))

    def _attention(self, buffer: Tensor) -> Any:
        sizes, own = self.module.config, self.module.kv_b_proj.weight
        project = ColumnParallelLinear(own.shape[1], own.shape[0], bias=False, params_dtype=torch.float32)
        project.weight.data.copy_(own)
        layer = MLAAttention(
            num_heads=sizes.num_attention_heads,
            scale=self.module.scaling,
            qk_nope_head_dim=sizes.qk_nope_head_dim,
            qk_rope_head_dim=sizes.qk_rope_head_dim,
            v_head_dim=sizes.v_head_dim,
            q_lora_rank=sizes.q_lora_rank,
            kv_lora_rank=sizes.kv_lora_rank,
            kv_b_proj=project,
            cache_config=self.config.cache_config,
            prefix=self.attention_name,
            use_sparse=True,
            indexer=SimpleNamespace(topk_indices_buffer=buffer, indexer_op=self.operator),
            topk_indices_buffer=buffer,
        )
        layer.process_weights_after_loading(torch.float32)
        return layer

    def begin(self, common: CommonAttentionMetadata) -> None:
        """Build the metadata of a step, as vLLM's runner does."""
        keys = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=ROW, dtype=torch.uint8)
        self.slots, cpu = common.slot_mapping, torch.device("cpu")
        builders = (
            (self.index_name, self.operator.k_cache.get_attn_backend(), keys),
            (self.attention_name, Backend, self.spec),
        )
        self.metadata = {
            name: backend.get_builder_cls()(spec, [name], self.config, cpu).build(0, common)
            for name, backend, spec in builders
        }

    def __call__(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        module, sizes, tokens = self.module, self.module.config, hidden_states.shape[1]
        residual = module.q_a_layernorm(module.q_a_proj(hidden_states))
        q = module.q_b_proj(residual).view(1, tokens, sizes.num_attention_heads, -1).transpose(1, 2)
        q, q_rope = q.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        latent, rope = module.kv_a_proj_with_mqa(hidden_states).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], -1)
        latent = module.kv_a_layernorm(latent)[0]
        q_rope, rope = apply_rotary_pos_emb_interleave(q_rope, rope.unsqueeze(1), *position_embeddings)
        q, rope = torch.cat((q, q_rope), dim=-1)[0].transpose(0, 1), rope[0].transpose(0, 1)
        self._select(hidden_states, residual, position_embeddings)
        metadata = self.metadata[self.attention_name]
        write_rows(self.layer, latent, rope, self.slots, metadata, self.config.cache_config.cache_dtype)
        out = torch.empty(tokens, sizes.num_attention_heads * sizes.v_head_dim)
        self.layer.forward_impl(q.contiguous(), latent, rope, self.layer.kv_cache, metadata, out)
        return module.o_proj(out.unsqueeze(0)), None

    def _select(self, hidden_states: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
        """Fill the buffer of positions by vLLM's operator, whose queries are e4m3 with a scale in the weights."""
        indexer = self.module.indexer
        q = indexer.wq_b(residual).view(1, -1, indexer.n_heads, DIM)
        k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        q_rope, k_rope = apply_rotary_pos_emb(q[..., : engine.ROPE], k[..., : engine.ROPE], *rotation, unsqueeze_dim=2)
        q = torch.cat((q_rope, q[..., engine.ROPE :]), -1)[0]
        k = torch.cat((k_rope, k[..., engine.ROPE :]), -1)[0, :, 0]
        scale = (q.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448).log2().ceil().exp2()
        weights = indexer.weights_proj(hidden_states)[0] * scale[..., 0] * (indexer.n_heads * DIM) ** -0.5
        with set_forward_context({self.index_name: self.metadata[self.index_name]}, self.config):
            found = self.operator(hidden_states[0], (q / scale).to(torch.float8_e4m3fn), k, weights)
        if self.random is not None:
            ends = self.slots - PAGE  # positions of the new tokens: page 0 is nobody's
            for row, end in zip(found, ends.tolist(), strict=False):
                order = torch.randperm(end + 1, generator=self.random)[: self.topk]
                row[: len(order)] = order.int()


def serve(model: Any, prompt: Tensor, cache_dtype: str, random: torch.Generator | None = None) -> Tensor:
    """The logits [1, S, vocabulary] of a prompt that comes in pieces."""
    config = configure(model, cache_dtype)
    selector._cached_get_attn_backend.cache_clear()
    logits, table = [], torch.arange(1, LONGEST // PAGE + 1, dtype=torch.int32).unsqueeze(0)
    with set_current_vllm_config(config), torch.no_grad():
        layers = [Served(layer.self_attn, config, number, random) for number, layer in enumerate(model.model.layers)]
        for layer, served in zip(model.model.layers, layers, strict=True):
            layer.self_attn.forward = served
        end = 0
        for piece in PIECES:
            start, end = end, end + piece
            standin = engine.common([end], [piece], table, torch.arange(start, end) + PAGE)
            common = CommonAttentionMetadata(**vars(standin), seq_lens_cpu_upper_bound=standin.seq_lens)
            for served in layers:
                served.begin(common)
            positions = torch.arange(start, end).unsqueeze(0)
            logits.append(model(prompt[:, start:end], position_ids=positions, use_cache=False).logits)
    assert end == prompt.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.usefixtures("alone", "dense_prefill")
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_the_trained_model_answers_questions(model: Any, cache_dtype: str) -> None:
    batch = make_batch(torch.Generator().manual_seed(21), 1, TOKENS, far=True)
    right = batch.right(serve(model, batch.tokens, cache_dtype))
    assert float(right.float().mean()) >= ANSWERS_BAR


@pytest.mark.usefixtures("alone", "dense_prefill")
def test_a_random_selection_does_not(model: Any) -> None:
    """The answers come from the rows that the indexer selects: 64 random ones seldom hold the right one."""
    batch = make_batch(torch.Generator().manual_seed(22), 1, TOKENS, far=True)
    right = batch.right(serve(model, batch.tokens, "auto", torch.Generator().manual_seed(0)))
    # At the first question, 64 of the 768 tokens before it may hold the answer by luck.
    assert float(right.float().mean()) <= RANDOM_BAR + 64 / 768
