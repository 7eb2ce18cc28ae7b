"""The columns of a planner's block table that prompts are scored in: as few as their requests have keys."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import small_v4
import torch
from torch import Tensor

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, Shard, SparseMLA
from tamis.cache.layout import rows
from tamis.lab.testing.index_cases import best_positions
from tamis.layers import v4
from tamis.layers.selecting import for_prompts
from tamis.ops import IndexInputs
from tamis.ops.index import columns, reference
from tamis.ops.index.columns import seen_columns
from tamis.ops.index.operations import IndexTopk

ROOT = Path(__file__).parents[2]
PAGE, HEADS, DIM, K, MOST = 16, 3, 8, 12, 4096
SPEC = LayerSpec(heads=2, scale=0.08, topk=K)
KEYS = rows(torch.float32, latent=DIM, rope=0)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns of the block table of each selection that runs."""
    found: list[int] = []

    def watched(usual: Callable[[IndexTopk], Any]) -> Callable[[IndexTopk], Any]:
        def run(call: IndexTopk) -> Any:
            found.append(call.block_table.shape[1])
            return usual(call)

        return run

    monkeypatch.setattr(reference, "index_topk", watched(reference.index_topk))
    monkeypatch.setattr(reference, "index_topk_and_blocks", watched(reference.index_topk_and_blocks))
    return found


def step(queries: list[int], lengths: list[int]) -> tuple[Any, ...]:
    """Queries, caches, plan and index inputs of a step, and the positions that it must select. Products of small whole
    numbers are exact, and many are equal."""
    pool, tokens = PagePool(40, PAGE, seed=3), sum(queries)
    caches = Caches(PagedCache("v32-fp32", 40, PAGE), PagedCache(KEYS, 40, PAGE))
    limits = Limits(64, 4, MOST, PAGE)
    keys = [torch.randint(-2, 3, (length, DIM)).float() for length in lengths]
    first = Planner(SPEC, Limits(600, 4, MOST, PAGE), layout="v32-fp32").plan(Batch.build(lengths, lengths, pool))
    none = IndexInputs(torch.zeros(sum(lengths), 1, DIM), torch.zeros(sum(lengths), 1), torch.cat(keys))
    SparseMLA(SPEC).write(torch.randn(sum(lengths), 576), caches, first, none)
    plan = Planner(SPEC, limits, layout="v32-fp32").plan(Batch.build(queries, lengths, pool))
    index = IndexInputs(
        torch.randint(-2, 3, (tokens, HEADS, DIM)).float(), torch.randint(-2, 3, (tokens, HEADS)).float()
    )
    expected, token = [], 0
    for new, own in zip(queries, keys, strict=True):
        for seen in range(len(own) - new + 1, len(own) + 1):
            products = (index.q[token].double() @ own[:seen].double().T).relu()
            expected.append(best_positions(index.weights[token].double() @ products, seen, K))
            token += 1
    return torch.randn(tokens, 2, 576), caches, plan, index, torch.tensor(expected, dtype=torch.int32)


@pytest.mark.parametrize("longest", [15, 16, 17, 143, 144, 145, 400])
def test_prompts_are_scored_in_the_columns_that_they_need(longest: int, scored: list[int]) -> None:
    q, caches, plan, index, expected = step([1, 13], [9, longest])
    for room, least in ((1 << 28, MOST), (14 * MOST * 4, MOST), (14 * MOST * 4 - 1, longest), (1, longest)):
        layer = SparseMLA(SPEC, index_workspace_bytes=room)
        assert torch.equal(layer(q, None, caches, plan, index=index).positions, expected)
        assert torch.equal(layer.select(index, caches, plan), expected)
        pages = -(-least // PAGE)
        assert all(pages <= width <= pages + pages // columns.WIDTHS for width in scored)
        assert len(scored) == 2
        scored.clear()


def test_decodes_are_scored_in_all_columns(scored: list[int]) -> None:
    """They are captured in graphs, after calls that load the kernels for as many columns."""
    q, caches, plan, index, expected = step([1, 1, 1], [30, 60, 90])
    assert torch.equal(SparseMLA(SPEC, index_workspace_bytes=1)(q, None, caches, plan, index=index).positions, expected)
    assert scored == [MOST // PAGE]


@pytest.mark.parametrize("captured", [False, True])
def test_a_table_stays_whole_in_a_graph(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)

    class OnDevice(Tensor):
        is_cuda = True

    table = torch.zeros(2, 100, dtype=torch.int32).as_subclass(OnDevice)
    assert seen_columns(table, 64, 8, 500, 1000).shape[1] == (100 if captured else 8)


def test_columns_are_enough_and_few() -> None:
    table = torch.zeros(3, 5000, dtype=torch.int32)
    widths = set()
    for keys in (0, 1, 63, 64, 65, *range(640, 64 * 5000, 977), 64 * 5000 - 1, 64 * 5000, 2**31 - 1):
        found = seen_columns(table, 64, 10, keys, 1)
        pages = max(1, -(-keys // 64))
        assert min(pages, 5000) <= found.shape[1] <= pages * (1 + 1 / columns.WIDTHS)
        assert found.data_ptr() == table.data_ptr()
        widths.add(found.shape[1])
    assert len(widths) <= columns.WIDTHS * 13  # 5000 pages are 13 octaves


@pytest.mark.parametrize("interleave", [1, 3, 16, 1000])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_shard_has_at_most_so_many_keys(ranks: int, interleave: int) -> None:
    lengths = torch.arange(700, dtype=torch.int32)
    for rank in range(ranks):
        shard = Shard(ranks, rank, interleave)
        held = shard.local_lengths(lengths).tolist()
        for length, own in enumerate(held):
            assert own <= shard.most(length) < length / ranks + interleave + 1


def test_a_shard_needs_fewer_columns() -> None:
    _, caches, plan, index, _ = step([1, 13], [9, 400])
    assert caches.index is not None
    where = (plan.request_ids, plan.block_table, plan.visible)
    out = torch.empty(14, K, dtype=torch.int32)
    call = IndexTopk(index.q, index.weights, caches.index, *where, K, 1, 14, out, None, "reference")
    assert for_prompts(call, plan, 1, Shard(4, 3, 16)).block_table.shape[1] == 7  # 112 of 400 positions
    assert for_prompts(call, plan, 4).block_table.shape[1] == 7  # 100 groups of 4


def test_entries_are_scored_in_the_columns_that_they_need(scored: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = rows(torch.float32, latent=24, rope=8)
    layer, hidden, found = small_v4.layer_of(small_v4.OVERLAPPING), torch.randn(37, small_v4.HIDDEN), []
    for room in (v4.WORKSPACE_BYTES, 1):
        monkeypatch.setattr(v4, "WORKSPACE_BYTES", room)
        planner, batch = small_v4.planner_of(small_v4.OVERLAPPING, layout)
        caches = small_v4.caches_of(small_v4.OVERLAPPING, layout)
        chosen = torch.empty(37, small_v4.OVERLAPPING.topk, dtype=torch.int32)
        plan = planner.plan(batch([37], [37]))
        found.append((layer(hidden, caches, plan, selected=chosen), chosen))
        queries = layer.write(hidden, caches, plan)
        assert torch.equal(layer.select(hidden, queries.index_q, caches, plan), chosen)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    # The pages of 80 tokens, and those of 37 tokens: 4 entries each.
    assert scored == [5, 5, 3, 3]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which is not installed")
def test_a_planner_for_longer_requests_takes_no_more_launches() -> None:
    """Of an H200's kernels, in calls that are remembered. In a process of its own: see `tests/tools/test_walk.py`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-c", "from benchmarks.index_host import *; print(launches(map(prompt, LIMITS)))"]
    done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    assert first > 0
    assert others == [first] * len(others)
