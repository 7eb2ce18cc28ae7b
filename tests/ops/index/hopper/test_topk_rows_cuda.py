"""Top-k of many rows in CUDA C++: the source runs on the host, with threads in random order, against a stable sort."""

from pathlib import Path

import on_host
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import reseed
from test_topk_cuda import KINDS, difficult, expected, slots_of, unaligned
from torch import Tensor

from tamis.ops.index.hopper import topk, topk_rows
from tamis.ops.index.hopper.topk_params import TopkParams
from tamis.ops.index.hopper.topk_rows import Form, usual_form

ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(int rows, int seed, const TopkParams* params) {
  emulator::random_order.seed(seed);
  for (int row = 0; row < rows; ++row) {
    emulator::start_cta(rows);
    emulator::run_cluster(row, 1, LIST + (STREAMED ? LISTED * 8 : 0), [&] { topk_rows(*params); });
  }
}
"""
WHOLE, STREAMED = Form(64, 6, 512), Form(64, 6, 512, stages=2, quads=3)
"""Forms with few threads: rows of up to 2048 scores, and tiles of 768 scores with a list for k up to 512."""


class Emulated:
    """The kernel of a form, compiled for the host."""

    def __init__(self, folder: Path, form: Form) -> None:
        program = topk_rows.program(form)
        source = f'#include "matrix_emulator.hpp"\n{program.source}{ENTRY}'
        options = [*program.options, "-I", str(Path(topk_rows.__file__).parent)]
        self.form, self.run = form, on_host.load(folder, source, options).run

    def __call__(
        self, scores: Tensor, lengths: Tensor, k: int, pages: tuple[Tensor, Tensor, int] | None = None, seed: int = 0
    ) -> Tensor:
        out = torch.full((scores.shape[0], k), -7, dtype=torch.int32)
        ids, table, page_size = pages or (torch.empty(0), torch.empty(0, 0), 0)
        params = TopkParams(
            *(scores.data_ptr(), scores.stride(0), scores.shape[1], lengths.data_ptr(), k, ids.data_ptr()),
            *(table.data_ptr(), table.stride(0), *table.shape, page_size, out.data_ptr(), 0, 0),
        )
        self.run(scores.shape[0], seed, on_host.packed(params))
        return out


@pytest.fixture(scope="session")
def whole(host_folder: Path) -> Emulated:
    return Emulated(host_folder, WHOLE)


@pytest.fixture(scope="session")
def streamed(host_folder: Path) -> Emulated:
    return Emulated(host_folder, STREAMED)


def adversarial(kind: str, width: int) -> Tensor:
    """One row that is difficult for a sample, or for a list that may fill up."""
    if kind == "ascending":
        return torch.arange(width, dtype=torch.float32)[None] - width / 3
    if kind == "descending":
        return -adversarial("ascending", width)
    if kind == "two values":
        return (torch.rand(1, width) < 0.4).float() * 3.0 - 1.0
    if kind == "outliers":
        scores = torch.randn(1, width)
        scores[0, ::64] = 1e30
        scores[0, 1::640] = torch.inf
        return scores
    if kind == "mostly -inf":
        scores = torch.randn(1, width)
        scores[torch.rand_like(scores) < 0.8] = -torch.inf
        return scores
    if kind == "hidden":  # what is sampled is low, what is not is high
        scores = torch.randn(1, width)
        scores[0, torch.arange(width) % 64 >= 8] += 100.0
        return scores
    if kind == "raised":  # what is sampled is high, what is not is low
        return adversarial("hidden", width) * -1.0
    if kind == "subnormal":
        return torch.randint(-3, 4, (1, width)).float() * 1e-45
    assert kind == "last"
    scores = torch.zeros(1, width)
    scores[0, -width // 3 :] = 1.0
    return scores


ADVERSARIES = (
    *("ascending", "descending", "two values", "outliers", "mostly -inf", "hidden", "raised", "subnormal", "last"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_shared_memory(whole: Emulated, kind: str) -> None:
    width, k = 2043, 250
    scores = unaligned(difficult(kind, 8, width), offset=3, gap=2)
    lengths = torch.tensor([width, 1203, 700, k + 1, k, 1, 0, 2**31 - 1], dtype=torch.int32)
    assert torch.equal(whole(scores, lengths, k), expected(scores, lengths, k))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_streamed(streamed: Emulated, kind: str) -> None:
    width, k = 9003, 250
    scores = unaligned(difficult(kind, 8, width), offset=3, gap=2)
    lengths = torch.tensor([width, 5003, 1025, k + 1, k, 1, 0, 2**31 - 1], dtype=torch.int32)
    assert torch.equal(streamed(scores, lengths, k), expected(scores, lengths, k))


@pytest.mark.parametrize("kind", ADVERSARIES)
def test_rows_that_mislead_a_sample(whole: Emulated, streamed: Emulated, kind: str) -> None:
    for emulated, width, k in ((whole, 2048, 512), (whole, 2000, 3), (streamed, 8000, 512), (streamed, 12_001, 70)):
        scores = adversarial(kind, width)
        lengths = torch.tensor([width], dtype=torch.int32)
        assert torch.equal(emulated(scores, lengths, k), expected(scores, lengths, k))


@pytest.mark.parametrize("k", [1, 5, 256, 512])
def test_lengths_around_limits(whole: Emulated, streamed: Emulated, k: int) -> None:
    for emulated, limits in ((whole, (k, 256, 1792, 2047)), (streamed, (k, 768, 1024, 1536, 4608))):
        lengths = torch.tensor([limit + step for limit in limits for step in (-1, 0, 1)], dtype=torch.int32)
        scores = torch.randn(len(lengths), int(lengths.max()))
        assert torch.equal(emulated(scores, lengths, k), expected(scores, lengths, k))


def test_the_largest_sample(streamed: Emulated) -> None:
    """From some length on the gate's sample is as large as the list's memory allows."""
    scores, lengths = torch.randn(2, 30_001), torch.tensor([30_001, 22_000], dtype=torch.int32)
    assert torch.equal(streamed(scores, lengths, 512), expected(scores, lengths, 512))


def test_a_bin_that_ends_at_minus_zero(whole: Emulated) -> None:
    """Between the keys of the highest negative number and of 0 lies that of -0, which no score has."""
    part = torch.arange(512)
    sampled = part * 4 + part // 16 // 8  # so that the interval is above all other scores
    scores = torch.zeros(1, 2048)
    scores[0, ::2] = (torch.randint(1, 1000, (1024,), dtype=torch.int32) | -(2**31)).view(torch.float32)
    scores[0, sampled] = 100.0 + torch.rand(512)
    lengths = torch.tensor([2048], dtype=torch.int32)
    zeros = int((scores == 0.0).sum())
    for k in (512 + zeros - 1, 512 + zeros, 512 + zeros + 100):
        assert torch.equal(whole(scores, lengths, k), expected(scores, lengths, k))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    width=st.integers(1, 5000),
    k=st.integers(1, 512),
    kind=st.sampled_from(KINDS),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_any_shape(whole: Emulated, streamed: Emulated, width, k, kind, offset, seed) -> None:
    reseed(seed)
    scores = unaligned(difficult(kind, 2, width), offset, gap=seed % 5)
    lengths = torch.randint(-1, width + 2, (2,), dtype=torch.int32)
    wanted = expected(scores, lengths, k)
    assert torch.equal(streamed(scores, lengths, k, seed=seed), wanted)
    if width + 3 <= WHOLE.places:
        assert torch.equal(whole(scores, lengths, k, seed=seed), wanted)


def test_slots_keep_the_columns_of_their_positions(whole: Emulated, streamed: Emulated) -> None:
    scores = difficult("normal", 6, 2000)
    lengths = torch.tensor([2000, 2000, 50, 1000, 1000, 0], dtype=torch.int32)
    table = torch.randint(-1, 9, (3, 50), dtype=torch.int32)
    table[1, 7] = 2**31 - 1  # a slot that no int32 holds
    ids = torch.tensor([0, 1, 2, -1, 3, 0], dtype=torch.int32)
    for emulated in (whole, streamed):
        found = emulated(scores, lengths, 100, pages=(ids, table, 16))
        assert torch.equal(found, slots_of(expected(scores, lengths, 100), ids, table, 16))
        assert (found[:3] == -1).any()
        assert (found[:3] >= 0).any()


@pytest.mark.parametrize("tokens", [1, 33, 128, 512, 4096])
@pytest.mark.parametrize("width", [1, 4096, 8189, 8192, 16_384, 65_536, 10**7])
@pytest.mark.parametrize("k", [1, 2048, 2049, 4096])
def test_every_form_holds_its_rows(tokens: int, width: int, k: int) -> None:
    for aligned in (False, True):
        form = usual_form(tokens, width, k, 132, aligned=aligned)
        if form is None:
            assert tokens <= 132
            continue
        assert k <= form.most_k
        assert form.stages or width + 3 * (not aligned) <= form.places
        assert (form.shared + 1024) * form.ctas <= topk_rows.SHARED_PER_SM


FORMS = (*topk_rows.WHOLE, *topk_rows.STREAMED, topk_rows.ALONE)


def placed(scores: Tensor) -> Tensor:
    """The same rows on the device, at the same addresses modulo 16."""
    whole = scores.as_strided((scores.untyped_storage().nbytes() // 4,), (1,), 0)
    return whole.cuda().as_strided(scores.shape, scores.stride(), scores.storage_offset())


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *ADVERSARIES])
def test_the_device_selects_what_a_stable_sort_selects(kind: str, form: Form) -> None:
    widths = (form.places - 3, form.places // 2 + 77) if form.places else (9000, 40_003, 131_072)
    for width in widths:
        rows = difficult(kind, 40, width) if kind in KINDS else adversarial(kind, width).repeat(40, 1)
        scores = unaligned(rows, offset=1, gap=3)
        lengths = torch.randint(0, width + 1, (40,), dtype=torch.int32)
        limits = [width, width - 1, 8193, 8192, 8191, 2049, 2048, 2047, 1, 0]
        lengths[: len(limits)] = torch.tensor(limits, dtype=torch.int32)
        device, ends = placed(scores), lengths.cuda()
        for k in (1, 600, 2048, form.most_k):
            found = topk.topk_positions(device, ends, k, variant=form)
            assert torch.equal(found.cpu(), expected(scores, lengths, k)), (width, k)
            again = topk.topk_positions(device, ends, k, variant=topk.cluster_variant(40, width, 132))
            assert torch.equal(found, again), (width, k)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8192, 16_384, 65_536])
def test_every_row_of_a_prompt_is_exact(width: int) -> None:
    """Samples fail in one row of some hundreds, so many rows are compared, by the other kernel."""
    scores = torch.randn(4096, width, device="cuda")
    lengths = torch.arange(width - 4095, width + 1, dtype=torch.int32, device="cuda")
    found = topk.topk_positions(scores, lengths, 2048)
    assert torch.equal(found, topk.topk_positions(scores, lengths, 2048, variant=topk.Variant(1, 512, 2)))
    assert torch.equal(found[:8].cpu(), expected(scores[:8], lengths[:8], 2048))
