"""Attention of few heads in CUDA C++: its source runs on the host, in random orders of threads, against float64."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.layout import v32_fp8
from tamis.ops.attend import few_heads, hopper_kernels
from tamis.ops.attend.few_heads import Variant
from tamis.ops.combine import reference as combine_reference
from tamis.testing import oracle

SCALE = 0.05
TYPES = {"P": ctypes.c_void_p, "q": ctypes.c_longlong, "i": ctypes.c_int, "f": ctypes.c_float}
NAMES = {"P": "void*", "q": "long long", "i": "int", "f": "float"}
CASTS = {0: "(const u16*)", 3: "(const unsigned char*)", 17: ""} | {i: "(const int*)" for i in (7, 11, 12, 13)}
CASTS |= {22: "(float*)", 23: "(float*)", 24: "(const float*)", 26: "(const float*)"}
# As laid out for a device, with rings as short as they can be.
VARIANTS = {"two streams": Variant(2, 1, 2, 1), "one stream": Variant(1, 1, 2, 2), "two groups": Variant(1, 2, 2, 1)}


def entry() -> str:
    """A function that runs every block of a grid, one after the other."""
    given = ", ".join(f"{NAMES[letter]} a{i}" for i, letter in enumerate(few_heads.SIGNATURE))
    passed = ", ".join(f"{CASTS.get(i, '')}a{i}" for i in range(len(few_heads.SIGNATURE)))
    return f"""
extern "C" __attribute__((visibility("default"))) void run(int grid, long long shared, int seed, {given}) {{
  emulator::random_order.seed(seed);
  for (int block = 0; block < grid; ++block) {{
    emulator::start_block(grid);
    emulator::run_cluster(block, 1, shared, [&] {{ attend_few_heads({passed}); }});
  }}
}}
"""


class Emulated:
    """Launches of one variant, on the host."""

    def __init__(self, folder: Path, variant: Variant, dtype: torch.dtype) -> None:
        program = few_heads.program(variant, dtype)
        source = program.source.replace('#include "instructions.cuh"', '#include "matrix_emulator.hpp"')
        name = "-".join(str(number) for number in (*variant, dtype))
        file, library = folder / f"{name}.cpp", folder / f"{name}.so"
        file.write_text(source + entry())
        # Several of them are loaded at once, each with variables of its own.
        flags = ["-std=c++20", "-O2", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique"]
        flags += ["-fvisibility=hidden", "-I", str(Path(__file__).parent)]
        subprocess.run(["g++", *flags, *program.options, "-o", library, file], check=True)
        self.run, self.shared, self.seed = ctypes.CDLL(str(library)).run, variant.shared, 0
        self.run.argtypes = [TYPES[letter] for letter in "iqi" + few_heads.SIGNATURE]

    def __call__(self, grid: tuple[int, int, int], *values: Any) -> None:
        self.seed += 1
        self.run(grid[0], self.shared, self.seed, *values)


Attend = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    return tmp_path_factory.mktemp("few_heads")


@pytest.fixture
def emulated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Makes the module launch a variant on the host, on a device of a number of multiprocessors."""

    def install(name: str, cores: int = 2) -> None:
        def launch(device: torch.device, variant: Variant, dtype: torch.dtype) -> Emulated:
            if (variant, dtype) not in BUILT:
                BUILT[variant, dtype] = Emulated(folder, variant, dtype)
            return BUILT[variant, dtype]

        monkeypatch.setattr(few_heads, "_launch", launch)
        monkeypatch.setattr(few_heads, "multiprocessors", lambda device: cores)
        monkeypatch.setattr(few_heads, "usual_variant", lambda *_: VARIANTS[name])

    return install


BUILT: dict[tuple[Variant, torch.dtype], Emulated] = {}


def filled(rows: int, page_size: int = 16, *, mode: str = "pow2", gap: int = 0, spread: float = 0.0) -> PagedCache:
    """Random rows; `gap` bytes of NaN between pages; `spread`: tiles differ by up to this power of two."""
    layout = v32_fp8(scale_mode=mode)
    pages = -(-rows // page_size)
    raw = torch.full((pages, page_size * 656 + gap), 0x7F, dtype=torch.uint8)
    cache = PagedCache.wrap(raw[:, : page_size * 656].unflatten(1, (page_size, 656)), layout)
    kv = torch.randn(cache.rows, 576)
    kv[:, :512] *= torch.exp2((torch.rand(cache.rows, 4) * 2 - 1) * spread).repeat_interleave(128, 1)
    oracle.write(kv, cache, torch.arange(cache.rows))
    return cache


def check(
    q: Tensor,
    selection: Selection,
    *,
    splits: int | None = 1,
    sink: Tensor | None = None,
    scale: float = SCALE,
    bound: float = 1e-3,
) -> None:
    """Both functions of the stage, each tile of each head by itself."""
    wanted, wanted_lse = oracle.attend(q, [selection], scale=scale, value_dim=512, sink=sink)
    parts, lses, maxima = hopper_kernels.attend_slots(q, [selection], scale=scale, value_dim=512, splits=splits)
    merged = torch.empty(wanted.shape)
    lse = combine_reference.combine_parts(parts, lses, sink, merged)
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert (merged[empty] == 0).all()
    assert torch.allclose(lse[~empty].double(), wanted_lse[~empty], atol=2e-3, rtol=1e-5)
    norm = wanted.unflatten(2, (4, 128)).norm(dim=3)
    error = (merged - wanted).unflatten(2, (4, 128)).norm(dim=3)
    assert (error <= bound * norm + 1e-30).all(), float((error / norm.clamp_min(1e-30)).max())
    for token, head in (~empty).nonzero().tolist():
        rows = oracle.rows_of(selection.cache, torch.tensor(oracle.selected_slots(selection, token)))
        top = (rows @ q[token, head].double()).max() * scale
        assert abs(maxima[:, token, head].max() - top) < 2e-3 + 1e-4 * abs(top)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_source_computes_attention(emulated, name: str) -> None:
    torch.manual_seed(0)
    emulated(name)
    cache = filled(100)
    heads = 32 if name == "two groups" else 16
    slots = torch.randint(0, cache.rows, (3, 150), dtype=torch.int32)
    check(torch.randn(3, heads, 576).bfloat16(), Selection(cache, slots))
