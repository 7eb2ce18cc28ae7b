"""Top-k in CUDA C++: the source runs on the host, with threads in random order, against a stable sort."""

import ctypes
from pathlib import Path

import numpy as np
import on_host
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import numpy_seeded, reseed
from torch import Tensor

from tamis.arithmetic import ceil_div, round_up
from tamis.ops.index.hopper import topk
from tamis.ops.index.hopper.topk import SHARED_PER_SM, Variant, memory_of, topk_positions, usual_variant

ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(
    int rows, int cluster, long long shared, int seed, const TopkParams* params) {
  emulator::random_order.seed(seed);
  for (int row = 0; row < rows; ++row) emulator::run_cluster(row, cluster, shared, [&] { topk_positions(*params); });
}
"""


def expected(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Positions by a stable sort of each row."""
    scores, result = scores.cpu(), torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.cpu().clamp(0, scores.shape[1]).tolist()):
        clean = torch.where(scores[row, :length].isnan(), -torch.inf, scores[row, :length])
        values, order = clean.sort(descending=True, stable=True)
        chosen = order[:k][values[:k] > -torch.inf].sort().values
        result[row, : len(chosen)] = chosen.int()
    return result


def slots_of(positions: Tensor, ids: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Positions through a block table, one by one."""
    result = torch.full_like(positions, -1)
    for row, column in (positions >= 0).nonzero().tolist():
        position, request = int(positions[row, column]), int(ids[row])
        if 0 <= request < len(table) and position // page_size < table.shape[1]:
            page = int(table[request, position // page_size])
            slot = page * page_size + position % page_size
            if page >= 0 and slot < 2**31:
                result[row, column] = slot
    return result


def difficult(kind: str, rows: int, width: int) -> Tensor:
    """Scores of a kind that is difficult for a radix select."""
    scores = torch.randn(rows, width)
    if kind == "plateau":
        scores.relu_()
        scores[scores < 1.5] = 0.0
        scores[:, ::3] *= -1.0  # some zeros become -0.0
    elif kind == "equal":
        scores.fill_(-3.25)
    elif kind == "invalid":
        scores[torch.rand_like(scores) < 0.9] = -torch.inf
        scores[torch.rand_like(scores) < 0.05] = torch.nan
        scores[torch.rand_like(scores) < 0.05] = -torch.nan
    elif kind == "bits":
        scores = torch.from_numpy(numpy_seeded(width).integers(0, 2**32, (rows, width), dtype=np.uint32))
        scores = scores.view(torch.float32)
    elif kind == "close":
        scores = (torch.full((rows, width), 1.0).view(torch.int32) + torch.randint(0, 1500, (rows, width))).view(
            torch.float32
        )
    elif kind == "coarse":
        scores = (scores * 4).round()
    return scores


def aligned(scores: Tensor) -> Tensor:
    """The same scores in rows aligned to 16 bytes, followed by infinity, which would win if it were read."""
    rows, width = scores.shape
    storage = torch.full((rows, 4 * ceil_div(width, 4) + 8), torch.inf)
    storage[:, :width] = scores
    return storage[:, :width]


KINDS = ("normal", "plateau", "equal", "invalid", "bits", "close", "coarse")


class Emulated:
    """The kernel of a number of threads, compiled for the host."""

    def __init__(self, folder: Path, threads: int) -> None:
        program = topk.program(threads)
        source = f'#include "emulator.hpp"\n{program.source}{ENTRY}'
        self.threads, self.run = threads, on_host.load(folder, source, program.options).run

    def __call__(
        self,
        scores: Tensor,
        lengths: Tensor,
        k: int,
        *,
        cluster: int = 1,
        resident: int | None = None,
        pages: tuple[Tensor, Tensor, int] | None = None,
        maxima_from: int = topk.NEVER,
        seed: int = 0,
    ) -> Tensor:
        fitting, words = memory_of(Variant(cluster, self.threads, 1), scores.shape[1], k)
        blocks = round_up(ceil_div(scores.shape[1], 8), 128)
        if maxima_from == 0:
            # No row is searched as a whole, so that there is only room for blocks and for the scores of those selected.
            words = max(blocks, round_up(8 * k, 128)) // 32
            fitting = 32 * words
        keys = fitting if resident is None else min(resident, fitting)
        if maxima_from != topk.NEVER:
            keys = max(keys, blocks)  # all maxima are kept
        # The smallest memory that suffices, so that the emulator notices if the kernel uses more.
        shared = topk.FIXED_BYTES + 4 * (2 * words + keys)
        out = torch.full((scores.shape[0], k), -7, dtype=torch.int32)
        ids, table, page_size = pages or (torch.empty(0), torch.empty(0, 0), 0)
        params = topk.TopkParams(
            *(scores.data_ptr(), scores.stride(0), scores.shape[1], lengths.data_ptr(), k, ids.data_ptr()),
            *(table.data_ptr(), table.stride(0), *table.shape, page_size, out.data_ptr(), keys, words),
            maxima_from,
        )
        self.run(scores.shape[0], cluster, ctypes.c_longlong(shared), seed, on_host.packed(params))
        return out


@pytest.fixture(scope="session")
def emulated(host_folder: Path) -> Emulated:
    return Emulated(host_folder, 64)


def unaligned(scores: Tensor, offset: int, gap: int) -> Tensor:
    """The same scores in unaligned rows, surrounded by infinity, which would win if it were read."""
    rows, width = scores.shape
    storage = torch.full((offset + rows * (width + gap) + 16,), torch.inf)
    placed = storage.as_strided((rows, width), (width + gap, 1), offset)
    placed.copy_(scores)
    return placed


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_source_selects_what_a_stable_sort_selects(emulated: Emulated, kind: str, cluster: int) -> None:
    width, k = 3001, 250
    scores = unaligned(difficult(kind, 7, width), offset=3, gap=2)
    lengths = torch.tensor([width, 2003, k + 1, k, 1, 0, 2**31 - 1], dtype=torch.int32)
    for resident in (0, 128, 10**6):
        found = emulated(scores, lengths, k, cluster=cluster, resident=resident, seed=resident)
        assert torch.equal(found, expected(scores, lengths, k))


def test_the_largest_cluster(emulated: Emulated) -> None:
    scores = unaligned(difficult("coarse", 2, 5000), offset=1, gap=0)
    lengths = torch.tensor([5000, 700], dtype=torch.int32)
    assert torch.equal(emulated(scores, lengths, 600, cluster=16, resident=128), expected(scores, lengths, 600))


@pytest.mark.parametrize("kind", ["normal", "plateau", "equal", "close"])
def test_more_candidates_than_a_cta_lists(emulated: Emulated, kind: str) -> None:
    scores = difficult(kind, 1, 12_000)
    lengths = torch.tensor([12_000], dtype=torch.int32)
    for k, cluster in ((4096, 1), (4096, 2), (4095, 1), (1, 1)):
        assert torch.equal(emulated(scores, lengths, k, cluster=cluster), expected(scores, lengths, k))


@pytest.mark.parametrize("kind", KINDS)
def test_maxima_do_not_change_the_selection(emulated: Emulated, kind: str) -> None:
    width, k = 4003, 100
    scores = aligned(difficult(kind, 8, width))
    lengths = torch.tensor([width, 4000, 3999, 1601, k + 1, k, 0, 2**31 - 1], dtype=torch.int32)
    wanted = expected(scores, lengths, k)
    for maxima_from, resident in ((0, 0), (0, 128), (0, 10**6), (1602, 10**6)):
        seed = resident + maxima_from
        assert torch.equal(emulated(scores, lengths, k, maxima_from=maxima_from, resident=resident, seed=seed), wanted)


def adversarial(kind: str, rows: int, width: int) -> Tensor:
    """Scores of a kind that is difficult to select by maxima of blocks of 8."""
    scores = torch.randn(rows, width)
    blocks = scores[:, : width // 8 * 8].view(rows, -1, 8)
    if kind == "ascending":
        scores = scores.sort().values
    elif kind == "descending":
        scores = scores.sort(descending=True).values
    elif kind == "one outlier per block":
        blocks[:, :, 5] += 100
    elif kind == "equal outliers":
        blocks[:, :, 3] = 7.0
    elif kind == "equal blocks":
        blocks[:] = blocks[:, :, :1].clone()
    elif kind == "blocks of NaN":
        blocks[:, ::2] = torch.nan
        blocks[:, 1::4, 1:] = torch.nan
    elif kind == "blocks of -inf":
        blocks[:, 3:] = -torch.inf
        blocks[:, 100::50, 7] = -1e30
    elif kind == "few candidates":
        scores.fill_(-torch.inf)
        scores[:, 17::97] = torch.randn_like(scores[:, 17::97])
    elif kind == "nothing":
        scores.fill_(-torch.inf)
        scores[:, 5] = torch.nan
    elif kind == "infinities":
        scores[:, 11::50] = torch.inf
        scores[:, 12::50] = -torch.inf
    elif kind == "zeros":
        scores[:] = torch.where(torch.rand_like(scores) < 0.5, 0.0, -0.0)
        scores[:, 2000] = 1e-45
    elif kind == "one high block":
        scores.clamp_(max=1.0)
        blocks[:, 30:60] = 1.0
        blocks[:, -1] = torch.inf
    return scores


ADVERSARIAL = (
    *("ascending", "descending", "one outlier per block", "equal outliers", "equal blocks", "blocks of NaN"),
    *("blocks of -inf", "few candidates", "nothing", "infinities", "zeros", "one high block"),
)


@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_adversarial_rows_by_maxima(emulated: Emulated, kind: str) -> None:
    scores = aligned(adversarial(kind, 3, 5003))
    lengths = torch.tensor([5003, 4997, 3200], dtype=torch.int32)
    for k, resident in ((150, 10**6), (1, 0), (700, 512), (2048, 10**6)):
        found = emulated(scores, lengths, k, maxima_from=0, resident=resident, seed=k)
        assert torch.equal(found, expected(scores, lengths, k)), k


def test_more_candidates_by_maxima_than_a_cta_lists(emulated: Emulated) -> None:
    scores = aligned(difficult("close", 2, 20_000))
    scores[1] = 2.5
    scores[:, 9_000] = torch.inf  # keys spread over all digits, so that most others share their first
    lengths = torch.tensor([20_000, 19_999], dtype=torch.int32)
    for resident in (0, 10**6):
        found = emulated(scores, lengths, 2048, maxima_from=0, resident=resident)
        assert torch.equal(found, expected(scores, lengths, 2048))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 3000),
    k=st.integers(1, 300),
    kind=st.sampled_from((*KINDS, *ADVERSARIAL)),
    resident=st.sampled_from([0, 124, 256, 10**6]),
    seed=st.integers(0, 2**20),
)
def test_any_shape_by_maxima(emulated: Emulated, width, k, kind, resident, seed) -> None:
    reseed(seed)
    scores = aligned((difficult if kind in KINDS else adversarial)(kind, 2, max(width, 2001))[:, :width])
    lengths = torch.randint(width // 2, width + 2, (2,), dtype=torch.int32)
    found = emulated(scores, lengths, k, maxima_from=0, resident=resident, seed=seed)
    assert torch.equal(found, expected(scores, lengths, k))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 1500),
    k=st.integers(1, 700),
    cluster=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(KINDS),
    resident=st.sampled_from([0, 128, 256, 10**6]),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_any_shape(emulated: Emulated, width, k, cluster, kind, resident, offset, seed) -> None:
    reseed(seed)
    scores = unaligned(difficult(kind, 2, width), offset, gap=seed % 5)
    lengths = torch.randint(-1, width + 2, (2,), dtype=torch.int32)
    found = emulated(scores, lengths, k, cluster=cluster, resident=resident, seed=seed)
    assert torch.equal(found, expected(scores, lengths, k))


def test_slots_keep_the_columns_of_their_positions(emulated: Emulated) -> None:
    scores = difficult("normal", 6, 1000)
    lengths = torch.tensor([1000, 1000, 50, 1000, 1000, 0], dtype=torch.int32)
    table = torch.randint(-1, 9, (3, 50), dtype=torch.int32)
    table[1, 7] = 2**31 - 1  # a slot that no int32 holds
    ids = torch.tensor([0, 1, 2, -1, 3, 0], dtype=torch.int32)
    found = emulated(scores, lengths, 100, cluster=2, pages=(ids, table, 16))
    assert torch.equal(found, slots_of(expected(scores, lengths, 100), ids, table, 16))
    by_maxima = emulated(scores, lengths, 100, pages=(ids, table, 16), maxima_from=0)
    assert torch.equal(by_maxima, found)
    assert (found[:3] == -1).any()
    assert (found[:3] >= 0).any()


@pytest.mark.parametrize("width", [1, 2048, 4097, 65536, 131072, 2**20, 3 * 2**20, 10**7])
@pytest.mark.parametrize("tokens", [1, 32, 64, 128, 133, 1024, 4096])
def test_every_launch_fits_the_device(tokens: int, width: int) -> None:
    variant = usual_variant(tokens, width, 132)
    resident, bitmap_words = memory_of(variant, width, 4096)
    assert variant.cluster in (1, 2, 4, 8, 16)
    assert (variant.shared + 1024) * variant.per_sm <= SHARED_PER_SM
    used = topk.FIXED_BYTES + 4 * (2 * bitmap_words + resident)
    assert used <= variant.shared
    assert resident % 128 == 0
    slice_size = ceil_div(width + 3, variant.cluster)
    assert bitmap_words * 32 >= max(slice_size, min(4096, width) + 3)
    if tokens == 1 and width >= 65536:
        assert variant.cluster == (8 if width == 65536 else 16)


@pytest.mark.parametrize("k", [1, 512, 2048])
@pytest.mark.parametrize("width", [25_600, 65_536, 131_072])
@pytest.mark.parametrize("tokens", [67, 128, 133, 4096])
def test_launches_by_maxima_fit_the_device(tokens: int, width: int, k: int) -> None:
    assert topk.by_maxima(tokens, width, k, 132)
    variant = usual_variant(tokens, width, 132, maxima=True)
    assert variant == (Variant(1, 1024, 1) if tokens <= 132 else Variant(1, 512, 2))
    resident, bitmap_words = memory_of(variant, width, k, maxima=True)
    assert topk.FIXED_BYTES + 4 * (2 * bitmap_words + resident) <= variant.shared
    gathered = 8 * k
    assert bitmap_words * 32 >= max(gathered, width // 8, topk.maxima_from(k) + 3)
    assert resident >= max(width // 8, gathered), "nothing is read twice"


def test_maxima_are_left_aside_where_they_do_not_help() -> None:
    assert not topk.by_maxima(4096, 16_384, 2048, 132), "rows are short"
    assert not topk.by_maxima(4096, 65_536, 2049, 132), "the result and the blocks do not fit"
    assert not topk.by_maxima(4096, 2**19, 2048, 132), "the maxima do not fit"
    assert not topk.by_maxima(32, 65_536, 2048, 132), "a cluster reads the row"


def test_k_has_a_limit() -> None:
    for k in (0, 4097):
        with pytest.raises(ValueError, match="k must be between 1 and 4096"):
            topk_positions(torch.zeros(1, 1), torch.ones(1, dtype=torch.int32), k)


def test_rows_that_no_launch_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="scores must be narrower, got rows of 100000000; split them"):
        memory_of(Variant(16, 1024, 1), 10**8, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(1, 65536, 2048), (33, 20_001, 2048), (5, 2**20 + 5, 4096), (300, 999, 1)]
)
def test_the_device_selects_what_a_stable_sort_selects(kind: str, rows: int, width: int, k: int) -> None:
    scores = unaligned(difficult(kind, rows, width), offset=1, gap=3)
    lengths = torch.randint(0, width + 1, (rows,), dtype=torch.int32)
    lengths[0] = width
    whole = scores.as_strided((scores.untyped_storage().nbytes() // 4,), (1,), 0)
    placed = whole.cuda().as_strided(scores.shape, scores.stride(), scores.storage_offset())
    wanted = expected(scores, lengths, k)
    for variant in (None, Variant(1, 512, 2), Variant(2, 1024, 1), Variant(8, 512, 2), Variant(16, 1024, 1)):
        if variant is not None and topk._room_for_keys(variant, scores.shape[1], k)[1] < 0:
            continue  # the bitmaps of so wide a slice do not fit in shared memory
        found = topk_positions(placed, lengths.cuda(), k, variant=variant)
        assert torch.equal(found.cpu(), wanted), variant


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, *ADVERSARIAL])
@pytest.mark.parametrize(("rows", "width", "k"), [(100, 131_072, 2048), (300, 65_536, 2048), (140, 32_768, 512)])
def test_the_device_selects_alike_with_and_without_maxima(kind: str, rows: int, width: int, k: int) -> None:
    scores = (difficult if kind in KINDS else adversarial)(kind, rows, width).cuda()
    lengths = torch.randint(width // 4, width + 1, (rows,), dtype=torch.int32, device="cuda")
    lengths[0] = width
    assert topk.by_maxima(rows, width, k, torch.cuda.get_device_properties(0).multi_processor_count)
    wanted = topk_positions(scores, lengths, k, variant=Variant(2, 512, 2))  # clusters read all scores
    for variant in (None, Variant(1, 512, 2), Variant(1, 1024, 1)):
        assert torch.equal(topk_positions(scores, lengths, k, variant=variant), wanted), variant
    assert torch.equal(wanted[:2].cpu(), expected(scores[:2], lengths[:2], k))
    out = torch.full_like(wanted, -7)
    addresses = (scores.data_ptr(), lengths.data_ptr(), out.data_ptr())
    topk.prepare_topk(rows, width, k, scores.device)(torch.cuda.current_stream().cuda_stream, addresses)
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_captured_launch_sees_new_lengths_scores_and_pages() -> None:
    scores, lengths = torch.randn(9, 30_000, device="cuda"), torch.full((9,), 30_000, dtype=torch.int32, device="cuda")
    ids = torch.arange(9, dtype=torch.int32, device="cuda")
    table = torch.randint(-1, 9999, (9, 400), dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk_positions(scores, lengths, 2048, ids, table, 64)
    for seed in range(3):
        reseed(seed)
        scores.normal_()
        table.random_(-1, 9999)
        lengths.random_(0, 30_001)
        graph.replay()
        positions = expected(scores, lengths, 2048)
        assert torch.equal(found.cpu(), slots_of(positions, ids.cpu(), table.cpu(), 64))
