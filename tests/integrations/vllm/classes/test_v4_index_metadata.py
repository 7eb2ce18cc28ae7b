"""V4's indexer under vLLM's names: every field worked out once more, and selections made from the records."""

from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from v4_standin import MAX_LENGTH, MAX_REQUESTS, MAX_TOKENS, PAGE, SHAPES, TOPK, V4Step, engine_config, main_builder

from tamis import PagedCache
from tamis.arithmetic import ceil_div
from tamis.cache.layout import index_fp8
from tamis.integrations.vllm.classes.v4_index_metadata import (
    TamisV4IndexBackend,
    V4IndexChunk,
    V4IndexMetadata,
    V4IndexMetadataBuilder,
    V4UniformIndexMetadataBuilder,
)
from tamis.ops import gather_index, index_topk, ragged_scores, topk_positions, write_kv

RATIO, ENTRIES = 4, PAGE // 4


def index_builder(
    kind: type[V4IndexMetadataBuilder] = V4IndexMetadataBuilder, drafts: int = 1, **options: Any
) -> V4IndexMetadataBuilder:
    config = engine_config()
    config.speculative_config.num_speculative_tokens = drafts
    return kind(SimpleNamespace(block_size=PAGE, compress_ratio=RATIO), ["layer"], config, "cpu", **options)


@cache
def step_of(queries: tuple[int, ...], lengths: tuple[int, ...]) -> V4Step:
    return V4Step("v4-bf16", list(queries), list(lengths))


def left_over(builder: V4IndexMetadataBuilder) -> V4IndexMetadataBuilder:
    """After large steps, whose values must not be seen again."""
    builder.build(0, step_of((1, 2, 1, 60, 90), (300, 900, 100, 900, 1100)).common("main"))
    builder.build(0, step_of((2,) * 8, (400,) * 8).common("main"))
    return builder


@pytest.mark.parametrize("shape", SHAPES)
def test_what_all_tokens_share(shape: str) -> None:
    builder, step = left_over(index_builder()), step_of(*map(tuple, SHAPES[shape]))
    common = step.common("main", padding=3, empty=1)
    before = {name: value.clone() for name, value in vars(common).items() if isinstance(value, Tensor)}
    record = builder.build(0, common)
    for name, value in before.items():
        assert torch.equal(getattr(common, name), value), name
    tokens = len(step.tokens)
    assert (record.num_reqs, record.num_actual_tokens) == (len(step.lengths) + 1, tokens + 3)
    assert (record.block_size, record.topk_tokens, record.max_seq_len) == (PAGE, TOPK, max(step.lengths))
    assert record.seq_lens.tolist() == [*step.lengths, 0]
    assert record.compressed_seq_lens.tolist() == [*(n // RATIO for n in step.lengths), 0]
    assert builder.compressed_seq_lens_buffer[len(step.lengths) + 1 :].eq(0).all()
    # The keys of an entry go where the entry goes.
    assert torch.equal(record.slot_mapping, main_builder(RATIO).build(0, common).slot_mapping)
    assert torch.equal(record.query_start_loc, common.query_start_loc)
    width = common.block_table_tensor.shape[1]
    assert torch.equal(record.block_table[:, :width], common.block_table_tensor)
    assert record.num_decode_tokens + record.num_prefill_tokens == tokens + 3
    assert record.num_decodes + record.num_prefills == len(step.lengths) + 1


@pytest.mark.parametrize("shape", ["mixed", "decodes"])
def test_decodes_flattened_to_one_row_per_token(shape: str) -> None:
    builder, step = left_over(index_builder()), step_of(*map(tuple, SHAPES[shape]))
    record = builder.build(0, step.common("main", padding=2, empty=1))
    assert builder._cudagraph_support == "ALWAYS"
    decode, rows = record.decode, record.num_decode_tokens
    assert decode is not None
    assert (decode.requires_padding, decode.schedule_metadata) == (False, None)
    real = [(r, p) for r, p in step.tokens if all(q <= 2 for q in step.queries[: r + 1])]
    assert rows == len(real) + 2 * (shape == "decodes")
    assert decode.seq_lens.tolist() == [[(p + 1) // RATIO] for _, p in real] + [[0]] * (rows - len(real))
    assert decode.decode_lens.tolist() == [1] * rows
    width = record.block_table.shape[1]
    assert torch.equal(decode.block_table[: len(real), :width], record.block_table[[r for r, _ in real]])
    assert decode.block_table.is_contiguous()
    assert torch.equal(decode.block_table[len(real) :, :width], record.block_table[:1].expand(rows - len(real), -1))
    assert decode.block_table[:, width:].eq(-1).all()
    assert builder.decode_seq_lens_buffer[len(step.tokens) :].eq(0).all()
    assert builder.decode_lens_buffer[rows:].eq(0).all()


def test_a_table_of_full_width_is_expanded_as_it_is() -> None:
    step, width = step_of(*map(tuple, SHAPES["decodes"])), ceil_div(MAX_LENGTH, PAGE)
    for columns in (width, width + 2):
        common = step.common("main")
        table = torch.arange(3 * columns, dtype=torch.int32).view(3, columns)
        common.block_table_tensor = table
        decode = index_builder().build(0, common).decode
        assert decode is not None
        assert torch.equal(decode.block_table, table[[r for r, _ in step.tokens], :width])


@pytest.mark.parametrize("empty", [0, 2])
def test_uniform_decodes_as_a_matrix(empty: int) -> None:
    builder = left_over(index_builder(V4UniformIndexMetadataBuilder, drafts=2))
    step = V4Step("v4-bf16", [3, 3, 3], [300, 3, 1000])
    record = builder.build(0, step.common("main", padding=3 * empty, empty=empty))
    assert builder._cudagraph_support == "UNIFORM_BATCH"
    assert builder.expanded_block_table_buffer is None
    decode = record.decode
    assert decode is not None
    assert decode.seq_lens.tolist() == [[74, 74, 75], [0, 0, 0], [249, 249, 250]] + [[0] * 3] * empty
    assert decode.seq_lens.is_contiguous()
    assert decode.decode_lens.tolist() == [3] * 3 + [0] * empty
    assert decode.requires_padding == bool(empty)
    assert torch.equal(decode.block_table, record.block_table)
    assert builder.decode_seq_lens_buffer[3 * (3 + empty) :].eq(0).all()


def test_negative_lengths_of_padding_requests_count_as_none() -> None:
    """A request of no tokens has 0 - n + j + 1 before it is clamped: kernels that read it unsigned would run away."""
    builder = index_builder(V4UniformIndexMetadataBuilder, drafts=3)
    record = builder.build(0, V4Step("v4-bf16", [4], [4]).common("main", padding=4, empty=1))
    assert record.decode is not None
    assert record.decode.seq_lens.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


def test_the_indexer_cuts_batches_by_its_own_rule() -> None:
    common = V4Step("v4-bf16", [1, 1, 2, 1], [9, 50, 70, 80]).common("main")
    flat = index_builder().build(0, common)
    assert (flat.num_decodes, flat.num_prefills) == (4, 0)
    assert flat.prefill is None
    uniform = index_builder(V4UniformIndexMetadataBuilder).build(0, common)
    assert (uniform.num_decodes, uniform.num_decode_tokens, uniform.num_prefill_tokens) == (2, 2, 3)
    assert uniform.prefill is not None


def slow_chunks(step: V4Step, first: int, keys: int, scores: int) -> list[tuple[list[int], range]]:
    """Requests and tokens of each chunk."""
    start = [sum(step.queries[:r]) for r in range(len(step.queries) + 1)]
    groups: list[list[int]] = []
    for request in range(first, len(step.queries)):
        joined = [*(groups[-1] if groups else []), request]
        count = sum(step.lengths[r] // RATIO for r in joined)
        if groups and count <= keys and count * sum(step.queries[r] for r in joined) <= scores:
            groups[-1] = joined
        else:
            groups.append([request])
    found = []
    for group in groups:
        count = sum(step.lengths[r] // RATIO for r in group)
        tokens = range(start[group[0]], start[group[-1] + 1])
        size = max(1, scores // max(1, count))
        found += [(group, tokens[at : at + size]) for at in range(0, len(tokens), size) if count]
    return found


@pytest.mark.parametrize("score_bytes", [512 << 20, 4 * 200 * 80, 4 * 2000, 4])
@pytest.mark.parametrize(
    ("queries", "lengths"),
    [SHAPES["mixed"], SHAPES["prefills"], ([1, 3, 3, 50, 9], [40, 3, 3, 90, 1000]), ([3, 3], [3, 3])],
)
def test_chunks_of_prefills(queries: list[int], lengths: list[int], score_bytes: int) -> None:
    builder = left_over(index_builder(score_bytes=score_bytes))
    step = step_of(tuple(queries), tuple(lengths))
    record = builder.build(0, step.common("main"))
    assert record.prefill is not None
    expected = slow_chunks(step, record.num_decodes, 40 * MAX_LENGTH, score_bytes // 4)
    assert len(record.prefill.chunks) == len(expected)
    seen: list[int] = []
    last: list[int] = []
    for chunk, (requests, tokens) in zip(record.prefill.chunks, expected, strict=True):
        entries = [lengths[r] // RATIO for r in requests]
        starts = [sum(entries[:n]) for n in range(len(entries) + 1)]
        assert (chunk.token_start, chunk.token_end, chunk.num_reqs) == (tokens[0], tokens[-1] + 1, len(requests))
        assert chunk.cu_seq_lens.tolist() == starts
        assert chunk.total_seq_lens == starts[-1]
        assert chunk.token_to_seq.tolist() == [n for n, count in enumerate(entries) for _ in range(count)]
        owner = [step.tokens[t][0] - requests[0] for t in tokens]
        assert chunk.cu_seqlen_ks.tolist() == [starts[n] for n in owner]
        ends = [starts[n] + (step.tokens[t][1] + 1) // RATIO for n, t in zip(owner, tokens, strict=True)]
        assert chunk.cu_seqlen_ke.tolist() == ends
        assert torch.equal(chunk.block_table, record.block_table[requests[0] : requests[-1] + 1])
        assert chunk.skip_kv_gather == (requests == last)
        last = requests
        seen += tokens
    # Tokens in no chunk see no entry.
    for token in range(record.num_decode_tokens, len(step.tokens)):
        assert token in seen or step.tokens[token][1] + 1 < RATIO
    assert builder.cu_seqlen_ke_buffer[len(step.tokens) :].eq(0).all()


@pytest.mark.parametrize("score_bytes", [512 << 20, 4 * 2000])
@pytest.mark.parametrize("shape", SHAPES)
def test_selections_from_the_records(shape: str, score_bytes: int) -> None:
    """Decodes over pages and prefills over gathered keys select what one call over all tokens selects."""
    step, held = step_of(*map(tuple, SHAPES[shape])), PagedCache(index_fp8(dim=32), 40, ENTRIES)
    for request, length in enumerate(step.lengths):
        slots = step.entry_slots(request, length // RATIO, RATIO)
        write_kv(torch.randn(len(slots), 32), held, slots)
    padding = 2 * (shape == "decodes")
    builder = index_builder(score_bytes=score_bytes)
    record = builder.build(0, step.common("main", padding=padding))
    rows = len(step.tokens) + padding
    q, weights = torch.randn(rows, 2, 32), torch.randn(rows, 2)
    buffer = torch.full((rows, TOPK), -1, dtype=torch.int32)
    if record.decode is not None:
        decode, count = record.decode, record.num_decode_tokens
        ids = torch.arange(count, dtype=torch.int32)
        lengths = decode.seq_lens.flatten()
        buffer[:count] = index_topk(q[:count], weights[:count], held, ids, decode.block_table, lengths, TOPK)
    keys: tuple[Tensor, Tensor] | None = None
    for chunk in record.prefill.chunks if record.prefill is not None else ():
        if not chunk.skip_kv_gather:
            keys = gather_index(held, chunk.block_table, chunk.cu_seq_lens.diff(), rows=chunk.total_seq_lens)
        assert keys is not None
        part = slice(chunk.token_start, chunk.token_end)
        buffer[part] = prefill_topk(q[part], weights[part], keys, chunk)
    visible, ids = (builder.tokens.positions[:rows] + 1) // RATIO, builder.tokens.request_ids[:rows]
    assert torch.equal(buffer, index_topk(q, weights, held, ids, record.block_table, visible, TOPK))
    assert (buffer >= 0).any()


def prefill_topk(q: Tensor, weights: Tensor, keys: tuple[Tensor, Tensor], chunk: V4IndexChunk) -> Tensor:
    scores = ragged_scores(q, weights, *keys, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
    found = topk_positions(scores, chunk.cu_seqlen_ke, TOPK)
    return torch.where(found >= 0, found - chunk.cu_seqlen_ks.unsqueeze(1), -1)


def test_buffers_never_move_and_no_device_value_is_looked_at() -> None:
    builder = index_builder()
    assert builder.decode_seq_lens_buffer.shape == builder.cu_seqlen_ks_buffer.shape == (MAX_TOKENS,)
    assert builder.expanded_block_table_buffer is not None
    assert builder.expanded_block_table_buffer.shape == (MAX_TOKENS, ceil_div(MAX_LENGTH, PAGE))
    assert builder.compressed_seq_lens_buffer.shape == (MAX_REQUESTS,)
    places, looked = [], []
    usual = torch.Tensor.item
    for queries, lengths in (SHAPES["mixed"], ([2, 9], [8, 90])):
        common = step_of(tuple(queries), tuple(lengths)).common("main")
        with patch("torch.Tensor.item", lambda self: looked.append(self) or usual(self)):
            record = builder.build(0, common)
        assert record.decode is not None
        assert record.prefill is not None
        assert record.seq_lens.data_ptr() == common.seq_lens.data_ptr()
        parts = [record.compressed_seq_lens, record.slot_mapping]
        parts += [record.decode.seq_lens, record.decode.decode_lens, record.decode.block_table]
        places.append([part.data_ptr() for part in parts] + [record.prefill.chunks[0].cu_seq_lens.data_ptr()])
        assert {part.dtype for part in parts} == {torch.int32, torch.int64}
        assert record.slot_mapping.dtype == torch.int64
    assert places[0] == places[1]
    assert not looked


def test_empty_steps() -> None:
    step = V4Step("v4-bf16", [1], [5])
    common = step.common("main")
    common.num_reqs, common.num_actual_tokens = 0, 0
    common.query_start_loc_cpu = common.query_start_loc = torch.zeros(1, dtype=torch.int32)
    common.seq_lens, common.slot_mapping = common.seq_lens[:0], common.slot_mapping[:0]
    record = index_builder().build(0, common)
    assert record.decode is record.prefill is None
    assert len(record.slot_mapping) == len(record.seq_lens) == 0


def test_declarations_and_refusals() -> None:
    backend = TamisV4IndexBackend
    assert backend.get_builder_cls() is V4IndexMetadataBuilder
    assert backend.get_metadata_cls() is V4IndexMetadata
    assert backend.get_name() == "TAMIS_SPARSE_V4_INDEX"
    assert backend.get_supported_kernel_block_sizes() == [256]
    assert backend.get_supported_head_sizes() == [32, 64, 128]
    assert backend.get_kv_cache_shape(7, 64, 1, 132) == (7, 64, 132)
    with pytest.raises(ValueError, match="num_kv_heads must be 1, got 2"):
        backend.get_kv_cache_shape(7, 64, 2, 132)
    with pytest.raises(NotImplementedError, match="runs attention itself"):
        backend.get_impl_cls()
    with pytest.raises(ValueError, match="score_bytes must be"):
        index_builder(score_bytes=3)
    with pytest.raises(TypeError, match=r"kv_cache_spec.compress_ratio must be an int"):
        V4IndexMetadataBuilder(SimpleNamespace(block_size=PAGE), [], engine_config(), "cpu")
