"""The Triton gather kernels: rows equal to the reference's, bit for bit, from arbitrary bytes."""

import pytest
import torch
from byte_formats import BF16, FP16, FP32, engine_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.write.test_triton_write import LAYOUTS, every_layout
from seeds import seeded
from torch import Tensor

from tamis import PagedCache
from tamis.cache.layout import Layout, index_mxfp4, v4_fp8
from tamis.ops.gather import reference
from tamis.ops.gather.operations import GatherIndex, GatherKv, ReadKv
from tamis.ops.gather.triton_kernels import gather_index, gather_kv, read_kv, read_rows
from tamis.ops.rows.triton_rows import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
UNTOUCHED = -77.0


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(
    layout: Layout, pages: int, page_size: int, device: torch.device, *, gap: int = 64, scale: float | Tensor = 1.0
) -> tuple[PagedCache, PagedCache]:
    """Two caches of the same random bytes, NaN of every kind included: on the host and where kernels run."""
    gap += -layout.page_bytes(page_size) % 16
    buffer, host = engine_cache(layout, pages, page_size, gap=gap)
    if layout.scales is not None and layout.scales.dtype == FP32:
        host.field(layout.scales).copy_(torch.exp(torch.empty(pages, page_size, layout.scales.count).uniform_(-9, 9)))
    moved = buffer.to(device).view(layout.element)
    storage = torch.as_strided(moved, host.storage.shape, host.storage.stride(), host.storage.storage_offset())
    cache = PagedCache.wrap(storage, layout)
    if layout.scale_mode == "tensor":
        host = host.with_scale(scale)
        cache = cache.with_scale(scale.to(device) if isinstance(scale, Tensor) else scale)
    return host, cache


def same_numbers(found: Tensor, expected: Tensor) -> None:
    """The same bits, but for NaN, of which any will do."""
    found = found.cpu()
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    numbers = ~expected.isnan()
    assert torch.equal(found.contiguous().view(bits)[numbers], expected.contiguous().view(bits)[numbers])


def check_gather(
    caches: tuple[PagedCache, PagedCache],
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    first: Tensor,
    out: Tensor,
    device: torch.device,
) -> None:
    """Gather with kernel and reference into equal workspaces, and compare all of them."""
    expected = out.clone()
    moved = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=device).copy_(out)
    requests = (table, lengths, starts, first)
    reference.gather_kv(GatherKv(*requests, caches[0], expected, "reference"))
    gather_kv(GatherKv(*(t.to(device) for t in requests), caches[1], moved, "triton"))
    same_numbers(moved, expected)


# --- By slot ----------------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rows_by_slot(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    host, cache = filled(layout, 4, 3, device, scale=0.37)
    slots = torch.tensor([[3, -1, 11], [0, 12, INT_MAX]], dtype=torch.int32)
    found = read_kv(ReadKv(slots.to(device), cache, dtype, "triton"))
    same_numbers(found, reference.read_kv(ReadKv(slots, host, dtype, "reference")))
    assert not found[[0, 1, 1], [1, 1, 2]].any()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (1, 2, 2)], ids=str)
def test_any_shape_of_slots(shape: tuple[int, ...], device: torch.device) -> None:
    host, cache = filled(LAYOUTS["v4"], 4, 3, device)
    slots = torch.randint(-1, 13, shape)
    slots = torch.where(slots == 12, 2**40, slots)
    same_numbers(
        read_kv(ReadKv(slots.to(device), cache, FP32, "triton")),
        reference.read_kv(ReadKv(slots, host, FP32, "reference")),
    )


def test_strided_slots_and_many_of_them(device: torch.device) -> None:
    host, cache = filled(LAYOUTS["v32-pow2"], 5, 7, device)
    slots = torch.randint(-1, 36, (9, 11)).T
    same_numbers(
        read_kv(ReadKv(slots.to(device), cache, BF16, "triton")),
        reference.read_kv(ReadKv(slots, host, BF16, "reference")),
    )


def test_every_code_under_every_exponent(device: torch.device) -> None:
    storage = torch.zeros(1, 256, 264, dtype=torch.uint8)
    cache = PagedCache.wrap(storage, v4_fp8(latent=256, rope=0))
    cache.field(cache.layout.values).copy_(torch.arange(256))
    assert cache.layout.scales is not None
    cache.field(cache.layout.scales).copy_(torch.arange(256).unsqueeze(1))
    moved = PagedCache.wrap(storage.to(device), cache.layout)
    slots = torch.arange(256)
    for dtype in (BF16, FP16, FP32):
        same_numbers(
            read_kv(ReadKv(slots.to(device), moved, dtype, "triton")),
            reference.read_kv(ReadKv(slots, cache, dtype, "reference")),
        )


def test_every_packed_pair_under_every_exponent(device: torch.device) -> None:
    cache = PagedCache(index_mxfp4(dim=512), 1, 256)
    assert cache.layout.scales is not None
    cache.field(cache.layout.values).copy_(torch.arange(256))
    cache.field(cache.layout.scales).copy_(torch.arange(256).unsqueeze(1))
    moved = PagedCache.wrap(cache.storage.to(device), cache.layout)
    slots = torch.arange(256)
    for dtype in (BF16, FP16, FP32):
        same_numbers(
            read_kv(ReadKv(slots.to(device), moved, dtype, "triton")),
            reference.read_kv(ReadKv(slots, cache, dtype, "reference")),
        )


@pytest.mark.parametrize("scale", [0.3, torch.tensor(0.3), torch.tensor(2.0**-40)], ids=str)
def test_one_scale_as_number_or_tensor(scale: float | Tensor, device: torch.device) -> None:
    host, cache = filled(LAYOUTS["plain"], 3, 2, device, scale=scale)
    slots = torch.arange(6)
    same_numbers(
        read_kv(ReadKv(slots.to(device), cache, BF16, "triton")),
        reference.read_kv(ReadKv(slots, host, BF16, "reference")),
    )


def test_rope_keeps_its_bits_even_those_of_a_nan(device: torch.device) -> None:
    for name in ("v32-pow2", "v4", "bf16"):
        host, cache = filled(LAYOUTS[name], 2, 2, device)
        rope = host.field(host.layout.tail or host.layout.values)[..., -64:]
        odd = torch.tensor([0x7FA1, -0x55, 0x7F80, 1, -0x8000, 0x7FFF, 0x8001 - 2**16, 0x1234], dtype=torch.int16)
        for where in (rope, cache.field(cache.layout.tail or cache.layout.values)[..., -64:]):
            where.view(torch.int16).copy_(odd.repeat(8))
        found = read_kv(ReadKv(torch.arange(4, device=device), cache, BF16, "triton"))
        assert torch.equal(found[:, -64:].cpu().view(torch.int16), odd.repeat(8).expand(4, 64))


# --- Whole requests ---------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("page_size", [1, 3, 61])
def test_requests_from_every_format_and_page_size(layout: Layout, page_size: int, device: torch.device) -> None:
    caches = filled(layout, 14, page_size, device, scale=0.37)
    table = torch.randperm(14)[:12].int().view(3, 4)
    lengths, starts, first = int32([3, 0, 1]), int32([2, 7, 8]), int32([0, 0, 3])
    out = torch.full((11, layout.width), UNTOUCHED, dtype=BF16)
    check_gather(caches, table, lengths, starts, first, out, device)


@pytest.mark.parametrize("requests", [1, 3, 15, 16, 17, 130, pytest.param(5000, marks=pytest.mark.gpu)])
def test_rows_find_their_request_among_many(requests: int, device: torch.device) -> None:
    generator = seeded(requests)
    caches = filled(LAYOUTS["bf16-7+3"], 64, 2, device)
    lengths = torch.randint(0, 4, (requests,), generator=generator, dtype=torch.int32)
    lengths[torch.rand(requests, generator=generator) < 0.3] = 0
    gaps = torch.randint(0, 3, (requests,), generator=generator, dtype=torch.int32)
    starts = (torch.cumsum(gaps + lengths, 0) - lengths).int()
    first = torch.randint(0, 3, (requests,), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 64, (requests, 3), generator=generator, dtype=torch.int32)
    out = torch.full((int(starts[-1] + lengths[-1]) + 5, 10), UNTOUCHED, dtype=FP16)
    check_gather(caches, table, lengths, starts, first, out, device)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_strided_workspace_and_strided_tables(dtype: torch.dtype, device: torch.device) -> None:
    caches = filled(LAYOUTS["v32-pow2"], 8, 4, device)
    table = torch.randperm(8)[:6].int().view(2, 3)
    table = torch.stack((table, torch.full_like(table, INT_MAX)), dim=2)[..., 0]
    lengths, starts, first = int32([3, -5, 5])[::2], int32([1, 0, 5])[::2], int32([0, 9, 1])[::2]
    wide = torch.full((12, 600), UNTOUCHED, dtype=dtype)
    for out in (wide[:, 8:584], torch.full((576, 12), UNTOUCHED, dtype=dtype).T):
        check_gather(caches, table, lengths, starts, first, out, device)


@pytest.mark.parametrize("name", ["v32-exact", "v4", "bf16"])
def test_garbage_that_the_host_could_not_see_is_skipped(name: str, device: torch.device) -> None:
    layout = LAYOUTS[name]
    caches = filled(layout, 9, 4, device)
    table = int32([0, 9, 2, 5, -1, INT_MAX, INT_MIN, 7, 8, 100, 1, 3]).view(4, 3)
    for lengths, starts, first in (
        ([12, 12, 12, 12], [0, 12, 24, 36], [0, 0, 0, 0]),  # pages that do not exist
        ([99, 0, INT_MAX, -3], [0, 13, 20, 35], [0, 0, 0, 0]),  # past the table, past the next start
        ([4, 4, 4, 4], [0, 4, 8, 12], [INT_MAX, 11, 12, 2]),  # sums that leave 32 bits
        ([4, 4, 4, 4], [INT_MIN, -3, 8, INT_MAX], [0, 0, 0, 0]),
        ([4, 4, 4, 4], [INT_MIN, 20, 30, 40], [INT_MAX, 0, 0, 0]),
        ([5, 5, 5, 5], [60, 61, 70, 80], [0, 0, 0, 0]),  # past the workspace
    ):
        out = torch.full((42, layout.width), UNTOUCHED, dtype=BF16)
        check_gather(caches, table, int32(lengths), int32(starts), int32(first), out, device)


def test_a_negative_first_position_reads_nothing(device: torch.device) -> None:
    _, cache = filled(LAYOUTS["v32-pow2"], 4, 4, device)
    out = torch.full((8, 576), UNTOUCHED, device=device)
    table = torch.ones(2, 2, dtype=torch.int32, device=device)[1:]
    gather_kv(GatherKv(table, *(int32([n]).to(device) for n in (7, 0, -6)), cache, out, "triton"))
    assert (out[[0, 1, 2, 3, 4, 5, 7]] == UNTOUCHED).all()
    same_numbers(out[6:7], read_kv(ReadKv(int32([4]).to(device), cache, FP32, "triton")).cpu())


def test_nothing_to_gather(device: torch.device) -> None:
    caches = filled(LAYOUTS["v32-pow2"], 2, 4, device)
    none, out = int32([]), torch.full((4, 576), UNTOUCHED)
    check_gather(caches, torch.zeros(0, 3, dtype=torch.int32), none, none, none, out, device)
    two = int32([0, 0])
    check_gather(caches, torch.zeros(2, 0, dtype=torch.int32), two, two, two, out, device)
    check_gather(caches, torch.zeros(2, 3, dtype=torch.int32), two, two, two, out[:0], device)


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, int, list[list[int]]]:
    count = draw(st.integers(1, 4))
    lists = [draw(st.lists(st.integers(0, 6), min_size=count, max_size=count)) for _ in range(3)]
    return draw(st.sampled_from(sorted(LAYOUTS))), draw(st.sampled_from([1, 2, 5, 61])), lists


@settings(deadline=None, max_examples=20)
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_any_batch(batch: tuple[str, int, list[list[int]]], seed: int, device: torch.device) -> None:
    name, page_size, (lengths, first, gaps) = batch
    generator = seeded(seed)
    layout = LAYOUTS[name]
    caches = filled(layout, 20, page_size, device, scale=1.7)
    table = torch.randint(-1, 21, (len(lengths), 18), generator=generator, dtype=torch.int32)
    ends = torch.cumsum(int32(lengths) + int32(gaps), 0).int()
    out = torch.full((int(ends[-1]) + 3, layout.width), UNTOUCHED, dtype=BF16)
    check_gather(caches, table, int32(lengths), ends - int32(lengths), int32(first), out, device)


# --- Index keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 61])
@pytest.mark.parametrize("name", ["index", "index-100"])
def test_index_keys_come_back_as_stored(name: str, page_size: int, device: torch.device) -> None:
    layout = LAYOUTS[name]
    host, cache = filled(layout, 14, page_size, device)
    table = torch.randperm(14)[:12].int().view(3, 4)
    table[2, 1] = 14
    requests = (table, int32([4, 0, 3]), int32([1, 6, 6]), int32([0, 0, 1]))
    check_keys(host, cache, requests, device)


def check_keys(
    host: PagedCache, cache: PagedCache, requests: tuple[Tensor, ...], device: torch.device, rows: int = 30
) -> tuple[Tensor, Tensor]:
    found = gather_index(GatherIndex(*(t.to(device) for t in requests), cache, rows, "triton"))
    expected = reference.gather_index(GatherIndex(*requests, host, rows, "reference"))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8).cpu(), other.view(torch.uint8))
    return expected


@pytest.mark.parametrize("name", ["index-mxfp4", "index-mxfp4-96"])
def test_packed_index_keys_come_back_as_stored(name: str, device: torch.device) -> None:
    layout = LAYOUTS[name]
    assert layout.scales is not None
    host, cache = filled(layout, 14, 3, device)
    table = torch.randperm(14)[:12].int().view(3, 4)
    requests = (table, int32([4, 0, 3]), int32([1, 6, 6]), int32([0, 0, 1]))
    keys, _ = check_keys(host, cache, requests, device, rows=12)
    assert (keys[[0, 5, 9, 11]] == 0).all()
    assert keys[[1, 2, 3, 4, 6, 7, 8]].any(1).all()


def test_no_index_keys(device: torch.device) -> None:
    _, cache = filled(LAYOUTS["index"], 2, 4, device)
    none = int32([]).to(device)
    table = torch.zeros(0, 1, dtype=torch.int32, device=device)
    keys, scales = gather_index(GatherIndex(table, none, none, none, cache, 3, "triton"))
    assert keys.shape == (3, 128)
    assert not keys.view(torch.uint8).any()
    assert scales.tolist() == [0, 0, 0]


def test_the_kernel_runs_as_meant(device: torch.device) -> None:
    assert interpreted(read_rows) == (device.type == "cpu")
