"""The Triton index kernels against the reference: scores to float32 rounding, selections position by position."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded
from selecting import select
from torch import Tensor

from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.cache.paged import PagedCache
from tamis.ops.index import hopper, reference, scoring, triton_kernels
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores, TopkPositions
from tamis.ops.index.triton_scores import score_keys
from tamis.ops.rows.triton_rows import interpreted

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3)
INF = float("inf")


def int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(layout: Layout, pages: int, page_size: int, seed: int = 0) -> PagedCache:
    """A cache of random keys; FP8 ones have scales that are no powers of two."""
    cache = PagedCache(layout, pages, page_size)
    generator = seeded(seed)
    values = cache.field(layout.values)
    if layout.packed:
        values.copy_(torch.randint(0, 256, values.shape, generator=generator))
        scales = cache.field(layout.scales)
        scales.copy_(torch.randint(118, 132, scales.shape, generator=generator))
    elif layout.quantised:
        assert layout.scales is not None
        codes = torch.randn(values.shape, generator=generator).mul(30).to(E4M3).view(torch.uint8)
        values.copy_(codes)
        scales = cache.field(layout.scales)
        scales.copy_(torch.rand(scales.shape, generator=generator) + 0.1)
    else:
        values.copy_(torch.randn(values.shape, generator=generator).to(values.dtype))
    return cache


def moved(cache: PagedCache, device: torch.device) -> PagedCache:
    return PagedCache.wrap(cache.storage.to(device), cache.layout)


class Step:
    """Tokens of a step, their requests and a cache; kernels see it on their device."""

    def __init__(
        self, cache: PagedCache, ids: list[int], table: Tensor, lengths: list[int], heads: int, dtype: torch.dtype
    ) -> None:
        generator = seeded(len(ids) * heads)
        self.q = torch.randn(len(ids), heads, cache.layout.width, generator=generator).to(dtype)
        self.weights = torch.randn(len(ids), heads, generator=generator)
        self.cache, self.ids, self.table, self.lengths = cache, int32(ids), table, int32(lengths)

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        device = torch.device(device)
        tensors = [t.to(device) for t in (self.q, self.weights, self.ids, self.table, self.lengths)]
        return tensors[0], tensors[1], moved(self.cache, device), *tensors[2:]

    def check_scores(self, device: torch.device, width: int | None = None) -> None:
        """Every element of a result that held something else before."""
        longest = self.table.shape[1] * self.cache.page_size
        found = torch.full((len(self.ids), longest if width is None else width), 7.0, device=device)
        expected = torch.empty_like(found, device="cpu")
        reference.index_scores(IndexScores(*self.arguments(), expected, "reference"))
        triton_kernels.index_scores(IndexScores(*self.arguments(device), found, "triton"))
        q, weights, *rest = self.arguments()
        magnitudes = torch.empty_like(expected)
        reference.index_scores(IndexScores(q, weights.abs(), *rest, magnitudes, "reference"))
        agree(found.cpu(), expected, self.q.shape[1], magnitudes)


def agree(found: Tensor, expected: Tensor, heads: int, magnitudes: Tensor | None = None) -> None:
    """The same holes, and numbers within the rounding of the largest sum; FP8 products on a device are coarser.

    `magnitudes` are the sums without their signs: of few scores, even the largest may be what is left of larger terms.
    """
    assert torch.equal(found == -INF, expected == -INF)
    assert torch.equal(found.isnan(), expected.isnan())
    seen = expected.isfinite()
    if seen.any():
        size = (expected if magnitudes is None else magnitudes / heads**0.5)[seen].abs().max()
        bound = 2e-6 if interpreted(score_keys) else 2e-3
        assert (found[seen] - expected[seen]).abs().max() <= bound * heads**0.5 * size


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_scores_agree_with_the_reference(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    page_size, width = draw(st.sampled_from([1, 2, 16, 61, 64, 128])), draw(st.integers(1, 5))
    dim = draw(st.sampled_from([16, 64, 96, 128]))
    stored = draw(st.sampled_from([None, "packed", torch.bfloat16, torch.float16, torch.float32]))
    layout = index_fp8(dim=dim) if stored is None else index_mxfp4(dim=max(32, dim))
    if isinstance(stored, torch.dtype):
        layout = rows(stored, latent=dim, rope=0)
    requests, pages = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    generator = seeded(draw(st.integers(0, 2**31)))
    table = torch.randint(-1, pages, (requests, width), generator=generator, dtype=torch.int32)
    longest = width * page_size
    one = st.tuples(st.integers(0, requests - 1), st.sampled_from([-4, 0, 1, longest // 2, longest - 1, longest]))
    tokens = draw(st.lists(one, min_size=1, max_size=6))
    step = Step(
        filled(layout, pages, page_size), [t[0] for t in tokens], table, [t[1] for t in tokens],
        draw(st.sampled_from([1, 3, 4, 16, 64])), draw(st.sampled_from(DTYPES)),
    )  # fmt: skip
    step.check_scores(device, longest + draw(st.sampled_from([0, 5])))


@pytest.mark.parametrize("heads", [1, 4, 5, 64, 128])
@pytest.mark.parametrize("dim", [16, 128, 256])
def test_heads_and_widths(heads: int, dim: int, device: torch.device) -> None:
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    for dtype in (E4M3, torch.float32):
        Step(filled(index_fp8(dim=dim), 8, 16), [0, 0, 1], table, [64, 63, 20], heads, dtype).check_scores(device)


@pytest.mark.parametrize("ids", [[0, 0, 0, 0], [0, 1, 0, 1, 2], [2, 2, 1, 0, 0, 0, 2], [1]])
def test_neighbours_of_any_requests(ids: list[int], device: torch.device) -> None:
    table = torch.randperm(30)[:12].int().view(3, 4)
    lengths = [(37 * n) % 65 for n in range(len(ids))]
    Step(filled(index_fp8(), 30, 16), ids, table, lengths, 4, E4M3).check_scores(device)


def test_pages_and_requests_that_do_not_exist(device: torch.device) -> None:
    table = int32([[3, -1, 5, 2**31 - 1], [-(2**31), 0, 9, 10], [1, 2, 3, 4]])
    cache = filled(index_fp8(), 10, 64)
    Step(cache, [0, 0, 1, 2, 2], table, [256, 200, 256, 1, 256], 4, E4M3).check_scores(device)
    step = Step(cache, [-1, 3, 0, -(2**31), 2**31 - 1, 2], table, [256, 3, 256, 9, 80, 100], 4, E4M3)
    step.check_scores(device)
    found = select(triton_kernels, *step.arguments(device), 16, 1 << 20, "triton").cpu()
    assert torch.equal(found[[0, 1, 3, 4]], torch.full((4, 16), -1, dtype=torch.int32))
    assert (found[[2, 5]] >= 0).all()


def test_pages_apart_and_strided_inputs(device: torch.device) -> None:
    layout = index_fp8()
    held = torch.randint(0, 120, (24, 16, layout.row_bytes), dtype=torch.uint8)
    held.view(24, -1)[:, 16 * 128 :].view(torch.float32).uniform_(0.5, 1)
    cache = PagedCache.wrap(held.to(device)[::3], layout)
    table = torch.arange(12, dtype=torch.int32).view(6, 2).T.remainder(8)
    ids, lengths = int32([0, 9, 1, 9, 0])[::2], int32([96, 9, 80, 9, 5])[::2]
    q, weights = torch.randn(3, 128, 8).transpose(1, 2).to(torch.bfloat16), torch.randn(8, 3).T.to(torch.float16)
    expected, found = torch.empty(3, 96), torch.empty(3, 200, device=device)[:, 50:146]
    reference.index_scores(
        IndexScores(q, weights, PagedCache.wrap(held[::3], layout), ids, table, lengths, expected, "reference")
    )
    on_device = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in (q, weights)]
    placed = [t.to(device) for t in (ids, table, lengths)]
    triton_kernels.index_scores(IndexScores(*on_device, cache, *placed, found, "triton"))
    agree(found.cpu(), expected, q.shape[1])


def test_keys_that_are_not_finite(device: torch.device) -> None:
    cache = filled(rows(torch.float32, latent=16, rope=0), 2, 16)
    keys = cache.field(cache.layout.values)
    keys[0, 3, 2], keys[0, 5, 0], keys[1, 1, 7] = float("nan"), INF, -INF
    step = Step(cache, [0, 0, 0], int32([[0, 1]]), [32, 32, 20], 5, torch.float32)
    step.check_scores(device)
    expected = select(reference, *step.arguments(), 32, 1 << 20, "reference")
    assert torch.equal(select(triton_kernels, *step.arguments(device), 32, 1 << 20, "triton").cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [True, False])
def test_ragged_scores(dtype: torch.dtype, scaled: bool, device: torch.device) -> None:
    total = 150
    keys = torch.randn(total, 128).to(torch.bfloat16 if dtype == torch.bfloat16 else E4M3)
    scales = torch.rand(total) if scaled else None
    starts, ends = int32([0, 0, 70, 149, 80, -9, 60, 2**30]), int32([70, 1, 150, 150, 80, 2000, 40, 2**31 - 1])
    q, weights = torch.randn(8, 4, 128).to(dtype), torch.randn(8, 4)
    expected, found = torch.empty(8, total), torch.full((8, total), 7.0, device=device)
    reference.ragged_scores(RaggedScores(q, weights, keys, scales, starts, ends, expected, "reference"))
    given = [None if t is None else t.to(device) for t in (q, weights, keys, scales, starts, ends)]
    triton_kernels.ragged_scores(RaggedScores(*given, found, "triton"))
    agree(found.cpu(), expected, q.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_packed_keys_in_pages_and_in_a_list(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    """Every code, exponents far apart in one key, and a tile that is NaN."""
    cache = filled(index_mxfp4(dim=dim), 4, 61)
    cache.field(cache.layout.values)[0, :4, :16] = torch.randperm(256)[:64].view(4, 16).byte()
    exponents = cache.field(cache.layout.scales)
    exponents[1, 7, 0], exponents[2, 3, -1], exponents[2, 4] = 255, 30, 0
    step = Step(cache, [0, 0, 1], int32([[2, 0, 1], [3, -1, 1]]), [183, 100, 170], 5, dtype)
    step.check_scores(device)
    expected = select(reference, *step.arguments(), 32, 1 << 20, "reference")
    assert torch.equal(select(triton_kernels, *step.arguments(device), 32, 1 << 20, "triton").cpu(), expected)
    keys, scales = (cache.field(f).flatten(0, 1) for f in (cache.layout.values, cache.layout.scales))
    starts, ends = int32([0, 70, -9]), int32([244, 150, 300])
    listed, found = torch.empty(3, 244), torch.full((3, 244), 7.0, device=device)
    reference.ragged_scores(RaggedScores(step.q, step.weights, keys, scales, starts, ends, listed, "reference"))
    given = [t.to(device) for t in (step.q, step.weights, keys, scales, starts, ends)]
    triton_kernels.ragged_scores(RaggedScores(*given, found, "triton"))
    agree(found.cpu(), listed, 5)


def whole_numbers(tokens: int, heads: int) -> tuple[PagedCache, Tensor, Tensor]:
    """Keys, queries and weights whose scores are exact in any order of sums, many of them equal."""
    layout = index_fp8()
    assert layout.scales is not None
    cache = PagedCache(layout, 40, 16)
    keys = cache.field(layout.values)
    keys.copy_(torch.randint(-2, 3, keys.shape).float().to(E4M3).view(torch.uint8))
    cache.field(layout.scales).fill_(0.5)
    q = torch.randint(-2, 3, (tokens, heads, 128)).float().to(E4M3)
    return cache, q, torch.randint(-3, 4, (tokens, heads)).float()


@pytest.mark.parametrize("k", [1, 48, 4096])
def test_fused_selection_is_that_of_the_scores_whatever_the_workspace(k: int, device: torch.device) -> None:
    cache, q, weights = whole_numbers(7, 4)
    ids, lengths = int32([0, 0, 1, 1, 1, 2, 0]), int32([160, 159, 0, 1, 48, 49, -3])
    table = torch.randperm(40)[:30].int().view(3, 10)
    table[1, 0] = -1
    step = Step(cache, ids.tolist(), table, lengths.tolist(), 4, E4M3)
    step.q, step.weights = q, weights
    expected = select(reference, *step.arguments(), k, 1 << 20, "reference")
    scores = torch.empty(7, 160, device=device)
    triton_kernels.index_scores(IndexScores(*step.arguments(device), scores, "triton"))
    unfused = triton_kernels.topk_positions(TopkPositions(scores, lengths.to(device), k, None, None, None, "triton"))
    assert torch.equal(unfused.cpu(), expected)
    for workspace in (1, 10_000, 1 << 28):
        found = select(triton_kernels, *step.arguments(device), k, workspace, "triton")
        assert torch.equal(found.cpu(), expected), workspace


def test_hopper_selects_from_the_same_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its top-k runs on its own GPUs alone, so the reference selects here."""

    def select_rows(scores: Tensor, lengths: Tensor, k: int, *, out: Tensor) -> None:
        out.copy_(reference.topk_positions(TopkPositions(scores, lengths, k, None, None, None, "reference")))

    monkeypatch.setattr(hopper.topk, "topk_positions", select_rows)
    cache, q, weights = whole_numbers(7, 4)
    step = Step(
        cache, [0, 0, 1, 1, 1, 2, 0], torch.randperm(40)[:30].int().view(3, 10), [160, 9, 0, 1, 48, 49, -3], 4, E4M3
    )
    step.q, step.weights = q, weights
    expected = select(reference, *step.arguments(), 20, 1 << 20, "reference")
    for workspace in (1, 2000, 1 << 28):
        found = select(hopper, *step.arguments(device), 20, workspace, "hopper")
        assert torch.equal(found.cpu(), expected), workspace
    step.table = step.table[:, :0]
    assert (select(hopper, *step.arguments(device), 20, 1, "hopper") == -1).all()


def test_a_token_does_not_depend_on_its_batch(device: torch.device) -> None:
    cache, q, weights = whole_numbers(5, 64)
    table = torch.randperm(40)[:20].int().view(2, 10)
    ids, lengths = int32([0, 1, 1, 1, 0]), int32([160, 33, 34, 160, 77])
    placed = [t.to(device) for t in (q, weights, ids, table, lengths)]
    there = moved(cache, device)
    together = torch.empty(5, 160, device=device)
    triton_kernels.index_scores(
        IndexScores(placed[0], placed[1], there, placed[2], placed[3], placed[4], together, "triton")
    )
    for token in range(5):
        one = slice(token, token + 1)
        alone = torch.empty(1, 160, device=device)
        triton_kernels.index_scores(
            IndexScores(
                placed[0][one], placed[1][one], there, placed[2][one], placed[3], placed[4][one], alone, "triton"
            )
        )
        assert torch.equal(alone, together[one])


def test_a_part_is_scored_in_the_order_of_its_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a program takes two tokens changes the order of summation, so a part of a batch must not decide it."""
    seen, usual = [], scoring.score_launch

    def spied(*arguments: Any, shared: bool, **options: Any) -> Any:
        seen.append(shared)
        return usual(*arguments, shared=shared, **options)

    monkeypatch.setattr(scoring, "score_launch", spied)
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    step = Step(filled(index_fp8(), 40, 64), [0, 1], table, [640, 3], 4, E4M3)
    for batch in (2, 4, 5):
        select(triton_kernels, *step.arguments(device), 64, 1 << 28, "triton", batch=batch)
    select(triton_kernels, *step.arguments(device), 64, 1, "triton", batch=5)
    assert seen == [False, False, True, True, True]


def test_selection_does_not_read_what_scoring_left_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    step = Step(filled(index_fp8(), 40, 64), [0, 1, 2, 9, 3], table, [640, 3, 0, 100, 500], 4, E4M3)
    expected = select(triton_kernels, *step.arguments(device), 64, 1 << 28, "triton")
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(INF if made.is_floating_point() else 2**31 - 1)

    monkeypatch.setattr(triton_kernels.torch, "empty", poisoned)
    assert torch.equal(select(triton_kernels, *step.arguments(device), 64, 1 << 28, "triton"), expected)


def test_no_tokens_and_no_pages(device: torch.device) -> None:
    cache = filled(index_fp8(), 2, 16)
    none = Step(cache, [], torch.zeros(2, 3, dtype=torch.int32), [], 4, E4M3)
    none.check_scores(device)
    assert select(triton_kernels, *none.arguments(device), 5, 1 << 20, "triton").shape == (0, 5)
    for table in (torch.zeros(2, 0, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)):
        step = Step(cache, [0, 1], table, [0, 9], 4, E4M3)
        step.check_scores(device, 40)
        assert (select(triton_kernels, *step.arguments(device), 5, 1 << 20, "triton") == -1).all()


def test_more_heads_or_numbers_than_fit_are_refused(device: torch.device) -> None:
    for heads, dim in ((129, 16), (4, 512)):
        step = Step(filled(rows(torch.float32, latent=dim, rope=0), 2, 16), [0], int32([[0, 1]]), [9], heads, E4M3)
        with pytest.raises(ValueError, match=r"at most 128 heads of 256 numbers.*backend='reference'"):
            triton_kernels.check_index_topk(IndexTopk(*step.arguments(device), 4, 1, 1, int32([[0] * 4]), "triton"))


def test_the_kernel_runs_as_meant(device: torch.device) -> None:
    assert interpreted(score_keys) == (device.type == "cpu")
