"""DeepSeek-V4 caches of plain rows, in bf16 and in e4m3, inside vLLM: its layers, specs, writes and records."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import v4_standin as v4
from test_v4 import config_with, record
from torch import Tensor
from v4_built import built_layers
from v4_rows import E4M3, ROW_DTYPES, PlainStep, encoded
from vllm.models.deepseek_v4 import compressor as engine_compressor
from vllm.models.deepseek_v4.nvidia import flashinfer_sparse, model
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

from tamis.integrations.vllm import v4_layer, v4_plugin
from tamis.integrations.vllm.v4_caches import _COMPRESSOR, _WRITERS
from tamis.integrations.vllm.v4_formats import wrap
from tamis.integrations.vllm.v4_layer import TamisV4Attention, TamisV4PlainAttention

Built = Callable[..., AbstractContextManager[tuple[Any, dict[int, Any]]]]
KIND_OF = {"auto": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8"}


def rotated(rows: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """The last 64 numbers of float64 rows [T, ..., 512], rotated in pairs."""
    shape = (len(positions), *[1] * (rows.dim() - 2), 32)
    cos, sin = (part.reshape(shape) for part in cos_sin[positions].double().split(32, dim=1))
    even, odd = rows[..., 448::2], rows[..., 449::2]
    found = rows.clone()
    found[..., 448::2], found[..., 449::2] = even * cos - odd * sin, even * sin + odd * cos
    return found


def written(q: Tensor, kv: Tensor, positions: Tensor, cos_sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What vLLM's kernel makes of queries and rows before it rounds them, in float64."""
    wide = q.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return rotated(normed, positions, cos_sin), rotated(kv.double(), positions, cos_sin)


def put(cache: Tensor, slots: Tensor, block: int, data: Tensor) -> None:
    keep = slots >= 0
    cache.view(torch.uint8)[slots[keep] // block, slots[keep] % block] = data[keep]


def insert_bf16(
    q: Tensor, kv: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, cos_sin: Tensor, eps: float, block: int
) -> None:
    """Stands for vLLM's kernel, which needs a GPU."""
    queries, rows = written(q, kv, positions, cos_sin, eps)
    q.copy_(encoded(queries.reshape(-1, 512), "bf16", 1.0)[1].view(q.shape))
    put(cache, slots, block, encoded(rows, "bf16", 1.0)[0])


def insert_fp8(
    q: Tensor,
    kv: Tensor,
    q_fp8: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    kv_scale: Tensor,
    q_scale_inv: Tensor,
    eps: float,
    block: int,
) -> None:
    """Stands for vLLM's kernel, which needs a GPU."""
    queries, rows = written(q, kv, positions, cos_sin, eps)
    codes = encoded(queries.reshape(-1, 512), "fp8", 1.0 / float(q_scale_inv))[0]
    q_fp8.copy_(codes.view(E4M3).view(q_fp8.shape))
    put(cache, slots, block, encoded(rows, "fp8", float(kv_scale))[0])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, hopper: type[Any], tmp_path: Path) -> Built:
    """Builds layers in a vLLM that can write plain rows."""
    monkeypatch.setattr(model, "_select_dsv4_attn_cls", model._select_dsv4_attn_cls)
    for name, kernel in zip(_WRITERS.values(), (insert_bf16, insert_fp8), strict=True):
        monkeypatch.setattr(torch.ops._C, name, kernel, raising=False)
    monkeypatch.setitem(sys.modules, _COMPRESSOR, ModuleType(_COMPRESSOR))
    v4_plugin.replace_attention()
    return lambda dtype, **options: built_layers(dtype, hopper, monkeypatch, tmp_path, **options)


@pytest.mark.parametrize("dtype", [*KIND_OF, "fp8", "fp8_ds_mla"])
def test_the_layer_follows_from_the_cache_dtype(built: Built, dtype: str) -> None:
    """Specs of plain rows are those of vLLM's FlashInfer layer: 512 numbers a row, pages aligned to 512 bytes."""
    with built(dtype) as (config, layers):
        held = ROW_DTYPES[KIND_OF[dtype]] if dtype in KIND_OF else torch.uint8
        kind = TamisV4PlainAttention if dtype in KIND_OF else TamisV4Attention
        v4_plugin.check_attention(list(layers.values()))
        for ratio, layer in layers.items():
            assert type(layer) is kind
            assert layer.kv_cache_torch_dtype is held
            assert layer.padded_heads == v4.HEADS == len(layer.attn_sink)
            window, entries = layer.swa_cache_layer.get_kv_cache_spec(config), layer.get_kv_cache_spec(config)
            assert (window.dtype, window.block_size) == (held, v4.WINDOW_PAGE)
            assert (entries is None) == (ratio == 1)
            if dtype not in KIND_OF:
                continue
            row = 512 * held.itemsize
            assert window.page_size_bytes == v4.WINDOW_PAGE * row
            assert window.alignment == 512
            assert issubclass(layer.get_attn_backend(), flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend)
            if entries is not None:
                assert (entries.dtype, entries.alignment) == (held, 512)
                assert entries.page_size_bytes == v4.PAGE // ratio * row


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_pages_lie_where_vllms_cache_manager_puts_them(built: Built, dtype: str) -> None:
    """Its pages hold several layers side by side, so that a layer's rows have gaps between their pages."""
    with built(dtype) as (config, layers):
        if hasattr(config.cache_config, "kv_cache_layout"):
            config.cache_config.kv_cache_layout = "BLHNC"
        known = config.compilation_config.static_forward_context
        specs = {name: spec for name, layer in known.items() if (spec := layer.get_kv_cache_spec(config)) is not None}
        found = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), 2**22)
        placed = {
            name: (tensor.offset, tensor.block_stride)
            for tensor in found.kv_cache_tensors
            for name in getattr(tensor, "layers", None) or tensor.shared_by
        }
        held = ROW_DTYPES[KIND_OF[dtype]]
        for ratio, layer in layers.items():
            for name, rows in ((layer.swa_cache_layer.prefix, v4.WINDOW_PAGE), (layer.prefix, v4.PAGE // ratio)):
                if name not in placed:
                    assert (name, ratio) == (layer.prefix, 1)
                    continue
                offset, stride = (size // held.itemsize for size in placed[name])
                memory = torch.zeros(found.num_blocks * stride, dtype=torch.uint8).to(held)
                storage = memory.as_strided((found.num_blocks, rows, 512), (stride, 512, 1), offset)
                cache = wrap(name, storage, layer)
                assert cache.page_stride == placed[name][1]
                assert cache.page_stride % 16 == placed[name][0] % 16 == 0, "as our kernels for Hopper load rows"


def bind(layer: Any, step: PlainStep, ratio: int) -> None:
    """Give a layer the step's caches, as vLLM's runner does."""
    for owner, cache in ((layer.swa_cache_layer, step.window), (layer, step.entries.get(ratio))):
        if cache is None:
            continue
        if hasattr(owner, "bind_kv_cache"):
            owner.bind_kv_cache(cache.storage.unsqueeze(1))
        else:
            owner.kv_cache = cache.storage
    layer.topk_indices_buffer[: len(step.chosen)] = step.chosen
    layer.attn_sink.data.copy_(step.sink)


@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("shape", v4.SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_step_of_vllms_layer(
    built: Built, dtype: str, shape: str, ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's layer has its kernel write the step's queries and rows, and then attends, with rows of padding."""
    kind, padding = KIND_OF[dtype], 3
    step = PlainStep(kind, *v4.SHAPES[shape], scale=1.0)  # vLLM's scales are 1
    total = len(step.tokens)
    with built(dtype) as (_, layers):
        layer = layers[ratio]
        bind(layer, step, ratio)
        common = step.common("window", padding)
        window = v4.window_builder().build(0, common)
        metadata = {layer.swa_cache_layer.prefix: record(DeepseekSparseSWAMetadata, window)}
        if ratio > 1:
            main = v4.main_builder(ratio).build(0, step.common("main", padding))
            metadata[layer.prefix] = record(DeepseekV4FlashMLAMetadata, main)
        q = torch.randn(total + padding, v4.HEADS, 512).bfloat16()
        kv, positions = torch.randn(total + padding, 512).bfloat16(), step.positions(padding)
        queries, rows = written(q, kv, positions, layer.rotary_emb.cos_sin_cache, layer.eps)
        values = [encoded(x[:total].reshape(-1, 512), kind, 1.0)[1] for x in (queries, rows)]
        slots = common.slot_mapping[:total]
        step.exact[1][slots] = values[1]
        q = layer._fused_qnorm_rope_kv_insert(q, kv, positions, metadata)
        assert q.dtype == step.window.storage.dtype
        output = layer._alloc_attn_out(len(q), kv) if hasattr(layer, "_alloc_attn_out") else step.output(padding)
        assert (output.dtype, output.shape) == (torch.bfloat16, q.shape)
        context = SimpleNamespace(attn_metadata=metadata)
        monkeypatch.setattr(v4_layer, "get_forward_context", lambda: context)
        layer.forward_mqa(q, kv, positions, output)
        step.agrees(output[:total], ratio, values[0].view(step.q.shape))
        context.attn_metadata = None
        layer.forward_mqa(q.bfloat16(), kv, positions, output)
        assert output.eq(0).all(), "a warm-up run"


@pytest.mark.parametrize("heads", [5, 128])
def test_outputs_are_bf16_at_any_number_of_heads(built: Built, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's FlashInfer layer may have the kernel quantise the output of 128 heads; ours never does."""
    monkeypatch.setattr(flashinfer_sparse, "rope_quant_unsupported_reason", lambda _: None, raising=False)
    with built("fp8_e4m3", heads=heads) as (_, layers):
        layer = layers[1]
        assert layer.padded_heads == heads
        hidden = torch.zeros(2, 8, dtype=torch.bfloat16)
        output = layer._alloc_attn_out(2, hidden) if hasattr(layer, "_alloc_attn_out") else None
        assert output is None or (output.dtype, output.shape) == (torch.bfloat16, (2, heads, 512))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_the_compressor_stores_what_the_layer_holds(built: Built, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's compressor asks the layer for its cache and its scale."""
    asked: dict[str, Any] = {}
    for name in ("compress_norm_rope_store_cutedsl", "_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL"):
        monkeypatch.setattr(sys.modules[_COMPRESSOR], name, lambda **options: asked.update(options), raising=False)
    for name in ("save_partial_states", "_SAVE_PARTIAL_STATES_KERNEL"):
        monkeypatch.setattr(engine_compressor, name, lambda *_, **__: None, raising=False)
    step = PlainStep(KIND_OF[dtype], [1], [300], scale=1.0)
    with built(dtype) as (_, layers):
        layer = layers[4]
        bind(layer, step, 4)
        layer.compressor.state_cache.kv_cache = torch.zeros(2, 4, 2048)
        state = SimpleNamespace(
            token_to_req_indices=None,
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            block_table=None,
            block_size=4,
            c128_boundary=None,
        )
        context = SimpleNamespace(
            attn_metadata={layer.compressor.state_cache.prefix: state, layer.prefix: None}, cudagraph_runtime_mode=None
        )
        monkeypatch.setattr(engine_compressor, "get_forward_context", lambda: context)
        layer.compressor(torch.zeros(1, 2048), step.positions(), layer.rotary_emb)
        assert asked["kv_cache"] is layer.kv_cache
        assert (asked["store_full_kv"], asked["store_full_fp8"]) == (True, dtype == "fp8_e4m3")
        scale = asked["fp8_scale"]
        assert scale is None if dtype == "bfloat16" else scale.tolist() == [1.0]


class Model:
    """A model class of vLLM's, as far as the plugin looks."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        kind = model._select_dsv4_attn_cls(vllm_config)
        vllm_config.compilation_config.static_forward_context["layers.0.attn"] = kind.__new__(kind)


@pytest.mark.usefixtures("built")
def test_a_model_is_refused_where_vllm_cannot_write_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(dtype: str) -> type[Any]:
        config = config_with(AttentionBackendEnum.CUSTOM, dtype)
        v4_plugin._checked(Model, "Model")(vllm_config=config)
        return type(config.compilation_config.static_forward_context["layers.0.attn"])

    assert start("auto") is start("fp8_e4m3") is TamisV4PlainAttention
    assert start("fp8") is start("fp8_ds_mla") is TamisV4Attention
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*, got fp8_e5m2"):
        start("fp8_e5m2")
    monkeypatch.delattr(torch.ops._C, _WRITERS["bf16"])
    with pytest.raises(ValueError, match="bfloat16 needs rows in bf16, which this vLLM cannot write"):
        start("bfloat16")
    assert start("fp8_e4m3") is TamisV4PlainAttention
    monkeypatch.delitem(sys.modules, _COMPRESSOR)
    with pytest.raises(ValueError, match="cutedsl failed with ModuleNotFoundError"):
        start("fp8_e4m3")
