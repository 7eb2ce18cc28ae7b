"""Scores and top-k against a plain scorer and sort."""

import pytest
import torch

from tamis import PagedCache, PagePool
from tamis.layout import rows
from tamis.ops import index_topk, write_kv


def make(layout, lengths: list[int], dim: int, page_size: int = 16):
    pool = PagePool(100, page_size, seed=3)
    cache = PagedCache(layout, 100, page_size)
    keys = []
    for request, length in enumerate(lengths):
        pool.extend(request, length)
        keys.append(torch.randn(length, dim))
        write_kv(keys[-1], cache, pool.slots(request, 0, length))
    return cache, pool.block_table(list(range(len(lengths)))), keys


def stable_top(scores: torch.Tensor, k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda j: (-float(scores[j]), j))[:k]


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("k", [1, 7, 40, 100])
def test_selects_the_highest_scores_lowest_position_first(heads: int, k: int) -> None:
    lengths = [50, 40, 3]
    cache, table, keys = make(rows(torch.float32, latent=16, rope=0), lengths, 16)
    ids = torch.tensor([0, 0, 1, 2, 1, 2], dtype=torch.int32)
    visible = torch.tensor([50, 41, 40, 3, 1, 0], dtype=torch.int32)
    q, weights = torch.randn(6, heads, 16), torch.randn(6, heads)
    found = index_topk(q, weights, cache, ids, table, visible, k)
    assert found.shape == (6, k)
    for t in range(6):
        known = keys[int(ids[t])][: int(visible[t])]
        scores = (weights[t].unsqueeze(1) * torch.relu(q[t] @ known.T)).sum(0)
        expected = sorted(stable_top(scores, k))
        assert found[t, : len(expected)].tolist() == expected
        assert (found[t, len(expected) :] == -1).all()


def test_plateaus_of_zeros_resolve_to_the_lowest_positions() -> None:
    cache, table, _ = make(rows(torch.float32, latent=8, rope=0), [64], 8)
    q = torch.randn(1, 4, 8)
    weights = torch.zeros(1, 4)
    ids, visible = torch.zeros(1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    assert index_topk(q, weights, cache, ids, table, visible, 10)[0].tolist() == list(range(10))


def test_fp8_keys_are_scored_as_stored() -> None:
    cache, table, _ = make("index-fp8", [70], 128)
    stored = cache.read(torch.tensor([int(table[0, p // 16]) * 16 + p % 16 for p in range(70)]))
    q, weights = torch.randn(1, 8, 128), torch.randn(1, 8)
    scores = (weights[0].unsqueeze(1) * torch.relu(q[0] @ stored.T)).sum(0)
    ids, visible = torch.zeros(1, dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    found = index_topk(q, weights, cache, ids, table, visible, 20)[0].tolist()
    assert set(found) == set(stable_top(scores, 20))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"q": torch.randn(2, 4, 9)}, ValueError, "q must be of shape .*D=8"),
        ({"weights": torch.randn(2, 3)}, ValueError, "weights must be of shape"),
        ({"weights": None}, TypeError, "weights must be a tensor"),
        ({"request_ids": torch.zeros(3, dtype=torch.int32)}, ValueError, "request_ids .* one per query token"),
        ({"request_ids": torch.tensor([0, 4], dtype=torch.int32)}, ValueError, "request_ids must be between 0 and 0"),
        ({"lengths": torch.tensor([1, 999], dtype=torch.int32)}, ValueError, "lengths must be between 0 and 64"),
        ({"k": 0}, ValueError, "k must be between 1 and 4096"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(fields, kind, message) -> None:
    cache, table, _ = make(rows(torch.float32, latent=8, rope=0), [64], 8)
    arguments = {
        "q": torch.randn(2, 4, 8),
        "weights": torch.randn(2, 4),
        "cache": cache,
        "request_ids": torch.zeros(2, dtype=torch.int32),
        "block_table": table,
        "lengths": torch.ones(2, dtype=torch.int32),
        "k": 3,
    }
    with pytest.raises(kind, match=message):
        index_topk(**(arguments | fields))
