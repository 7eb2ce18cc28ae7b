"""The attention kernels of few heads on the host, and a comparison of their results with float64."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import on_host
import pytest
import torch
from attention_calls import attend_slots_call, combine_call
from few_heads_rows import SCALE
from torch import Tensor

from tamis import Selection
from tamis.lab.testing import oracle
from tamis.ops.attention.hopper import few_heads
from tamis.ops.attention.hopper.few_heads_shapes import CtaShape, mma_shape, wgmma_shape
from tamis.ops.attention.hopper.params import AttendParams
from tamis.ops.combine import reference as combine_reference

# The shapes of a device, with rings as short as they can be.
BF16_SHAPES = {
    "two streams": mma_shape(2, 2, per_sm=1, shared=219_232, bf16_rows=True),
    "one stream": mma_shape(1, 2, per_sm=2, shared=91_184, bf16_rows=True),
}
FP8_SHAPES = {
    "two streams": mma_shape(2, 2, per_sm=1, shared=154_720),
    "one stream": mma_shape(1, 2, per_sm=2, shared=58_928),
    "32 columns": wgmma_shape(32, 4, shared=168_752),
    "16 columns": wgmma_shape(16, 5, shared=147_456),
}
ENTRY = """
extern "C" __attribute__((visibility("default")))
void run(int width, int height, long long shared, int seed, const AttendParams* params) {
  emulator::random_order.seed(seed);
  for (int cta = 0; cta < width * height; ++cta) {
    emulator::start_wgmma_cta(width);
    emulator::cta_y = cta / width;
    emulator::run_cluster(cta % width, 1, shared, [&] { attend_SOURCE(*params); });
    emulator::check_finished();
  }
}
"""
"""Runs every CTA of a grid, one after the other."""


class Emulated:
    """The launches of a shape, emulated on the host."""

    def __init__(self, folder: Path, shape: CtaShape, dtype: torch.dtype, keep_rest: bool = False) -> None:
        program = few_heads.program(shape, dtype, keep_rest)
        source = program.source.replace('#include "instructions.cuh"', '#include "warpgroup_emulator.hpp"')
        options = [*program.options, "-I", str(Path(few_heads.__file__).parent)]
        self.run = on_host.load(folder, source + ENTRY.replace("SOURCE", shape.source), options).run
        self.shared, self.seed = shape.shared, 0

    def __call__(self, grid: tuple[int, int, int], params: AttendParams) -> None:
        self.seed += 1
        self.run(grid[0], grid[1], ctypes.c_longlong(self.shared), self.seed, on_host.packed(params))


Attend = Callable[..., tuple[Tensor, Tensor, Tensor]]


def emulated_launches(host_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """For a fixture: a function that makes the module launch a shape on the host, as on a device of so many SMs."""

    def install(name: str, sms: int = 2) -> None:
        def launch(device: torch.device, *given: Any) -> Emulated:
            if given not in BUILT:
                BUILT[given] = Emulated(host_folder, *given)
            return BUILT[given]

        monkeypatch.setattr(few_heads, "_launch", launch)
        monkeypatch.setattr(few_heads, "sm_count", lambda device: sms)
        monkeypatch.setattr(few_heads, "choose_shape", lambda *given: (BF16_SHAPES if given[3] else FP8_SHAPES)[name])
        few_heads.plan_launch.cache_clear()

    yield install
    few_heads.plan_launch.cache_clear()


BUILT: dict[tuple[Any, ...], Emulated] = {}
"""By shape, dtype of queries, and whether the rest of the output is kept."""


def check(
    q: Tensor,
    selection: Selection,
    *,
    splits: int | None = 1,
    sink: Tensor | None = None,
    scale: float = SCALE,
) -> None:
    """Compare with the oracle, each tile of each head by itself."""
    wanted, wanted_lse = oracle.attend(q, [selection], scale=scale, value_dim=512, sink=sink)
    split_out, split_lse, max_logits = few_heads.attend_slots(
        attend_slots_call(q, [selection], scale=scale, value_dim=512, splits=splits)
    )
    merged = torch.empty(wanted.shape)
    lse = combine_reference.combine_parts(combine_call(split_out, split_lse, sink, merged))
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (merged[empty] == 0).all()
    assert torch.allclose(lse[~empty].double(), wanted_lse[~empty], atol=2e-3, rtol=1e-5)
    norm = wanted.unflatten(2, (4, 128)).norm(dim=3)
    error = (merged - wanted).unflatten(2, (4, 128)).norm(dim=3)
    assert (error <= 1e-3 * norm + 1e-30).all(), float((error / norm.clamp_min(1e-30)).max())
    for token, head in (~empty).nonzero().tolist():
        rows = oracle.rows_of(selection.cache, torch.tensor(oracle.selected_slots(selection, token)))
        max_logit = (rows @ q[token, head].double()).max() * scale
        assert abs(max_logits[:, token, head].max() - max_logit) < 2e-3 + 1e-4 * abs(max_logit)
