"""vLLM's own MLA layer, built and run on CPU tensors with the backend that its selector gives it."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch

# A layer imports this when its weights are loaded, and under a CUDA platform it would ask vLLM's kernels.
import vllm.model_executor.layers.quantization.fp8
import vllm.version
from bounds import relative_error
from configured import make_config
from engine_standin import LATENT, NOPE, ROPE, VALUE
from test_attention import PAGE, common_of
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.attention import selector

from tamis.integrations.vllm.plugin import Backend, Impl

HEADS = 4


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The process groups of a single rank."""
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'rendezvous'}", 0, "gloo")
        initialize_model_parallel()
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def make_layer(config: VllmConfig, buffer: torch.Tensor, rope: int = ROPE, prefix: str = "layer") -> Any:
    selector._cached_get_attn_backend.cache_clear()
    project = ColumnParallelLinear(LATENT, HEADS * (NOPE + VALUE), bias=False, params_dtype=torch.float32)
    torch.nn.init.normal_(project.weight, std=LATENT**-0.5)
    layer = MLAAttention(
        num_heads=HEADS,
        scale=engine.SCALE,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=rope,
        v_head_dim=VALUE,
        q_lora_rank=1536,
        kv_lora_rank=LATENT,
        kv_b_proj=project,
        cache_config=config.cache_config,
        prefix=prefix,
        use_sparse=True,
        indexer=SimpleNamespace(topk_indices_buffer=buffer),
        topk_indices_buffer=buffer,
    )
    layer.process_weights_after_loading(torch.float32)
    return layer


def bind_cache(layer: Any, pages: torch.Tensor) -> None:
    """Give a layer its cache, [pages, heads, page size, row], as the version's runner does."""
    if hasattr(layer, "bind_kv_cache"):
        layer.bind_kv_cache(pages)
    else:
        layer.kv_cache = pages.squeeze(1)


def write_rows(layer: Any, latent: Any, rope: Any, slots: Any, metadata: Any, cache_dtype: str) -> None:
    """Write rows as the version's layer does before attention: by a method of its own, or of the impl."""
    cache, scale = layer.kv_cache, layer._k_scale
    if hasattr(layer, "update_kv_cache"):
        layer.update_kv_cache(latent, rope, cache, slots, metadata, cache_dtype, scale)
    else:
        layer.impl.do_kv_cache_update(latent, rope, cache, slots, cache_dtype, scale)


BATCHES = {
    "mixed": ([300, 90, 200, 40], [1, 1, 30, 40]),
    # All of a short prompt is selected. vLLM would rather run it through dense attention, which tamis does not have.
    "short prompts": ([90, 100, 40], [1, 30, 40]),
}


@pytest.fixture
def dense_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense prefill that fails if it runs. vLLM's own needs kernels, and its choice without them is to have none."""
    found = SimpleNamespace(supports_quant_output=lambda key: False)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: lambda **options: found)


@pytest.mark.usefixtures("hopper", "alone", "dense_prefill")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_a_layer_of_vllm_runs_on_tamis(cache_dtype: str, batch: str) -> None:
    config = make_config(HEADS, cache_dtype, dtype=torch.float32)
    config.cache_config.block_size = PAGE
    step = engine.make_step(*BATCHES[batch], HEADS)
    with set_current_vllm_config(config):
        layer = make_layer(config, step.positions.clone())
        assert layer.attn_backend is Backend
        assert type(layer.impl) is Impl
        spec = layer.get_kv_cache_spec(config)
        row = 656 if cache_dtype == "fp8_ds_mla" else 576 * 4
        assert spec.page_size_bytes == PAGE * row
        table, slots, pages = step.place(PAGE)
        shape = (pages, 1, PAGE, 656 if cache_dtype == "fp8_ds_mla" else 576)
        bind_cache(layer, torch.zeros(shape, dtype=spec.dtype))
        metadata = Backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu")).build(
            0, common_of(step, table, step.new_slots(slots))
        )
        for rows, at in zip(step.rows, slots, strict=True):
            latent, rope = rows.float().split([LATENT, ROPE], 1)
            write_rows(layer, latent, rope.unsqueeze(1), at, metadata, cache_dtype)
        q = torch.randn(step.tokens, HEADS, NOPE + ROPE)
        output = torch.empty(step.tokens, HEADS * VALUE)
        latent, rope = step.new_rows().float().split([LATENT, ROPE], 1)
        layer.forward_impl(q, latent, rope.unsqueeze(1), layer.kv_cache, metadata, output)
    up = layer.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, LATENT)
    absorbed = torch.cat((torch.einsum("thp,hpl->thl", q[..., :NOPE].double(), up[:, :NOPE]), q[..., NOPE:]), -1)
    whole = engine.Step(step.lengths, step.queries, step.rows, absorbed, step.positions)
    expected = torch.einsum("thl,hvl->thv", engine.dense_fp64(whole)[0], up[:, NOPE:]).flatten(1)
    assert relative_error(output, expected) < 1e-5
    # So that vLLM can free the caches over which it has measured graphs.
    pages = weakref.ref(layer.kv_cache)
    layer.kv_cache = torch.tensor([])
    gc.collect()
    assert pages() is None


@pytest.mark.usefixtures("hopper", "alone", "dense_prefill")
def test_a_layer_with_a_cache_dtype_of_its_own() -> None:
    """`--kv-cache-dtype-skip-layers 0`: rows of layer 0 are not packed, so that its prefills are not gathered."""
    config = make_config(64, "fp8_ds_mla", dtype=torch.float32)
    config.cache_config.block_size, config.cache_config.kv_cache_dtype_skip_layers = PAGE, ["0"]
    with set_current_vllm_config(config):
        step, made = engine.step("mixed_small", HEADS), []
        for number in range(2):
            layer = make_layer(config, step.positions.clone(), prefix=f"layers.{number}.attn")
            spec = layer.get_kv_cache_spec(config)
            builder = Backend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))
            made.append((layer.impl.kv_cache_dtype, builder.use_fp8_kv_cache, builder.planner.mode))
    own = "fp8_ds_mla" if vllm.version.__version__.startswith("0.25.") else "auto"  # whose MLA knows no such layers
    expected = {"auto": ("auto", False, "mixed"), "fp8_ds_mla": ("fp8_ds_mla", True, "separate")}
    assert made == [expected[own], expected["fp8_ds_mla"]]
