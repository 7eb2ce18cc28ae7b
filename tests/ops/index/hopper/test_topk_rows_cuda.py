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

from tamis.ops.index.hopper import topk_rows
from tamis.ops.index.hopper.topk_params import TopkParams
from tamis.ops.index.hopper.topk_rows import Form

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
