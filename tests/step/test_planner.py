"""The planner against a slow, obvious recomputation, and its promises about buffers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seed_of, seeded

from tamis import Batch, LayerSpec, Limits, PageMap, PagePool, Planner
from tamis.step import planner as planning
from tamis.step.batch import parse_shape

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
@given(st.lists(batches(), min_size=1, max_size=3), st.sampled_from([16, 64]), st.integers(0, 2), st.booleans())
def test_plans_match_a_recomputation_over_random_batches(steps, heads, speculative, uniform) -> None:
    planner = make_planner(heads, speculative_tokens=speculative, uniform_decodes=uniform)
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


def test_addresses_never_change_and_stale_values_are_gone() -> None:
    planner = make_planner(64)
    big = planner.plan(make_batch([1, 1, 20, 30], [40, 50, 100, 120], padded_tokens=64))
    fields = ["query_starts", "lengths", "request_ids", "positions", "slots", "block_table"]
    before = [getattr(big, f).data_ptr() for f in fields] + [big.prefill.ids.data_ptr(), big.workspace.data_ptr()]
    small = planner.plan(make_batch([1, 2], [7, 9], padded_tokens=64))
    after = [getattr(small, f).data_ptr() for f in fields] + [small.prefill.ids.data_ptr(), small.workspace.data_ptr()]
    assert before == after
    assert small.request_ids[3:].eq(0).all()
    assert small.positions[3:].eq(-1).all()
    assert small.slots[3:].eq(-1).all()
    assert small.prefill.ids.tolist() == [-1, 0, 0] + [-1] * 61
    assert big.query_starts.tolist() == [0, 1, 3, 3, 3]  # the old view shows the new step: one set of buffers
    assert big.lengths.tolist() == [7, 9, 0, 0]
    assert (big.block_table[2:] == -1).all()


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


def test_shape_grammar() -> None:
    assert parse_shape("32q1s1k_2q1k") == ([1] * 32 + [1024] * 2, [1024] * 34)
    assert parse_shape("q5s7") == ([5], [7])
    with pytest.raises(ValueError, match="shape must be groups like"):
        parse_shape("32x1")
    with pytest.raises(ValueError, match="totals that include"):
        parse_shape("q5s3")
    batch = Batch.parse("2q1s20_q10", PagePool(20, 16))
    assert batch.lengths.tolist() == [20, 20, 10]


def spoiled(**fields):
    return lambda: make_batch([1, 5], [10, 20], **fields)


def bad_pages(**fields):
    good = make_batch([1, 5], [10, 20]).pages
    return PageMap(**({"block_table": good.block_table, "slots": good.slots} | fields))


INT = {"dtype": torch.int32}
BAD = {
    "starts dtype": (spoiled(query_starts=torch.tensor([0, 1, 6])), TypeError, "query_starts must be int32, got int64"),
    "starts begin": (spoiled(query_starts=torch.tensor([1, 2, 6], **INT)), ValueError, "a running sum from 0"),
    "starts fall": (spoiled(query_starts=torch.tensor([0, 6, 1], **INT)), ValueError, "a running sum from 0"),
    "starts rank": (spoiled(query_starts=torch.zeros(2, 2, **INT)), ValueError, "query_starts must be of shape"),
    "too many tokens": (lambda: make_batch([65], [100]), ValueError, "of at most max_tokens=64 tokens, got 65"),
    "too many requests": (lambda: make_batch([1] * 9, [9] * 9), ValueError, "at most max_requests=8 requests, got 9"),
    "too long": (lambda: make_batch([1], [201]), ValueError, "lengths must be between 0 and 200, got a value of 201"),
    "negative": (spoiled(lengths=torch.tensor([-1, 20], **INT)), ValueError, "got a value of -1"),
    "short": (spoiled(lengths=torch.tensor([1, 4], **INT)), ValueError, r"lengths\[1\] must be at least its 5 new"),
    "lengths count": (spoiled(lengths=torch.tensor([10], **INT)), ValueError, "lengths must be of shape .*one per"),
    "device lengths": (
        spoiled(lengths=torch.zeros(2, device="meta", **INT)),
        ValueError,
        "host_lengths must be given when lengths are on a device",
    ),
    "padding": (spoiled(padded_tokens=5), ValueError, "padded_tokens must be between 6 and 64, got 5"),
    "prefilling": (spoiled(prefilling=[True]), ValueError, "prefilling must be 2 flags, one per request, got 1"),
    "table rows": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(block_table=torch.zeros(3, 2, **INT))),
        ValueError,
        "pages.block_table must be of shape",
    ),
    "table width": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(block_table=torch.zeros(2, 14, **INT))),
        ValueError,
        "at most 13 pages wide, got 14",
    ),
    "slots count": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(slots=torch.zeros(5, **INT))),
        ValueError,
        "pages.slots must be of 6 to 6 values, got 5",
    ),
    "too many slots": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(slots=torch.zeros(9, **INT)), padded_tokens=8),
        ValueError,
        "pages.slots must be of 6 to 8 values, got 9",
    ),
    "slots dtype": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(slots=torch.zeros(6))),
        TypeError,
        "pages.slots must be int32 or int64, got float32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_batches_are_refused_with_a_remedy(case: str) -> None:
    make, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        make_planner().plan(make())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"page_size": 0}, "page_size must be >= 1"),
        ({"workspace_rows": 0}, "workspace_rows must be >= 1"),
        ({"other_page_sizes": {"window": 0}}, "other_page_sizes"),
    ],
)
def test_bad_limits_are_refused(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_planner(**fields)


def test_a_prefill_longer_than_the_workspace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workspace_rows must be at least the longest prefill \(150 rows\), got 100"):
        make_planner(64, workspace_rows=100).plan(make_batch([20], [150]))


def test_pool_hands_out_each_page_once_and_takes_them_back() -> None:
    pool = PagePool(10, 4)
    pool.extend("a", 9)
    pool.extend("b", 4)
    table = pool.block_table(["a", "b"])
    held = table[table >= 0].tolist()
    assert len(held) == len(set(held)) == 4
    assert 0 not in held
    assert pool.free_pages == 5
    with pytest.raises(ValueError, match="length must be within 5 free pages"):
        pool.extend("c", 24)
    with pytest.raises(ValueError, match="end must be at most 4"):
        pool.slots("b", 0, 5)
    pool.release("a")
    assert pool.free_pages == 8


def test_no_workspace_where_kernels_read_fp8_rows_at_every_head_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "backend_for_stage", lambda *args: SimpleNamespace(direct_prefills=True))
    assert make_planner(128).mode == "mixed"
    assert make_planner(128, mode="separate").mode == "separate"


def test_decodes_of_different_lengths_have_no_common_one() -> None:
    planner = make_planner(uniform_decodes=False, speculative_tokens=2)
    decode = planner.plan(make_batch([1, 3, 0, 2, 9], [10, 20, 30, 40, 50])).decode
    assert (decode.requests, decode.tokens, decode.query_length) == (3, 6, None)
    decode = planner.plan(make_batch([2, 2, 0], [10, 20, 30])).decode
    assert (decode.requests, decode.tokens, decode.query_length) == (2, 4, 2)
