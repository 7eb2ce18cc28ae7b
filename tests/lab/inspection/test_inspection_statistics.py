"""The measures of a selection, each against a slow version of its definition."""

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded

from tamis.lab.inspection.statistics import (
    DISTANCE_BINS,
    dense_shares,
    distance_counts,
    evenly_spaced,
    mean_overlap,
    selected_mask,
    tied_at_cut,
    visible_counts,
)

quick = settings(max_examples=60, deadline=None)
SETS = st.lists(st.sets(st.integers(0, 19), max_size=8), min_size=1, max_size=6)


def padded(rows: list[set[int]], width: int = 8) -> torch.Tensor:
    return torch.tensor([[*sorted(row), *[-1] * (width - len(row))] for row in rows], dtype=torch.int32)


@quick
@given(SETS)
def test_masks(rows: list[set[int]]) -> None:
    mask = selected_mask(padded(rows), 20)
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == rows


@quick
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 30), st.integers(1, 4))
def test_shares_of_dense_attention(seed: int, queries: int, places: int, heads: int) -> None:
    generator = seeded(seed)
    logits = torch.randn(queries, heads, places, generator=generator) * 3
    visible = torch.randint(0, places + 1, (queries,), generator=generator)
    logits.masked_fill_((torch.arange(places) >= visible[:, None])[:, None], -torch.inf)
    chosen = torch.rand(queries, places, generator=generator) < 0.4
    found = dense_shares(logits, chosen)
    for query in range(queries):
        count = int(visible[query])
        if count == 0:
            assert all(math.isnan(part[query]) for part in found[:3])
            assert float(found.weights[query].sum()) == 0
            continue
        weights = [[math.exp(x) for x in row[:count]] for row in logits[query].double().tolist()]
        weights = [[x / sum(row) for x in row] for row in weights]
        picked = [place for place in range(count) if chosen[query, place]]
        recall = sum(sum(row[place] for place in picked) for row in weights) / heads
        top1 = sum(row.index(max(row)) in picked for row in weights) / heads
        mean = [sum(row[place] for row in weights) / heads for place in range(count)]
        inside = [mean[place] / sum(mean[p] for p in picked) for place in picked]
        effective = math.exp(-sum(p * math.log(p) for p in inside)) if picked else 1.0
        assert math.isclose(float(found.recall[query]), recall, abs_tol=1e-5)
        assert math.isclose(float(found.top1[query]), top1, abs_tol=1e-6)
        assert math.isclose(float(found.effective[query]), effective, rel_tol=1e-4)
        assert torch.allclose(found.weights[query, :count].double(), torch.tensor(mean).double(), atol=1e-6)


@quick
@given(st.lists(st.lists(st.integers(-2, 3), min_size=12, max_size=12), min_size=1, max_size=5), st.integers(1, 14))
def test_ties_at_the_cut(rows: list[list[int]], topk: int) -> None:
    positions, expected = [], []
    for row in rows:
        order = sorted(range(12), key=lambda place: (-row[place], place))
        chosen = set(order[:topk])
        cut = min(row[place] for place in chosen)
        level = [place for place in range(12) if row[place] == cut]
        expected.append(len(level) if any(place not in chosen for place in level) else 0)
        positions.append(chosen)
    assert tied_at_cut(torch.tensor(rows).float(), padded(positions, topk)).tolist() == expected


def test_queries_that_see_nothing_have_no_ties() -> None:
    nothing = torch.full((1, 4), -torch.inf)
    assert tied_at_cut(nothing, torch.full((1, 2), -1)).tolist() == [0]


def distance_bin(distance: int) -> int:
    return next(b for b in range(DISTANCE_BINS) if distance < 2**b)


@quick
@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.sampled_from([1, 4, 128]), st.integers(0, 2**32))
def test_distances(own: list[int], ratio: int, seed: int) -> None:
    generator = seeded(seed)
    chosen, every = Counter(), Counter()
    rows = []
    for position in own:
        places = range((position + 1) // ratio)
        picked = [place for place in places if torch.rand((), generator=generator) < 0.3]
        rows.append([*picked, *[-1] * (301 - len(picked))])
        for kind, some in ((chosen, picked), (every, places)):
            kind.update(distance_bin(position - (place * ratio + ratio - 1)) for place in some)
    positions, where = torch.tensor(rows, dtype=torch.int32), torch.tensor(own, dtype=torch.int32)
    assert distance_counts(positions, where, ratio).tolist() == [chosen[b] for b in range(DISTANCE_BINS)]
    assert visible_counts(where, ratio).tolist() == [every[b] for b in range(DISTANCE_BINS)]


@quick
@given(st.lists(st.lists(st.sets(st.integers(0, 19), max_size=8), min_size=3, max_size=3), min_size=1, max_size=4))
def test_overlap_of_layers(layers: list[list[set[int]]]) -> None:
    masks = torch.stack([selected_mask(padded(rows), 20) for rows in layers])
    found = mean_overlap(masks)
    for i, left in enumerate(layers):
        for j, right in enumerate(layers):
            ratios = [len(a & b) / len(a | b) if a | b else 1.0 for a, b in zip(left, right, strict=True)]
            assert math.isclose(float(found[i, j]), sum(ratios) / len(ratios))


@quick
@given(st.integers(1, 1000), st.integers(1, 1000))
def test_evenly_spaced_numbers(total: int, count: int) -> None:
    found = evenly_spaced(total, count).tolist()
    assert len(found) == min(total, count)
    assert found[-1] == total - 1
    gaps = [b - a for a, b in zip([-1, *found], found, strict=False)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1
