"""Step records with vLLM's fields: made without a builder, for FP8 caches, for steps without tokens, used too late."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import numpy as np
import pytest
import torch
from engine_standin import BF16, LATENT, Served, close

from tamis.integrations.vllm.fp8_metadata import FP8KernelMetadata, FP8SeparatePrefillDecode
from tamis.integrations.vllm.metadata import SparseMetadata

FIELDS = [
    "num_reqs",
    "max_query_len",
    "max_seq_len",
    "num_actual_tokens",
    "query_start_loc",
    "slot_mapping",
    "block_table",
    "req_id_per_token",
    "seq_lens",
    "block_size",
    "topk_tokens",
    "fp8_extra_metadata",
    "fp8_use_mixed_batch",
]
"""Those of vLLM's record of a step over packed rows."""


def by_hand(record: SparseMetadata, **changes: Any) -> SparseMetadata:
    return SparseMetadata(**({name: getattr(record, name) for name in FIELDS} | changes))


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_a_record_made_by_hand_serves_attention(cache_dtype: str) -> None:
    assert [field.name for field in fields(SparseMetadata)][: len(FIELDS)] == FIELDS
    served = Served(engine.step("mixed_small", 16), cache_dtype)
    expected = served.attend()[0]
    built = served.metadata
    served.metadata = by_hand(built)
    assert torch.equal(served.attend()[0], expected)
    made = served.metadata
    for name in ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens", "prefill_max_seq_len"):
        assert getattr(made, name) == getattr(built, name)
    assert (made.prefill, made.new_tokens) == (None, 12)
    short = made.request_ids(5)
    assert short.tolist() == built.req_id_per_token[:5].tolist()
    with pytest.raises(ValueError, match=r"q must be of 0 \(new tokens\) to 12 rows .*got 13"):
        made.request_ids(13)
    with pytest.raises(ValueError, match="attn_metadata must be made by a builder to have a plan"):
        _ = made.plan
    with pytest.raises(ValueError, match="query_start_loc must be accompanied by"):
        _ = by_hand(built, query_start_loc=built.query_start_loc.to("meta")).num_decodes


def test_the_fewest_fields() -> None:
    served = Served(engine.step("mixed_small", 16))
    names = FIELDS[: FIELDS.index("seq_lens")]
    served.metadata = SparseMetadata(*(getattr(served.metadata, name) for name in names))
    close(served.attend()[0], engine.dense("mixed_small", 16), BF16)
    assert (served.metadata.block_size, served.metadata.topk_tokens) == (64, 2048)
    assert (served.metadata.fp8_extra_metadata, served.metadata.fp8_use_mixed_batch) == (None, False)


def test_one_call_form_over_a_record_made_by_hand() -> None:
    """It writes one row per slot that the record has."""
    of = engine.make_step([60, 20], [1, 6], 4)
    weight = torch.randn(4 * (engine.NOPE + engine.VALUE), LATENT).bfloat16() * LATENT**-0.5
    served = Served(of, kv_b_proj=SimpleNamespace(weight=weight))
    served.impl.process_weights_after_loading(torch.bfloat16)
    q = torch.randn(7, 4, engine.NOPE + engine.ROPE).bfloat16()
    latent, rope = of.new_rows().split([LATENT, engine.ROPE], 1)
    outs = []
    for record in (served.metadata, by_hand(served.metadata)):
        storage = served.storage.clone()
        storage.flatten(0, 1)[served.slots] = torch.nan
        out = torch.empty(7, 4, engine.VALUE).bfloat16()
        outs.append(served.impl.forward(engine.layer(), q, latent, rope, storage, record, out))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_fp8_record_of_one_call_for_all_tokens(ranks: int) -> None:
    builder = engine.builder(engine.config(16, "fp8_ds_mla", max_length=1000, ranks=ranks))
    record = builder.build(0, Served(engine.step("mixed_small", 16)).common)
    assert record.fp8_use_mixed_batch
    extra = record.fp8_extra_metadata
    assert isinstance(extra, FP8KernelMetadata)
    assert isinstance(extra, SparseMetadata.FP8KernelMetadata)
    assert (extra.cache_lens.tolist(), extra.dummy_block_table.shape) == ([1000], (1, 1))
    assert extra.scheduler_metadata.num_splits is None
    assert (
        engine.builder(engine.config(16)).build(0, Served(engine.step("mixed_small", 16)).common).fp8_extra_metadata
        is None
    )


def test_the_fp8_record_of_prefills_apart() -> None:
    """Field by field: two decodes of two tokens and one of padding, three prefills in two chunks."""
    lengths, queries = [90, 40, 70, 300, 500], [2, 2, 9, 5, 30]
    of = engine.make_step(lengths, queries, 32)
    drafts = SimpleNamespace(num_speculative_tokens=1)
    settings = engine.config(32, "fp8_ds_mla", max_length=700, speculative=drafts)
    builder = engine.builder(settings, workspace_rows=700)
    served = Served(of, "fp8_ds_mla", planned=builder)
    record = served.metadata
    extra = record.fp8_extra_metadata
    assert isinstance(extra, FP8SeparatePrefillDecode)
    assert not record.fp8_use_mixed_batch
    assert (extra.num_decodes, extra.num_decode_tokens) == (2, 4)
    assert (extra.num_prefills, extra.num_prefill_tokens) == (3, 44)
    assert extra.decode is not None
    assert (extra.decode.decode_query_len, extra.decode.kernel_metadata.cache_lens.tolist()) == (2, [700, 700])
    assert extra.decode.kernel_metadata.dummy_block_table.shape == (2, 1)
    assert extra.decode.seq_lens is not None
    assert extra.decode.seq_lens.tolist() == [90, 40]
    part = extra.prefill
    assert part is not None
    assert part.request_ids.tolist() == [-1] * 4 + [0] * 9 + [1] * 5 + [2] * 30
    assert part.workspace_starts.tolist() == [0, 70, 0]
    assert part.seq_lens is not None
    assert part.seq_lens.tolist() == [70, 300, 500]
    first, second = part.chunks
    assert (first.tokens_slice, second.tokens_slice) == (slice(4, 18), slice(18, 48))
    assert (first.req_start_idx, second.req_start_idx) == (0, 2)
    assert (first.chunk_tot_seqlen, second.chunk_tot_seqlen) == (370, 500)
    assert (first.workspace_starts.tolist(), second.workspace_starts.tolist()) == ([0, 70], [0])
    width = served.table.shape[1]
    assert torch.equal(first.block_table[:, :width], served.table[2:4])
    assert torch.equal(second.block_table[:, :width], served.table[4:])
    assert first.seq_lens is not None
    assert first.seq_lens.tolist() == [70, 300]
    padded = engine.common(lengths, queries, served.table, served.slots, padded_tokens=60)
    again = builder.build(0, padded).fp8_extra_metadata
    assert isinstance(again, FP8SeparatePrefillDecode)
    assert again.prefill is not None
    assert again.prefill.request_ids.tolist() == part.request_ids.tolist() + [-1] * 12


def test_the_fp8_record_of_decodes_alone() -> None:
    of = engine.make_step([90, 40], [1, 1], 32)
    extra = Served(of, "fp8_ds_mla").metadata.fp8_extra_metadata
    assert isinstance(extra, FP8SeparatePrefillDecode)
    assert extra.prefill is None
    assert (extra.num_prefills, extra.num_prefill_tokens, extra.num_decode_tokens) == (0, 0, 2)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize(("requests", "rows"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_steps_without_a_token(requests: int, rows: int, cache_dtype: str) -> None:
    """No request, or some that have nothing to do; no row, or rows of padding."""
    of = engine.make_step([60, 20], [1, 6], 32)
    served = Served(of, cache_dtype, kv_b_proj=SimpleNamespace(weight=torch.randn(32 * 256, LATENT)))
    served.impl.process_weights_after_loading(torch.bfloat16)
    served.impl.need_to_return_lse_for_decode = True
    common = engine.common([], [], served.table[:0], served.slots[:0], padded_tokens=rows, padded_requests=requests)
    served.metadata = record = served.builder.build(0, common)
    assert (record.num_reqs, record.num_actual_tokens, record.num_prefills) == (requests, rows, 0)
    served.indexer.topk_indices_buffer.fill_(-1)
    before = served.storage.clone()
    for output in (None, torch.full((rows + 2, 32, LATENT), 3.0).bfloat16()):
        out, lse = served.attend(of.q[:rows], output=output)
        assert lse is not None
        assert (out.shape, lse.shape) == ((rows, 32, LATENT), (rows, 32))
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()
        assert out.dtype == torch.bfloat16
    out, _ = served.attend(of.q[:rows].to(torch.float8_e4m3fn))
    assert (out.dtype, out.shape) == (torch.bfloat16, (rows, 32, LATENT))
    nothing, value = torch.zeros(rows, 32, 192).bfloat16(), torch.full((rows, 32, 128), 3.0).bfloat16()
    latent, rope = torch.zeros(rows, LATENT).bfloat16(), torch.zeros(rows, 64).bfloat16()
    served.impl.forward(engine.layer(), nothing, latent, rope, served.storage, record, value)
    assert value.eq(0).all()
    assert engine.same_bytes(served.storage, before)
    with pytest.raises(ValueError, match="q must be of 0"):
        served.attend(of.q[: rows + 1])
    served.metadata = served.builder.build(0, served.common)
    with pytest.raises(ValueError, match=r"q must be of 7 \(new tokens\)"):
        served.attend(of.q[:0])


def test_a_record_whose_requests_a_later_build_has_renumbered_is_refused() -> None:
    """Records share the builder's buffer of request numbers. An old one is refused where its tokens are others' now."""
    builder = engine.builder(engine.config(16))
    served = Served(engine.make_step([90, 40, 70], [1, 1, 3], 16), planned=builder)
    expected = served.attend()[0]

    def later(*queries: int) -> None:
        lengths = [q + 20 for q in queries]
        of = engine.Step(tuple(lengths), queries, (), torch.empty(0), torch.empty(0))
        table, slots, _ = of.place(64)
        builder.build(0, engine.common(lengths, list(queries), table, of.new_slots(slots)))

    for same in ((1, 1, 3), (1, 1, 3, 5), (1, 1, 7)):
        later(*same)
        assert torch.equal(served.attend()[0], expected), "the same tokens of the same requests"
    for other in ((2, 1, 3), (1, 1), (1, 1, 2, 1), (5,)):
        later(*other)
        with pytest.raises(ValueError, match="attn_metadata must be of the builder's latest step"):
            served.attend()
    fresh = Served(served.of, planned=builder)
    assert torch.equal(fresh.attend()[0], expected)
    step = fresh.metadata.step
    assert step is not None
    assert step.held.ids is step.ids
    assert np.array_equal(step.held.buffer[:5].numpy(), step.ids)


def test_an_assigned_buffer_replaces_the_indexer() -> None:
    """vLLM's drafting layers are given the buffer of another layer after they were made."""
    served = Served(engine.step("mixed_small", 16))
    expected = served.attend()[0]
    held = served.indexer.topk_indices_buffer.clone()
    served.indexer.topk_indices_buffer.zero_()
    served.impl.topk_indices_buffer = held
    assert torch.equal(served.attend()[0], expected)
    assert served.impl.indexer is None
