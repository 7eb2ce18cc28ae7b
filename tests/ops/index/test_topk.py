"""Exact, deterministic top-k against a sort written here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.arithmetic import ceil_div
from tamis.ops import topk_positions, translate_positions


def best(row: list[float], length: int, k: int) -> list[int]:
    """The definition: highest scores, lowest positions among equals, ascending, -1 padded."""
    seen = [j for j in range(max(0, length)) if not math.isnan(row[j]) and row[j] > -math.inf]
    # In Python -0.0 == 0.0, and sorting is stable.
    chosen = sorted(sorted(seen, key=lambda j: -row[j])[:k])
    return chosen + [-1] * (k - len(chosen))


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
    kept = scores.clone()
    found = topk_positions(scores, lengths, k)
    assert found.dtype == torch.int32
    assert found.shape == (len(scores), k)
    assert torch.equal(scores.view(torch.int32), kept.view(torch.int32)), "the scores are not ours to change"
    expected = [best(row, length, k) for row, length in zip(scores.tolist(), lengths.tolist(), strict=True)]
    assert found.tolist() == expected
    return found


@pytest.mark.parametrize("k", [1, 2, 7, 64, 100, 2048, 4096])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 2047, 2048, 2049, 5000])
def test_random_scores(k: int, width: int) -> None:
    check(torch.randn(3, width), ints([width, width // 2, 0]), k)


@pytest.mark.parametrize("k", [1, 5, 32, 33])
def test_contexts_of_one_of_k_and_of_one_more(k: int) -> None:
    scores = torch.randn(4, k + 1)
    found = check(scores, ints([1, k, k + 1, min(2, k)]), k)
    assert found[1].tolist() == list(range(k)), "everything is selected, in order"


def test_plateaus_of_zeros_resolve_to_the_lowest_positions() -> None:
    scores = torch.relu(torch.randn(5, 3000) - 2.0)
    assert (scores == 0).float().mean() > 0.9
    found = check(scores, ints([3000, 2999, 1500, 700, 100]), 600)
    positive = scores[0].nonzero().flatten()
    assert set(positive.tolist()) <= set(found[0].tolist())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, torch.inf, 1e-45, -3.4e38])
def test_all_equal_scores(value: float) -> None:
    found = check(torch.full((2, 500), value), ints([500, 3]), 40)
    assert found[0].tolist() == list(range(40))


def test_signed_zeros_are_equal() -> None:
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, 0.0, -1.0, -0.0]])
    assert check(scores, ints([7]), 3)[0].tolist() == [0, 1, 2]


def test_negative_scores_are_selected_and_minus_infinity_never_is() -> None:
    scores = torch.tensor([[-5.0, -torch.inf, -7.0, -torch.inf, -6.0], [-torch.inf] * 5])
    assert check(scores, ints([5, 5]), 4).tolist() == [[0, 2, 4, -1], [-1, -1, -1, -1]]


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_is_never_selected_and_harms_no_other_score(sign: int) -> None:
    scores = torch.randn(4, 300)
    nan = torch.tensor(torch.nan).copysign(torch.tensor(float(sign)))
    scores[0, ::3], scores[1, 7], scores[2] = nan, nan, nan
    scores[3, 5], scores[3, 6] = nan, torch.inf
    found = check(scores, ints([300, 300, 300, 300]), 250)
    assert (found[0] >= 0).sum() == 200
    assert (found[2] == -1).all()
    assert 6 in found[3].tolist()


def test_garbage_behind_the_length_is_not_looked_at() -> None:
    scores = torch.randn(3, 200)
    scores[0, 50:], scores[1, 1:], scores[2, 0:] = torch.inf, torch.nan, 1e30
    check(scores, ints([50, 1, 0]), 60)


def test_negative_lengths_select_nothing() -> None:
    found = check(torch.randn(3, 10), ints([-1, -(2**31), 10]), 4)
    assert (found[:2] == -1).all()


@pytest.mark.parametrize("bits", [1, 4, 10])
def test_scores_that_differ_in_their_lowest_bits_only(bits: int) -> None:
    raw = torch.tensor(1.0).view(torch.int32) + torch.randint(0, 2**bits, (4, 4000), dtype=torch.int32)
    check(raw.view(torch.float32), ints([4000, 3999, 2048, 2049]), 2048)


@pytest.mark.parametrize("descending", [False, True])
def test_sorted_scores(descending: bool) -> None:
    scores = torch.arange(3000).float().sort(descending=descending).values.expand(2, -1)
    check(scores, ints([3000, 2049]), 2048)


def test_rows_far_apart_and_transposed() -> None:
    check(torch.randn(5, 1000)[:, 100:700], ints([600, 5, 0, 599, 300]), 77)
    check(torch.randn(600, 5).t(), ints([600, 5, 0, 599, 300]), 77)


def test_a_row_depends_on_nothing_else_in_the_batch() -> None:
    scores = torch.randint(-3, 4, (40, 900)).float()
    lengths = torch.randint(0, 901, (40,), dtype=torch.int32)
    together = topk_positions(scores, lengths, 100)
    for row in range(40):
        assert torch.equal(topk_positions(scores[row : row + 1], lengths[row : row + 1], 100)[0], together[row])
    order = torch.randperm(40)
    assert torch.equal(topk_positions(scores[order], lengths[order], 100), together[order])


def test_empty_batches_and_contexts() -> None:
    assert topk_positions(torch.randn(0, 9), ints([]), 5).shape == (0, 5)
    assert topk_positions(torch.randn(2, 0), ints([0, 0]), 5).tolist() == [[-1] * 5] * 2


SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_scores_with_many_ties(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    total = data.draw(st.integers(1, 4))
    number = st.one_of(SCORES, st.floats(width=32))
    scores = data.draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=total, max_size=total))
    lengths = data.draw(st.lists(st.integers(-2, width), min_size=total, max_size=total))
    check(torch.tensor(scores, dtype=torch.float32), ints(lengths), data.draw(st.integers(1, 50)))


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_translated_in_the_same_call(page_size: int) -> None:
    scores, lengths, ids = torch.randn(6, 200), ints([200, 199, 30, 0, 1, 200]), ints([0, 0, 1, 1, 2, 2])
    pages = ceil_div(200, page_size)
    table = torch.randperm(3 * pages).view(3, pages).int()
    table[2, pages // 2] = -1
    scores[5, pages // 2 * page_size] = 9.0
    positions = topk_positions(scores, lengths, 64)
    found = topk_positions(scores, lengths, 64, request_ids=ids, block_table=table, page_size=page_size)
    expected = translate_positions(positions, ids, table, page_size=page_size).slots
    assert torch.equal(found, expected)
    absent = (positions[4:] >= 0) & (positions[4:] // page_size == pages // 2)
    assert absent.any()
    assert (found[4:][absent] == -1).all(), "an absent page keeps its column"
    assert torch.equal(found[5] >= 0, (positions[5] >= 0) & ~absent[1])


def test_translation_past_the_table_and_of_huge_pages() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 5.0]])
    table = ints([[2**30, 1]])
    found = topk_positions(scores, ints([4]), 4, request_ids=ints([0]), block_table=table[:, :1], page_size=2)
    assert found.tolist() == [[-1, -1, -1, -1]]
    found = topk_positions(scores, ints([4]), 4, request_ids=ints([0]), block_table=table, page_size=1)
    assert found.tolist() == [[2**30, 1, -1, -1]]
    found = topk_positions(scores, ints([4]), 4, request_ids=ints([0]), block_table=table[:, :0], page_size=1)
    assert found.tolist() == [[-1] * 4]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"scores": torch.randn(2, 9).double()}, TypeError, "scores must be float32"),
        ({"scores": torch.randn(9)}, ValueError, "scores must be of shape"),
        ({"lengths": ints([1])}, ValueError, "lengths must be of shape .* one per row of scores"),
        ({"lengths": ints([1, 10])}, ValueError, "lengths must be between 0 and 9, got a value of 10"),
        ({"k": 0}, ValueError, "k must be between 1 and 4096"),
        ({"k": 4097}, ValueError, "k must be between 1 and 4096"),
        ({"page_size": 4}, ValueError, "given together, got 1 of 3"),
        ({"page_size": 0, "request_ids": ints([0, 0]), "block_table": ints([[0]])}, ValueError, "page_size must be"),
        ({"page_size": 4, "request_ids": ints([0, 1]), "block_table": ints([[0]])}, ValueError, "request_ids must be"),
        ({"page_size": 4, "request_ids": ints([0]), "block_table": ints([[0]])}, ValueError, "request_ids .* shape"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(fields, kind, message) -> None:
    arguments = {"scores": torch.randn(2, 9), "lengths": ints([1, 9]), "k": 3}
    with pytest.raises(kind, match=message):
        topk_positions(**(arguments | fields))
