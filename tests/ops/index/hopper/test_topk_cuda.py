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

from tamis.arithmetic import ceil_div
from tamis.ops.index.hopper import topk, topk_rows
from tamis.ops.index.hopper.topk import Variant, cluster_variant, memory_of, topk_positions, usual_variant
from tamis.ops.index.hopper.topk_params import SHARED_PER_SM

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
        steps = torch.randint(0, 1500, (rows, width), dtype=torch.int32)
        scores = (torch.ones(rows, width).view(torch.int32) + steps).view(torch.float32)
    elif kind == "coarse":
        scores = (scores * 4).round()
    return scores


KINDS = ("normal", "plateau", "equal", "invalid", "bits", "close", "coarse")


class Emulated:
    """The kernel of a number of threads, compiled for the host."""

    def __init__(self, folder: Path, threads: int) -> None:
        program = topk.program(threads)
        source = f'#include "emulator.hpp"\n{program.source}{ENTRY}'
        options = [*program.options, "-I", str(Path(topk.__file__).parent)]
        self.threads, self.run = threads, on_host.load(folder, source, options).run

    def __call__(
        self,
        scores: Tensor,
        lengths: Tensor,
        k: int,
        *,
        cluster: int = 1,
        resident: int | None = None,
        pages: tuple[Tensor, Tensor, int] | None = None,
        seed: int = 0,
    ) -> Tensor:
        fitting, words = memory_of(Variant(cluster, self.threads, 1), scores.shape[1], k)
        keys = fitting if resident is None else min(resident, fitting)
        # The smallest memory that suffices, so that the emulator notices if the kernel uses more.
        shared = topk.FIXED_BYTES + 4 * (2 * words + keys)
        out = torch.full((scores.shape[0], k), -7, dtype=torch.int32)
        ids, table, page_size = pages or (torch.empty(0), torch.empty(0, 0), 0)
        params = topk.TopkParams(
            *(scores.data_ptr(), scores.stride(0), scores.shape[1], lengths.data_ptr(), k, ids.data_ptr()),
            *(table.data_ptr(), table.stride(0), *table.shape, page_size, out.data_ptr(), keys, words),
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
    assert (found[:3] == -1).any()
    assert (found[:3] >= 0).any()


@pytest.mark.parametrize("width", [1, 2048, 4097, 65536, 131072, 2**20, 3 * 2**20, 10**7])
@pytest.mark.parametrize("tokens", [1, 32, 64, 128, 133, 1024, 4096])
def test_every_launch_fits_the_device(tokens: int, width: int) -> None:
    variant = cluster_variant(tokens, width, 132)
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


def test_k_has_a_limit() -> None:
    for k in (0, 4097):
        with pytest.raises(ValueError, match="k must be between 1 and 4096"):
            topk_positions(torch.zeros(1, 1), torch.ones(1, dtype=torch.int32), k)


def test_rows_that_no_launch_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="scores must be narrower, got rows of 100000000; split them"):
        memory_of(Variant(16, 1024, 1), 10**8, 2048)


@pytest.mark.parametrize("tokens", [1, 33, 66])
@pytest.mark.parametrize("k", [1, 2048, 4096])
def test_rows_too_long_to_be_divided_are_streamed(tokens: int, k: int) -> None:
    """16 CTAs, each with two bits a score beside its fixed memory, hold 12 million scores."""
    slice_size = (Variant(16, 1024, 1).shared - topk.FIXED_BYTES) * 4 // topk.SLICE_UNIT * topk.SLICE_UNIT
    most = 16 * slice_size - 3  # a row may begin three scores before an aligned address
    assert most > 12e6
    assert usual_variant(tokens, most, k, 132, aligned=True) == Variant(16, 1024, 1)
    for width in (most + 1, 10**8, 2**30):
        form = usual_variant(tokens, width, k, 132, aligned=True)
        assert form in topk_rows.STREAMED
        assert k <= form.most_k


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
