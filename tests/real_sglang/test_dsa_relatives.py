"""Models that SGLang runs as DSA besides those with tests of their own: LongCat, and dots3, which has windows too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.model_config import is_deepseek_dsa
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v2, longcat_flash
from steps import LATENT, PAGE, ROPE, TOPK, Step, fill_pool, make_step

from tamis.integrations.sglang import dsa_plugin

pytestmark = pytest.mark.usefixtures("hopper")

FULL, WINDOW = 1, 0
"""The numbers of a layer with an indexer and of one with a window, whose rows have another width."""


class Windows:
    """The backend that `--attention-backend fa3` chooses, of which only sliding windows would run."""

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, runner.req_to_token_pool
        self.kv_index_translator = runner.kv_index_translator


def build(runner: Any) -> Any:
    """The backend that SGLang builds at its start, with the plugin's check."""
    return model_runner.build_attention_backends(model_runner=runner).attn_backend


def make_dots3(mode: ForwardMode, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Step, Any]:
    """A step whose pool and backends are those that SGLang builds for dots3, and those backends."""
    dots3 = pytest.importorskip("sglang.srt.configs.dots3", reason="not in every version of SGLang")
    step = make_step(mode, **options)
    runner, usual, config = step.runner, step.runner.token_to_kv_pool, step.runner.model_config
    config.hf_config.architectures = ["Dots3NoteForCausalLM"]
    config.hf_text_config = dots3.Dots3Config(index_topk=TOPK, swa_kv_lora_rank=2 * LATENT)
    config.is_draft_model = config.attention_arch = None
    common = {"page_size": PAGE, "device": "cpu", "enable_memory_saver": False, "qk_rope_head_dim": ROPE}
    own = {"kv_lora_rank": LATENT, "index_head_dim": 128, "kv_cache_dim": usual.kv_cache_dim}
    runner.token_to_kv_pool = SWAKVPool(
        size=usual.size,
        size_swa=4 * PAGE,
        page_size=PAGE,
        dtype=usual.dtype,
        head_num=0,
        head_dim=0,
        swa_attention_layer_ids=[WINDOW],
        full_attention_layer_ids=[FULL],
        device="cpu",
        full_kv_pool_class=DSATokenToKVPool,
        swa_kv_pool_class=MLATokenToKVPool,
        full_kv_pool_kwargs=common | own,
        swa_kv_pool_kwargs=common | {"kv_lora_rank": 2 * LATENT},
    )
    monkeypatch.setitem(ATTENTION_BACKENDS, "fa3", Windows)
    runner.prefill_attention_backend_str = runner.decode_attention_backend_str = "fa3"
    runner.is_draft_worker = False
    built = build(runner)
    step.backend, step.layer.layer_id, step.layer.sliding_window_size = built.dsa_backend, FULL, -1
    step.backend.init_forward_metadata(step.batch)
    fill_pool(built.dsa_backend.token_to_kv_pool.get_key_buffer(FULL)[:, 0])
    return step, built


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND], ids=lambda mode: mode.name.lower())
def test_layers_with_an_indexer_run_on_tamis(mode: ForwardMode, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang writes the step's rows before it calls, and says so."""
    step, built = make_dots3(mode, monkeypatch, fp8=fp8)
    assert type(built).__name__ == "DotsHybridAttnBackend"
    assert type(built.dsa_backend) is dsa_plugin.TamisSparseAttnBackend
    assert built.backend_for_layer(step.layer) is built.dsa_backend
    assert built.backend_for_layer(SimpleNamespace(sliding_window_size=512)).backend.__class__ is Windows
    pool = built.token_to_kv_pool
    pool.set_mla_kv_buffer(step.layer, step.batch.out_cache_loc, step.k, step.k_rope)
    before = pool.get_key_buffer(FULL).clone()
    latent, rope = (part.flatten(1) for part in step.q.split([LATENT, ROPE], 2))
    forward = built.forward_decode if mode.is_decode() else built.forward_extend
    given = (latent, step.k, step.k, step.layer, step.batch)
    out = forward(*given, save_kv_cache=False, q_rope=rope, k_rope=step.k_rope, topk_indices=step.topk_slots)
    assert torch.equal(pool.get_key_buffer(FULL).view(torch.uint8), before.view(torch.uint8))
    expected = step.expected()
    assert (out.double() - expected).norm() < 4e-3 * expected.norm()


def test_a_dots3_without_an_indexer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every layer runs on the backend that tamis is no part of."""
    step, _ = make_dots3(ForwardMode.DECODE, monkeypatch)
    step.runner.model_config.hf_text_config.index_topk = None
    with pytest.raises(ValueError, match="--dsa-decode-backend tamis was chosen, but decode runs on the attention"):
        build(step.runner)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND], ids=lambda mode: mode.name.lower())
def test_longcats_layers_are_those_of_v32(mode: ForwardMode) -> None:
    """LongCat has two attention modules a layer, which are of V3.2's class."""
    assert longcat_flash.DeepseekV2AttentionMLA is deepseek_v2.DeepseekV2AttentionMLA
    step = make_step(mode, heads=64)
    config = step.runner.model_config.hf_config
    config.architectures = ["LongcatFlashForCausalLM"]
    assert is_deepseek_dsa(config)
    step.runner.model_config.attention_arch, step.runner.is_draft_worker = None, False
    step.backend = build(step.runner)
    assert type(step.backend) is dsa_plugin.TamisSparseAttnBackend
    step.backend.init_forward_metadata(step.batch)
    step.backend.use_mha = False
    out, expected = step.run(), step.expected()  # of the rows that the step has written
    assert (out.double() - expected).norm() < 4e-3 * expected.norm()
