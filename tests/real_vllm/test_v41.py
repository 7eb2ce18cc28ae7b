"""DeepSeek-V4.1: vLLM's layers on tamis, with entries and selections of other layers, on Hopper and nowhere else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bounds
import index_standin as index
import pytest
import torch
import v4_standin as v4
from test_v4 import config_with, record
from torch import Tensor

pytest.importorskip("vllm.models.deepseek_v41", reason="this vLLM has no DeepSeek-V4.1")
import vllm.version

if not vllm.version.__version__.startswith("0.32"):
    pytest.skip("tamis supports DeepSeek-V4.1 in vLLM 0.32", allow_module_level=True)

from v41_built import BLOCK_SIZE, BLOCKS, RATIOS, built_layers
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v41 import attention as engine_attention
from vllm.models.deepseek_v41.nvidia import flashmla, model
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4FlashMLAMetadata
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tamis import PagedCache
from tamis.integrations.vllm import v4_plugin
from tamis.integrations.vllm.indexer import IndexerMetadata, StepRows
from tamis.integrations.vllm.indexer_plugin import Indexer
from tamis.integrations.vllm.v41_layer import TamisV41Attention
from tamis.ops import write_kv

Built = Callable[..., AbstractContextManager[tuple[Any, list[Any]]]]
V41 = "deepseek_v41"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, hopper: type[Any], tmp_path: Path) -> Built:
    monkeypatch.setattr(model, "_select_dsv4_attn_cls", model._select_dsv4_attn_cls)
    monkeypatch.setattr(model, "current_platform", hopper())
    v4_plugin.replace_attention(V41)
    return lambda *args, **options: built_layers(hopper, monkeypatch, tmp_path, *args, **options)


def test_layers_have_v4s_rows(built: Built) -> None:
    """Rows of 584 bytes in pages of a multiple of 576; only two layers own entries, which the others find."""
    with built() as (config, layers):
        v4_plugin.check_attention(layers, V41)
        for number, (layer, ratio) in enumerate(zip(layers, RATIOS, strict=True)):
            assert type(layer) is TamisV41Attention
            assert layer.padded_heads == v4.HEADS == len(layer.attn_sink)
            assert (layer.swa_bytes_per_token, layer.compressed_bytes_per_token) == (584, 584)
            window, entries = layer.swa_cache_layer.get_kv_cache_spec(config), layer.get_kv_cache_spec(config)
            assert window.page_size_bytes % 576 == 0
            assert (entries is not None) == (number in (1, 3))
            if entries is not None:
                assert (entries.dtype, entries.tokens_per_state) == (torch.uint8, ratio)
                assert entries.page_size_bytes == -(-v4.PAGE // ratio * 584 // 576) * 576
            else:
                assert ratio == 0 or layer._compressed_kv_cache() is layers[layer.kv_source_layer_id].kv_cache


@pytest.mark.parametrize(("dtype", "found"), [("auto", "fp8_ds_mla"), ("fp8", "fp8_ds_mla")])
def test_names_of_packed_rows(built: Built, dtype: str, found: str) -> None:
    with built(dtype) as (config, layers):
        assert {layer.kv_cache_dtype for layer in layers} == {found}
        assert config.cache_config.cache_dtype == found


def test_the_class_is_replaced_where_custom_is_chosen(built: Built) -> None:
    del built
    v4_plugin.replace_attention(V41)
    assert model._select_dsv4_attn_cls(config_with(AttentionBackendEnum.CUSTOM)) is TamisV41Attention
    usual = config_with(AttentionBackendEnum.FLASHMLA_SPARSE_DSV41)
    assert model._select_dsv4_attn_cls(usual) is flashmla.DeepseekV4FlashMLAAttention
    with pytest.raises(RuntimeError, match="CUSTOM was chosen, but vLLM built no V4 attention at all"):
        v4_plugin.check_attention([], V41)


@pytest.mark.parametrize("major", [10, 12])
def test_other_devices_are_refused(hopper: type[Any], monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(hopper, "get_device_capability", classmethod(lambda *_: DeviceCapability(major, 0)))
    with pytest.raises(ValueError, match=r"DeepSeek-V4\.1 in vLLM on .* 9\.x \(on 10\.x .* of 528 and 288 bytes\)"):
        v4_plugin.replace_attention(V41)


class Model:
    """A model class of vLLM's, as far as the plugin looks."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        kind = model._select_dsv4_attn_cls(vllm_config)
        vllm_config.compilation_config.static_forward_context["layers.0.attn"] = kind.__new__(kind)


def test_models_and_cache_dtypes(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    del built
    for name in ("DeepseekV41ForCausalLM", "DSparkDeepseekV4ForCausalLM"):
        checked = v4_plugin._checked(Model, f"{V41}__{name}")
        for dtype in ("auto", "fp8", "fp8_ds_mla"):
            config = config_with(AttentionBackendEnum.CUSTOM, dtype)
            checked(vllm_config=config)
            assert type(config.compilation_config.static_forward_context["layers.0.attn"]) is TamisV41Attention
        for dtype in ("bfloat16", "fp8_e4m3", "nvfp4_ds_mla"):
            with pytest.raises(ValueError, match=rf"must be one of .* for DeepSeek-V4\.1 with tamis, got {dtype}"):
                checked(vllm_config=config_with(AttentionBackendEnum.CUSTOM, dtype))
    monkeypatch.setattr(vllm.version, "__version__", "0.31.0")
    with pytest.raises(ValueError, match=r"tamis does not run Model: .* vLLM 0\.32\.x, and this is 0\.31\.0"):
        checked(vllm_config=config_with(AttentionBackendEnum.CUSTOM))


class V41Step(v4.V4Step):
    """A step of V4 with entries of one and of two tokens, some of which are selected for each token."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__("v4-fp8", *args, **options)
        self.low = {ratio: PagedCache(self.window.layout, 40, v4.PAGE // ratio) for ratio in (1, 2)}
        self.picked: dict[int, Tensor] = {}
        for ratio, cache in self.low.items():
            cache.storage.view(torch.uint8).fill_(0xFF)
            for number, length in enumerate(self.lengths):
                slots = self.entry_slots(number, length // ratio, ratio)
                write_kv(torch.randn(len(slots), 512), cache, slots)
            self.picked[ratio] = torch.full((len(self.tokens), v4.TOPK), -1, dtype=torch.int32)
            for row, (_, position) in enumerate(self.tokens):
                complete = (position + 1) // ratio
                chosen = torch.randperm(complete)[: v4.TOPK].int()
                self.picked[ratio][row, : len(chosen)] = chosen

    def rows_seen(self, row: int, ratio: int) -> Tensor:
        keys = super().rows_seen(row, 1)
        if ratio == 0:
            return keys
        request, position = self.tokens[row]
        slots = self.entry_slots(request, (position + 1) // ratio, ratio)
        picked = self.picked[ratio][row]
        return torch.cat((keys, self.low[ratio].read(slots[picked[picked >= 0].long()]).double()))


@pytest.mark.parametrize("number", range(len(RATIOS)))
@pytest.mark.parametrize("shape", v4.SHAPES)
def test_vllms_layer_attends(built: Built, shape: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `forward_mqa` with vLLM's records: each layer reads its source's entries by the shared selection."""
    step, padding, ratio = V41Step(*v4.SHAPES[shape]), 3, RATIOS[number]
    with built() as (_, layers):
        layer = layers[number]
        layer.attn_sink.data.copy_(step.sink)
        for owner in layers:
            owner.swa_cache_layer.bind_kv_cache(torch.full((1, 1, 1, 584), 0xFF, dtype=torch.uint8))
            if owner.is_kv_source:
                owner.bind_kv_cache(step.low[owner.compress_ratio].storage.unsqueeze(1))
        layer.swa_cache_layer.bind_kv_cache(step.window.storage.unsqueeze(1))
        window = v4.window_builder().build(0, step.common("window", padding))
        metadata = {layer.swa_cache_layer.prefix: record(DeepseekSparseSWAMetadata, window)}
        if ratio:
            layer.topk_indices_buffer[: len(step.tokens)] = step.picked[ratio]
            main = v4.main_builder(4).build(0, step.common("main", padding))
            metadata[layer.compressed_cache_prefix] = record(DeepseekV4FlashMLAMetadata, main)
            assert layer.compressed_cache_prefix == f"model.layers.{(0, 1, 1, 3, 3, 3)[number]}.attn"
        monkeypatch.setattr(flashmla, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
        q = torch.cat((step.q, torch.ones(padding, *step.q.shape[1:])))
        output = torch.full_like(q, 3.0)
        positions = torch.tensor([p for _, p in step.tokens] + [0] * padding)
        assert isinstance(layer, engine_attention.DeepseekV4Attention)
        layer.forward_mqa(q, None, positions, output)
        step.agrees(output[: len(step.tokens)], ratio)


def slow_blocks(scores: Tensor, length: int) -> list[int]:
    """The best blocks by their highest score; the newest always, then lower numbers among equals."""
    tops = [float(scores[at : min(at + BLOCK_SIZE, length)].max()) for at in range(0, length, BLOCK_SIZE)]
    if tops:
        tops[-1] = float("inf")
    return sorted(sorted(range(len(tops)), key=lambda at: (-tops[at], at))[:BLOCKS])


def test_two_level_selection(built: Built) -> None:
    """tamis' indexer in vLLM's V4.1 layers: three share one cache of keys, one selects blocks, one selects in them."""
    step = index.make_index_step([300, 90, 200, 40], [1, 1, 30, 40])
    with built(indexer="tamis") as (config, layers):
        first, source, inner = (layers[number].indexer.indexer_op for number in (1, 3, 4))
        assert {type(one) for one in (first, source, inner)} == {Indexer}
        assert source.k_cache is inner.k_cache
        assert first.k_cache is not source.k_cache
        assert (first._candidates, source._candidates.writes, inner._candidates.writes) == (None, True, False)
        known = config.compilation_config.static_forward_context
        assert known[source._name] is source
        assert known[inner._name] is inner
        # The keys are those of single tokens here, whatever the layers' ratio: the step's standard selections are then
        # those of each token's position.
        cache = source.k_cache
        cache.kv_cache = step.storage(new=True)
        backend = cache.get_attn_backend()
        assert backend.__name__ == "TamisDeepseekV41IndexerBackend"
        assert backend.get_name() == "DEEPSEEK_V41_INDEXER"
        common = step.common()
        rows = step_rows(common)
        q, weights = step.q, step.weights
        metadata = {cache.prefix: rows}
        buffer = source.topk_indices_buffer
        with set_current_vllm_config(config), set_forward_context(metadata, config):
            source(torch.zeros(len(q), 8), q, None, weights)
            assert torch.equal(buffer[: step.tokens], step.selected(v4.TOPK))
            blocks = source.candidate_blocks[: step.tokens].clone()
            inner(torch.zeros(len(q), 8), q, None, weights)
        token = 0
        for keys, length, count in zip(step.keys, step.lengths, step.queries, strict=True):
            for position in range(length - count, length):
                scores = ((keys[: position + 1].double() @ q[token].double().T).relu() * weights[token].double()).sum(1)
                wanted = slow_blocks(scores, position + 1)
                assert blocks[token].tolist() == wanted + [-1] * (BLOCKS - len(wanted))
                allowed = [at for at in range(position + 1) if at // BLOCK_SIZE in wanted]
                best = sorted(sorted(allowed, key=lambda at: (-float(scores[at]), at))[: v4.TOPK])
                assert buffer[token].tolist() == best + [-1] * (v4.TOPK - len(best))
                token += 1
        assert bool((source.candidate_blocks[step.tokens :] == 77).all())


def step_rows(common: SimpleNamespace) -> IndexerMetadata:
    """The metadata of a step, by the part of the builder that is tamis'; vLLM's own part launches Triton kernels."""
    wide = CommonAttentionMetadata(**vars(common), seq_lens_cpu_upper_bound=common.seq_lens)
    limits = SimpleNamespace(max_num_batched_tokens=v4.MAX_TOKENS, max_num_seqs=v4.MAX_REQUESTS)
    engine = SimpleNamespace(scheduler_config=limits, speculative_config=None)
    return StepRows(engine, torch.device("cpu")).read(wide, wide.slot_mapping)


def test_ranks_cannot_share_a_selection_in_two_levels(built: Built) -> None:
    with (
        pytest.raises(ValueError, match="several ranks cannot share a selection in two levels"),
        built(indexer="tamis", share_indexer=True),
    ):
        pass


def test_vllms_own_kernels_agree() -> None:
    """vLLM's Triton kernels in Triton's interpreter, which truncates: bf16 to within 2**-7, e4m3 to within 2**-3."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    program = Path(__file__).with_name("v41_kernels.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found.pop("blocks"), found.pop("masked")) == (0.0, 0.0)
    assert len(found) == 10
    for name, gap in found.items():
        assert gap < 2.0 ** (-7 if name.startswith(("latents", "rope")) else -3), name


def test_bounds_are_those_of_the_arithmetic() -> None:
    """The comparison above has teeth: another row of entries is seen."""
    step = V41Step(*v4.SHAPES["decodes"])
    exact = step.attention(2)
    step.picked[2][0, 0] = (int(step.picked[2][0, 0]) + 1) % 40
    with pytest.raises(AssertionError):
        bounds.agree(step.attention(2).out.float(), exact.out, exact.out_error)
