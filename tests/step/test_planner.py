"""The planner against a slow, obvious recomputation, and its promises about buffers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seed_of, seeded
from torch.overrides import TorchFunctionMode
from torch_calls import Calls

from tamis import Batch, LayerSpec, Limits, PageMap, PagePool, Planner
from tamis.step import planner as planning

LIMITS = Limits(max_tokens=64, max_requests=8, max_length=200, page_size=16, workspace_rows=210)


def make_planner(heads: int = 16, mode: str = "auto", layout: str = "v32-fp8", **limits) -> Planner:
    fields = {
        f: getattr(LIMITS, f) for f in ("max_tokens", "max_requests", "max_length", "page_size", "workspace_rows")
    }
    return Planner(LayerSpec(heads=heads, topk=32), Limits(**(fields | limits)), layout=layout, mode=mode)


def make_batch(new: list[int], total: list[int], page_size: int = 16, **fields) -> Batch:
    batch = Batch.build(new, total, PagePool(300, page_size, seed=seed_of(5)))
    return Batch(**({f: getattr(batch, f) for f in ("query_starts", "lengths", "pages")} | fields))


@st.composite
def batches(draw) -> tuple[list[int], list[int]]:
    decodes = draw(st.lists(st.integers(1, 200), max_size=4))
    prompts = draw(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 150)), max_size=4))
    queries = [1] * len(decodes) + [q for q, _ in prompts]
    return queries, decodes + [q + context for q, context in prompts]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(batches(), min_size=1, max_size=3),
    st.sampled_from([16, 64]),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_plans_match_a_recomputation_over_random_batches(steps, heads, speculative, uniform, whole) -> None:
    planner = make_planner(heads, speculative_tokens=speculative, uniform_decodes=uniform)
    planner._arena._whole = whole
    for queries, lengths in steps:
        batch = make_batch(queries, lengths)
        plan = planner.plan(batch)
        requests, tokens = len(queries), sum(queries)
        assert (plan.requests, plan.tokens, plan.rows) == (requests, tokens, tokens)
        assert plan.max_query == max(queries, default=0)
        assert plan.max_length == max(lengths, default=0)
        ids = [r for r, q in enumerate(queries) for _ in range(q)]
        assert plan.request_ids.tolist() == ids
        assert plan.query_starts.tolist() == [sum(queries[:r]) for r in range(requests + 1)]
        assert plan.lengths.tolist() == lengths
        positions = [length - q + i for q, length in zip(queries, lengths, strict=True) for i in range(q)]
        assert plan.positions.tolist() == positions
        assert plan.visible.tolist() == [position + 1 for position in positions]
        assert plan.slots.tolist() == batch.pages.slots.tolist()
        width = batch.pages.block_table.shape[1]
        assert torch.equal(plan.block_table[:, :width], batch.pages.block_table)
        assert (plan.block_table[:, width:] == -1).all()
        check_parts(plan, queries, lengths, 1 + speculative, uniform)


def check_parts(plan, queries, lengths, threshold, uniform) -> None:
    first = len(queries)
    for number, q in enumerate(queries):
        differs = q != queries[0] if uniform and threshold > 1 else q > threshold
        if differs or queries[0] > threshold:
            first = number
            break
    decode_tokens = sum(queries[:first])
    assert (plan.split.decodes, plan.split.decode_tokens) == (first, decode_tokens)
    assert (plan.split.prefills, plan.split.prefill_tokens) == (len(queries) - first, plan.tokens - decode_tokens)
    if first == 0:
        assert plan.decode is None
    else:
        same = len(set(queries[:first])) == 1
        assert (plan.decode.requests, plan.decode.tokens) == (first, decode_tokens)
        assert plan.decode.query_length == (queries[0] if same else None)
    if first == len(queries):
        assert plan.prefill is None
        return
    rest = lengths[first:]
    ids = [-1] * decode_tokens + [r for r, q in enumerate(queries[first:]) for _ in range(q)]
    assert plan.prefill.ids.tolist() == ids
    assert plan.prefill.lengths.tolist() == rest
    if plan.mode == "mixed":
        assert plan.prefill.chunks == ()
        return
    seen = []
    for chunk in plan.prefill.chunks:
        begin, end = chunk.requests.start - first, chunk.requests.stop - first
        seen += range(begin, end)
        assert chunk.rows == sum(rest[begin:end]) <= 210
        assert chunk.starts.tolist() == [sum(rest[begin:r]) for r in range(begin, end)]
        assert chunk.lengths.tolist() == rest[begin:end]
        assert chunk.tokens == slice(sum(queries[: first + begin]), sum(queries[: first + end]))
        assert torch.equal(chunk.block_table, plan.block_table[chunk.requests])
        assert plan.prefill.starts[begin:end].tolist() == chunk.starts.tolist()
    assert seen == list(range(len(rest)))


@pytest.mark.parametrize("whole", [True, False])
def test_addresses_never_change_and_stale_values_are_gone(whole: bool) -> None:
    planner = make_planner(64)
    planner._arena._whole = whole
    big = planner.plan(make_batch([1, 1, 20, 30], [40, 50, 100, 120], padded_tokens=64))
    fields = ["query_starts", "lengths", "request_ids", "positions", "visible", "slots", "block_table"]
    before = [getattr(big, f).data_ptr() for f in fields] + [big.prefill.ids.data_ptr(), big.workspace.data_ptr()]
    small = planner.plan(make_batch([1, 2], [7, 9], padded_tokens=64))
    after = [getattr(small, f).data_ptr() for f in fields] + [small.prefill.ids.data_ptr(), small.workspace.data_ptr()]
    assert before == after
    assert small.request_ids[3:].eq(0).all()
    assert small.positions[3:].eq(-1).all()
    assert small.visible[3:].eq(0).all()
    assert small.slots[3:].eq(-1).all()
    assert small.prefill.ids.tolist() == [-1, 0, 0] + [-1] * 61
    assert big.query_starts.tolist() == [0, 1, 3, 3, 3]  # the old view shows the new step: one set of buffers
    assert big.lengths.tolist() == [7, 9, 0, 0]
    assert (big.block_table[2:] == -1).all()
    one = planner.plan(make_batch([1], [3]))
    assert big.query_starts.tolist() == [0, 1, 1, 1, 1]  # as a graph that was captured for four requests reads it
    assert big.lengths.tolist() == [3, 0, 0, 0]
    assert big.request_ids.eq(0).all()
    assert big.slots[1:].eq(-1).all()
    assert one.slots.data_ptr() == big.slots.data_ptr()


def test_a_step_costs_two_copies_and_no_kernel() -> None:
    """The time of a step is that of its torch calls. Lengths, slots and tables are on the host here."""
    planner, batch = make_planner(), make_batch([1] * 8, [30] * 8)
    planner.plan(batch)
    with Calls() as calls:
        planner.plan(batch)
    assert sorted(calls.names) == ["aten.copy_", "aten.copy_", "aten.empty"]  # the arena and the block table


def test_a_narrower_table_leaves_nothing_behind() -> None:
    made = make_planner()
    generator = seeded(0)
    for requests, width in ((6, 5), (3, 2), (5, 4), (5, 1), (6, 5)):
        starts = torch.arange(requests + 1, dtype=torch.int32)
        table = torch.randint(0, 90, (requests, width), dtype=torch.int32, generator=generator)
        pages = PageMap(table, torch.arange(requests))
        plan = made.plan(Batch(starts, torch.ones(requests, dtype=torch.int32), pages))
        whole = plan.block_table.as_strided((8, plan.block_table.shape[1]), plan.block_table.stride())
        assert torch.equal(whole[:requests, :width], table)
        assert (whole[requests:] == -1).all()
        assert (whole[:, width:] == -1).all()


def test_callers_tensors_are_never_changed() -> None:
    batch = make_batch([1, 1, 5], [30, 40, 50])
    batch.pages.block_table[0, -1] = -1
    kept = [t.clone() for t in (batch.query_starts, batch.lengths, batch.pages.block_table, batch.pages.slots)]
    plan = make_planner(64).plan(batch)
    plan.lengths.fill_(99)
    plan.slots.fill_(99)
    for now, before in zip(
        (batch.query_starts, batch.lengths, batch.pages.block_table, batch.pages.slots), kept, strict=True
    ):
        assert torch.equal(now, before)


def test_mode_follows_heads_and_layout() -> None:
    assert make_planner(31).mode == "mixed"
    assert make_planner(32).mode == "separate"
    assert make_planner(128, layout="v32-bf16").mode == "mixed"
    assert make_planner(8, mode="separate").mode == "separate"
    assert make_planner(128, mode="mixed").mode == "mixed"
    with pytest.raises(ValueError, match="mode must be 'auto' or 'mixed' for v32-bf16 rows, got 'separate'"):
        make_planner(16, mode="separate", layout="v32-bf16")


def test_workspace_is_reserved_once_and_only_where_it_is_used() -> None:
    assert make_planner(16).plan(make_batch([1], [5])).workspace is None
    planner = make_planner(64, workspace_rows=None)
    workspace = planner.plan(make_batch([1], [5])).workspace
    assert workspace.shape == (5 * 200, 576)
    assert workspace.dtype == torch.bfloat16
    assert (workspace == 0).all()


def test_speculative_tokens_are_decode_and_padding_requests_are_not_counted() -> None:
    planner = make_planner(64, speculative_tokens=1)
    plan = planner.plan(make_batch([2, 2, 2, 0, 0], [10, 20, 30, 0, 0], padded_tokens=10))
    assert plan.prefill is None
    assert (plan.decode.requests, plan.decode.tokens, plan.decode.query_length) == (3, 6, 2)
    assert plan.rows == 10
    assert plan.slots.tolist()[6:] == [-1] * 4


def test_device_lengths_are_used_where_the_host_knows_a_bound_only() -> None:
    batch = make_batch([1, 1], [20, 30], host_lengths=torch.tensor([25, 40], dtype=torch.int32))
    plan = make_planner().plan(batch)
    assert plan.max_length == 40
    assert plan.lengths.tolist() == [20, 30]
    assert plan.positions.tolist() == [19, 29]
    short = make_batch([3, 1], [3, 9], lengths=torch.tensor([1, 9], dtype=torch.int32))
    short = replace(short, host_lengths=torch.tensor([3, 9], dtype=torch.int32))
    assert make_planner().plan(short).positions.tolist() == [-1, -1, 0, 8]  # no position is below that of padding


def test_further_pools_have_buffers_of_their_own() -> None:
    planner = make_planner(other_page_sizes={"window": 8})
    window = PageMap(torch.tensor([[3, 4]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32))
    plan = planner.plan(make_batch([1], [10], other_pages={"window": window}))
    assert plan.other_pages["window"].block_table[0, :3].tolist() == [3, 4, -1]
    assert plan.other_pages["window"].slots.tolist() == [9]
    with pytest.raises(ValueError, match="other_pages must be among window"):
        planner.plan(make_batch([1], [10], other_pages={"state": window}))


def test_empty_step() -> None:
    plan = make_planner(64).plan(make_batch([], []))
    assert (plan.requests, plan.tokens, plan.decode, plan.prefill) == (0, 0, None, None)


def test_a_prefill_longer_than_the_workspace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workspace_rows must be at least the longest prefill \(150 rows\), got 100"):
        make_planner(64, workspace_rows=100).plan(make_batch([20], [150]))


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 0, 3], [2, 5], [1, 1, 20]])
def test_positions_are_made_of_lengths_that_only_the_device_knows(new: list[int], monkeypatch) -> None:
    bounds = [60] * len(new)
    exact = torch.tensor([50 - number for number in range(len(new))], dtype=torch.int32)
    batch = make_batch(new, bounds, lengths=exact, host_lengths=torch.tensor(bounds, dtype=torch.int32))
    expected = make_planner(64).plan(batch)
    check = planning.check_batch
    monkeypatch.setattr(planning, "check_batch", lambda *args: check(*args)._replace(exact=None))
    found = make_planner(64).plan(batch)
    for name in ("positions", "visible", "lengths", "request_ids", "query_starts", "slots"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    negative = replace(batch, lengths=torch.full_like(exact, -9))
    assert make_planner(64).plan(negative).positions.eq(-1).all()  # never below the position of padding
    assert make_planner(64).plan(negative).visible.eq(0).all()
    assert make_planner(64).plan(negative).lengths.eq(0).all()


def test_a_default_device_is_not_asked_about_every_attribute() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    planner, batch = make_planner(), make_batch([1, 5], [30, 40])
    with Mode():
        plan = planner.plan(batch)
    assert not seen
    with torch.device("meta"):
        assert planner.plan(batch).positions.device == plan.positions.device == torch.device("cpu")


def test_pools_may_have_any_name() -> None:
    planner = make_planner(other_page_sizes={"positions": 8, "slots": 4})
    pages = PageMap(torch.tensor([[3, 4]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32))
    plan = planner.plan(make_batch([1], [8], other_pages={"positions": pages, "slots": pages}))
    assert plan.positions.tolist() == [7]
    assert plan.other_pages["positions"].slots.tolist() == plan.other_pages["slots"].slots.tolist() == [9]


def test_decodes_of_different_lengths_have_no_common_one() -> None:
    planner = make_planner(uniform_decodes=False, speculative_tokens=2)
    decode = planner.plan(make_batch([1, 3, 0, 2, 9], [10, 20, 30, 40, 50])).decode
    assert (decode.requests, decode.tokens, decode.query_length) == (3, 6, None)
    decode = planner.plan(make_batch([2, 2, 0], [10, 20, 30])).decode
    assert (decode.requests, decode.tokens, decode.query_length) == (2, 4, 2)
