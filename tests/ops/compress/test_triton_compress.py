"""The Triton compressor: entries as in fp64, state bits as the reference's, whatever the steps."""

import pytest
import torch
from compressing import C4, C16, C128, KPOOL, PADDING, Compressor
from seeds import reseed
from torch import Tensor

from tamis import Layout, PagedCache
from tamis.cache.layout import index_fp8, index_mxfp4, named, plain_fp8, rows, v4_fp8, v32_fp8
from tamis.ops import StatePages
from tamis.ops.compress import reference
from tamis.ops.compress.triton_kernels import compress_kv, compress_kv_kernel
from tamis.ops.rows.triton_rows import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
KINDS = [C4, C128, C16, KPOOL, {"ratio": 3, "overlapping": True}, {"ratio": 1, "overlapping": False}]


@pytest.fixture
def both(device: torch.device):
    """Compressors alike in everything but what runs them: kernel and reference."""

    def make(**options) -> tuple[Compressor, Compressor]:
        reseed(5)
        kernel = Compressor(**options, stage=compress_kv, device=device)
        reseed(5)
        return kernel, Compressor(**options, stage=reference.compress_kv)

    return make


def same_state(kernel: Compressor, plain: Compressor) -> None:
    assert torch.equal(kernel.state.storage.cpu().nan_to_num(7.0), plain.state.storage.nan_to_num(7.0))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_chunks_and_decodes(both, kind) -> None:
    kernel, plain = both(**kind)
    long = 131 if kernel.ratio > 16 else 19
    steps = [[("a", 0, 17)], [("b", 0, long), (PADDING, 0, 2), ("a", 17, 18)], [("a", 18, long), ("b", long, long + 1)]]
    for step in steps:
        for compressor in (kernel, plain):
            reseed(7)
            compressor.step(*step)
    same_state(kernel, plain)
    kernel.check("b", (long + 1) // kernel.ratio)
    kernel.check("a", long // kernel.ratio)


def test_rejected_drafts_are_overwritten(both) -> None:
    kernel, _ = both(**C4)
    kernel.step(("a", 0, 21))
    right = [part.clone() for part in kernel.tokens("a", 60)]
    for part in kernel.given["a"]:
        part[22:25] = torch.randn(3, kernel.channels)
    kernel.step(("a", 21, 25))
    for part, restored in zip(kernel.given["a"], right, strict=True):
        part[:60] = restored
    kernel.run("a", 40, 3, start=22)
    kernel.check("a", 10)


@pytest.mark.parametrize("kind", [C4, C16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hostile_tokens_write_nothing(both, kind, dtype: torch.dtype) -> None:
    kernel, plain = both(**kind)
    lowest = torch.iinfo(dtype).min
    for compressor in (kernel, plain):
        reseed(7)
        compressor.step(("a", 0, 48))
        table = compressor.state_pool.block_table(["a"])
        count = 9
        values, scores = torch.randn(count, compressor.channels), torch.randn(count, compressor.channels)
        positions = torch.tensor([-1, lowest, 48, 47, 47, 47, 47, 15, 47]).to(dtype)
        state_slots = torch.tensor([3, 5, -1, -1, lowest, 10**6, -1, -1, -1]).to(dtype)
        slots = torch.tensor([2, 3, 4, -1, lowest, 10**6, 40, 41, 42]).to(dtype)
        ids = torch.tensor([0, 0, 0, 0, 0, 0, -1, 7, 0], dtype=torch.int32)
        compressor.call(values, scores, positions, StatePages(state_slots, ids, table), slots)
    same_state(kernel, plain)
    found, expected = kernel.cache.storage.cpu(), plain.cache.storage
    assert (found - expected).abs().max() < 1e-5
    assert torch.equal(found == 0, expected == 0)


def test_pages_that_a_table_lacks_take_no_part(both) -> None:
    kernel, plain = both(**C16, entry_page=1)
    for compressor in (kernel, plain):
        reseed(7)
        compressor.step(("a", 0, 32))
        whole = compressor.state_pool.block_table(["a"])
        tables = [whole.clone() for _ in range(3)]
        tables[0][0, 4], tables[1][0, 6] = -1, 700
        tables[2][:] = -1
        for slot, table in enumerate([*tables, whole[:, :6]]):
            values, scores = (part[31:32] for part in compressor.tokens("a", 32))
            pages = StatePages(torch.tensor([-1]), torch.zeros(1, dtype=torch.int32), table)
            compressor.call(values, scores, torch.tensor([31]), pages, torch.tensor([100 + slot]))
    slots = torch.arange(100, 104)
    found, expected = kernel.cache.read(slots.to(kernel.device)).cpu(), plain.cache.read(slots)
    assert (found - expected).abs().max() < 1e-5
    assert not found[2].any()


LAYOUTS: list[Layout] = [
    named("v4-bf16"),
    named("v4-fp16"),
    named("v4-fp8"),
    v4_fp8(latent=24, rope=8, tile=8),
    v4_fp8(latent=48, rope=16, tile=48),
    v32_fp8(latent=32, rope=8, tile=16),
    v32_fp8(latent=64, rope=0, tile=32, scale_mode="exact"),
    plain_fp8(latent=448, rope=64),
    index_fp8(),
    index_fp8(dim=40),
    index_mxfp4(),
    rows(torch.float32, latent=10, rope=0),
]


@pytest.mark.parametrize("layout", [index_fp8(), index_mxfp4(), index_fp8(dim=32)], ids=lambda layout: layout.name)
def test_index_keys_turned_by_hadamard(both, layout: Layout) -> None:
    kernel, plain = both(**C4, layout=layout, rope=8, length=44, hadamard=True)
    for compressor in (kernel, plain):
        reseed(7)
        compressor.step(("a", 0, 6))
        compressor.step(("a", 6, 42))
    # Sums in another order may move a value over a rounding boundary, once in many.
    bytes_found, bytes_expected = kernel.cache.storage.cpu(), plain.cache.storage
    written = bytes_expected.count_nonzero()
    assert (bytes_found != bytes_expected).sum() < 0.02 * written
    kernel.check("a", 10, 0.15 if layout.packed else 4e-2)


@pytest.mark.parametrize("kind", [C4, KPOOL])
def test_exact_entries_turned_by_hadamard(both, kind) -> None:
    kernel, _ = both(**kind, layout=rows(torch.float32, latent=32, rope=0), length=44, hadamard=True)
    kernel.run("a", 42, 7)
    kernel.check("a", 10)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_format_of_entries(both, layout: Layout, device: torch.device) -> None:
    scale = 0.5 if layout.scale_mode == "tensor" else 1.0
    rope = min(64, layout.rope or layout.width // 2 // 2 * 2)
    kernel, plain = both(**C4, layout=layout, rope=rope, length=20, scale=scale)
    if layout.scale_mode == "tensor":
        kernel.cache = kernel.cache.with_scale(torch.tensor(0.5, device=device))
    for compressor in (kernel, plain):
        reseed(7)
        compressor.step(("a", 0, 6))
        compressor.step(("a", 6, 19))
    found, expected = kernel.entries("a", 4), plain.entries("a", 4)
    # Sums in another order may round a value to its neighbour, and rarely.
    step = 2**-3 if layout.quantised else 2**-8
    gap = (found - expected).abs()
    assert (gap <= step * expected.abs() + 1e-3).all()
    assert (gap > 2e-6 * expected.abs().max()).float().mean() < 0.05
    untouched = kernel.cache.storage.view(torch.uint8).cpu() == plain.cache.storage.view(torch.uint8)
    assert untouched.float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strided_16_bit_inputs(both, dtype: torch.dtype) -> None:
    kernel, plain = both(**C4)
    for compressor in (kernel, plain):
        reseed(7)
        mixed = torch.randn(compressor.length, 2 * compressor.channels).to(dtype)
        compressor.given["a"] = tuple(mixed.chunk(2, dim=1))
        compressor.run("a", 14, 5)
    same_state(kernel, plain)
    kernel.check("a", 3)


def test_pages_apart_and_empty_steps(device: torch.device) -> None:
    layout = v4_fp8(latent=24, rope=8, tile=8)
    reseed(3)
    plain = Compressor(**C4, layout=layout, stage=reference.compress_kv)
    reseed(3)
    kernel = Compressor(**C4, layout=layout, stage=compress_kv, device=device)
    block = torch.zeros(600, 3, kernel.entry_page, layout.row_elements, dtype=torch.uint8, device=device)
    kernel.cache = PagedCache.wrap(block[:, 1], layout)
    state = torch.full((700, 2, kernel.state_page, kernel.state.layout.width), torch.nan, device=device)
    kernel.state = PagedCache.wrap(state[:, 1], kernel.state.layout)
    for compressor in (kernel, plain):
        reseed(7)
        compressor.run("a", 30, 7)
    same_state(kernel, plain)
    assert (kernel.entries("a", 7) - plain.entries("a", 7)).abs().max() < 0.3
    assert not block[:, ::2].any()
    assert state[:, 0].isnan().all()
    none = torch.zeros(0, dtype=torch.int64)
    empty: Tensor = torch.zeros(0, kernel.channels)
    kernel.call(empty, empty, none, StatePages(none, none.int(), torch.zeros(1, 1, dtype=torch.int32)), none)


def test_the_kernel_runs_where_it_should(device: torch.device) -> None:
    assert interpreted(compress_kv_kernel) == (device.type == "cpu")
