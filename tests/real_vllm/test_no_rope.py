"""GLM-5.3-Flash's layers inside the real vLLM, on CPU tensors: no rope, and selections of whole groups and a tail."""

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import engine_standin as engine
import pytest
import torch
import vllm
from bounds import relative_error
from configured import make_config
from engine_standin import LATENT, NOPE, VALUE
from packaging.version import Version
from test_attention import PAGE, common_of
from test_layer import BATCHES, HEADS, alone, bind_cache, dense_prefill, make_layer, write_rows  # noqa: F401
from test_plugin import choose
from torch import Tensor
from vllm.config import set_current_vllm_config

from tamis.integrations.vllm.plugin import Backend, Impl

pytestmark = pytest.mark.skipif(Version(vllm.__version__) < Version("0.32"), reason="its rows have other shapes before")
KPOOL, TOPK, WIDTH = 4, 64, 128


@cache
def kpool_operations() -> Any:
    """The module of vLLM that makes positions of groups. Its package also imports vision models and their libraries."""
    path = Path(vllm.__file__).parent / "models/glm5next/nvidia/ops/kpool_compress.py"
    spec = spec_from_file_location("kpool_compress", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine_positions(lengths: tuple[int, ...], queries: tuple[int, ...]) -> Tensor:
    """A buffer of vLLM's width that vLLM's own functions fill from groups."""
    ops = kpool_operations()
    own = [n - q + i for n, q in zip(lengths, queries, strict=True) for i in range(q)]
    seen = torch.tensor(own, dtype=torch.int32) + 1
    groups = torch.full((len(own), TOPK // KPOOL), -1, dtype=torch.int64)
    for token, count in enumerate((seen // KPOOL).tolist()):
        chosen = torch.randperm(count)[: TOPK // KPOOL]
        groups[token, : len(chosen)] = chosen
    tokens = ops.expand_pools_to_tokens(groups, groups >= 0, TOPK, KPOOL).int()
    found = ops.append_tail_to_topk(tokens, seen, seen // KPOOL, KPOOL)
    buffer = torch.full((len(own), WIDTH), -1, dtype=torch.int32)
    buffer[:, : found.shape[1]] = found
    return buffer


@pytest.mark.usefixtures("hopper", "alone", "dense_prefill")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_a_layer_of_vllm_runs_on_tamis(cache_dtype: str, batch: str) -> None:
    config = make_config(HEADS, cache_dtype, dtype=torch.float32, rope=0, topk=TOPK)
    config.cache_config.block_size = PAGE
    of = engine.make_step(*BATCHES[batch], HEADS)
    positions = engine_positions(of.lengths, of.queries)
    of = engine.Step(of.lengths, of.queries, tuple(r[:, :LATENT] for r in of.rows), of.q[..., :LATENT], positions)
    with set_current_vllm_config(config):
        layer = make_layer(config, positions.clone(), rope=0)
        assert layer.attn_backend is Backend
        assert type(layer.impl) is Impl
        assert layer.head_size == 512
        spec = layer.get_kv_cache_spec(config)
        assert spec.page_size_bytes == PAGE * (656 if cache_dtype == "fp8_ds_mla" else 512 * 4)
        table, slots, pages = of.place(PAGE)
        shape = (pages, 1, PAGE, 656 if cache_dtype == "fp8_ds_mla" else 512)
        bind_cache(layer, torch.zeros(shape, dtype=spec.dtype))
        metadata = Backend.get_builder_cls()(spec, ["layer"], config, torch.device("cpu")).build(
            0, common_of(of, table, of.new_slots(slots))
        )
        for rows, at in zip(of.rows, slots, strict=True):
            write_rows(layer, rows.float(), rows.new_zeros(len(rows), 1, 0).float(), at, metadata, cache_dtype)
        q, output = torch.randn(of.tokens, HEADS, NOPE), torch.empty(of.tokens, HEADS * VALUE)
        latent = of.new_rows().float()
        layer.forward_impl(q, latent, latent.new_zeros(len(latent), 1, 0), layer.kv_cache, metadata, output)
    up = layer.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, LATENT)
    absorbed = torch.einsum("thp,hpl->thl", q.double(), up[:, :NOPE])
    whole = engine.Step(of.lengths, of.queries, of.rows, absorbed, positions)
    expected = torch.einsum("thl,hvl->thv", engine.dense_fp64(whole)[0], up[:, NOPE:]).flatten(1)
    assert relative_error(output, expected) < 1e-5


@pytest.mark.usefixtures("hopper")
def test_a_rope_in_rows_of_512_columns_is_refused() -> None:
    config = make_config(HEADS, "auto", rope=64)
    config.model_config.hf_text_config.kv_lora_rank = 448
    with set_current_vllm_config(config), pytest.raises(ValueError, match="head size 512 is for models without a rope"):
        choose(head_size=512)
