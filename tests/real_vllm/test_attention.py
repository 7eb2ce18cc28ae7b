"""Metadata from vLLM's own common records over random batches, and attention on it against dense fp64."""

import inspect
import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import long_context as long
import pytest
import torch
import vllm.version
from configured import make_config
from engine_standin import BF16, LATENT, Served, Step, close
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tamis.integrations.vllm import plugin

PAGE = 64


def common_of(step: Step, table: Tensor, slots: Tensor, tokens: int = 0, requests: int = 0) -> CommonAttentionMetadata:
    """vLLM's record of a step, padded as for a captured graph."""
    standin = engine.common(
        step.lengths, step.queries, table, slots, padded_tokens=tokens or None, padded_requests=requests or None
    )
    return CommonAttentionMetadata(**vars(standin), seq_lens_cpu_upper_bound=standin.seq_lens)


def make_builder(config: VllmConfig) -> Any:
    packed = config.cache_config.cache_dtype == "fp8_ds_mla"
    spec = MLAAttentionSpec(
        block_size=PAGE,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8 if packed else torch.bfloat16,
        cache_dtype_str=config.cache_config.cache_dtype,
    )
    builder: Any = AttentionBackendEnum.CUSTOM.get_class().get_builder_cls()
    return builder(spec, ["layer"], config, torch.device("cpu"))


def random_batch(choice: random.Random) -> tuple[list[int], list[int]]:
    """Lengths and new tokens: decodes first, then pieces of prompts."""
    decodes, prefills = choice.randint(0, 5), choice.randint(0, 3)
    decodes = decodes or (prefills == 0)
    lengths = [choice.randint(1, 900) for _ in range(decodes)]
    queries = [1] * decodes
    for _ in range(prefills):
        lengths.append(choice.randint(2, 900))
        queries.append(choice.randint(2, min(120, lengths[-1])))
    return lengths, queries


def serve(step: Step, config: VllmConfig, padding: int = 0, common: Any = None) -> tuple[Any, Tensor]:
    """The step's metadata and output, as a layer in vLLM gets them."""
    with set_current_vllm_config(config):
        builder = make_builder(config)
        table, slots, _ = step.place(PAGE)
        common = common or common_of(
            step, table, step.new_slots(slots), step.tokens + padding, len(step.lengths) + (1 if padding else 0)
        )
        impl: Any = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
        served = Served(step, config.cache_config.cache_dtype, planned=builder, shared=common, cls=impl)
    q = torch.cat((step.q, torch.ones(padding, *step.q.shape[1:]).to(step.q.dtype)))
    room = torch.full((padding, engine.TOPK), 7, dtype=torch.int32)
    served.indexer.topk_indices_buffer = torch.cat((served.indexer.topk_indices_buffer, room))
    latent, rope = q.split([LATENT, 64], -1)
    out, lse = served.impl.forward_mqa((latent, rope), served.storage, served.metadata, engine.layer())
    assert lse is None
    return served.metadata, out


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int, heads: int, cache_dtype: str) -> None:
    choice = random.Random(100 * heads + seed)
    lengths, queries = random_batch(choice)
    step = engine.make_step(lengths, queries, heads)
    config = make_config(heads, cache_dtype)
    padding = choice.choice([0, 3]) if len(lengths) == sum(queries) else 0
    record, out = serve(step, config, padding)
    table, slots, _ = step.place(PAGE)
    expected = split_decodes_and_prefills(common_of(step, table, step.new_slots(slots)), decode_threshold=1)
    empty = 1 if padding else 0
    assert (record.num_decodes, record.num_prefills) == (expected[0] + empty, expected[1])
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (expected[2] + padding, expected[3])
    requests = [number for number, query in enumerate(queries) for _ in range(query)]
    assert record.req_id_per_token.tolist() == requests + [0] * padding
    assert record.num_actual_tokens == step.tokens + padding
    assert record.prefill is None
    close(out[: step.tokens], engine.dense_fp64(step)[0], BF16)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_a_chunk_without_tokens_and_a_long_context(cache_dtype: str) -> None:
    """Where vLLM 0.26's own prefill fails on Hopper: vllm-project/vllm#54179, #52339, #51486, #49922."""
    step = long.LongStep(4)
    config = make_config(4, cache_dtype, topk=long.TOPK, max_length=long.MAX_LENGTH)
    impl: Any = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    with set_current_vllm_config(config):
        common = CommonAttentionMetadata(**vars(step.common()))
        record, out = step.run(cache_dtype, cls=impl, builder=make_builder(config), common=common)
    long.check_record(record)
    long.check_output(out, step.expected())


def test_queries_are_joined_by_the_engines_kernel_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.make_step([300, 40], [1, 3], 16)
    plain = serve(step, make_config())[1]
    joined = []

    def concat_mla_q(latent: torch.Tensor, rope: torch.Tensor, out: torch.Tensor) -> None:
        joined.append(torch.cat((latent, rope), -1, out=out))

    monkeypatch.setattr(_custom_ops, "concat_mla_q", concat_mla_q)
    assert torch.equal(serve(step, make_config())[1], plain)
    assert not joined  # on the host
    monkeypatch.setattr(plugin, "engine_joins", lambda latent, rope: True)
    assert torch.equal(serve(step, make_config())[1], plain)
    assert [q.shape for q in joined] == [(4, 16, 576)]


def test_rows_are_written_by_the_engines_kernel_where_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    step = engine.make_step([300, 40], [1, 3], 16)
    plain = serve(step, make_config())[1]
    written = []

    def concat_and_cache_mla(
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        scale: torch.Tensor,
    ) -> None:
        written.append((kv_cache_dtype, len(kv_c)))
        kv_cache.view(-1, 576)[slot_mapping] = torch.cat((kv_c, k_pe), -1)

    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", concat_and_cache_mla)
    assert torch.equal(serve(step, make_config())[1], plain)
    assert not written  # on the host
    monkeypatch.setattr(plugin, "engine_writes", lambda *arguments: True)
    assert torch.equal(serve(step, make_config())[1], plain)
    assert written == [("auto", 299), ("auto", 37), ("auto", 4)]
    monkeypatch.setattr(plugin.Impl, "tamis_backend", "reference")
    assert torch.equal(serve(step, make_config())[1], plain)
    assert len(written) == 3  # a backend that was chosen by name writes by itself


def test_speculative_decode_is_decode() -> None:
    drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False, enable_adaptive_verification=False)
    step = engine.make_step([300, 40, 700], [3, 3, 3], 16)
    record, out = serve(step, make_config(speculative=drafts))
    assert (record.num_decodes, record.num_prefills, record.num_decode_tokens) == (3, 0, 9)
    close(out, engine.dense_fp64(step)[0], BF16)


def test_graphs_find_their_buffers_again() -> None:
    """What a captured graph reads must lie where it was, whatever the step, and hold nothing stale."""
    builder = make_builder(make_config())
    wide = engine.make_step([500, 400, 300], [1, 1, 6], 16)
    table, slots, _ = wide.place(PAGE)
    common = common_of(wide, table, wide.new_slots(slots))
    captured = builder.build_for_cudagraph_capture(common)
    engines = {"query_start_loc", "slot_mapping", "seq_lens"}
    for name in engines:
        assert getattr(captured, name).data_ptr() == getattr(common, name).data_ptr()
    assert captured.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    small = engine.make_step([70, 90], [1, 1], 16)
    table, slots, _ = small.place(PAGE)
    record = builder.build(0, common_of(small, table, small.new_slots(slots), tokens=8, requests=8))
    assert record.req_id_per_token.data_ptr() == captured.req_id_per_token.data_ptr()
    assert captured.req_id_per_token.tolist() == [0, 1] + [0] * 6


def test_bounds_beyond_the_longest_request_are_accepted() -> None:
    """While drafting, vLLM counts its upper bounds up without looking at the limit."""
    step = engine.make_step([2048], [1], 16)
    table, slots, _ = step.place(PAGE)
    common = common_of(step, table, step.new_slots(slots))
    common.seq_lens_cpu_upper_bound = torch.tensor([2050], dtype=torch.int32)
    assert make_builder(make_config()).build_for_drafting(common, 1).num_decodes == 1


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_cache_shapes(cache_dtype: str) -> None:
    """vLLM 0.25 passes "auto" for packed rows. Releases up to 0.28 ask too, and mean what they say."""
    backend: Any = AttentionBackendEnum.CUSTOM.get_class()
    row, always_auto = 656 if cache_dtype == "fp8_ds_mla" else 576, vllm.version.__version__.startswith("0.25.")
    with set_current_vllm_config(make_config(cache_dtype=cache_dtype)):
        assert backend.get_kv_cache_shape(5, 64, 1, 576, cache_dtype) == (5, 64, row)
        assert backend.get_kv_cache_shape(5, 64, 1, 576, "auto") == (5, 64, row if always_auto else 576)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_kv_connectors_accept_the_caches(cache_dtype: str) -> None:
    """Releases up to 0.28 ask a backend for the shape of a cache that no model has."""
    arguments = {"tp_rank": 0, "tp_size": 1, "block_size": 64, "engine_id": "engine", "is_mla": True, "is_mamba": False}
    backends = [AttentionBackendEnum.CUSTOM.get_class()]
    with set_current_vllm_config(make_config(cache_dtype=cache_dtype)):
        TransferTopology(**arguments, total_num_kv_heads=1, attn_backends=backends)


@pytest.mark.parametrize("interleave", [1, 16])
def test_context_parallel_ranks_merge_by_lse(interleave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's base class tells a layer its rank; what the ranks return, merged as vLLM merges it, is the whole."""
    ranks, step = 2, engine.step("mixed_small", 16)
    config = make_config(8, ranks=ranks)
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    table, _, pages = step.place(PAGE)
    metadata = make_builder(config).build(0, common_of(step, table, torch.full((step.tokens,), -1)))
    impl_class: Any = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    outs, lses = [], []
    for rank in range(ranks):
        group = SimpleNamespace(world_size=ranks, rank_in_group=rank)
        for name, found in (("get_dcp_group", group), ("get_dcp_world_size_and_rank", (ranks, rank))):
            monkeypatch.setattr(parallel_state, name, lambda *_, found=found: found, raising=False)
        with set_current_vllm_config(config):
            impl = engine.impl(8, cls=impl_class, topk_indices_buffer=step.positions)
        storage = torch.full((pages, PAGE, 576), torch.nan, dtype=torch.bfloat16)
        for request, rows in enumerate(step.rows):
            position = torch.arange(len(rows))
            inside = position // (interleave * ranks) * interleave + position % interleave
            slots = table[request, inside // PAGE].long() * PAGE + inside % PAGE
            slots[position // interleave % ranks != rank] = -1
            impl.do_kv_cache_update(*rows.split([LATENT, 64], 1), storage, slots)
        out, lse = impl.forward_mqa(step.q, storage, metadata, engine.layer())
        assert lse is not None
        outs.append(out.double())
        lses.append(lse.double())
    weights = torch.softmax(torch.stack(lses), 0).unsqueeze(-1)
    close((weights * torch.stack(outs)).sum(0), engine.dense_fp64(step)[0], BF16)


def test_records_have_the_fields_of_vllms_own() -> None:
    """Code that reads vLLM's record of a step over packed rows finds its names in ours."""
    from vllm.v1.attention.backends.mla import flashmla_sparse

    theirs, ours = flashmla_sparse.FlashMLASparseMetadata, plugin.Metadata
    builder = make_builder(make_config(32, "fp8_ds_mla"))
    step = engine.make_step([70, 90], [1, 9], 32)
    table, slots, _ = step.place(PAGE)
    record = builder.build(0, common_of(step, table, step.new_slots(slots)))
    only_dense = {"causal", "decode", "decode_max_query_len", "head_dim"}
    missing = [field.name for field in fields(theirs) if not hasattr(record, field.name)]
    assert set(missing) <= only_dense
    for path in ("FP8KernelMetadata", "FP8SeparatePrefillDecode"):
        same_fields(getattr(theirs, path), getattr(ours, path))
    pairs = [(c.FP8SeparatePrefillDecode.Decode, c.FP8SeparatePrefillDecode.Prefill) for c in (theirs, ours)]
    for mine, other in zip(*pairs, strict=True):
        same_fields(mine, other)
    same_fields(pairs[0][1].Chunk, pairs[1][1].Chunk)


def same_fields(theirs: type[Any], ours: type[Any]) -> None:
    assert {field.name for field in fields(theirs)} <= {field.name for field in fields(ours)}


def test_the_translation_has_the_arguments_of_vllms_own() -> None:
    from vllm.v1.attention.backends.mla import sparse_utils as engines

    from tamis.integrations.vllm import sparse_utils

    name = "triton_convert_req_index_to_global_index"
    theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (engines, sparse_utils))
    # Ours has the order of the newest version, in which all but the first three arguments are passed by name.
    assert set(theirs) <= set(ours)
    assert list(theirs)[:4] == list(ours)[:4]
    if len(theirs) == len(ours):
        assert list(theirs) == list(ours)
