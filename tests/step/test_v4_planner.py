"""Per-step metadata of V4: every field against the rules, stable addresses, nothing stale, no waiting."""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seed_of
from torch import Tensor

from tamis import Batch, LayerSpec, Limits, PageMap, PagePool
from tamis.step.split import Group, group_prefills
from tamis.step.v4_plan import V4Plan, state_pool
from tamis.step.v4_planner import V4Planner

WINDOW, TOPK, OVERLAPPING, PLAIN = 8, 5, 4, 16
MAX_TOKENS, MAX_LENGTH = 64, 200
POOLS = {"window": 8, "state4": 4, "state16": 8}


def specs() -> list[LayerSpec]:
    common: dict[str, Any] = {"heads": 4, "latent_dim": 24, "rope_dim": 8, "value_dim": 32, "window": WINDOW}
    return [
        LayerSpec(**common, kind="window"),
        LayerSpec(**common, kind="overlapping", compress=OVERLAPPING, topk=TOPK, index_heads=2, index_dim=16),
        LayerSpec(**common, kind="plain", compress=PLAIN),
    ]


def limits(**changes: Any) -> Limits:
    sizes: dict[str, Any] = {"max_tokens": MAX_TOKENS, "max_requests": 8, "max_length": MAX_LENGTH}
    return Limits(**sizes | {"page_size": 32, "other_page_sizes": POOLS} | changes)


@cache
def shared(mode: Any = "mixed") -> V4Planner:
    """The same buffers for every example: what an earlier step left there must not show."""
    return V4Planner(specs(), limits(speculative_tokens=2), layout="v4-fp32", mode=mode)


class Pools:
    """Pages of all pools for some requests."""

    def __init__(self, queries: list[int], lengths: list[int], seed: int = 0) -> None:
        self.pools = {name: PagePool(400, size, seed=seed_of(seed)) for name, size in {"": 32, **POOLS}.items()}
        batches = {name: Batch.build(queries, lengths, pool) for name, pool in self.pools.items()}
        main = batches.pop("")
        self.batch = replace(main, other_pages={name: b.pages for name, b in batches.items()})

    def slot(self, name: str, request: int, position: int) -> int:
        return int(self.pools[name].slots(request, position, position + 1))

    def entry(self, request: int, number: int, ratio: int) -> int:
        page = int(self.pools[""].block_table([request])[0, number // (32 // ratio)])
        return page * (32 // ratio) + number % (32 // ratio)


requests = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 180)), min_size=1, max_size=5)


def tokens_of(queries: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    return [(r, n - q + i) for r, (q, n) in enumerate(zip(queries, lengths, strict=True)) for i in range(q)]


@given(requests, st.integers(0, 3), st.sampled_from(["mixed", "separate"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_field(shape: list[tuple[int, int]], pad: int, mode: Any, hole: bool) -> None:
    shape = sorted(shape)
    queries, lengths = [q for q, _ in shape], [q + context for q, context in shape]
    pools = Pools(queries, lengths, seed=sum(lengths))
    tokens = tokens_of(queries, lengths)
    batch = replace(pools.batch, padded_tokens=len(tokens) + pad)
    skipped = -1
    if hole:  # a token that the engine does not write: it must select nothing
        skipped = len(tokens) // 2
        window = batch.other_pages["window"]
        for slots in (batch.pages.slots, window.slots):
            slots[skipped] = -1
    plan = shared(mode).plan(batch)
    assert plan.step.rows == len(tokens) + pad
    for row, (request, p) in enumerate(tokens):
        real = row != skipped
        seen = [pools.slot("window", request, x) for x in range(max(0, p - WINDOW + 1), p + 1)] if real else []
        assert plan.window.slots[row].tolist() == seen + [-1] * (WINDOW - len(seen))
        assert plan.window.lengths[row] == len(seen)
        for ratio in (OVERLAPPING, PLAIN):
            part = plan.entries[ratio]
            count = (p + 1) // ratio if real else 0
            assert part.visible[row] == count
            assert part.lengths[row] == min(count, part.columns)
            ends = real and (p + 1) % ratio == 0
            assert part.slots[row] == (pools.entry(request, p // ratio, ratio) if ends else -1)
            assert part.state is not None
            assert part.state.slots[row] == pools.slot(state_pool(ratio), request, p)
            if ratio == PLAIN:
                assert part.every is not None
                slots = [pools.entry(request, n, ratio) for n in range(count)]
                assert part.every[row].tolist() == slots + [-1] * (128 - count)
    for buffer, fill in whole_buffers(shared(mode)):
        assert buffer[len(tokens) :].eq(fill).all()
    decodes = next((r for r, q in enumerate(queries) if q > 3), len(queries))
    assert plan.step.split.decodes == decodes
    if mode == "separate":
        check_gathers(plan, queries, lengths, decodes)
    else:
        assert not plan.gathers


def whole_buffers(planner: V4Planner) -> list[tuple[Tensor, int]]:
    """Every buffer in full length, with what must stand in rows that the step does not have."""
    found = [(planner._window_slots, -1), (planner._window_lengths, 0)]
    for held in planner._entries.values():
        found += [(held.completed, -1), (held.visible, 0), (held.lengths, 0)]
        found += [(held.every, -1)] if held.every is not None else []
    return found


def check_gathers(plan: V4Plan, queries: list[int], lengths: list[int], decodes: int) -> None:
    raw = [q + min(n - q, WINDOW - 1) for q, n in zip(queries, lengths, strict=True)][decodes:]
    assert set(plan.gathers) == (set() if decodes == len(queries) else {1, OVERLAPPING, PLAIN})
    for ratio, gather in plan.gathers.items():
        assert gather.lengths.tolist() == raw
        assert gather.first.tolist() == [n - r for n, r in zip(lengths[decodes:], raw, strict=True)]
        entries = [n // ratio if ratio > 1 else 0 for n in lengths[decodes:]]
        assert gather.entries.tolist() == entries
        assert gather.groups[0].requests.start == decodes
        assert gather.groups[-1].requests.stop == len(queries)
        for group in gather.groups:
            mine = range(group.requests.start - decodes, group.requests.stop - decodes)
            assert group.entries == max(entries[k] for k in mine)
            assert group.rows == group.entries + max(raw[k] for k in mine)
            assert group.tokens == slice(sum(queries[: group.requests.start]), sum(queries[: group.requests.stop]))
            assert plan.workspace is not None
            assert group.rows * len(mine) <= len(plan.workspace)


def test_the_published_chunk_plan() -> None:
    lengths, window, ratio = [80, 96, 112, 128, 144], 64, 4
    raw = [4 + min(n - 4, window - 1) for n in lengths]
    budget = 4 * (1024 // ratio + window + 128)
    assert group_prefills([n // ratio for n in lengths], raw, budget) == [Group(0, 5, 36, 103)]


def test_groups_end_where_the_budget_does() -> None:
    assert group_prefills([1, 1, 9], [4, 4, 4], 15) == [Group(0, 2, 1, 5), Group(2, 3, 9, 13)]
    assert group_prefills([1, 1], [4, 4], 10) == [Group(0, 2, 1, 5)]
    assert group_prefills([1, 1], [4, 4], 9) == [Group(0, 1, 1, 5), Group(1, 2, 1, 5)]
    assert group_prefills([1, 9], [7, 2], 99) == [Group(0, 2, 9, 16)]  # room for the most of both, of each request
    with pytest.raises(ValueError, match=r"workspace_rows must be at least the longest prefill \(13 rows\), got 12"):
        group_prefills([9], [4], 12)


def test_addresses_never_change() -> None:
    planner = V4Planner(specs(), limits(), layout="v4-fp32", mode="separate")

    def places(plan: V4Plan) -> list[int]:
        parts = [plan.window, *plan.entries.values(), *plan.gathers.values()]
        return [v.data_ptr() for part in parts for v in vars(part).values() if isinstance(v, Tensor)]

    first = places(planner.plan(Pools([1, 9], [50, 90]).batch))
    assert len(first) > 20
    assert places(planner.plan(Pools([2, 3, 12], [2, 80, 40]).batch)) == first


def test_a_step_looks_at_no_device_value() -> None:
    """Whatever would wait for a device (`.item()`, `.tolist()`) is only done to what the caller keeps on the host."""
    planner = V4Planner(specs(), limits(), layout="v4-fp32")
    batch = Pools([1, 9], [50, 90]).batch
    seen: list[Any] = []
    usual = torch.Tensor.item
    with patch("torch.Tensor.item", lambda self: seen.append(self) or usual(self)):
        planner.plan(batch)
    assert not seen


def test_draft_blocks_see_each_other() -> None:
    planner = V4Planner(specs(), limits(speculative_tokens=3), layout="v4-fp32", draft_tokens=4)
    pools = Pools([4, 4, 4], [30, 6, 50])
    plan = planner.plan(pools.batch, causal=False)
    assert plan.window.slots.shape == (12, 64)
    for row in range(12):
        request, seen = row // 4, (range(18, 30), range(6), range(38, 50))[row // 4]
        slots = [pools.slot("window", request, x) for x in seen]
        assert plan.window.slots[row].tolist() == slots + [-1] * (64 - len(slots))
        assert plan.window.lengths[row] == len(slots)
    causal = planner.plan(pools.batch)
    assert causal.window.lengths.tolist() == [8, 8, 8, 8, 3, 4, 5, 6, 8, 8, 8, 8]


def test_the_default_workspace_holds_four_of_the_largest_prefills() -> None:
    planner = V4Planner(specs(), limits(max_tokens=64), layout="v4-fp32", mode="separate")
    plan = planner.plan(Pools([16] * 4, [MAX_LENGTH] * 4).batch)
    assert {ratio: len(gather.groups) for ratio, gather in plan.gathers.items()} == {1: 1, OVERLAPPING: 1, PLAIN: 1}


def test_an_empty_step_and_padding_alone() -> None:
    planner = V4Planner(specs(), limits(), layout="v4-fp32", mode="separate")
    planner.plan(Pools([9], [90]).batch)
    empty = PageMap(torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    batch = Batch(
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        empty,
        other_pages=dict.fromkeys(POOLS, empty),
        padded_tokens=4,
    )
    plan = planner.plan(batch)
    assert plan.window.lengths.tolist() == [0] * 4
    assert plan.window.slots.eq(-1).all()
    assert plan.entries[PLAIN].slots.tolist() == [-1] * 4
    assert not plan.gathers


def test_refusals() -> None:
    with pytest.raises(ValueError, match="page_size must be a multiple of the ratio 16, got 24"):
        V4Planner(specs(), limits(page_size=24))
    with pytest.raises(ValueError, match="other_page_sizes must be one with 'window'"):
        V4Planner(specs(), limits(other_page_sizes={}))
    with pytest.raises(TypeError, match="specs must be a list, got LayerSpec; pass a V4 model's specs"):
        V4Planner(specs()[0], limits())
    with pytest.raises(TypeError, match=r"specs\[1\] must be a LayerSpec, got NoneType"):
        V4Planner([specs()[0], None], limits())
    with pytest.raises(TypeError, match="limits must be a Limits, got NoneType"):
        V4Planner(specs(), None)
    with pytest.raises(ValueError, match="specs must be layers with one window size"):
        V4Planner([*specs(), LayerSpec(heads=4, window=9, kind="window")], limits())
    with pytest.raises(ValueError, match="specs must be of one kind for ratio 16"):
        V4Planner([*specs(), replace(specs()[1], compress=16)], limits())
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        V4Planner(specs(), limits(), layout="v4-fp32", backend="magic")
    batch = replace(Pools([1], [5]).batch, other_pages={})
    with pytest.raises(ValueError, match="other_pages must be one with 'window'"):
        V4Planner(specs(), limits(), layout="v4-fp32").plan(batch)
