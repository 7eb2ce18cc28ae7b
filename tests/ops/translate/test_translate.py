"""Positions to slots against the rule, one entry at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded

from tamis.lab.testing.cases import INT_MAX, INT_MIN
from tamis.ops import translate_positions


def slow_translate(positions, request_ids, table, page_size, span, workspace=None, ranks=1, rank=0, interleave=1):
    result = torch.full_like(positions, -1)
    for t in range(positions.shape[0]):
        for c in range(positions.shape[1]):
            p = int(positions[t, c])
            if p < 0:
                continue
            if ranks > 1:
                if p // interleave % ranks != rank:
                    continue
                p = p // (interleave * ranks) * interleave + p % interleave
            if p // page_size >= table.shape[1]:
                continue
            if workspace is not None and int(workspace[0][t]) >= 0:
                result[t, c] = int(workspace[1][int(workspace[0][t])]) + p
                continue
            page = int(table[int(request_ids[t]), p // page_size])
            if page >= 0:
                result[t, c] = page * span + p % page_size
    return result


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_translation_follows_the_rule(data: st.DataObject) -> None:
    draw = data.draw
    page_size = draw(st.sampled_from([1, 2, 16, 61, 64, 128]))
    width, requests = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    tokens, k = draw(st.integers(0, 6)), draw(st.integers(0, 40))
    generator = seeded(draw(st.integers(0, 2**31)))

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    table = ints(-1, 50, requests, width)
    positions = ints(-3, width * page_size + 20, tokens, k)
    if positions.numel():
        positions.view(-1)[0] = draw(st.sampled_from([INT_MIN, INT_MAX, -1, 0]))
    request_ids = ints(0, requests, tokens)
    span = page_size + draw(st.sampled_from([0, 3]))
    workspace = (ints(-1, 2, tokens), torch.tensor([0, 100], dtype=torch.int32)) if draw(st.booleans()) else None
    ranks = draw(st.sampled_from([1, 2, 3]))
    shard = {"ranks": ranks, "rank": draw(st.integers(0, ranks - 1)), "interleave": draw(st.sampled_from([1, 4]))}
    expected = slow_translate(positions, request_ids, table, page_size, span, workspace, **shard)
    arguments = {"page_size": page_size, "rows_per_page": span, "workspace": workspace, **shard}
    kept = positions.clone()
    slots, counts = translate_positions(positions, request_ids, table, **arguments)
    assert slots.dtype == torch.int32
    assert counts.dtype == torch.int32
    assert torch.equal(slots, expected)
    assert torch.equal(counts, (expected >= 0).sum(1).int())
    assert torch.equal(positions, kept)
    packed = translate_positions(positions, request_ids, table, compact=True, **arguments)
    assert torch.equal(packed.counts, counts)
    for row, count, full in zip(packed.slots, counts.tolist(), expected, strict=True):
        assert row[:count].tolist() == full[full >= 0].tolist()
        assert (row[count:] == -1).all()


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("k", [1, 127, 128, 256, 384, 512])
def test_any_number_of_columns(page_size: int, k: int) -> None:
    table = torch.randperm(40).int().view(4, 10)
    positions = torch.randint(-1, page_size * 12, (9, k), dtype=torch.int32)
    request_ids = torch.randint(0, 4, (9,), dtype=torch.int32)
    found = translate_positions(positions, request_ids, table, page_size=page_size).slots
    assert torch.equal(found, slow_translate(positions, request_ids, table, page_size, page_size))


def test_shards_of_all_ranks_cover_every_position_once() -> None:
    positions = torch.arange(64, dtype=torch.int32).unsqueeze(0)
    ids = torch.zeros(1, dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).unsqueeze(0)
    owned = [
        translate_positions(positions, ids, table, page_size=4, ranks=4, rank=rank, interleave=2).slots
        for rank in range(4)
    ]
    assert (torch.stack(owned) >= 0).sum(0).eq(1).all()
    assert all(sorted(o[o >= 0].tolist()) == list(range(16)) for o in owned)


def test_a_garbage_page_id_never_wraps_around_to_a_valid_slot() -> None:
    table = torch.tensor([[2**29, 3, INT_MAX]], dtype=torch.int32)
    positions = torch.tensor([[5, 64 + 5, 128]], dtype=torch.int32)
    found = translate_positions(positions, torch.zeros(1, dtype=torch.int32), table, page_size=64)
    assert found.slots.tolist() == [[-1, 3 * 64 + 5, -1]]


GOOD = {
    "positions": torch.zeros(3, 5, dtype=torch.int32),
    "request_ids": torch.zeros(3, dtype=torch.int32),
    "block_table": torch.zeros(2, 4, dtype=torch.int32),
    "page_size": 64,
}
BAD = {
    "longer request_ids": ({"request_ids": torch.zeros(4, dtype=torch.int32)}, ValueError, "request_ids .*T=3.* slice"),
    "unknown request": ({"request_ids": torch.tensor([0, 1, 2], dtype=torch.int32)}, ValueError, "between 0 and 1"),
    "int64 positions": ({"positions": torch.zeros(3, 5).long()}, TypeError, "positions must be int32, got int64"),
    "list positions": ({"positions": [[1, 2]]}, TypeError, "positions must be a tensor, got list; pass a torch.Tensor"),
    "flat positions": ({"positions": torch.zeros(3, dtype=torch.int32)}, ValueError, r"positions must be of shape"),
    "empty table": ({"block_table": torch.zeros(2, 0, dtype=torch.int32)}, ValueError, "block_table must be at least"),
    "table rank": ({"block_table": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_table must be of shape"),
    "page size": ({"page_size": 0}, ValueError, "page_size must be >= 1, got 0"),
    "page size type": ({"page_size": 6.5}, TypeError, "page_size must be an int, got float"),
    "span": ({"rows_per_page": 63}, ValueError, "rows_per_page must be >= 64, got 63"),
    "rank": ({"ranks": 2, "rank": 2}, ValueError, "rank must be between 0 and 1, got 2"),
    "interleave": ({"interleave": 0}, ValueError, "interleave must be >= 1"),
    "workspace ids": (
        {"workspace": (torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))},
        ValueError,
        "workspace ids must be of shape",
    ),
    "workspace without ids": (
        {"workspace": (None, torch.zeros(1, dtype=torch.int32))},
        TypeError,
        "workspace ids must be a tensor",
    ),
    "workspace id past starts": (
        {"workspace": (torch.ones(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))},
        ValueError,
        "workspace ids must be between",
    ),
    "device": (
        {"block_table": torch.zeros(2, 4, dtype=torch.int32, device="meta")},
        ValueError,
        "block_table must be on",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_remedy(case: str) -> None:
    fields, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        translate_positions(**(GOOD | fields))
