"""The engine adapter's attention against dense fp64, over the scenarios of vLLM's own sparse-MLA tests."""

import gc
import weakref
from types import SimpleNamespace

import engine_standin as engine
import pytest
import torch
from engine_standin import BATCHES, BF16, FP8, LATENT, ROPE, SCALE, TOPK, VALUE, Served, Step, close
from torch import Tensor

from tamis.integrations.vllm.impl import SparseImpl
from tamis.ops import Partials, combine_parts

SMALL = ("mixed_small", "small_prefill")


def as_pair(q: Tensor) -> tuple[Tensor, Tensor]:
    """As the engine's layer makes it: the latent part is a transposed view of a per-head product."""
    latent, rope = q.split([LATENT, ROPE], -1)
    return latent.transpose(0, 1).contiguous().transpose(0, 1), rope


SCENARIOS = [(name, tensor_parallel) for name in BATCHES for tensor_parallel in ((1, 2, 4) if name in SMALL else (4,))]


@pytest.mark.parametrize(("name", "tensor_parallel"), SCENARIOS)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_scenarios(name: str, tensor_parallel: int, block_size: int, cache_dtype: str) -> None:
    heads = 128 // tensor_parallel
    served = Served(engine.step(name, heads), cache_dtype, block_size=block_size)
    assert served.builder.planner.mode == ("separate" if cache_dtype == "fp8_ds_mla" else "mixed")
    out, lse = served.attend(as_pair(served.of.q))
    assert out.dtype == torch.bfloat16
    assert out.shape == (served.of.tokens, heads, LATENT)
    assert lse is None
    close(out, engine.dense(name, heads), BF16)


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "fp8"])
@pytest.mark.parametrize("name", ["mixed_medium", "medium_prefill"])
def test_quantisation_error(name: str, cache_dtype: str) -> None:
    """Rows that FP8 cannot hold exactly, as upstream draws them."""
    exact = engine.step(name, 8)
    rows, q = tuple(torch.rand(r.shape).bfloat16() for r in exact.rows), torch.rand(exact.q.shape).bfloat16()
    of = Step(exact.lengths, exact.queries, rows, q, exact.positions)
    expected = engine.dense_fp64(of)[0]
    for mode in ("mixed", "separate"):
        builder = engine.builder(engine.config(8, cache_dtype), mode=mode)
        served = Served(of, cache_dtype, k_scale=3.0, planned=builder)
        close(served.attend(by=engine.layer(2.0, 3.0))[0], expected, FP8)


@pytest.mark.parametrize(("q_scale", "k_scale"), [(1.0, 1.0), (2.0, 3.0)])
@pytest.mark.parametrize(
    ("name", "block_size"), [("mixed_small", 32), ("mixed_medium", 64), ("small_prefill", 64), ("medium_prefill", 32)]
)
def test_per_tensor_fp8(name: str, block_size: int, q_scale: float, k_scale: float) -> None:
    served = Served(engine.step(name, 16, k_scale), "fp8", block_size=block_size, k_scale=k_scale)
    assert served.metadata.plan.workspace is None  # only packed rows are ever gathered
    expected, layer = engine.dense(name, 16, k_scale), engine.layer(q_scale, k_scale)
    quantised = (served.of.q.float() / q_scale).to(torch.float8_e4m3fn)
    out, _ = served.attend(quantised, layer)
    assert out.dtype == torch.bfloat16
    close(out, expected, BF16)
    # A 16-bit query carries no scale, so the layer's number for queries must not count.
    close(served.attend(by=layer)[0], expected, BF16)


def test_scales_are_those_of_the_call() -> None:
    served = Served(engine.step("mixed_small", 16, 0.5), "fp8_e4m3", k_scale=0.5)
    first = served.attend(by=engine.layer(1.0, 0.5))[0]
    again = served.attend(by=engine.layer(1.0, 1.0))[0]
    doubled = [rows.float() * 2 for rows in served.of.rows]
    expected, _ = engine.dense_fp64(
        Step(served.of.lengths, served.of.queries, tuple(doubled), served.of.q, served.of.positions)
    )
    close(again, expected, BF16)
    assert not torch.allclose(first, again, rtol=0.1, atol=0.1)
    assert torch.equal(served.attend(by=engine.layer(1.0, 0.5))[0], first)


def test_query_packed_or_as_a_pair() -> None:
    served = Served(engine.step("mixed_small", 16))
    pair = as_pair(served.of.q)
    assert not pair[0].is_contiguous()
    assert torch.equal(served.attend(pair)[0], served.attend()[0])


@pytest.mark.parametrize("heads", [1, 7, 128])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_any_head_count_without_padding(heads: int, cache_dtype: str) -> None:
    served = Served(engine.make_step([70, 5], [1, 3], heads), cache_dtype)
    out, _ = served.attend()
    assert out.shape == (4, heads, LATENT)
    close(out, engine.dense_fp64(served.of)[0], BF16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_row_dtypes(dtype: torch.dtype) -> None:
    served = Served(engine.step("mixed_small", 16))
    name = "float16" if dtype == torch.float16 else "auto"
    impl = engine.impl(16, name, indexer=served.indexer)
    storage = served.storage.to(dtype)
    out, _ = impl.forward_mqa(served.of.q.to(dtype), storage, served.metadata, engine.layer())
    assert out.dtype == dtype
    close(out, engine.dense("mixed_small", 16), {"rtol": 1e-3, "atol": 1e-3})


def test_lse_is_returned_where_the_engine_merges_ranks() -> None:
    of = engine.step("mixed_small", 16)
    served = Served(of)
    served.indexer.topk_indices_buffer[3] = -1
    served.impl.need_to_return_lse_for_decode = True
    out, lse = served.attend()
    kept = torch.arange(of.tokens) != 3
    assert lse is not None
    torch.testing.assert_close(lse[kept].double(), engine.dense_fp64(of)[1][kept], rtol=1e-5, atol=1e-5)
    assert (lse[3] == -torch.inf).all()
    assert (out[3] == 0).all()


def test_output_buffer_is_written_in_place() -> None:
    served = Served(engine.step("mixed_small", 16))
    expected = served.attend()[0]
    for buffer in (torch.empty(20, 16, LATENT), torch.empty(20, 16 * LATENT)):
        buffer = buffer.bfloat16()
        out, _ = served.attend(output=buffer)
        assert out.data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer[:12].view(12, 16, LATENT), expected)
        assert buffer[12:].isnan().all()
    with pytest.raises(ValueError, match=r"output must be of shape \[12 or more, 16, D\]"):
        served.attend(output=torch.empty(11, 16, LATENT))


def test_positions_come_from_the_indexer_and_stay_untouched() -> None:
    of = engine.step("mixed_small", 16)
    longer = torch.cat([of.positions, torch.full((50, TOPK), 2**31 - 1, dtype=torch.int32)])
    before = longer.clone()
    expected = Served(of).attend()[0]
    stale = torch.zeros_like(longer)
    indexer = SimpleNamespace(topk_indices_buffer=longer)
    assert torch.equal(Served(of, indexer=indexer, topk_indices_buffer=stale).attend()[0], expected)
    for name in ("topk_indices_buffer", "topk_indice_buffer"):
        assert torch.equal(Served(of, indexer=None, **{name: longer}).attend()[0], expected)
    assert torch.equal(longer, before)
    with pytest.raises(ValueError, match="indexer or topk_indices_buffer must be given"):
        Served(of, indexer=None).attend()


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_speculative_decode(cache_dtype: str) -> None:
    """Several query tokens per request, each with its own positions; they count as decode."""
    of = engine.make_step([90, 130, 4], [3, 3, 3], 32)
    settings = engine.config(32, cache_dtype, speculative=SimpleNamespace(num_speculative_tokens=2))
    served = Served(of, cache_dtype, planned=engine.builder(settings))
    metadata = served.metadata
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (3, 0, 9)
    assert metadata.plan.decode is not None
    assert metadata.plan.decode.query_length == 3
    close(served.attend()[0], engine.dense_fp64(of)[0], BF16)


@pytest.mark.parametrize("workspace_rows", [None, 2048, 3100])
def test_separate_and_mixed_agree(workspace_rows: int | None) -> None:
    of = engine.step("mixed_medium", 8)
    settings = engine.config(8, "fp8_ds_mla")
    outs = {}
    for mode in ("mixed", "separate"):
        builder = engine.builder(settings, mode=mode, workspace_rows=workspace_rows)
        outs[mode] = (served := Served(of, "fp8_ds_mla", planned=builder)).attend()[0]
        assert (served.metadata.plan.workspace is None) == (mode == "mixed")
        close(outs[mode], engine.dense("mixed_medium", 8), BF16)
    torch.testing.assert_close(outs["mixed"], outs["separate"], **BF16)
    chunks = served.metadata.plan.prefill.chunks if served.metadata.plan.prefill else ()
    assert len(chunks) == {None: 1, 2048: 2, 3100: 2}[workspace_rows]


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("name", ["mixed_small", "small_prefill"])
def test_padded_graph_rows_are_harmless(name: str, cache_dtype: str) -> None:
    of = engine.step(name, 32)
    plain = Served(of, cache_dtype)
    expected = plain.attend()[0]
    common = engine.common(of.lengths, of.queries, plain.table, plain.slots, padded_tokens=32, padded_requests=8)
    served = Served(of, cache_dtype, planned=plain.builder, shared=common)
    stale = torch.randint(0, 2**31 - 1, (32, TOPK), dtype=torch.int32)
    served.indexer.topk_indices_buffer = torch.cat([of.positions, stale])
    padding = torch.full((32 - of.tokens, 32, LATENT + ROPE), 1e4, dtype=torch.bfloat16)
    out, _ = served.attend(torch.cat([of.q, padding]))
    assert out.shape[0] == served.metadata.num_actual_tokens == 32
    assert torch.equal(out[: of.tokens], expected)
    # An engine may also drop the padding before it calls; stale slots past it must not matter either.
    assert torch.equal(served.attend(of.q)[0], expected)
    common.slot_mapping = torch.cat([plain.slots, torch.full((100,), 5)])
    metadata = plain.builder.build(0, common)
    assert metadata.plan.slots[of.tokens :].tolist() == [-1] * 100
    for rows in (of.tokens - 1, metadata.plan.rows + 1):
        with pytest.raises(ValueError, match="q must be of"):
            served.impl.forward_mqa(torch.zeros(rows, 32, 576), served.storage, metadata, engine.layer())


def test_cache_with_other_layers_between_its_pages() -> None:
    served = Served(engine.step("mixed_small", 16))
    expected = served.attend()[0]
    wide = torch.full((served.pages, 3, 64, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
    wide[:, 1] = served.storage
    for storage in (wide[:, 1], served.storage.unsqueeze(1), served.storage.unsqueeze(2)):
        served.storage = storage
        assert torch.equal(served.attend()[0], expected)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_a_layer_does_not_keep_a_cache(cache_dtype: str) -> None:
    """vLLM frees the caches over which it measures graphs before it allocates those that it serves from."""
    served = Served(engine.step("mixed_small", 16), cache_dtype)
    before, first = served.attend()[0], weakref.ref(served.storage)
    served.storage = served.storage.clone()
    gc.collect()
    assert first() is None
    assert torch.equal(served.attend()[0], before)


def test_short_name_of_packed_rows() -> None:
    """Some backends call the 656-byte rows "fp8"; the row width tells them from per-tensor rows."""
    packed = Served(engine.step("mixed_small", 16), "fp8_ds_mla")
    impl = engine.impl(16, "fp8", indexer=packed.indexer)
    out, _ = impl.forward_mqa(packed.of.q, packed.storage, packed.metadata, engine.layer(5.0, 7.0))
    assert torch.equal(out, packed.attend()[0])


def test_sinks() -> None:
    served = Served(engine.step("mixed_small", 16), sinks=torch.linspace(-1, 3, 16))
    expected, lse = engine.dense_fp64(served.of)
    share = torch.sigmoid(lse - torch.linspace(-1, 3, 16).double())
    close(served.attend()[0], expected * share.unsqueeze(-1), BF16)


@pytest.mark.parametrize("interleave", [1, 16])
def test_context_parallel_ranks_merge_by_lse(interleave: int) -> None:
    """Each rank holds every second run of positions and sees all heads; the merged result is the whole."""
    ranks, of = 2, engine.step("mixed_small", 16)
    table, _, pages = of.place(64)
    builder = engine.builder(engine.config(8, ranks=ranks))
    assert builder.spec.heads == 16
    parts = []
    for rank in range(ranks):
        local = type("Local", (SparseImpl,), {"dcp_world_size": ranks, "dcp_rank": rank})
        local.cp_kv_cache_interleave_size = interleave
        local.need_to_return_lse_for_decode = True
        impl = engine.impl(8, cls=local, topk_indices_buffer=of.positions)
        storage = torch.full((pages, 64, LATENT + ROPE), torch.nan, dtype=torch.bfloat16)
        for request, rows in enumerate(of.rows):
            position = torch.arange(len(rows))
            inside = position // (interleave * ranks) * interleave + position % interleave
            slots = table[request, inside // 64].long() * 64 + inside % 64
            slots[position // interleave % ranks != rank] = -1
            impl.do_kv_cache_update(*rows.split([LATENT, ROPE], 1), storage, slots)
        metadata = builder.build(0, engine.common(of.lengths, of.queries, table, torch.full((12,), -1)))
        parts.append(impl.forward_mqa(of.q, storage, metadata, engine.layer()))
    merged = combine_parts(Partials(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])))
    close(merged.out, engine.dense("mixed_small", 16), BF16)
    with pytest.raises(ValueError, match="dcp_world_size must be 1 for the one-call form"):
        impl.forward(engine.layer(), of.q, of.q, of.q, storage, metadata, torch.empty(12, 8 * VALUE))


def test_a_layer_without_rope() -> None:
    impl = engine.impl(
        2, head_size=LATENT, qk_rope_head_dim=0, topk_indices_buffer=torch.zeros(1, 1, dtype=torch.int32)
    )
    storage = torch.zeros(1, 64, LATENT, dtype=torch.bfloat16)
    impl.do_kv_cache_update(torch.full((1, LATENT), 3.0), torch.empty(1, 1, 0), storage, torch.tensor([0]))
    common = engine.common([1], [1], torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0]))
    metadata = engine.builder(engine.config(2, rope=0)).build(0, common)
    out, _ = impl.forward_mqa(torch.ones(1, 2, LATENT) * SCALE, storage, metadata, SimpleNamespace())
    assert (out == 3).all()


@pytest.mark.parametrize("mode", ["mixed", "separate"])
@pytest.mark.parametrize("padding", [0, 5])
def test_fp8_queries_over_packed_rows(mode: str, padding: int) -> None:
    """The query's own scale counts for decodes and for gathered prefills alike; padded rows disturb neither."""
    of = engine.step("mixed_small", 16)
    builder = engine.builder(engine.config(16, "fp8_ds_mla"), mode=mode)
    table, slots, _ = of.place(64)
    shared = engine.common(of.lengths, of.queries, table, of.new_slots(slots), padded_tokens=of.tokens + padding)
    served = Served(of, "fp8_ds_mla", planned=builder, shared=shared)
    room = torch.full((padding, TOPK), 2**31 - 1, dtype=torch.int32)
    served.indexer.topk_indices_buffer = torch.cat((of.positions, room))
    q = torch.cat((of.q, torch.full((padding, 16, 576), 400.0).bfloat16()))
    out, _ = served.attend((q.float() / 4).to(torch.float8_e4m3fn), engine.layer(4.0, 9.0))
    assert out.dtype == torch.bfloat16
    close(out[: of.tokens], engine.dense("mixed_small", 16), BF16)
    assert out[of.tokens :].eq(0).all()
