"""How the Hopper kernels cut a batch, and how parts are merged: its source runs on the host against the definition."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import on_host
import pytest
import torch
from attention_calls import combine_call
from seeds import reseed
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.ops.attention.hopper import few_heads, items
from tamis.ops.attention.hopper.items import Target
from tamis.ops.combine import reference as combine

TYPES = {"P": ctypes.c_void_p, "q": ctypes.c_longlong, "i": ctypes.c_int}
ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(
    int blocks, const float* parts, const float* lses, const float* tops, int count, int tokens, int heads,
    const float* sink, void* out, int kind, long long token_stride, long long head_stride, float* lse, float* top) {
  for (int block = 0; block < blocks; ++block) {
    emulator::start_block(blocks);
    emulator::run_cluster(block, 1, 0, [&] {
      merge_parts(parts, lses, tops, count, tokens, heads, sink, out, kind, token_stride, head_stride, lse, top);
    });
  }
}
"""


@pytest.fixture
def merge(host_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module launch the merge on the host, for a number of parts that are read at once."""

    def launch(device: torch.device, at_once: int) -> Callable[..., None]:
        program = items.merge_program(at_once)
        source = program.source.replace('#include "instructions.cuh"', '#include "matrix_emulator.hpp"')
        run = on_host.load(host_folder, source + ENTRY, [*program.options, "-DTHREADS=128"]).run
        run.argtypes = [TYPES[letter] for letter in "i" + items.MERGE_SIGNATURE]
        return lambda grid, *values: run(grid[0], *values)

    monkeypatch.setattr(items, "_merge_launch", launch)


def some_parts(count: int, tokens: int, heads: int) -> Target:
    reseed(count)
    found = Target(torch.randn(count, tokens, heads, 512), torch.randn(count, tokens, heads) * 9, Tensor())
    found.lse[torch.rand(count, tokens, heads) < 0.3] = -torch.inf
    found.lse[:, 0, 0] = -torch.inf  # nothing selected anywhere
    found.out[found.lse == -torch.inf] = 0.0
    return found._replace(maxima=found.lse - 1.0)


@pytest.mark.parametrize("dtype", items.OUT_KINDS)
@pytest.mark.parametrize("count", [1, 4, 5, 16, 37])
def test_parts_are_merged_by_their_weights(merge, count: int, dtype: torch.dtype) -> None:
    tokens, heads = 2, 3
    parts, sink = some_parts(count, tokens, heads), torch.tensor([0.5, -torch.inf, torch.inf])
    room = torch.full((tokens, heads, 516), 7.0, dtype=dtype)
    for given in (None, sink):
        whole = Target(room[..., 4:], torch.empty(tokens, heads), torch.empty(tokens, heads))
        items.merge_parts(parts, given, whole)
        wanted = torch.empty(tokens, heads, 512)
        lse = combine.combine_parts(combine_call(parts.out, parts.lse, given, wanted))
        assert torch.equal(whole.lse == -torch.inf, lse == -torch.inf)
        found = lse.isfinite()
        assert torch.allclose(whole.lse[found], lse[found], atol=1e-5)
        assert torch.allclose(whole.out.float(), wanted, atol=1e-6 if dtype == torch.float32 else 2e-2)
        assert (whole.out[0, 0] == 0).all()
        assert torch.equal(whole.maxima, parts.maxima.amax(0))
        assert (room[..., :4] == 7).all()


def test_nan_in_a_part_shows(merge) -> None:
    parts = some_parts(6, 2, 2)
    parts.lse[3, 1, 0] = parts.maxima[3, 1, 0] = torch.nan
    whole = Target(torch.empty(2, 2, 512), torch.empty(2, 2), torch.empty(2, 2))
    items.merge_parts(parts, None, whole)
    assert whole.out[1, 0].isnan().all()
    assert whole.lse[1, 0].isnan()
    assert whole.maxima[1, 0].isnan()
    assert not whole.out[1, 1].isnan().any()


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64, 128, 132, 133, 264, 265, 512, 4096])
@pytest.mark.parametrize("bf16_rows", [False, True])
def test_no_batch_falls_off_a_cliff(tokens: int, heads: int, bf16_rows: bool) -> None:
    variant = few_heads.usual_variant(tokens, heads, 132, bf16_rows)
    if few_heads.suits(tokens, heads, bf16_rows):
        if isinstance(variant, few_heads.Columns):
            assert not bf16_rows
            assert variant.heads >= heads
        else:
            assert variant.bf16_rows == bf16_rows
        assert (variant.shared + 1024) * variant.per_sm <= 228 * 1024
        row, room = 2048 // variant.rows_at_once, 132 * variant.per_sm // ceil_div(heads, variant.heads)
        costs = {"parts_per_step": variant.parts_per_step, "steps_per_part": variant.steps_per_part}
    else:
        row, room, costs = 32, 132 // ceil_div(heads, 64), {}

    def steps(count: int) -> float:
        whole, parts = items.choose_cut(count, heads, row, room, **costs)
        cut = row / parts + items.OVERHEAD_STEPS
        return ceil_div(whole, room) * (row + items.OVERHEAD_STEPS) + ceil_div(count - whole * parts, room) * cut

    assert steps(tokens + 1) <= steps(tokens) + 4
    parts = items.choose_cut(tokens, heads, row, room, **costs).parts
    assert parts == 1 or row // parts >= costs.get("steps_per_part", 1)


def test_what_the_kernels_write_to() -> None:
    good = torch.empty(3, 4, 512, dtype=torch.bfloat16)
    assert items.fits_directly(good)
    assert items.fits_directly(good.float())
    assert not items.fits_directly(good.double())
    assert not items.fits_directly(good.transpose(1, 2))
    assert not items.fits_directly(torch.empty(3, 4, 514, dtype=torch.bfloat16)[..., 2:])
