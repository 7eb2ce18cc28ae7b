"""Selection in two levels against a slow definition: sets of numbers, position by position."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seed_of, seeded
from test_triton_index import Step, filled, int32

from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.ops import index_scores, index_topk, index_topk_and_blocks, index_topk_within
from tamis.ops.index import reference, scoring, triton_blocks, triton_kernels
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.operations import IndexScores

KEYS = (index_fp8(dim=32), index_mxfp4(dim=32), rows(torch.float32, latent=32, rope=0))
KEY_NAMES = tuple(layout.name for layout in KEYS)


def best(scores: list[float], allowed: list[int], count: int) -> list[int]:
    """The slow definition: the highest scores above -inf, the lowest numbers among equal ones, ascending, then -1."""
    ranked = sorted((-scores[i], i) for i in allowed if scores[i] > -math.inf)
    chosen = sorted(i for _, i in ranked[:count])
    return chosen + [-1] * (count - len(chosen))


def best_blocks(scores: list[float], length: int, count: int, size: int) -> list[int]:
    seen = scores[:length]
    tops = [max(seen[i : i + size]) for i in range(0, len(seen), size)]
    if tops:
        tops[-1] = math.inf
    return best(tops, list(range(len(tops))), count)


def within(scores: list[float], length: int, candidates: list[int], count: int, size: int) -> list[int]:
    held = set(candidates)
    return best(scores, [i for i in range(min(length, len(scores))) if i // size in held], count)


def stepped(layout: Layout) -> Step:
    """Three requests, one with an absent page, and tokens that see from nothing to everything."""
    table = int32([[3, 0, 5, 1], [2, -1, 4, -1], [6, 7, -1, -1]])
    ids = [0, 0, 0, 1, 1, 2, 2, 2]
    lengths = [64, 63, 17, 48, 9, 32, 0, 1]
    return Step(filled(layout, 8, 16, seed=5), ids, table, lengths, 4, torch.float32)


def checked(step: Step, kernels: object, device: torch.device, count: int, size: int, k: int, space: int) -> None:
    """Both operations of a backend against the slow definition over this backend's own scores."""
    arguments = step.arguments(device)
    tokens = len(step.ids)
    scores = torch.full((tokens, 64), -math.inf, device=device)
    kernels.index_scores(IndexScores(*arguments, scores, "auto"))  # type: ignore[attr-defined]
    found, blocks = (torch.full((tokens, n), 77, dtype=torch.int32, device=device) for n in (k, count))
    both = IndexTopkAndBlocks(*arguments, k, size, space, tokens, found, blocks, "auto")
    kernels.index_topk_and_blocks(both)  # type: ignore[attr-defined]
    listed, seen = scores.cpu().tolist(), step.lengths.tolist()
    for row in range(tokens):
        assert found[row].tolist() == best(listed[row], list(range(seen[row])), k)
        assert blocks[row].tolist() == best_blocks(listed[row], seen[row], count, size)
    inner = torch.full((tokens, k), 77, dtype=torch.int32, device=device)
    kernels.index_topk_within(IndexTopkWithin(*arguments, blocks, k, size, space, inner, "auto"))  # type: ignore[attr-defined]
    for row in range(tokens):
        assert inner[row].tolist() == within(listed[row], seen[row], blocks[row].tolist(), k, size)


@pytest.mark.parametrize("layout", KEYS, ids=KEY_NAMES)
@pytest.mark.parametrize("kernels", [reference, triton_kernels], ids=["reference", "triton"])
def test_both_levels_are_exact(layout: Layout, kernels: object, device: torch.device) -> None:
    where = torch.device("cpu") if kernels is reference else device
    checked(stepped(layout), kernels, where, count=3, size=8, k=5, space=1 << 20)


@pytest.mark.parametrize(("count", "size", "k", "space"), [(1, 3, 1, 1), (8, 8, 20, 4000), (64, 1, 7, 1 << 20)])
def test_sizes_of_blocks_and_memory(count: int, size: int, k: int, space: int, device: torch.device) -> None:
    """Blocks that divide neither a page nor the context, blocks of one position, and little memory."""
    step = stepped(KEYS[2])
    checked(step, reference, torch.device("cpu"), count, size, k, space)
    checked(step, triton_kernels, device, count, size, k, space)


def test_large_blocks(device: torch.device) -> None:
    """Blocks beyond the context, up to the largest; more positions are refused by name."""
    step = stepped(KEYS[2])
    checked(step, triton_kernels, device, 1, 1000, 5, 1 << 20)
    out = int32([[0] * 5] * len(step.ids)), int32([[0] * 2] * len(step.ids))
    call = IndexTopkAndBlocks(*step.arguments(), 5, scoring.MAX_BLOCK, 1 << 20, len(step.ids), *out, "triton")
    triton_kernels.check_index_topk_and_blocks(call)
    with pytest.raises(ValueError, match="block_size must be at most 16384 for the triton backend, got 16385; pass"):
        triton_kernels.check_index_topk_and_blocks(call._replace(block_size=scoring.MAX_BLOCK + 1))


@pytest.mark.parametrize(("size", "blocks"), [(128, 130), (129, 66), (1000, 18), (scoring.MAX_BLOCK, 3)])
def test_maxima_of_more_blocks_than_a_program_holds(size: int, blocks: int, device: torch.device) -> None:
    listed = blocks * size - 5
    lengths = [listed, listed - size, size, 1, 0, listed + 99]
    scores = torch.randn(len(lengths), listed, generator=seeded(7))
    memory = torch.full((len(lengths) * blocks + 128,), math.nan, device=device)
    found = memory[:-128].view(len(lengths), blocks)
    given = (scores.to(device), int32(lengths).to(device), found)
    arguments = triton_blocks.maxima_arguments(*given, size, listed)
    assert blocks > arguments["TILE"]
    triton_blocks.block_maxima[(len(lengths), -(-blocks // arguments["TILE"]))](**arguments)
    for row, length in enumerate(min(length, listed) for length in lengths):
        seen = scores[row, :length].tolist()
        tops = [max(seen[at : at + size], default=-math.inf) for at in range(0, blocks * size, size)]
        if length:
            tops[(length - 1) // size] = math.inf
        assert found[row].tolist() == tops
    assert bool(memory[-128:].isnan().all())  # nothing behind the last token's


def test_many_heads_are_scored_in_blocks(device: torch.device) -> None:
    layout = rows(torch.float32, latent=256, rope=0)
    step = Step(filled(layout, 8, 16, seed=5), [0, 1], stepped(layout).table, [40, 20], 48, torch.float32)
    checked(step, triton_kernels, device, count=2, size=8, k=4, space=1 << 20)


def test_ties_go_to_lower_blocks_and_positions() -> None:
    """All scores are equal: the lowest blocks win beside the newest one, and the lowest positions in them."""
    q, weights = torch.ones(1, 1, 32), torch.ones(1, 1)
    cache = filled(KEYS[2], 4, 16)
    cache.storage.fill_(1.0)
    table, ids, lengths = int32([[0, 1, 2, 3]]), int32([0]), int32([60])
    given = (q, weights, cache, ids, table, lengths)
    positions, blocks = index_topk_and_blocks(*given, 3, blocks=3, block_size=8)
    assert positions.tolist() == [[0, 1, 2]]
    assert blocks.tolist() == [[0, 1, 7]]
    candidates = int32([[2, 7, -1]])
    found = index_topk_within(*given, candidates, 10, block_size=8)
    assert found.tolist() == [[16, 17, 18, 19, 20, 21, 22, 23, 56, 57]]


def test_scores_that_are_no_numbers_are_not_selected() -> None:
    """A NaN key hides neither its block nor the others, and is never selected; the newest block is, whatever it is."""
    q, weights = torch.ones(1, 1, 32), torch.ones(1, 1)
    cache = filled(KEYS[2], 1, 16)
    cache.storage.fill_(1.0)
    cache.storage[0, 3:8] = torch.nan
    table, ids, lengths = int32([[0]]), int32([0]), int32([12])
    where = {"blocks": 3, "block_size": 4, "backend": "reference"}
    positions, blocks = index_topk_and_blocks(q, weights, cache, ids, table, lengths, 12, **where)
    assert positions.tolist() == [[0, 1, 2, 8, 9, 10, 11, -1, -1, -1, -1, -1]]
    assert blocks.tolist() == [[0, 2, -1]]
    found, out = torch.full((1, 12), 7, dtype=torch.int32), torch.full((1, 3), 7, dtype=torch.int32)
    both = IndexTopkAndBlocks(q, weights, cache, ids, table, lengths, 12, 4, 1 << 20, 1, found, out, "triton")
    if not torch.cuda.is_available():
        triton_kernels.index_topk_and_blocks(both)
        assert found.tolist() == positions.tolist()
        assert out.tolist() == blocks.tolist()


def test_all_blocks_select_what_one_level_selects() -> None:
    step = stepped(KEYS[0])
    arguments = step.arguments()
    every = torch.arange(8, dtype=torch.int32).expand(len(step.ids), 8).contiguous()
    whole = index_topk(*arguments, 6)
    assert torch.equal(index_topk_within(*arguments, every, 6, block_size=8), whole)
    # Blocks past the context, and past what 32-bit positions can count, hold nothing.
    far = torch.cat((every, torch.full((len(step.ids), 1), 2**31 - 1, dtype=torch.int32)), 1)
    assert torch.equal(index_topk_within(*arguments, far, 6, block_size=8), whole)


@given(st.integers(0, 2**31 - 1), st.integers(1, 20), st.integers(1, 9), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_the_reference_over_random_scores(seed: int, size: int, count: int, k: int) -> None:
    """Scores of few values, so that there are ties, by the definition's own selection of blocks."""
    generator = torch.Generator().manual_seed(seed_of(seed))
    scores = torch.randint(-2, 3, (3, 23), generator=generator).float()
    scores[torch.rand(3, 23, generator=generator) < 0.2] = -math.inf
    lengths = torch.randint(0, 24, (3,), generator=generator, dtype=torch.int32)
    blocks = reference.best_blocks(scores, lengths, count, size)
    for row in range(3):
        assert blocks[row].tolist() == best_blocks(scores[row].tolist(), int(lengths[row]), count, size)


def test_candidates_out_of_order_are_refused() -> None:
    step = stepped(KEYS[2])
    arguments = step.arguments()
    for wrong in ([2, 1], [1, 1], [-1, 3]):
        candidates = int32([wrong] * len(step.ids))
        with pytest.raises(ValueError, match="candidates must be in ascending order"):
            index_topk_within(*arguments, candidates, 4, block_size=8)
    with pytest.raises(ValueError, match="blocks"):
        index_topk_and_blocks(*arguments, 4, blocks=0, block_size=8)
    with pytest.raises(ValueError, match="block_size"):
        index_topk_and_blocks(*arguments, 4, blocks=2, block_size=0)


def test_no_token_and_no_page() -> None:
    cache = filled(KEYS[2], 2, 16)
    empty = int32([])
    nothing = (torch.empty(0, 2, 32), torch.empty(0, 2), cache, empty, int32([[0]]), empty)
    positions, blocks = index_topk_and_blocks(*nothing, 3, blocks=2, block_size=8)
    assert positions.shape == (0, 3)
    assert blocks.shape == (0, 2)
    absent = (torch.ones(1, 2, 32), torch.ones(1, 2), cache, int32([0]), int32([[-1]]), int32([16]))
    positions, blocks = index_topk_and_blocks(*absent, 3, blocks=2, block_size=8)
    assert positions.tolist() == [[-1, -1, -1]]
    assert blocks.tolist() == [[1, -1]]  # the newest block, although it has no page
    found = index_topk_within(*absent, blocks, 3, block_size=8)
    assert found.tolist() == [[-1, -1, -1]]
    assert bool((index_scores(*absent[:6]) == -math.inf).all())
