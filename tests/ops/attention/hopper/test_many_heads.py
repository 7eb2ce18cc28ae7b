"""Attention of many heads in CUDA C++: the source runs on the host, warps in random order, against the reference."""

import functools
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from attention_calls import attend_call
from many_heads_emulated import Emulated, choose, close, expected, filled, merged, on_gpu, queries
from seeds import reseed

from tamis.cache.layout import Layout, v4_fp8, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.cuda.compiler import compiled
from tamis.cuda.nvrtc import has_nvrtc
from tamis.lab.offline.attend import many_heads_cases
from tamis.lab.offline.cuda import CudaCase, compile_case
from tamis.ops import write_kv
from tamis.ops.attention.hopper import many_heads as many
from tamis.ops.attention.hopper.splits import Outputs
from tamis.ops.lse import LseForm

KINDS = {kind.layout: kind for kind in (many.V32_FP8, many.V4_FP8)}


@pytest.fixture(scope="session")
def emulated(host_folder: Path) -> Callable[..., Emulated]:
    """The kernel of a kind of rows and a number of selections, which may merge splits in clusters."""
    return functools.cache(lambda kind, selections=1, merges=False: Emulated(host_folder, kind, selections, merges))


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_the_source_attends_as_the_reference(emulated, layout: str) -> None:
    reseed(0)
    cache = filled(layout, 500)
    kernel, width, scale = emulated(KINDS[layout]), cache.layout.width, 0.05
    q = queries(2, 64, width)
    selections = [Selection(cache, choose(2, 330, cache))]
    for seed in range(3):
        _, splits = kernel(q, selections, scale=scale, seed=seed)
        close(merged(*splits), expected(q, selections, scale))


@pytest.mark.parametrize("heads", [33, 96, 128])
def test_heads_that_do_not_fill_a_cta(emulated, heads: int) -> None:
    reseed(heads)
    cache = filled("v32-fp8", 200)
    q, selections = queries(1, heads, 576), [Selection(cache, choose(1, 100, cache))]
    _, splits = emulated(many.V32_FP8)(q, selections, scale=0.05)
    close(merged(*splits), expected(q, selections, 0.05))


def test_window_and_entries_under_one_softmax_with_sinks(emulated) -> None:
    reseed(3)
    window, entries = filled("v4-fp8", 200, page_size=64), filled("v4-fp8", 300, page_size=2, seed=5)
    lengths = torch.tensor([70, 0, 1, 5], dtype=torch.int32), torch.tensor([140, 65, 0, 9999], dtype=torch.int32)
    slots = choose(4, 80, window), choose(4, 150, entries, invalid=0.3)
    selections = [Selection(window, slots[0], lengths[0]), Selection(entries, slots[1], lengths[1].clamp_max(150))]
    q, sink = queries(4, 64, 512), torch.randn(64)
    sink[3], sink[4] = -torch.inf, torch.inf
    scale = torch.tensor([0.06], dtype=torch.float64)  # kernels read float32
    wanted = expected(q, selections, 0.06, sink)
    selections[1] = Selection(entries, slots[1], lengths[1])  # lengths on a device are not checked
    direct, _ = emulated(many.V4_FP8, 2)(q, selections, scale=scale, whole=4, sink=sink)
    close(direct, wanted, error=4e-3)
    for splits in (2, 3, 7):
        _, found = emulated(many.V4_FP8, 2)(q, selections, scale=scale, splits=splits, seed=splits)
        close(
            merged(*found), expected(q, [selections[0], Selection(entries, slots[1], lengths[1].clamp_max(150))], 0.06)
        )
    direct, rest = emulated(many.V4_FP8, 2)(q, selections, scale=scale, whole=3, splits=3, sink=sink)
    close(Outputs(*(t[:3] for t in direct)), tuple(t[:3] for t in wanted), error=4e-3)
    assert (direct.out[3] == -7).all()
    close(merged(*rest, sink=sink), tuple(t[3:] for t in wanted))


def test_the_lse_leaves_in_the_form_that_was_asked_for(emulated) -> None:
    reseed(6)
    cache, form = filled("v4-fp8", 100), LseForm(2, base_2=True, plus_inf=True)
    slots = choose(4, 70, cache)
    slots[2] = -1
    q, given = queries(4, 70, 512), {"scale": 0.05, "whole": 4}
    plain, _ = emulated(many.V4_FP8)(q, [Selection(cache, slots)], **given)
    found, _ = emulated(many.V4_FP8)(q, [Selection(cache, slots)], **given, form=form)
    lse, max_logits = form.arrange(plain.lse, plain.max_logits)
    assert (found.lse[1, :, 0] == torch.inf).all()
    assert torch.allclose(found.lse, lse, rtol=1e-6)
    assert torch.equal(found.max_logits, max_logits)


@pytest.mark.parametrize(("heads", "splits", "first"), [(64, 2, 0), (70, 3, 1), (64, 5, 0)])
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_splits_are_merged_in_a_cluster(emulated, layout: str, heads: int, splits: int, first: int) -> None:
    """Tokens from `first` on. Token 1 has nothing selected, and some splits of token 2 have no row."""
    reseed(splits)
    cache = filled(layout, 300)
    slots, lengths = choose(3, 190, cache), torch.tensor([190, 150, 40], dtype=torch.int32)
    slots[1] = -1
    selections = [Selection(cache, slots, lengths)]
    if layout == "v4-fp8":
        selections.append(Selection(cache, choose(3, 20, cache), torch.tensor([20, 0, 1], dtype=torch.int32)))
    q, sink = queries(3, heads, cache.layout.width), torch.randn(heads)
    sink[3], sink[4] = -torch.inf, torch.inf
    kernel = emulated(KINDS[layout], len(selections), merges=True)
    found, _ = kernel(q, selections, scale=0.05, splits=splits, whole=first, sink=sink, seed=splits)
    assert (found.out[:first] == -7).all()
    wanted = expected(q, selections, 0.05, sink)
    close(Outputs(*(t[first:] for t in found)), tuple(t[first:] for t in wanted), error=4e-3)
    again, _ = kernel(q, selections, scale=0.05, splits=splits, whole=first, sink=sink, seed=splits + 1)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_splits_in_a_cluster_whose_rows_differ_in_size(emulated) -> None:
    """Half of the heads attend to the small rows of the first split, beside splits of much larger rows."""
    reseed(4)
    cache = PagedCache("v4-fp8", 12, 16)
    direction = torch.randn(512).sign()
    small = torch.randn(64, 512) * 1e-8
    large = -torch.rand(128, 512) * direction * 10.0 ** torch.linspace(0, 4, 128).unsqueeze(1)
    write_kv(torch.cat((small, large)).bfloat16(), cache, torch.arange(192), backend="reference")
    q = torch.randn(1, 64, 512).bfloat16()
    q[0, :32] = direction.bfloat16() * 4  # large rows have logits far below those of small ones
    selections = [Selection(cache, torch.arange(192, dtype=torch.int32).view(1, 192))]
    found, _ = emulated(many.V4_FP8, 1, merges=True)(q, selections, scale=0.05, splits=3)
    wanted = expected(q, selections, 0.05)
    assert wanted[0][0, :32].abs().max() < 1e-7
    close(found, wanted, error=5e-3, lse_error=2e-2)


def test_a_nan_in_one_split_of_a_cluster_shows(emulated) -> None:
    reseed(2)
    cache = filled("v32-fp8", 200)
    slots = torch.arange(192, dtype=torch.int32).view(1, 192)
    q = queries(1, 64, 576)
    q[0, 5, 0] = torch.nan
    found, _ = emulated(many.V32_FP8, 1, merges=True)(q, [Selection(cache, slots)], scale=0.05, splits=3)
    assert found.out[0, 5].isnan().all()
    assert found.lse[0, 5].isnan()
    assert found.max_logits[0, 5].isnan()
    assert not found.out[0, :5].isnan().any()


def test_positions_are_translated_in_the_kernel(emulated) -> None:
    reseed(4)
    cache = filled("v32-fp8", 640, page_size=8)
    table = torch.randint(-1, cache.pages, (3, 40), dtype=torch.int32)
    table[0, 3] = 2**31 - 1
    positions = torch.randint(-3, 8 * 45, (4, 150), dtype=torch.int32)
    ids = torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    for given in (ids, torch.tensor([0, -1, 3, 1], dtype=torch.int32)):
        selections = [Selection(cache, positions[:, ::2], None, given, table)]
        q = queries(4, 64, 576)
        _, splits = emulated(many.V32_FP8)(q, selections, scale=0.05)
        close(merged(*splits), expected(q, selections, 0.05))


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_rows_without_anything_selected_give_zeros(emulated, layout: str) -> None:
    cache = filled(layout, 64)
    cache.storage.view(torch.uint8).fill_(0x7F)  # NaN everywhere: no byte of it may be used
    slots = torch.full((2, 130), -1, dtype=torch.int32)
    selections = [Selection(cache, slots, torch.tensor([130, 0], dtype=torch.int32))]
    q = queries(2, 64, cache.layout.width)
    for splits in (1, 2):
        kernel = emulated(KINDS[layout])
        direct, found = kernel(q, selections, scale=0.1, whole=1, splits=splits, sink=torch.zeros(64))
        for out, lse, max_logits in (Outputs(*(t[0] for t in direct)), found):
            assert (out == 0).all()
            assert (lse == -torch.inf).all()
            assert (max_logits == -torch.inf).all()


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_nan_shows_and_stays_in_its_token(emulated, layout: str, tail: bool) -> None:
    cache = filled(layout, 128)
    if tail:
        cache.field(cache.layout.tail)[3, 5, 30] = torch.nan
    else:
        cache.field(cache.layout.values)[3, 5, 300] = 0x7F
    slots = choose(2, 120, cache, invalid=0.0)
    slots[slots == 3 * 16 + 5] = 0
    slots[1, 77] = 3 * 16 + 5
    q, selections = queries(2, 64, cache.layout.width), [Selection(cache, slots)]
    _, (out, lse, max_logits) = emulated(KINDS[layout])(q, selections, scale=0.05)
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan().all()
    assert max_logits[0, 1].isnan().all()
    wanted = expected(q[:1], [Selection(cache, slots[:1])], 0.05)
    close((out[0, :1], lse[0, :1], max_logits[0, :1]), wanted)


@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_columns_of_16_bits_and_values_of_different_size(emulated, layout: str, size: float) -> None:
    reseed(11)
    cache = filled(layout, 200)
    cache.field(cache.layout.tail)[:] *= size
    q, selections = queries(2, 64, cache.layout.width), [Selection(cache, choose(2, 130, cache))]
    q[:, :, cache.layout.latent :] /= size
    _, splits = emulated(KINDS[layout])(q, selections, scale=0.05)
    out, lse, _ = merged(*splits)
    true_out, true_lse, _ = expected(q, selections, 0.05)
    if layout == "v4-fp8":  # these columns are values too; their errors would hide those of the others
        out, true_out = out[..., : cache.layout.latent], true_out[..., : cache.layout.latent]
    assert (out - true_out).norm() < 1e-3 * true_out.norm()
    assert torch.allclose(lse.double(), true_lse.double(), atol=2e-3)


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1e4])
@pytest.mark.parametrize(("layout", "options"), [("v32-fp8", {}), ("v32-fp8", {"scale_mode": "exact"}), ("v4-fp8", {})])
def test_rows_of_any_size(emulated, layout: str, options: dict[str, str], size: float) -> None:
    reseed(6)
    cache = filled(layout, 200, size=size, **options)
    width = cache.layout.width
    q, selections = queries(1, 64, width, 1.0 / size), [Selection(cache, choose(1, 130, cache))]
    _, splits = emulated(KINDS[layout])(q, selections, scale=0.05)
    # Scales that are no powers of two are rounded to fp16, and so are their products with values; logits go up to 50.
    close(merged(*splits), expected(q, selections, 0.05), error=5e-3 if options else 1e-3)


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_small_rows_among_large_ones_are_right_where_they_count(emulated, layout: str) -> None:
    """Every second row is 2**28 times larger, but has no weight, so the output is that of the small rows."""
    reseed(7)
    cache = filled(layout, 128, page_size=64)
    width = cache.layout.width
    rows = torch.randn(128, width) * 1e-4
    direction = torch.randn(width).sign()
    rows[::2] = -direction * 2e4
    write_kv(rows.bfloat16(), cache, torch.arange(128), backend="reference")
    q = (direction * 0.1 + 0.01 * torch.randn(1, 64, width)).bfloat16()
    selections = [Selection(cache, torch.arange(128, dtype=torch.int32).unsqueeze(0))]
    _, splits = emulated(KINDS[layout])(q, selections, scale=1.0)
    close(merged(*splits), expected(q, selections, 1.0), error=8e-3)


@pytest.mark.parametrize("layout", [v32_fp8(scale_mode="exact"), v4_fp8()], ids=lambda layout: layout.name)
def test_small_tiles_of_rows_with_large_ones_are_right(emulated, layout: Layout) -> None:
    """fp16 does not hold a scale that is 2**-30 of the row's largest one, but it holds the values."""
    reseed(8)
    cache, width = PagedCache(layout, 2, 64), layout.width
    sizes = torch.logspace(-5, 4, layout.latent // layout.tile).repeat_interleave(layout.tile // 64)
    sizes = torch.cat((sizes, torch.ones(width // 64 - len(sizes))))
    tiles = torch.randn(128, width // 64, 64)
    rows = (tiles / tiles.abs().amax(-1, keepdim=True) * sizes[:, None]).flatten(1)
    write_kv(rows.bfloat16(), cache, torch.arange(128), backend="reference")
    q = torch.randn(2, 64, width).bfloat16()
    selections = [Selection(cache, torch.arange(128, dtype=torch.int32).repeat(2, 1))]
    _, splits = emulated(KINDS[layout.name])(q, selections, scale=1e-5)
    found, wanted = merged(*splits)[0].double(), expected(q, selections, 1e-5)[0].double()
    for first in range(0, layout.latent, layout.tile):
        part = slice(first, first + layout.tile)
        assert (found[..., part] - wanted[..., part]).norm() < 4e-3 * wanted[..., part].norm()


def test_calls_that_the_kernel_does_not_take_are_refused() -> None:
    cache = PagedCache("v32-fp8", 2, 16)
    q, slots = torch.zeros(1, 64, 576, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int32)
    good = Selection(cache, slots)
    assert many.refusal(q, [good, good], 512) is None
    cases = [
        (q.float(), [good], 512, "not bfloat16"),
        (q, [good], 576, "576 wide"),
        (q, [good] * 3, 512, "3 selections"),
        (q, [Selection(PagedCache("v32-fp16", 2, 16), slots)], 512, "not all v32-fp8"),
        (q, [good, Selection(PagedCache("v4-fp8", 2, 16), slots)], 512, "not all v32-fp8"),
    ]
    for query, selections, value_dim, words in cases:
        assert words in (many.refusal(query, selections, value_dim) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [40, 64, 128])
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8"])
def test_the_device_attends_as_the_reference(layout: str, heads: int) -> None:
    reseed(heads)
    caches = filled(layout, 4096, page_size=64), filled(layout, 3000, page_size=64, seed=2)
    lengths = torch.randint(0, 1025, (9,), dtype=torch.int32), torch.randint(0, 301, (9,), dtype=torch.int32)
    lengths[0][0] = lengths[1][0] = 0
    pairs = zip(caches, (1024, 300), lengths, strict=True)
    selections = [Selection(cache, choose(9, columns, cache), length) for cache, columns, length in pairs]
    q, sink = queries(9, heads, caches[0].layout.width), torch.randn(heads)
    wanted = expected(q, selections, 0.05, sink)
    placed = [on_gpu(s) for s in selections]
    for splits in (None, 1, 5):
        out = torch.empty(9, heads, 512, dtype=torch.bfloat16, device="cuda")
        call = attend_call(q.cuda(), placed, scale=0.05, splits=splits, sink=sink.cuda(), out=out)
        lse, max_logits = many.attend(call)
        close((out.cpu(), lse.cpu(), max_logits.cpu()), wanted, error=4e-3)


@pytest.mark.gpu
def test_a_captured_launch_sees_new_queries_slots_and_lengths() -> None:
    selection = on_gpu(Selection(filled("v32-fp8", 2048, page_size=64), torch.zeros(5, 512, dtype=torch.int32)))
    lengths = torch.zeros(5, dtype=torch.int32, device="cuda")
    selection = Selection(selection.cache, selection.slots, lengths)
    q = torch.zeros(5, 64, 576, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(5, 64, 512, dtype=torch.bfloat16, device="cuda")
    many.attend(attend_call(q, [selection], scale=0.05, splits=2, sink=None, out=out))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lse, max_logits = many.attend(attend_call(q, [selection], scale=0.05, splits=2, sink=None, out=out))
    host = PagedCache.wrap(selection.cache.storage.cpu(), "v32-fp8")
    for seed in range(3):
        reseed(seed)
        q.normal_()
        selection.slots.random_(-1, 2100)
        lengths.random_(0, 513)
        graph.replay()
        wanted = expected(q.cpu(), [Selection(host, selection.slots.cpu(), lengths.cpu())], 0.05)
        close((out.cpu(), lse.cpu(), max_logits.cpu()), wanted, error=4e-3)


@pytest.mark.parametrize("case", list(many_heads_cases()), ids=lambda case: case.label)
def test_it_compiles_without_spills_and_products_overlap(case: CudaCase) -> None:
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    found = compile_case(case, "sm_90a")
    assert [one.function for one in found] in ([], ["attend_many_heads"])
    triton = find_spec("triton")
    tool = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else None
    if tool is None or not tool.exists():
        pytest.skip("needs the disassembler that comes with Triton")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled(case.program, "sm_90a"))
        file.flush()
        code = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    # If the compiler serialises wgmma, it waits after each one, more often than the source does.
    # Rows without a rope have four products less for each time that a block's keys are multiplied in the source.
    counts = {"v4-fp8": (84, 7), "v32-fp8": (92, 7), "v32-bf16": (148, 13), "v4-bf16": (136, 13)}
    counts |= {many.NOPE_FP8.layout: (84, 7)}
    products, waits = counts[case.label.split(", ")[2]]
    assert code.count("HGMMA") == products
    assert code.count("WARPGROUP.DEPBAR") == waits
