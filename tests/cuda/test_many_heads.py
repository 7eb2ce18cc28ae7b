"""Attention of many heads in CUDA C++: its source runs on the host, warps in random order, against the reference."""

import ctypes
import math
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tamis.cache import PagedCache, Selection
from tamis.ops import write_kv
from tamis.ops.attend import cuda_many_heads as many
from tamis.ops.attend import reference
from tamis.ops.attend.cuda_many_heads import SIGNATURE, VARIANTS, Variant

ENTRY = """
#include <utility>
template <class... Arguments, size_t... I>
void call(void (*kernel)(Arguments...), const void* const* values, std::index_sequence<I...>) {
  kernel(*static_cast<const Arguments*>(values[I])...);
}
template <class... Arguments>
void call(void (*kernel)(Arguments...), const void* const* values) {
  call(kernel, values, std::index_sequence_for<Arguments...>());
}
extern "C" void run(int width, int parts, int seed, const void* const* values) {
  emulator::random_order.seed(seed);
  emulator::grid_width = width;
  for (int index = 0; index < width * parts; ++index) {
    emulator::restart();
    emulator::run_cluster(index, 1, USED, [&] { call(attend_many_heads, values); });
    emulator::check_finished();
  }
}
"""


class Emulated:
    """The kernel of a layout and a variant, compiled for the host."""

    def __init__(self, folder: Path, planar: bool, variant: Variant) -> None:
        program = many.program(planar, variant)
        source = program.source.replace('#include "instructions.cuh"', '#include "emulator.hpp"')
        source = source.replace('#include "warpgroups.cuh"', '#include "warpgroup_emulator.hpp"')
        file, library = folder / "many_heads.cpp", folder / "many_heads.so"
        file.write_text(source + ENTRY)
        flags = ["-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-I", str(Path(__file__).parent)]
        subprocess.run(["g++", *flags, *program.options, "-o", library, file], check=True)
        self.run = ctypes.CDLL(str(library)).run

    def __call__(
        self,
        q: Tensor,
        selections: Sequence[Selection],
        *,
        scale: float | Tensor,
        parts: int = 1,
        sink: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.full((parts, *q.shape[:2], 512), -7.0, dtype=dtype)
        lse = torch.full(out.shape[:3], -7.0)
        top = torch.full_like(lse, -7.0)
        values, _copies = many.launch_values(q, selections, scale, sink, out, lse, top)
        held = [ctypes.create_string_buffer(struct.pack(f"@{s}", v)) for s, v in zip(SIGNATURE, values, strict=True)]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        self.run(q.shape[0] * -(-q.shape[1] // 64), parts, seed, addresses)
        return out, lse, top


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, Variant], Emulated]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    made: dict[tuple[bool, Variant], Emulated] = {}

    def get(planar: bool, variant: Variant) -> Emulated:
        if (planar, variant) not in made:
            made[planar, variant] = Emulated(tmp_path_factory.mktemp("many"), planar, variant)
        return made[planar, variant]

    return get


def filled(layout: str, rows: int, *, page_size: int = 16, seed: int = 0, size: float = 1.0, **options) -> PagedCache:
    """A cache of random rows whose tiles differ in size."""
    generator = torch.Generator().manual_seed(seed)
    from tamis.layout import named

    cache = PagedCache(named(layout, **options), -(-rows // page_size), page_size)
    width = cache.layout.width
    values = torch.randn(cache.rows, width, generator=generator)
    tiles = torch.exp(0.7 * torch.randn(cache.rows, width // 64, generator=generator)).repeat_interleave(64, 1)
    write_kv((values * tiles * size).bfloat16(), cache, torch.arange(cache.rows), backend="reference")
    return cache


def expected(
    q: Tensor, selections: Sequence[Selection], scale: float | Tensor, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.zeros(*q.shape[:2], 512, dtype=torch.float64)
    factor = scale.double() if isinstance(scale, Tensor) else scale
    lse, top = reference.attend_into(q.double(), selections, scale=factor, splits=1, sink=sink, out=out)
    return out, lse, top


def merged(parts: Tensor, lses: Tensor, tops: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of the emulated kernel, by the definition of the merge."""
    from tamis.ops.combine import reference as combine

    out = torch.zeros(parts.shape[1:])
    return out, combine.combine_parts(parts, lses, None, out), tops.amax(0)


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], *, error: float = 1e-3) -> None:
    """Each head's output to a part of its size; lse and maxima to a part of the logits' size."""
    out, lse, top = (t.double() for t in found)
    true_out, true_lse, true_top = (t.double() for t in wanted)
    size = true_out.norm(dim=-1, keepdim=True)
    assert ((out - true_out).abs() <= error * size.clamp_min(1e-30)).all(), ((out - true_out).norm(dim=-1) / size[..., 0]).max()
    for mine, true in ((lse, true_lse), (top, true_top)):
        assert torch.equal(mine.isinf(), true.isinf())
        finite = true.isfinite()
        assert torch.allclose(mine[finite], true[finite], rtol=1e-4, atol=1e-3)


def choose(tokens: int, columns: int, cache: PagedCache, *, seed: int = 1, invalid: float = 0.1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, cache.rows, (tokens, columns), generator=generator, dtype=torch.int32)
    slots[torch.rand(tokens, columns, generator=generator) < invalid] = -1
    if columns:
        slots[:, 0] = cache.rows  # past the cache
    return slots


def queries(tokens: int, heads: int, width: int, size: float = 1.0) -> Tensor:
    sizes = torch.exp(torch.randn(tokens, heads, 1))
    return (torch.randn(tokens, heads, width) * sizes * size).bfloat16()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_the_source_attends_as_the_reference(emulated, layout: str, variant: Variant) -> None:
    torch.manual_seed(0)
    cache = filled(layout, 500)
    kernel, width, scale = emulated(layout == "v4-fp8", variant), cache.layout.width, 0.05
    q = queries(2, 64, width)
    selections = [Selection(cache, choose(2, 330, cache))]
    for seed in range(3):
        out, lse, top = kernel(q, selections, scale=scale, seed=seed)
        close((out[0], lse[0], top[0]), expected(q, selections, scale))
