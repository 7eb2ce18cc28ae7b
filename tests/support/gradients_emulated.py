"""The kernels of training in CUDA C++ on the host, for tests: warps in random order."""

from pathlib import Path
from typing import Any

import on_host

from tamis.cuda.compiler import Program

ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(int ctas, int seed, const {params}* params) {{
  emulator::random_order.seed(seed);
  for (int cta = 0; cta < ctas; ++cta) {{
    emulator::start_wgmma_cta(ctas);
    emulator::run_cluster(cta, 1, {shared}, [&] {{ {kernel}(*params); }});
    emulator::check_finished();
  }}
}}
"""
INDEX_LOSS_SHARED = "FIXED_BYTES + (params->columns + BLOCK_KEYS - 1) / BLOCK_KEYS * BLOCK_BYTES"
ENTRIES = {
    "gradients.cu": {"params": "GradientParams", "shared": "USED", "kernel": "attention_gradients"},
    "index_loss.cu": {"params": "IndexLossParams", "shared": INDEX_LOSS_SHARED, "kernel": "index_loss"},
    "ordered_sums.cu": {"params": "SumParams", "shared": "SHARED_BYTES", "kernel": "ordered_sums"},
}


class Emulated:
    """A program, compiled for the host; called as a launch."""

    def __init__(self, folder: Path, program: Program) -> None:
        source = f'#include "warpgroup_emulator.hpp"\n{program.source}{ENTRY.format(**ENTRIES[program.name])}'
        self.run = on_host.load(folder, source, program.options).run

    def __call__(self, grid: tuple[int, int, int], params: tuple[Any, ...]) -> None:
        self.run(grid[0], 3, on_host.packed(params))
