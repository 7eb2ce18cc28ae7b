"""tamis' indexer in place of vLLM's operator, built and run by vLLM's own code on CPU tensors.

Where vLLM's kernel writes index keys, a function with the same arguments does, by the documented format.
"""

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import index_standin as index
import pytest
import torch
import vllm.version
from configured import make_config
from index_standin import DIM, PAGE, ROW, IndexStep
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor import custom_op
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tamis.integrations.vllm import indexer_plugin, register
from tamis.integrations.vllm.indexer_plugin import Indexer
from tamis.integrations.vllm.plugin import check_indexer

PREFIX, K = "layers.0.indexer.k_cache", 48
STEPS = {
    "decode": ([300, 5, 130], [1, 1, 1]),
    "drafts": ([300, 9, 130], [6, 6, 6]),
    "uneven drafts": ([300, 9, 130], [6, 2, 1]),
    "prompts": ([200, 64, 90], [70, 64, 3]),
    "mixed": ([300, 90, 200, 40], [1, 1, 30, 40]),
}


@pytest.fixture(autouse=True)
def engine(hopper: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform with an H200, as far as the operator looks, and a function in place of vLLM's kernel."""
    monkeypatch.setattr(sparse_attn_indexer, "current_platform", hopper())
    monkeypatch.setattr(sparse_attn_indexer, "has_deep_gemm", lambda: True)

    def write(k: Tensor, pages: Tensor, slots: Tensor, block: int, scale_format: str) -> None:
        assert (block, scale_format) == (DIM, "ue8m0")
        index.write_keys(k, pages, slots)

    monkeypatch.setattr(_custom_ops, "indexer_k_quant_and_cache", write)


def configure(**options: Any) -> VllmConfig:
    """vLLM's configuration, with these options of tamis."""
    config = make_config()
    config.cache_config.block_size = PAGE
    config.additional_config = {"tamis": options} if options else {}
    if hasattr(config, "kernel_config") and hasattr(config.kernel_config, "enable_jit_warmup"):
        config.kernel_config.enable_jit_warmup = False
    return config


def make_operator(config: VllmConfig, rows: int = 200, **changes: Any) -> Any:
    """vLLM's operator, built as its models build it."""
    arguments: dict[str, Any] = {"quant_block_size": DIM, "scale_fmt": "ue8m0", "topk_tokens": K, "head_dim": DIM}
    arguments |= {"max_model_len": 2048, "max_total_seq_len": 4096} | changes
    buffer = torch.full((rows, K), 7, dtype=torch.int32)
    with set_current_vllm_config(config):
        cache = DeepseekV32IndexerCache(ROW, torch.uint8, PREFIX, config.cache_config)
        return SparseAttnIndexer(cache, topk_indices_buffer=buffer, **arguments)


def build(operator: Any, config: VllmConfig, step: IndexStep, **padding: int) -> Any:
    """The step's metadata, from the backend that vLLM finds for the cache."""
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=ROW, dtype=torch.uint8)
    builder = operator.k_cache.get_attn_backend().get_builder_cls()(spec, [PREFIX], config, torch.device("cpu"))
    common = step.common(**padding)
    return builder.build(0, CommonAttentionMetadata(**vars(common), seq_lens_cpu_upper_bound=common.seq_lens))


@contextmanager
def running(operator: Any, config: VllmConfig, step: IndexStep, metadata: Any) -> Iterator[None]:
    """A step of the engine, whose cache has all keys but the new ones."""
    operator.k_cache.kv_cache = step.storage(new=operator.skip_k_cache_insert)
    with set_current_vllm_config(config), set_forward_context(metadata, config):
        yield


def test_without_the_option_the_operator_is_vllms_own() -> None:
    for options in ({}, {"indexer": "vllm"}):
        config = configure(**options)
        before = list(config.compilation_config.static_forward_context)
        operator = make_operator(config)
        assert type(operator) is SparseAttnIndexer
        assert set(config.compilation_config.static_forward_context) == {*before, PREFIX}
        assert operator.k_cache.get_attn_backend() is type(operator.k_cache).get_attn_backend(operator.k_cache)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_the_operator_writes_and_selects(name: str, padding: int) -> None:
    config, step = configure(indexer="tamis"), index.make_index_step(*STEPS[name])
    operator = make_operator(config)
    assert type(operator) is Indexer
    metadata = {PREFIX: build(operator, config, step)}
    q = torch.cat((step.q, step.q[:1].expand(padding, -1, -1)))
    k, weights = (torch.nn.functional.pad(x, (0, 0, 0, padding)) for x in (step.new_keys(), step.weights))
    with running(operator, config, step, metadata):
        found = operator(torch.zeros(len(q), 8), q, k, weights)
        assert torch.equal(operator.k_cache.kv_cache, step.storage(new=True))
    assert found is operator.topk_indices_buffer
    assert torch.equal(found[: step.tokens], step.selected(K))
    assert bool((found[step.tokens : len(q)] == -1).all())
    assert bool((found[len(q) :] == 7).all())
    # So that vLLM can free the caches over which it has measured graphs.
    keys = weakref.ref(operator.k_cache.kv_cache)
    operator.k_cache.kv_cache = torch.tensor([])
    gc.collect()
    assert keys() is None


def test_a_captured_step_is_padded_by_the_engine() -> None:
    config, step = configure(indexer="tamis"), index.make_index_step(*STEPS["drafts"])
    operator = make_operator(config, skip_k_cache_insert=True)
    metadata = build(operator, config, step, padded_tokens=24, padded_requests=4)
    q, weights = (torch.cat((x, x[:6])) for x in (step.q, step.weights))
    with running(operator, config, step, {PREFIX: metadata}):
        found = operator(torch.zeros(24, 8), q, None, weights)
    assert torch.equal(found[: step.tokens], step.selected(K))
    assert bool((found[step.tokens : 24] == -1).all())


def test_models_that_call_vllms_function_reach_tamis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused layers of V3.2 build the operator, but call the function, which they have imported by its name, with a
    buffer of their own. `test_indexer_ranks.py` runs such a layer."""
    model: Any = ModuleType("a_model")
    model.sparse_attn_indexer = sparse_attn_indexer.sparse_attn_indexer
    monkeypatch.setitem(sys.modules, "a_model", model)
    config, step = configure(indexer="tamis"), index.make_index_step(*STEPS["mixed"])
    operator = make_operator(config)
    metadata = build(operator, config, step)
    buffer = torch.full((step.tokens + 4, K), 7, dtype=torch.int32)
    operator.skip_k_cache_insert = True  # in these layers a fused kernel writes the keys
    sizes = (DIM, "ue8m0", K, DIM, 2048, 4096)
    with running(operator, config, step, {PREFIX: metadata}):
        arguments = (torch.zeros(1), PREFIX, operator.k_cache.kv_cache, step.q, None, None, step.weights, *sizes)
        model.sparse_attn_indexer(*arguments, buffer, skip_k_cache_insert=True, skip_topk_buffer_clear=True)
    assert torch.equal(buffer[: step.tokens], step.selected(K))
    assert bool((buffer[step.tokens :] == 7).all())
    assert bool((operator.topk_indices_buffer == 7).all())


def test_other_layers_keep_vllms_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(indexer_plugin, "_theirs", lambda *args, **more: calls.append((args, more)))
    config = configure(indexer="tamis")
    arguments = [object() for _ in range(14)]
    arguments[1] = "another.k_cache"
    with set_current_vllm_config(config), set_forward_context({}, config):
        indexer_plugin._select_in_place(*arguments, True, dcp_rank=0)
    assert calls == [((*arguments, True), {"dcp_rank": 0})]


def test_vllms_own_function_fails_on_our_metadata() -> None:
    """A layer that would run vLLM's indexer after all does not go on in silence."""
    config, step = configure(indexer="tamis"), index.make_index_step(*STEPS["decode"])
    operator = make_operator(config)
    metadata = build(operator, config, step)
    with running(operator, config, step, {PREFIX: metadata}), pytest.raises(AssertionError):
        SparseAttnIndexer.forward_cuda(operator, torch.zeros(3, 8), step.q, step.new_keys(), step.weights)


def test_metadata_of_another_builder_is_refused() -> None:
    config, step = configure(indexer="tamis"), index.make_index_step(*STEPS["decode"])
    operator = make_operator(config)
    with (
        running(operator, config, step, {PREFIX: SimpleNamespace()}),
        pytest.raises(AssertionError, match="vLLM built other metadata"),
    ):
        operator(torch.zeros(3, 8), step.q, step.new_keys(), step.weights)


def test_profiling_reserves_the_workspace_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    config, step = configure(indexer="tamis"), index.make_index_step(*STEPS["decode"])
    operator = make_operator(config)
    reserved = []
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **more: reserved.append(sizes) or real(*sizes, **more))
    with running(operator, config, step, None):
        before = operator.k_cache.kv_cache.clone()
        operator(torch.zeros(3, 8), step.q, step.new_keys(), step.weights)
    assert reserved == [(256 << 20,)]
    assert torch.equal(operator.k_cache.kv_cache, before)
    assert bool((operator.topk_indices_buffer == 7).all())


def test_dense_prefills_of_vllm_need_no_selection() -> None:
    """Short prompts that vLLM's own attention takes densely: keys are written, and nothing is selected."""
    config, step = configure(indexer="tamis"), index.make_index_step([40, 30], [40, 30])
    operator = make_operator(config)
    operator.dense_mha_metadata_layer_name = "attention"
    dense = SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True), num_decode_tokens=0)
    metadata = {PREFIX: build(operator, config, step), "attention": dense}
    with running(operator, config, step, metadata):
        operator(torch.zeros(70, 8), step.q, step.new_keys(), step.weights)
        assert torch.equal(operator.k_cache.kv_cache, step.storage(new=True))
        assert bool((operator.topk_indices_buffer == 7).all())
        dense.num_decode_tokens = 1
        operator(torch.zeros(70, 8), step.q, step.new_keys(), step.weights)
    assert torch.equal(operator.topk_indices_buffer[:70], step.selected(K))


def test_compiled_models_are_split_at_the_operator() -> None:
    config, theirs = configure(indexer="tamis"), "vllm::sparse_attn_indexer"
    config.compilation_config.splitting_ops = ["vllm::other", theirs]
    operator = make_operator(config)
    assert config.compilation_config.splitting_ops == ["vllm::other", theirs, "vllm::tamis_sparse_attn_indexer"]
    step = index.make_index_step(*STEPS["mixed"])
    metadata = build(operator, config, step)
    traced = torch.compile(operator.forward, backend="eager", fullgraph=True)
    with running(operator, config, step, {PREFIX: metadata}):
        found = traced(torch.zeros(step.tokens, 8), step.q, step.new_keys(), step.weights)
    assert torch.equal(found[: step.tokens], step.selected(K))


def test_it_is_registered_once_and_leaves_other_plugins_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert custom_op.op_registry_oot["SparseAttnIndexer"] is Indexer
    register()
    assert not caplog.records
    monkeypatch.setitem(custom_op.op_registry_oot, "SparseAttnIndexer", SimpleNamespace)
    register()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        "tamis' indexer cannot be chosen in this vLLM: another plugin has registered types.SimpleNamespace for "
        "SparseAttnIndexer"
    )


REFUSED = {
    "MXFP4": ({"use_fp4_cache": True}, {}, "index keys in MXFP4"),
    "other scales": ({"scale_fmt": "fp32"}, {}, "not in e4m3 with one power-of-two scale each"),
    "more positions": ({"topk_tokens": 5000}, {}, "index_topk 5000 is above 4096"),
    "two ways to share": ({}, {"decode_context_parallel_size": 2}, r"\"share_indexer\" is true where ranks divide"),
    "divided prompts": ({}, {"prefill_context_parallel_size": 2}, r"divided among 2 ranks \(prefill context"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, parallel, message = REFUSED[name]
    config = configure(indexer="tamis", share_indexer=True)
    for field, value in parallel.items():
        setattr(config.parallel_config, field, value)
    group = SimpleNamespace(world_size=2, rank_in_group=0)
    monkeypatch.setattr(sparse_attn_indexer, "get_dcp_group", lambda: group)
    with pytest.raises(ValueError, match=f"tamis cannot replace vLLM's indexer here: .*{message}.*; leave out"):
        make_operator(config, **changes)


def test_other_devices_and_versions_are_refused(monkeypatch: pytest.MonkeyPatch, hopper: type[Any]) -> None:
    monkeypatch.setattr(hopper, "is_cuda", lambda self: False)
    monkeypatch.setattr(vllm.version, "__version__", "0.33.0")
    with pytest.raises(ValueError, match=r"and this is 0\.33\.0; install one of those; it needs a CUDA device"):
        make_operator(configure(indexer="tamis"))
    assert type(make_operator(configure())) is SparseAttnIndexer


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of 'tamis', 'vllm', got 'fast'"):
        make_operator(configure(indexer="fast"))


@pytest.mark.parametrize("options", [{}, {"indexer": "tamis"}])
def test_attention_asserts_that_the_layers_indexer_is_ours(options: dict[str, str]) -> None:
    config = configure(**options)
    operator = make_operator(config)
    check_indexer(config, SimpleNamespace(indexer_op=operator))
    check_indexer(config, None)  # a layer that shares the selection of another
    if options:
        with pytest.raises(RuntimeError, match=r"vLLM built SimpleNamespace with Linear, which tamis does not replace"):
            check_indexer(config, SimpleNamespace(indexer_op=torch.nn.Linear(1, 1)))
    else:
        check_indexer(config, SimpleNamespace())
