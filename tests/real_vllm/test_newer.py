"""What newer versions of vLLM ask of a backend: index groups, drafts dropped on the device, assigned buffers."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
import v4_standin as v4
from configured import make_config
from engine_standin import BF16, LATENT, ROPE, close
from test_attention import PAGE, common_of, make_builder, serve
from test_plugin import choose
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tamis.integrations.vllm import index_group
from tamis.integrations.vllm.classes.v4_metadata import V4MetadataBuilder
from tamis.integrations.vllm.plugin import Builder

ADAPTIVE = SimpleNamespace(
    num_speculative_tokens=2, parallel_drafting=False, enable_adaptive_verification=True, method="mtp"
)
ADAPTS = hasattr(AttentionBackend, "supports_device_cpu_query_lens_mismatch")
"""Whether this version drops drafts on the device, from 0.28 on."""


def test_layers_of_vllms_index_groups_translate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of layers, built with vLLM's own builder of groups, in its order of calls, on one of two ranks."""
    engines = pytest.importorskip("vllm.v1.attention.backends.mla.index_group", reason="from vLLM 0.30 on")
    ranks, step = 2, engine.step("mixed_small", 16)
    group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    for name, found in (("get_dcp_group", group), ("get_dcp_world_size_and_rank", (ranks, 0))):
        monkeypatch.setattr(parallel_state, name, lambda *_, found=found: found, raising=False)
    made = []
    real = index_group.translate_positions
    monkeypatch.setattr(index_group, "translate_positions", lambda call: made.append(call) or real(call))
    config = make_config(8, ranks=ranks)
    table, _, pages = step.place(PAGE)
    impl: Any = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    indexer = SimpleNamespace(topk_indices_buffer=step.positions.clone())
    with set_current_vllm_config(config):
        builder = engines.SparseMLAIndexGroupBuilder(indexer.topk_indices_buffer)
        shared = {"topk_indices_buffer": indexer.topk_indices_buffer, "index_group_builder": builder}
        layers = [engine.impl(8, cls=impl, indexer=has, **shared) for has in (indexer, None, None, indexer, None)]
        alone = engine.impl(8, cls=impl, topk_indices_buffer=step.positions)
    storage = torch.randn(pages, PAGE, LATENT + ROPE).bfloat16()
    metadata_builder = make_builder(config)
    common = common_of(step, table, torch.full((step.tokens,), -1))
    expected = alone.forward_mqa(step.q, storage, metadata_builder.build(0, common), engine.layer())
    made.clear()
    for _ in range(2):
        metadata = metadata_builder.build(0, common)
        for layer in layers:
            layer.record_logical_topk_ready()
            layer.prepare_for_batch(metadata)
            for ours, theirs in zip(
                layer.forward_mqa(step.q, storage, metadata, engine.layer()), expected, strict=True
            ):
                assert torch.equal(ours, theirs)
    assert len(made) == 4


@pytest.mark.skipif(not ADAPTS, reason="from vLLM 0.28 on")
@pytest.mark.usefixtures("hopper")
def test_adaptive_verification_is_accepted(current: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # The selector asks it which model is built. It wants vLLM's kernels.
    compiling: Any = ModuleType("vllm.compilation.backends")
    compiling.model_tag = "backbone"
    monkeypatch.setitem(sys.modules, "vllm.compilation.backends", compiling)
    current.speculative_config = ADAPTIVE  # type: ignore[assignment]
    assert choose() is AttentionBackendEnum.CUSTOM.get_class()
    if hasattr(AttentionMetadataBuilder, "get_varlen_cudagraph_max_query_len"):
        assert Builder.get_varlen_cudagraph_max_query_len(current, None) == 600


def test_query_lengths_come_from_the_device() -> None:
    """vLLM's record of a batch whose drafts were dropped on the device: on the host only the sum is right."""
    step = engine.make_step([300, 40, 700], [3, 1, 2], 16)
    config = make_config(speculative=ADAPTIVE)
    table, slots, _ = step.place(PAGE)
    common = common_of(step, table, step.new_slots(slots))
    common.query_start_loc_cpu = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    record, out = serve(step, config, common=common)
    assert record.req_id_per_token.tolist() == [0, 0, 0, 1, 2, 2]
    assert (record.num_decodes, record.num_prefills) == (3, 0)
    close(out, engine.dense_fp64(step)[0], BF16)


def test_a_buffer_that_is_assigned_replaces_the_indexers() -> None:
    """Hy4's MTP layers are given the target model's buffer after they were built."""
    step = engine.make_step([300, 40], [1, 3], 16)
    impl: Any = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    with set_current_vllm_config(make_config()):
        layer = engine.impl(cls=impl, indexer=SimpleNamespace(topk_indices_buffer=torch.zeros_like(step.positions)))
    layer.topk_indices_buffer = step.positions
    assert layer.topk_indices_buffer is step.positions
    table, slots, pages = step.place(PAGE)
    storage = torch.full((pages, PAGE, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
    for rows, at in zip(step.rows, slots, strict=True):
        layer.do_kv_cache_update(*rows.split([LATENT, ROPE], 1), storage, at)
    metadata = make_builder(make_config()).build(0, common_of(step, table, step.new_slots(slots)))
    close(layer.forward_mqa(step.q, storage, metadata, engine.layer())[0], engine.dense_fp64(step)[0], BF16)


@pytest.mark.parametrize("ratio", [4, 128])
def test_tokens_per_entry_are_read_from_vllms_own_spec(ratio: int) -> None:
    """`compress_ratio` is `tokens_per_state` from 0.29 on."""
    name = "tokens_per_state" if hasattr(MLAAttentionSpec, "tokens_per_state") else "compress_ratio"
    spec = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=512, dtype=torch.uint8, **{name: ratio})
    builder = V4MetadataBuilder(spec, ["layer"], v4.engine_config(), "cpu")
    assert builder.compress_ratio == ratio
    assert builder.compressed_slot_mapping_buffer is not None
