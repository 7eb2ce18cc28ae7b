"""tamis' indexer for vLLM without vLLM: options, the rows of a step, and the selection."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import index_standin as index
import pytest
import torch
from torch_calls import Calls

from tamis.cache.layout import index_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.shard import Shard
from tamis.integrations.vllm import indexer
from tamis.integrations.vllm.indexer import IndexerMetadataBuilder, IndexerOptions, StepRows, select_positions
from tamis.ops import index_topk

CPU = torch.device("cpu")
ADAPTIVE = SimpleNamespace(num_speculative_tokens=2, enable_adaptive_verification=True)


def options(**given: Any) -> IndexerOptions:
    return IndexerOptions.read(SimpleNamespace(additional_config={"tamis": given}))


def test_vllm_selects_unless_tamis_is_asked_for() -> None:
    for nothing in (None, {}, {"other": 1}, object()):
        assert IndexerOptions.read(SimpleNamespace(additional_config=nothing)) == IndexerOptions(False, False)
    assert IndexerOptions.read(SimpleNamespace()) == IndexerOptions(False, False)
    assert options() == options(indexer="vllm") == IndexerOptions(False, False)
    assert options(indexer="tamis") == IndexerOptions(True, False)
    assert options(indexer="tamis", share_indexer=True) == IndexerOptions(True, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"indexer": "Tamis"}, "indexer'.*must be one of 'tamis', 'vllm', got 'Tamis'"),
        ({"indexer": True}, "indexer'.*must be"),
        ({"indexr": "tamis"}, "must be an object with 'indexer' and 'share_indexer' at most, got"),
        ({"indexer": "tamis", "share_indexer": 1}, "share_indexer'.*must be"),
        ({"share_indexer": True}, 'share_indexer\'.*must be false, got True; set "indexer": "tamis" as well'),
    ],
)
def test_other_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        options(**given)
    with pytest.raises(ValueError, match="must be an object"):
        IndexerOptions.read(SimpleNamespace(additional_config={"tamis": "tamis"}))


def expected_rows(lengths: list[int], queries: list[int], rows: int, ratio: int) -> tuple[list[int], list[int]]:
    """The request of each token, and how many entries it sees; padding sees none."""
    ids = [r for r, count in enumerate(queries) for _ in range(count)]
    seen = [n for total, q in zip(lengths, queries, strict=True) for n in range(total - q + 1, total + 1)]
    return ids, [n // ratio for n in seen] + [0] * (rows - len(seen))


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("drafts", [None, ADAPTIVE])
def test_rows_of_random_steps(drafts: Any, ratio: int) -> None:
    choice = random.Random(3)
    made = StepRows(engine.config(speculative=drafts), CPU, ratio=ratio)
    places = set()
    for _ in range(60):
        most = choice.choice([1, 1, 4, 60])
        queries = [choice.randint(most > 1 and choice.random() < 0.1, most) for _ in range(choice.randint(1, 7))]
        queries = queries if sum(queries) else [1]
        lengths = [count + choice.randint(0, 900) for count in queries]
        empty, padding = choice.randint(0, 2), choice.choice([0, 0, 5])
        rows = sum(queries) + max(padding, empty)
        table = torch.zeros(len(queries), 30, dtype=torch.int32)
        slots = torch.arange(sum(queries))
        common = engine.common(lengths, queries, table, slots, padded_tokens=rows, padded_requests=len(queries) + empty)
        if drafts is ADAPTIVE:  # then only the sum is right on the host
            common.query_start_loc_cpu = torch.linspace(0, sum(queries), common.num_reqs + 1).int()
            common.max_query_len = 1
        metadata = made.read(common, common.slot_mapping)
        ids, seen = expected_rows(lengths, queries, rows, ratio)
        assert metadata.lengths.tolist() == seen
        assert metadata.request_ids.tolist()[: len(ids)] == ids
        assert 0 <= int(metadata.request_ids.min()) <= int(metadata.request_ids.max()) < common.num_reqs
        places.add((metadata.request_ids.data_ptr(), metadata.lengths.data_ptr()))
        for name in ("slot_mapping", "block_table", "seq_lens"):  # which captured graphs read where the engine has them
            theirs = getattr(common, {"block_table": "block_table_tensor"}.get(name, name))
            assert getattr(metadata, name).data_ptr() == theirs.data_ptr()
    assert len(places) == 1


@pytest.mark.parametrize(
    ("queries", "ids", "seen"), [([1, 0, 1], [0, 2], [9, 7, 0]), ([2, 1, 0], [0, 0, 1], [8, 9, 8])]
)
def test_as_many_rows_as_requests_but_not_one_each(queries: list[int], ids: list[int], seen: list[int]) -> None:
    table, slots = torch.zeros(3, 2, dtype=torch.int32), torch.arange(sum(queries))
    common = engine.common([9, 8, 7], queries, table, slots, padded_tokens=3)
    metadata = StepRows(engine.config(), CPU).read(common, common.slot_mapping)
    assert not metadata.one_each
    assert metadata.request_ids.tolist()[: len(ids)] == ids
    assert metadata.lengths.tolist() == seen


def test_slots_of_an_earlier_step_are_left_out() -> None:
    """The engine's tensor may be longer than the step. Keys would be written where an earlier step had them."""
    common = engine.common([9, 8], [1, 1], torch.zeros(2, 2, dtype=torch.int32), torch.arange(2))
    common.slot_mapping = torch.tensor([3, 4, 77, 78])
    metadata = IndexerMetadataBuilder(None, ["layer"], engine.config(), "cpu").build(0, common)
    assert metadata.slot_mapping.tolist() == [3, 4]


def test_drafts_follow_the_engines_lengths() -> None:
    """vLLM adds a token to every request in place and asks to update the record, possibly inside a graph."""
    builder = IndexerMetadataBuilder(None, ["layer"], engine.config(), "cpu")
    common = engine.common([9, 8], [1, 1], torch.zeros(2, 2, dtype=torch.int32), torch.arange(2))
    metadata = builder.build(0, common)
    common.seq_lens += 1
    metadata.request_ids.fill_(7)
    builder.update_draft_decode_metadata(metadata)
    assert (metadata.lengths.tolist(), metadata.request_ids.tolist()) == ([10, 9], [0, 1])


def test_a_step_of_decodes_takes_two_operations() -> None:
    builder = IndexerMetadataBuilder(None, ["layer"], engine.config(), "cpu")
    common = engine.common([9, 8], [1, 1], torch.zeros(2, 2, dtype=torch.int32), torch.arange(2))
    with Calls() as calls:
        builder.build(0, common)
    # Two numbers are read from the host's query starts.
    assert calls.names == ["aten._local_scalar_dense"] * 2 + ["aten.arange", "aten.div"]


def test_steps_that_do_not_fit_are_refused() -> None:
    made, table = StepRows(engine.config(), CPU), torch.zeros(1, 11, dtype=torch.int32)
    common = engine.common([700], [600], table, torch.arange(600))
    assert made.read(common, common.slot_mapping).lengths.tolist() == list(range(101, 701))
    common = engine.common([700], [601], table, torch.arange(601))
    with pytest.raises(ValueError, match="num_actual_tokens must be at most 600, got 601; raise"):
        made.read(common, common.slot_mapping)
    common = engine.common([70], [6], table, torch.arange(6))
    common.seq_lens = common.seq_lens.long()
    with pytest.raises(TypeError, match="seq_lens must be int32, got int64"):
        made.read(common, common.slot_mapping)


STEPS = {
    "decode": ([300, 5, 130], [1, 1, 1]),
    "drafts": ([300, 9, 130], [6, 6, 6]),
    "prompts": ([200, 64, 90], [70, 64, 3]),
    "mixed": ([300, 90, 200, 40], [1, 1, 30, 40]),
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_selects_as_an_exact_indexer_does(name: str, padding: int) -> None:
    step, k = index.make_index_step(*STEPS[name]), 48
    cache = PagedCache.wrap(step.storage(new=True), index_fp8(dim=index.DIM))
    common = step.common()
    metadata = IndexerMetadataBuilder(None, ["layer"], engine.config(), "cpu").build(0, common)
    q = torch.cat((step.q, step.q[:1].expand(padding, -1, -1)))
    weights = torch.nn.functional.pad(step.weights, (0, 0, 0, padding), value=1.0)
    buffer = torch.full((step.tokens + padding + 2, k), 7, dtype=torch.int32)
    select_positions(q, weights, cache, metadata, k, buffer)
    assert torch.equal(buffer[: step.tokens], step.selected(k))
    assert bool((buffer[step.tokens : step.tokens + padding] == -1).all())
    assert bool((buffer[step.tokens + padding :] == 7).all())


@pytest.mark.parametrize(("name", "drafts", "columns"), [("prompts", None, 4), ("mixed", None, 5), ("drafts", 5, 90)])
def test_prompts_are_scored_in_the_columns_that_they_need(
    name: str, drafts: int | None, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's table has columns for the longest request that it admits."""
    step, k, seen = index.make_index_step(*STEPS[name]), 48, []
    wide = replace(step, table=torch.nn.functional.pad(step.table, (0, 90 - step.table.shape[1]), value=0))
    speculative = None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts)
    builder = IndexerMetadataBuilder(None, ["layer"], engine.config(speculative=speculative), "cpu")
    metadata = builder.build(0, wide.common())
    cache = PagedCache.wrap(step.storage(new=True), index_fp8(dim=index.DIM))

    def watched(*given: Any, **options: Any) -> None:
        seen.append(given[4])
        index_topk(*given, **options)

    monkeypatch.setattr(indexer, "index_topk", watched)
    for room in (1 << 28, 1):
        monkeypatch.setattr(indexer, "WORKSPACE_BYTES", room)
        buffer = torch.full((step.tokens, k), 7, dtype=torch.int32)
        select_positions(step.q, step.weights, cache, metadata, k, buffer)
        assert torch.equal(buffer, step.selected(k))
    assert [table.shape[1] for table in seen] == [90, columns]
    assert all(table.data_ptr() == metadata.block_table.data_ptr() for table in seen)


def test_a_shard_needs_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", 1)
    step = index.make_index_step([600], [20])
    wide = replace(step, table=torch.nn.functional.pad(step.table, (0, 90 - step.table.shape[1]), value=0))
    metadata = StepRows(engine.config(), CPU, ratio=2).read(wide.common(), step.new_slots())
    assert indexer._seen_pages(metadata, 64, None).shape[1] == 5  # 300 entries
    assert indexer._seen_pages(metadata, 64, Shard(4, 1, 16)).shape[1] == 2  # 80 of them


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", ["decode", "drafts"])
def test_a_captured_step_follows_the_engines_tensors(name: str, heads: int) -> None:
    """A graph is captured from one step and replayed for a later one, which is in the same tensors of the engine."""
    lengths, queries = STEPS[name]
    step, k = index.make_index_step(lengths, queries, heads), 48
    # The later step is that of fewer keys.
    later = replace(step, lengths=tuple(n - 3 for n in lengths), keys=tuple(keys[:-3] for keys in step.keys))
    storage = step.storage(new=True).cuda()
    cache = PagedCache.wrap(storage, index_fp8(dim=index.DIM))
    common = SimpleNamespace(**vars(step.common()))
    for field in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(common, field, getattr(common, field).cuda())
    builder = IndexerMetadataBuilder(None, ["layer"], engine.config(), "cuda")
    q, weights = step.q.cuda(), step.weights.cuda()
    buffer = torch.full((step.tokens, k), 7, dtype=torch.int32, device="cuda")
    metadata = builder.build(0, common)
    select_positions(q, weights, cache, metadata, k, buffer)
    assert torch.equal(buffer.cpu(), step.selected(k))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_positions(q, weights, cache, metadata, k, buffer)
    common.seq_lens -= 3
    builder.build(0, common)
    graph.replay()
    assert torch.equal(buffer.cpu(), later.selected(k))
