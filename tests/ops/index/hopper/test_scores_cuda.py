"""Index scores in CUDA C++: the source runs on the host, with threads in random order, against plain torch."""

import struct
from pathlib import Path

import on_host
import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.cache.paged import PagedCache
from tamis.ops import index_scores, ragged_scores
from tamis.ops.index.hopper import scores
from tamis.ops.index.hopper.score_params import ScoreParams, key_pages
from tamis.ops.index.operations import IndexScores, RaggedScores

ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(
    int ctas, int seed, const ScoreParams* params, const void* pages) {
  emulator::random_order.seed(seed);
  TileMap map;
  std::memcpy(map.bytes, pages, sizeof(emulator::PagesOfRows));
  for (int cta = 0; cta < ctas; ++cta) {
    emulator::start_wgmma_cta(ctas);
    emulator::run_cluster(cta, 1, USED, [&] { index_scores(*params MAP); });
    emulator::check_finished();
  }
}
"""
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
LAYOUTS = {"e4m3": index_fp8(), "bf16": rows(BF16, latent=128, rope=0), "e2m1": index_mxfp4()}


class Emulated:
    """The kernel for a format, compiled for the host."""

    def __init__(self, folder: Path, name: str, heads: int, query: torch.dtype, *, few: bool = False) -> None:
        self.format = scores.FORMATS[name]
        tiles = self.format.decodes if few else self.format.prompts
        program = scores.program(self.format, heads, query.itemsize, tiles)
        entry = ENTRY.replace("MAP", ", map" if self.format.mapped else "")
        source = f'#include "warpgroup_emulator.hpp"\n{program.source}{entry}'
        self._run = on_host.load(folder, source, [*program.options, "-I", str(Path(scores.__file__).parent)]).run

    def params(self, call: IndexScores, *, fill: bool = True) -> ScoreParams:
        return scores.paged_params(self.format, call, call.out, fill=fill)

    def __call__(self, params: ScoreParams, *, ctas: int = 3, seed: int = 0) -> None:
        self._run(ctas, seed, on_host.packed(params), struct.pack("@5q", *key_pages(params)))


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, most: int = 2) -> Tensor:
    """Small integers, of which every sum of products is exact in any order."""
    numbers = torch.randint(-most, most + 1, shape, generator=seeded(seed), dtype=torch.int64, device="cpu")
    return numbers.to(dtype)


def filled(layout: Layout, pages: int, page_size: int, seed: int) -> PagedCache:
    """A cache of small integers with scales that are powers of two."""
    cache = PagedCache(layout, pages, page_size)
    values = cache.field(layout.values)
    if layout.packed:
        codes = torch.randint(0, 256, values.shape, generator=seeded(seed), dtype=torch.uint8, device="cpu")
        values.copy_(codes)
    elif layout.quantised:
        values.copy_(integers(*values.shape, seed=seed, dtype=E4M3).view(torch.uint8))
    else:
        values.copy_(integers(*values.shape, seed=seed, dtype=BF16))
    if layout.scales is not None:
        scales = cache.field(layout.scales)
        exponents = integers(*scales.shape, seed=seed + 1, most=1)
        scales.copy_((127 + exponents).to(torch.uint8) if layout.packed else 2.0**exponents)
    return cache


def paged_call(
    name: str,
    heads: int,
    query: torch.dtype,
    ids: list[int],
    lengths: list[int],
    *,
    page_size: int = 64,
    table_width: int = 5,
    width: int | None = None,
    weights: torch.dtype = torch.float32,
    seed: int = 0,
) -> IndexScores:
    requests, tokens = max(ids) + 1, len(ids)
    cache = filled(LAYOUTS[name], requests * table_width + 1, page_size, seed)
    order = torch.randperm(requests * table_width, generator=seeded(seed + 2), device="cpu")
    table = order.view(requests, table_width).int() + 1
    columns = table_width * page_size if width is None else width
    return IndexScores(
        integers(tokens, heads, 128, seed=seed + 3, dtype=query),
        integers(tokens, heads, seed=seed + 4, dtype=weights),
        cache,
        torch.tensor(ids, dtype=torch.int32, device="cpu"),
        table,
        torch.tensor(lengths, dtype=torch.int32, device="cpu"),
        torch.full((tokens, columns), -7.5e30, dtype=torch.float32, device="cpu"),
        "reference",
    )


def expected(call: IndexScores) -> Tensor:
    return index_scores(*call[:6], width=call.out.shape[1], backend="reference")


CASES = [
    ("e4m3", 64, E4M3),
    ("e4m3", 32, E4M3),
    ("e4m3", 16, E4M3),
    ("bf16", 64, BF16),
    ("bf16", 16, BF16),
    ("e2m1", 64, BF16),
    ("e2m1", 64, E4M3),
    ("e2m1", 32, BF16),
]


@pytest.mark.parametrize(("name", "heads", "query"), CASES)
def test_scores_of_a_prompt(host_folder: Path, name: str, heads: int, query: torch.dtype) -> None:
    """Eleven tokens of one request: a whole tile and a part of one, causal, with the last block cut off."""
    call = paged_call(name, heads, query, [0] * 11, list(range(180, 191)), table_width=3)
    emulated = Emulated(host_folder, name, heads, query)
    emulated(emulated.params(call))
    assert torch.equal(call.out, expected(call))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_scores_of_several_requests(host_folder: Path, page_size: int) -> None:
    """Tiles of one, two, three and more tokens; tokens without a request, without keys, and of absent pages."""
    ids = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 0, 2]
    lengths = [130, 5, 64, 0, 200, 65, 190, 191, 192, 193, 194, -3, 2**31 - 1]
    call = paged_call("e4m3", 64, E4M3, ids, lengths, page_size=page_size, table_width=256 // page_size, seed=7)
    call.block_table[2, 64 // page_size] = -1
    call.block_table[3, 0] = call.cache.pages
    call.request_ids[0] = 9
    capped = call._replace(lengths=call.lengths.clamp(0, 256))
    sane = capped._replace(request_ids=call.request_ids.clone().clamp_max(3))
    want = expected(sane)
    want[0] = -torch.inf
    emulated = Emulated(host_folder, "e4m3", 64, E4M3)
    emulated(emulated.params(call), ctas=4, seed=page_size)
    assert torch.equal(call.out, want)


@pytest.mark.parametrize(("name", "heads", "query"), CASES)
def test_scores_of_decodes(host_folder: Path, name: str, heads: int, query: torch.dtype) -> None:
    """Tiles of few tokens: as many of each request as fit, and decodes."""
    emulated = Emulated(host_folder, name, heads, query, few=True)
    drafts = emulated.format.decodes.columns // heads
    for each in {1, 2, drafts}:
        ids = [request for request in range(3) for _ in range(each)]
        lengths = [70 + 60 * request + draft for request in range(3) for draft in range(each)]
        call = paged_call(name, heads, query, ids, lengths, table_width=4, seed=each)
        params = emulated.params(call)
        assert params.group == each
        emulated(params, ctas=4, seed=each)
        assert torch.equal(call.out, expected(call))


@pytest.mark.parametrize("ctas", [1, 2, 7])
def test_a_score_does_not_depend_on_its_neighbours(host_folder: Path, ctas: int) -> None:
    """Random numbers, of which sums differ if their order does: tokens alone, and in tiles of other sizes."""
    ids, lengths = [0, 0, 0, 1, 1, 0, 0, 0, 0, 0], [150, 151, 152, 100, 101, 153, 154, 155, 156, 157]
    call = paged_call("e4m3", 64, E4M3, ids, lengths, table_width=3)
    q = torch.randn(call.q.shape, generator=seeded(1), dtype=torch.float32, device="cpu").to(E4M3)
    weights = torch.randn(call.weights.shape, generator=seeded(2), dtype=torch.float32, device="cpu")
    call = call._replace(q=q, weights=weights)
    emulated = Emulated(host_folder, "e4m3", 64, E4M3)
    few = Emulated(host_folder, "e4m3", 64, E4M3, few=True)
    emulated(emulated.params(call), ctas=ctas)
    for token in (0, 4, 9):
        one = slice(token, token + 1)
        alone = call._replace(
            q=q[one],
            weights=weights[one],
            request_ids=call.request_ids[one],
            lengths=call.lengths[one],
            out=torch.full_like(call.out[one], -7.5e30),
        )
        for kernel in (emulated, few):
            alone.out.fill_(-7.5e30)
            kernel(kernel.params(alone), ctas=2)
            assert torch.equal(alone.out[0], call.out[token])
    want = expected(call)
    seen = want > -torch.inf
    assert torch.equal(call.out > -torch.inf, seen)
    # A sum of n terms in float32 is off by at most n roundings of the sum of their sizes: 128 products, 64 heads and
    # the scale.
    sizes = call._replace(q=call.q.float().abs().to(E4M3), weights=weights.abs())
    values = call.cache.field(call.cache.layout.values)
    values.copy_(values & 0x7F)  # the sizes of the keys
    bound = (128 + 64 + 1) * 2.0**-24 * expected(sizes)
    assert ((call.out - want).abs() <= bound)[seen].all()


@pytest.mark.parametrize(("name", "query"), [("e4m3", E4M3), ("bf16", BF16)])
def test_unaligned_results_are_stored_one_by_one(host_folder: Path, name: str, query: torch.dtype) -> None:
    call = paged_call(name, 64, query, [0, 0, 0], [60, 97, 99], table_width=2, width=101)
    storage = torch.full((400,), -7.5e30, dtype=torch.float32, device="cpu")
    out = storage.as_strided((3, 101), (103, 1), 1)
    emulated = Emulated(host_folder, name, 64, query)
    params = scores.paged_params(emulated.format, call, out, fill=True)
    assert not params.pairs
    emulated(params)
    assert torch.equal(out, expected(call))
    assert (storage == -7.5e30).sum() == 400 - 3 * 101


def test_nothing_is_written_past_the_blocks_of_a_tile_without_fill(host_folder: Path) -> None:
    call = paged_call("e4m3", 64, E4M3, [0, 1], [60, 70], table_width=4)
    emulated = Emulated(host_folder, "e4m3", 64, E4M3)
    emulated(emulated.params(call, fill=False))
    want = expected(call)
    assert torch.equal(call.out[0, :64], want[0, :64])
    assert torch.equal(call.out[1, :128], want[1, :128])
    assert (call.out[0, 64:] == -7.5e30).all()
    assert (call.out[1, 128:] == -7.5e30).all()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(host_folder: Path, weights: torch.dtype) -> None:
    call = paged_call("e4m3", 64, E4M3, [0, 0], [33, 34], table_width=1, weights=weights)
    emulated = Emulated(host_folder, "e4m3", 64, E4M3)
    emulated(emulated.params(call))
    assert torch.equal(call.out, expected(call))


def test_nan_and_infinity_stay_with_their_own_scores(host_folder: Path) -> None:
    call = paged_call("e4m3", 64, E4M3, [0] * 8, [128] * 8, table_width=2, seed=3)
    call.q.view(torch.uint8)[2, 5, 17] = 0x7F
    call.weights[4, 9] = torch.inf
    call.cache.field(call.cache.layout.values)[1, 3, 7] = 0xFF
    call.cache.field(call.cache.layout.scales)[2, 9] = torch.inf
    emulated = Emulated(host_folder, "e4m3", 64, E4M3)
    emulated(emulated.params(call))
    torch.testing.assert_close(call.out, expected(call), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinite_products_are_rectified(host_folder: Path, sign: float) -> None:
    """A product of -inf counts as 0, for every head, and one of +inf is infinite."""
    call = paged_call("bf16", 64, BF16, [0], [64], table_width=1)
    call.q.fill_(0.0)
    call.q[:, :, 0] = sign
    keys = call.cache.field(call.cache.layout.values)
    keys.fill_(1.0)
    keys[1, 5, 0] = torch.inf
    call.weights.fill_(1.0)
    emulated = Emulated(host_folder, "bf16", 64, BF16)
    emulated(emulated.params(call))
    want = torch.full((64,), 64.0 if sign > 0 else 0.0)
    want[5] = torch.inf if sign > 0 else 0.0
    assert torch.equal(call.out[0], want)
    assert torch.equal(call.out, expected(call))


@pytest.mark.parametrize("name", ["e4m3", "bf16"])
@pytest.mark.parametrize("total", [61, 128, 195])
def test_scores_of_a_list(host_folder: Path, name: str, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts and ends differ within a tile; the list ends within a block, whose scales are no multiple of 16 bytes."""
    dtype = E4M3 if name == "e4m3" else BF16
    storage = integers(total, 128, seed=1, dtype=dtype)
    scales = 2.0 ** integers(total, seed=2, most=1) if name == "e4m3" else None
    starts = torch.tensor([0, 3, 70, 20, -4, 5, 64, 9, 1], dtype=torch.int32, device="cpu")
    ends = torch.tensor([10, total, total, 20, 300, 4, 66, 12, 64], dtype=torch.int32, device="cpu")
    out = torch.full((9, total), -7.5e30, dtype=torch.float32, device="cpu")
    q, weights = integers(9, 64, 128, seed=3, dtype=dtype), integers(9, 64, seed=4)
    call = RaggedScores(q, weights, storage, scales, starts, ends, out, "reference")
    assert scores.serves_list(call)
    emulated = Emulated(host_folder, name, 64, dtype)
    monkeypatch.setattr(scores, "_launch_all", lambda found, q, params, device: emulated(params))
    scores.ragged_scores(call)
    assert torch.equal(out, ragged_scores(*call[:6], backend="reference"))
