"""Layers that share an indexer's selection: who belongs to whom, and that a group translates at most once a step."""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
from engine_standin import BF16, LATENT, ROPE, Served, close
from torch import Tensor

from tamis.integrations.vllm import index_group
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.index_group import join_group
from tamis.layers import mla


class Builder:
    """vLLM's builder of groups, as far as tamis looks: an object that all layers of a model are given."""


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each translation that is made outside of attention."""
    made: list[int] = []
    real = index_group.translate_positions

    def counted(call: Any) -> Any:
        made.append(len(call.positions))
        return real(call)

    monkeypatch.setattr(index_group, "translate_positions", counted)
    monkeypatch.setattr(mla, "translate_positions", counted)
    return made


def test_groups_begin_at_indexers() -> None:
    builder, other = Builder(), Builder()
    first, leads = join_group(builder, True)
    assert leads
    assert join_group(builder, False) == (first, False)
    assert join_group(other, False)[0] is not first
    assert join_group(other, False)[1] is False
    second, leads = join_group(builder, True)
    assert leads
    assert second is not first
    assert join_group(builder, False) == (second, False)
    alone = [join_group(None, indexer) for indexer in (True, False)]
    assert alone[0][0] is not alone[1][0]
    assert [leads for _, leads in alone] == [True, True]


def shared_layers(cls: type[SparseImpl], indexer: Any, count: int, heads: int, cache_dtype: str) -> list[SparseImpl]:
    """A layer with an indexer, and layers that take its positions."""
    builder, buffer = Builder(), indexer.topk_indices_buffer
    return [
        engine.impl(
            heads,
            cache_dtype,
            cls=cls,
            indexer=None if number else indexer,
            topk_indices_buffer=buffer,
            index_group_builder=builder,
        )
        for number in range(count)
    ]


def fewer_positions(positions: Tensor) -> Tensor:
    """Other positions, which every token can see as well."""
    half = positions.shape[1] // 2
    other = torch.full_like(positions, -1)
    other[:, : half // 2] = positions[:, : half // 2]
    return other


@pytest.mark.parametrize("gathered", [True, False])
def test_a_group_translates_once_a_step(gathered: bool, translated: list[int]) -> None:
    """Prefills that are gathered need translated positions; everything else is looked up within attention."""
    of = engine.step("mixed_small", 16)
    builder = engine.builder(engine.config(16, "fp8_ds_mla"), mode="separate" if gathered else "mixed")
    served = Served(of, "fp8_ds_mla", planned=builder)
    layers = shared_layers(SparseImpl, served.indexer, 3, 16, "fp8_ds_mla")
    for _ in range(2):
        metadata = builder.build(0, served.common)
        for layer in layers:
            close(
                layer.forward_mqa(of.q, served.storage, metadata, engine.layer())[0],
                engine.dense("mixed_small", 16),
                BF16,
            )
    assert translated == ([12, 12] if gathered else [])
    # The indexer of the same layer selects other positions: they are at the same place in memory.
    served.indexer.topk_indices_buffer.copy_(fewer_positions(of.positions))
    other = engine.Step(of.lengths, of.queries, of.rows, of.q, served.indexer.topk_indices_buffer)
    for layer in layers:
        out = layer.forward_mqa(of.q, served.storage, metadata, engine.layer())[0]
        close(out, engine.dense_fp64(other)[0], BF16)
    assert translated == ([12] * 3 if gathered else [])


def test_a_group_translates_once_for_a_rank(translated: list[int]) -> None:
    """A rank keeps the positions whose rows it holds. Two groups of layers, two steps: four translations."""
    ranks, of = 2, engine.step("mixed_small", 16)
    table, _, pages = of.place(64)
    local: Any = type("Local", (SparseImpl,), {"dcp_world_size": ranks, "need_to_return_lse_for_decode": True})
    indexer = SimpleNamespace(topk_indices_buffer=of.positions.clone())
    layers = shared_layers(local, indexer, 3, 8, "auto") + shared_layers(local, indexer, 2, 8, "auto")
    storage = torch.randn(pages, 64, LATENT + ROPE).bfloat16()
    builder = engine.builder(engine.config(8, ranks=ranks))
    common = engine.common(of.lengths, of.queries, table, torch.full((12,), -1))
    alone = engine.impl(8, cls=local, topk_indices_buffer=of.positions)
    expected = alone.forward_mqa(of.q, storage, builder.build(0, common), engine.layer())
    translated.clear()
    for _ in range(2):
        metadata = builder.build(0, common)
        for layer in layers:
            out, lse = layer.forward_mqa(of.q, storage, metadata, engine.layer())
            assert torch.equal(out, expected[0])
            assert lse is not None
            assert expected[1] is not None
            assert torch.equal(lse, expected[1])
    assert translated == [12] * 4


def test_another_number_of_rows_is_translated_again(translated: list[int]) -> None:
    """A layer may be called with padding, and the next one without."""
    of = engine.step("mixed_small", 16)
    builder = engine.builder(engine.config(16, "fp8_ds_mla"), mode="separate")
    table, slots, _ = of.place(64)
    common = engine.common(of.lengths, of.queries, table, of.new_slots(slots), padded_tokens=15)
    served = Served(of, "fp8_ds_mla", planned=builder, shared=common)
    served.indexer.topk_indices_buffer = torch.cat((of.positions, torch.full((3, engine.TOPK), -1, dtype=torch.int32)))
    layers = shared_layers(SparseImpl, served.indexer, 2, 16, "fp8_ds_mla")
    padded = torch.cat((of.q, torch.ones(3, *of.q.shape[1:]).bfloat16()))
    for layer, q in zip(layers, (padded, of.q), strict=True):
        out = layer.forward_mqa(q, served.storage, served.metadata, engine.layer())[0]
        close(out[:12], engine.dense("mixed_small", 16), BF16)
    assert translated == [15, 12]


def test_a_group_translates_once_for_divided_prompts(translated: list[int]) -> None:
    """Decodes, and each part of the prompts whose pages ranks gather, are translated for all layers of a group."""
    ranks, of = 2, engine.make_step([100, 300, 200], [1, 20, 30], 4)
    own = {"dcp_world_size": ranks, "pcp_world_size": ranks, "need_to_return_lse_for_decode": True}
    local: Any = type("Local", (SparseImpl,), own)
    local._gather_ranks = lambda self, every, mine: every.copy_(torch.cat([mine] * ranks))
    configuration = engine.config(4, ranks=ranks, max_length=300)
    configuration.parallel_config.prefill_context_parallel_size = ranks
    configuration.parallel_config.cp_kv_cache_interleave_size = 1
    table, _, pages = of.place(64)
    common = engine.common(of.lengths, of.queries, table, torch.full((of.tokens,), -1))
    common.is_prefilling = torch.tensor([False, True, True])
    storage = torch.randn(pages, 64, LATENT + ROPE).bfloat16()
    record = engine.builder(configuration).build(0, common)
    assert record.gathered is not None
    assert len(record.gathered.chunks) == 2
    indexer = SimpleNamespace(topk_indices_buffer=of.positions)
    layers = shared_layers(local, indexer, 3, 4, "auto")
    results = [layer.forward_mqa(of.q, storage, record, engine.layer())[0] for layer in layers]
    assert all(torch.equal(found, results[0]) for found in results)
    assert translated == [1, 20, 30]
