"""The engine adapter's per-step metadata, field by field against a slow recomputation."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
from engine_standin import LATENT, NOPE, ROPE, VALUE, Step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tamis.integrations.vllm.fp8_metadata import FP8KernelMetadata, FP8SeparatePrefillDecode
from tamis.integrations.vllm.metadata import MlaDims, SparseMetadataBuilder
from tamis.step import planner as planning


def split_slowly(queries: list[int], threshold: int) -> tuple[int, int, int, int]:
    """Decodes, prefills and their tokens: request by request, as the rules for uniform decodes read."""
    decodes = 0
    for query in queries:
        fits = query <= threshold and (threshold == 1 or query in (0, queries[0]))
        if not fits:
            break
        decodes += 1
    tokens = sum(queries[:decodes])
    return decodes, len(queries) - decodes, tokens, sum(queries) - tokens


@cache
def one_builder(drafts: int) -> SparseMetadataBuilder:
    """The same buffers for every example: what an earlier step left there must not show."""
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return engine.builder(engine.config(64, "fp8_ds_mla", max_length=256, speculative=speculative), 16)


def shuffled(lengths: list[int], queries: list[int], block_size: int = 16) -> tuple[Tensor, Tensor]:
    of = Step(tuple(lengths), tuple(queries), (), torch.empty(0), torch.empty(0))
    table, slots, _ = of.place(block_size)
    return table, of.new_slots(slots)


requests = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 200)), min_size=1, max_size=6)


@given(requests, st.integers(0, 2), st.integers(0, 5), st.integers(0, 2), st.booleans())
@settings(max_examples=60, deadline=None)
def test_builder_fields(shape: list[tuple[int, int]], drafts: int, pad: int, empty: int, fast: bool) -> None:
    shape = sorted(shape)
    queries, lengths = [q for q, _ in shape], [q + context for q, context in shape]
    tokens, count = sum(queries), len(queries) + empty
    table, slots = shuffled(lengths, queries)
    common = engine.common(lengths, queries, table, slots, padded_tokens=tokens + pad, padded_requests=count)
    kept = {k: v.clone() for k, v in vars(common).items() if isinstance(v, Tensor)}
    builder = one_builder(drafts)
    metadata = builder.build(len(shape), common, fast_build=fast)

    assert (metadata.num_reqs, metadata.num_actual_tokens) == (count, tokens + pad)
    assert (metadata.max_query_len, metadata.max_seq_len) == (max(queries), max(lengths))
    assert (metadata.block_size, metadata.topk_tokens, metadata.prefill) == (16, engine.TOPK, None)
    ids = [r for r, q in enumerate(queries) for _ in range(q)]
    assert metadata.req_id_per_token.tolist() == ids + [0] * pad
    assert metadata.slot_mapping.tolist() == slots.tolist() + [-1] * pad
    assert metadata.seq_lens.tolist() == lengths + [0] * empty
    assert metadata.query_start_loc.tolist() == common.query_start_loc.tolist()
    assert torch.equal(metadata.block_table[:, : table.shape[1]], common.block_table_tensor)
    decodes, prefills, decode_tokens, prefill_tokens = split_slowly(queries + [0] * empty, 1 + drafts)
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, prefills)
    padding = (pad, 0) if prefills == 0 else (0, pad)
    assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (
        decode_tokens + padding[0],
        prefill_tokens + padding[1],
    )
    assert metadata.prefill_max_seq_len == max([*lengths, *[0] * empty][decodes:], default=0)
    for name, value in kept.items():
        assert torch.equal(getattr(common, name), value), name


def test_nothing_moves_and_nothing_stale_is_left() -> None:
    """Captured graphs read the builder's one buffer and the engine's tensors, at places that never change."""
    builder = engine.builder(engine.config(16, "fp8_ds_mla"))
    buffers = set()
    for turn in range(20):
        queries = [1] * (turn % 7) + [turn + 1]
        lengths = [q + 3 * turn for q in queries]
        common = engine.common(lengths, queries, *shuffled(lengths, queries, 64))
        metadata = builder.build(0, common)
        buffers.add(metadata.req_id_per_token.data_ptr())
        held = metadata.step.held.buffer
        assert held.tolist() == [n for n, q in enumerate(queries) for _ in range(q)] + [0] * (600 - sum(queries))
        for name in ("query_start_loc", "slot_mapping", "seq_lens"):
            assert getattr(metadata, name).data_ptr() == getattr(common, name).data_ptr()
        assert metadata.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert len(buffers) == 1


def test_a_step_is_planned_where_prefills_are_gathered_and_elsewhere_on_demand() -> None:
    """A plan fills buffers, which a captured graph of separate steps must find filled."""
    common = engine.common([40, 50], [1, 7], *shuffled([40, 50], [1, 7], 64))
    separate = engine.builder(engine.config(64, "fp8_ds_mla")).build(0, common)
    assert "plan" in vars(separate)
    direct = engine.builder(engine.config(16, "fp8_ds_mla")).build(0, common)
    assert "plan" not in vars(direct)
    assert direct.plan.positions.tolist() == separate.plan.positions.tolist() == [39, *range(43, 50)]
    assert direct.plan is direct.plan


def test_auto_plans_only_the_steps_whose_prefills_gain_from_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "backend_for_stage", lambda *args: SimpleNamespace(direct_prefills=True))
    builder = engine.builder(engine.config(128, "fp8_ds_mla", topk=2048))
    assert builder.planner.mode == "auto"
    for queries, gathers in (([1, 1], False), ([1, 9], False), ([1, 590], True)):
        lengths = [2000] * 2
        metadata = builder.build(0, engine.common(lengths, queries, *shuffled(lengths, queries, 64)))
        assert metadata.gathers == ("plan" in vars(metadata)) == gathers
        assert metadata.fp8_use_mixed_batch == (not gathers)
        kind = FP8SeparatePrefillDecode if gathers else FP8KernelMetadata
        assert isinstance(metadata.fp8_extra_metadata, kind)
        assert metadata.plan.mode == ("separate" if gathers else "mixed")


def test_a_query_may_have_a_row_for_every_slot() -> None:
    """The engine may keep more padding than it counts, up to its largest step."""
    builder = engine.builder(engine.config(max_tokens=12))
    of = engine.make_step([70, 9], [1, 3], 16)
    table, slots, _ = of.place(64)
    common = engine.common(of.lengths, of.queries, table, of.new_slots(slots))
    for count, most in ((4, 4), (9, 9), (12, 12), (15, 12)):
        common.slot_mapping = torch.full((count,), -1)
        metadata = builder.build(0, common)
        assert metadata.request_ids(most).tolist() == [0, 1, 1, 1] + [0] * (most - 4)
        assert metadata.plan_for(most).rows == most
        for rows in (3, most + 1):
            with pytest.raises(ValueError, match=rf"q must be of 4 \(new tokens\) to {most} rows"):
                metadata.request_ids(rows)
            with pytest.raises(ValueError, match=rf"q must be of 4 \(new tokens\) to {most} rows"):
                metadata.plan_for(rows)
    whole = engine.make_step([70, 9], [5, 7], 16)
    table, slots, _ = whole.place(64)
    assert builder.build(0, engine.common(whole.lengths, whole.queries, table, whole.new_slots(slots))).new_tokens == 12


def test_steps_that_do_not_fit() -> None:
    builder = engine.builder(engine.config(max_tokens=8, max_requests=4))

    def refused(match: str, lengths: list[int], queries: list[int], **changes: Any) -> None:
        common = engine.common(lengths, queries, *shuffled(lengths, queries, 64))
        for name, value in changes.items():
            setattr(common, name, value)
        with pytest.raises((ValueError, TypeError), match=match):
            builder.build(0, common)

    refused("query_starts must be of at most max_tokens=8 tokens, got 9", [9], [9])
    refused("query_starts must be of at most max_requests=4 requests, got 5", [1] * 5, [1] * 5)
    refused("num_actual_tokens must be at most max_num_batched_tokens=8, got 9", [3], [3], num_actual_tokens=9)
    refused("slot_mapping must be at least 3 long, got 2", [3], [3], slot_mapping=torch.zeros(2, dtype=torch.int64))
    wrong = torch.tensor([0, 2, 1], dtype=torch.int32)
    refused("query_starts must be a running sum from 0", [3, 3], [1, 1], query_start_loc_cpu=wrong)
    refused("query_starts must be a running sum from 0", [3, 3], [1, 1], query_start_loc_cpu=wrong + 1)
    wide = torch.zeros(1, 1, dtype=torch.int64)
    refused("block_table_tensor must be int32, got int64", [3], [3], block_table_tensor=wide)


def test_configs_become_spec_and_limits() -> None:
    settings = engine.config(128, topk=2048, max_tokens=99, max_requests=7, max_length=1000)
    settings.parallel_config.tensor_parallel_size = 4
    builder = engine.builder(settings, 32)
    assert (builder.spec.heads, builder.spec.head_dim, builder.spec.topk, builder.topk_tokens) == (32, 576, 2048, 2048)
    assert builder.mla_dims == MlaDims(LATENT, ROPE, 1536, NOPE, VALUE)
    limits = builder.limits
    assert (limits.max_tokens, limits.max_requests, limits.max_length, limits.page_size) == (99, 7, 1000, 32)
    assert builder._cudagraph_support == "UNIFORM_BATCH"
    for name in ("index_topk", "kv_lora_rank"):
        wrong = engine.config()
        for hf_config in (wrong.model_config.hf_config, wrong.model_config.hf_text_config):
            vars(hf_config).pop(name, None)
        with pytest.raises(ValueError, match=f"hf_config must be one with '{name}'"):
            engine.builder(wrong)


@pytest.mark.parametrize(
    ("speculative", "ranks", "threshold"),
    [
        (None, 1, 1),
        ({"num_speculative_tokens": None}, 1, 1),
        ({"num_speculative_tokens": 3}, 1, 4),
        ({"num_speculative_tokens": 3, "parallel_drafting": True}, 1, 7),
        ({"num_speculative_tokens": 3}, 2, 1),
    ],
)
def test_decode_threshold(speculative: dict[str, Any] | None, ranks: int, threshold: int) -> None:
    drafts = None if speculative is None else SimpleNamespace(**speculative)
    builder = engine.builder(engine.config(speculative=drafts, ranks=ranks))
    assert builder.reorder_batch_threshold == threshold


@pytest.mark.parametrize(
    ("heads", "cache_dtype", "ranks", "mode"),
    [
        (31, "fp8_ds_mla", 1, "mixed"),
        (32, "fp8_ds_mla", 1, "separate"),
        (64, "fp8", 1, "mixed"),
        (128, "auto", 1, "mixed"),
        (64, "fp8_ds_mla", 2, "mixed"),
    ],
)
def test_mode_by_heads_and_cache(heads: int, cache_dtype: str, ranks: int, mode: str) -> None:
    builder = engine.builder(engine.config(heads, cache_dtype, ranks=ranks))
    assert builder.planner.mode == mode
    assert builder.use_fp8_kv_cache == (cache_dtype == "fp8_ds_mla")
    assert builder.fp8_use_mixed_batch == (mode == "mixed")
    if ranks > 1:
        with pytest.raises(ValueError, match="mode must be 'mixed' under decode context parallelism"):
            engine.builder(engine.config(heads, cache_dtype, ranks=ranks), mode="separate")


@pytest.mark.parametrize("own", ["auto", "fp8_ds_mla"])
def test_the_cache_dtype_is_that_of_the_layers(own: str) -> None:
    """Some layers of vLLM, or those that draft, may have another one than the configuration says."""
    other = {"auto": "fp8_ds_mla", "fp8_ds_mla": "auto"}[own]
    of, spec = engine.step("mixed_small", 64), SimpleNamespace(block_size=64, cache_dtype_str=own)
    builder = SparseMetadataBuilder(spec, ["layer"], engine.config(64, other), "cpu")
    served = engine.Served(of, own, planned=builder)
    assert served.metadata.gathers == builder.use_fp8_kv_cache == (own == "fp8_ds_mla")
    engine.close(served.attend()[0], engine.dense("mixed_small", 64), engine.BF16)


def test_host_lengths_may_be_an_upper_bound() -> None:
    """The bound serves the host's decisions; what kernels see are the exact lengths."""
    common = engine.common([40, 50], [1, 1], *shuffled([40, 50], [1, 1], 64))
    common.seq_lens_cpu_upper_bound = torch.tensor([43, 50], dtype=torch.int32)
    metadata = engine.builder(engine.config()).build(0, common)
    assert metadata.seq_lens.tolist() == [40, 50]
    assert metadata.plan.positions.tolist() == [39, 49]
    assert metadata.plan.max_length == 50


class Lazy(SimpleNamespace):
    """As vLLM's record: a host copy that would be made on access unless it is there already."""

    @property
    def seq_lens_cpu(self) -> Tensor:
        raise AssertionError("copied from the device")


def test_no_hidden_copy_to_the_host() -> None:
    common = engine.common([40], [1], *shuffled([40], [1], 64))
    builder = engine.builder(engine.config())
    host = common.seq_lens
    for lazy in (Lazy(**vars(common), _seq_lens_cpu=None), Lazy(**vars(common), _seq_lens_cpu=host)):
        assert builder.build(0, lazy).seq_lens.tolist() == [40]
    common.seq_lens_cpu = torch.tensor([45], dtype=torch.int32)
    assert builder.build(0, common).plan.max_length == 45
    for name in ("seq_lens", "query_start_loc"):
        lost = SimpleNamespace(**vars(common))
        lost.seq_lens_cpu = lost.query_start_loc_cpu = None
        setattr(lost, name, getattr(common, name).to("meta"))
        with pytest.raises(ValueError, match=f"{name} must be accompanied by .* on the host, got int32"):
            builder.build(0, lost)


def test_what_engines_hand_over_in_other_shapes() -> None:
    common = engine.common([40, 50], [1, 1], *shuffled([40, 50], [1, 1], 64))
    expected = engine.builder(engine.config()).build(0, common)
    spare = torch.full((6, 90), 7, dtype=torch.int32)
    spare[:2, : common.block_table_tensor.shape[1]] = common.block_table_tensor
    common.block_table_tensor = spare  # rows and columns to spare
    for name in ("seq_lens", "query_start_loc_cpu"):
        setattr(common, name, torch.cat([getattr(common, name), torch.tensor([9, 9])]))  # and wider numbers
    metadata = engine.builder(engine.config()).build(0, common)
    assert metadata.seq_lens.tolist() == expected.seq_lens.tolist()
    assert metadata.block_table.shape == (2, 90)
    assert metadata.plan.block_table.shape == (2, 2048 // 64)
    assert metadata.block_table[:, 0].tolist() == expected.block_table[:, 0].tolist()
    assert metadata.plan.lengths.tolist() == expected.plan.lengths.tolist()
    common.num_actual_tokens = 1
    with pytest.raises(ValueError, match="num_actual_tokens must be at least the 2 new tokens, got 1"):
        engine.builder(engine.config()).build(0, common)


def test_short_pieces_of_a_prompt_can_be_forced_into_prefill() -> None:
    class Strict(SparseMetadataBuilder):
        treat_short_extends_as_decodes = False

    common = engine.common([40, 50], [1, 1], *shuffled([40, 50], [1, 1], 64))
    common.is_prefilling = torch.tensor([False, True])
    arguments = (SimpleNamespace(block_size=64), ["layer"], engine.config(), "cpu")
    assert SparseMetadataBuilder(*arguments).build(0, common).num_prefills == 0
    assert Strict(*arguments).build(0, common).num_prefills == 1
    common.is_prefilling = common.is_prefilling.to("meta")
    with pytest.raises(ValueError, match="is_prefilling must be on the host"):
        Strict(*arguments).build(0, common)
