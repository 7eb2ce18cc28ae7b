"""Attention over rows without a rope (GLM-5.3-Flash) in CUDA C++: every kernel on the host, against the reference."""

import functools
from collections.abc import Callable
from pathlib import Path

import on_host
import pytest
import torch
from attention_calls import attend_call
from few_heads_emulated import ENTRY
from few_heads_rows import SCALE
from few_heads_rows import filled as few_rows
from many_heads_emulated import Emulated, choose, close, expected, filled, merged, on_gpu, queries
from seeds import reseed

from tamis import PagedCache, Selection
from tamis.cache.layout import rows, v32_fp8
from tamis.cuda.nvrtc import has_nvrtc
from tamis.lab.offline.attend import few_heads_cases
from tamis.lab.offline.cuda import CudaCase, compile_case
from tamis.ops.attention import hopper
from tamis.ops.attention.hopper import few_heads, many_heads
from tamis.ops.attention.hopper.few_heads_shapes import CtaShape, RowKind, mma_shape, row_kind, wgmma_shape
from tamis.ops.attention.hopper.params import AttendParams, output_params, query_params, selection_params
from tamis.ops.attention.hopper.splits import Outputs
from tamis.ops.lse import LseForm

KINDS = {"fp8": many_heads.NOPE_FP8, "bf16": many_heads.NOPE_BF16}
LAYOUTS = {"fp8": "v32-fp8", "bf16": "v32-bf16"}
ERRORS = {"fp8": {"error": 1e-3}, "bf16": {"error": 4e-3, "lse_error": 1e-4}}
"""Weights are fp16 over FP8 rows, and bf16 over bf16 rows."""
# The shapes of a device, with rings as short as they can be.
SHAPES: dict[str, CtaShape] = {
    "fp8, mma": mma_shape(2, 2, per_sm=1, shared=138_336, rope=0),
    "fp8, wgmma": wgmma_shape(32, 4, shared=144_176, rope=0),
    "bf16, mma": mma_shape(1, 2, per_sm=2, shared=82_992, bf16_rows=True, rope=0),
}


@pytest.fixture(scope="session")
def many(host_folder: Path) -> Callable[..., Emulated]:
    return functools.cache(lambda kind, merges=False: Emulated(host_folder, KINDS[kind], 1, merges))


def no_rope(kind: str, count: int, **options) -> PagedCache:
    return filled(LAYOUTS[kind], count, rope=0, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_many_heads(many, kind: str) -> None:
    """A selection of whole groups and a tail, with gaps, and one of several blocks; tokens split and whole."""
    reseed(0)
    cache = no_rope(kind, 500)
    assert cache.layout.row_bytes == {"fp8": 528, "bf16": 1024}[kind]
    assert many_heads.kernel_of(cache.layout) is KINDS[kind]
    q, sink = queries(2, 70, 512), torch.randn(70)
    for seed, columns in enumerate((35, 330)):
        selections = [Selection(cache, choose(2, columns, cache))]
        _, splits = many(kind)(q, selections, scale=0.05, splits=seed + 1, seed=seed)
        close(merged(*splits), expected(q, selections, 0.05), **ERRORS[kind])
    direct, _ = many(kind)(q, selections, scale=0.05, whole=2, sink=sink)
    close(direct, expected(q, selections, 0.05, sink), error=6e-3)


def test_splits_are_merged_in_a_cluster(many) -> None:
    reseed(1)
    cache = no_rope("fp8", 300)
    q, selections = queries(2, 64, 512), [Selection(cache, choose(2, 200, cache))]
    direct, _ = many("fp8", True)(q, selections, scale=0.05, splits=2)
    close(direct, expected(q, selections, 0.05), error=6e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_anything_selected_and_nan(many, kind: str) -> None:
    cache = no_rope(kind, 128)
    cache.storage.view(-1, cache.layout.row_elements)[53, 300] = 0x7F if kind == "fp8" else torch.nan
    slots = choose(3, 120, cache, invalid=0.0)
    slots[slots == 53] = 0
    slots[1, 77], slots[2] = 53, -1
    q = queries(3, 64, 512)
    _, (out, lse, max_logits) = many(kind)(q, [Selection(cache, slots)], scale=0.05)
    assert out[0, 1].isnan().all() if kind == "bf16" else out[0, 1].isnan().any()
    assert lse[0, 1].isnan().all()
    assert (out[0, 2] == 0).all()
    assert (lse[0, 2] == -torch.inf).all()
    found = (out[0, :1], lse[0, :1], max_logits[0, :1])
    close(found, expected(q[:1], [Selection(cache, slots[:1])], 0.05), **ERRORS[kind])


@pytest.mark.parametrize("name", SHAPES)
def test_few_heads(host_folder: Path, name: str) -> None:
    reseed(2)
    shape, bf16 = SHAPES[name], name.startswith("bf16")
    program = few_heads.program(shape, torch.bfloat16)
    source = program.source.replace('#include "instructions.cuh"', '#include "warpgroup_emulator.hpp"')
    options = [*program.options, "-I", str(Path(few_heads.__file__).parent)]
    run = on_host.load(host_folder, source + ENTRY.replace("SOURCE", shape.source), options).run
    cache = few_rows(100, mode="bf16" if bf16 else "exact", rope=0, gap=48, spread=4.0)
    q, slots = torch.randn(3, shape.heads, 512).bfloat16(), torch.randint(-9, cache.rows + 9, (3, 150)).int()
    selection, lengths = Selection(cache, slots, torch.tensor([150, 0, 67]).int()), 150
    found = Outputs.empty(2, 3, shape.heads, device=q.device)
    output, held = output_params(found, found, None, LseForm()), []
    parts = (query_params(q, SCALE, held), output, selection_params(selection, held))
    run(2, 1, shape.shared, 5, on_host.packed(AttendParams(6, lengths // 2, *parts)))
    close(merged(*found), expected(q, [selection], SCALE), error=2e-3)


def test_which_kernels_take_them() -> None:
    """Those that take rows with a rope, at every number of heads and tokens."""
    for kind, usual in (("fp8", v32_fp8()), ("bf16", rows())):
        layout = v32_fp8(rope=0) if kind == "fp8" else rows(rope=0)
        assert row_kind(layout.key) == RowKind(kind == "bf16", 0)
        for heads in (8, 16, 32, 64, 128):
            for tokens in (1, 16, 600):
                chosen = []
                for one in (usual, layout):
                    q = torch.zeros(tokens, heads, one.width, dtype=torch.bfloat16, device="meta")
                    slots = torch.zeros(tokens, 2051, dtype=torch.int32, device="meta")
                    selections = [Selection(PagedCache(one, 1, 4, "meta"), slots)]
                    kernels = hopper.kernels_for(q, selections, 512, None)
                    chosen.append((kernels, kernels.source(q, selections, 132)))
                assert chosen[0] == chosen[1]
    for other in (v32_fp8(rope=0, tile=64), rows(torch.float16, rope=0), rows(latent=448, rope=0)):
        assert row_kind(other.key) is None
        assert many_heads.kernel_of(other) is None


def test_shapes_are_those_of_rows_with_a_rope() -> None:
    """So that they are no slower: the same CTAs and rings, over rows that are shorter by 128 bytes."""
    for bf16 in (False, True):
        short, usual = RowKind(bf16, 0).shapes, RowKind(bf16, 64).shapes
        for one, other in zip(short[:3], usual[:3], strict=True):
            assert dict(one.defines) == dict(other.defines) | {"ROPE_COLUMNS": 0}
            assert (one.threads, one.per_sm, one.columns) == (other.threads, other.per_sm, other.columns)
            assert one.shared < other.shared


@pytest.mark.parametrize("case", list(few_heads_cases()), ids=lambda case: case.label)
def test_it_compiles_without_spills(case: CudaCase) -> None:
    if not ("528" in case.label or "512-wide" in case.label) or ", float16" in case.label:
        pytest.skip("compiled by `tamis verify`")
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    compile_case(case, "sm_90a")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("tokens", [3, 300])
def test_the_device_attends_as_the_reference(kind: str, heads: int, tokens: int) -> None:
    reseed(heads)
    cache = no_rope(kind, 4096, page_size=64)
    lengths = torch.randint(0, 2052, (tokens,), dtype=torch.int32)
    lengths[0] = 0
    selection = Selection(cache, choose(tokens, 2051, cache), lengths)
    q, sink = queries(tokens, heads, 512), torch.randn(heads)
    wanted = expected(q, [selection], 0.05, sink)
    for splits in (None, 1, 5):
        out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
        placed = [on_gpu(selection)]
        call = attend_call(q.cuda(), placed, scale=0.05, splits=splits, sink=sink.cuda(), out=out)
        lse, max_logits = hopper.attend(call)
        close((out.cpu(), lse.cpu(), max_logits.cpu()), wanted, error=6e-3)
