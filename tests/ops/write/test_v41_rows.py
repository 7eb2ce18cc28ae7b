"""DeepSeek-V4.1's rows of 528 and 288 bytes: bytes computed by hand; kernels that write, read and attend to them."""

import bounds
import pytest
import torch
from attention_calls import attend_call
from bounds import selected_attention
from seeds import seeded
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.cache.layout import Layout, index_mxfp4, v41_fp4, v41_fp8
from tamis.ops import read_kv, write_kv
from tamis.ops.attention import triton_kernels as attend_kernels
from tamis.ops.gather import triton_kernels as read_kernels
from tamis.ops.gather.operations import ReadKv
from tamis.ops.write import triton_kernels as write_kernels
from tamis.ops.write.operations import WriteKv

FP8, FP4 = v41_fp8(latent=56, rope=8), v41_fp4(latent=24, rope=8)
LAYOUTS = {"fp8": FP8, "fp4": FP4}


def written(layout: Layout, rows: Tensor, page_size: int = 3) -> Tensor:
    """The bytes of one page with these rows."""
    cache = PagedCache(layout, 1, page_size)
    write_kv(rows, cache, torch.arange(len(rows)))
    return cache.storage.flatten()


def test_528_bytes_by_hand() -> None:
    """Tiles of 32 e4m3 values: 448 / 448 is 2**0, 1 / 448 is just above 2**-9, and an empty tile counts as 1e-4."""
    row = torch.zeros(1, 512)
    row[0, :5] = torch.tensor([448.0, 1.0, -0.5, 0.0, 17.0])  # 17 lies between 16 and 18: to the even code
    row[0, 32:34] = torch.tensor([-1.0, 0.25])
    row[0, 511] = 7.0  # 7 / 448 is exactly 2**-6
    page = written(v41_fp8(), row, page_size=2)
    assert page.shape == (2 * 528,)
    expected = torch.zeros(2 * 528, dtype=torch.uint8)
    expected[:5] = torch.tensor([0x7E, 0x38, 0xB0, 0x00, 0x58])
    expected[32:34] = torch.tensor([0xF8, 0x68])  # -256 and 64, under 2**-8
    expected[511] = 0x7E
    # After the values of both rows: an exponent per tile, biased by 127. 1e-4 / 448 is just above 2**-23.
    expected[1024:1040] = 127 - 22
    expected[1024], expected[1025], expected[1039] = 127, 127 - 8, 127 - 6
    assert torch.equal(page, expected)


def test_288_bytes_by_hand() -> None:
    """Tiles of 16 e2m1 values under an e4m3 scale: 6 / 6 is 1, 1 / 6 rounds to 0.171875, and at most 448."""
    row = torch.zeros(1, 512)
    row[0, :8] = torch.tensor([6.0, -6.0, 0.5, 1.0, -1.5, 2.0, 3.0, 4.0])
    row[0, 8:11] = torch.tensor([5.0, 2.5, 0.25])  # halfway: to the even codes of 4, 2 and 0
    row[0, 16:18] = torch.tensor([1.0, -0.25])  # 5.82 and -1.45 times 0.171875: to 6 and -1.5
    row[0, 32] = 1e6
    page = written(v41_fp4(), row, page_size=2)
    assert page.shape == (2 * 288,)
    expected = torch.zeros(2 * 288, dtype=torch.uint8)
    expected[:6] = torch.tensor([0xF7, 0x21, 0x4B, 0x65, 0x46, 0x00])  # the even column in the low four bits
    expected[8] = 0xB7
    expected[16] = 0x07
    # After the values of both rows: a scale per tile, of which the smallest is 2**-9.
    expected[512:544] = 0x01
    expected[512:515] = torch.tensor([0x38, 0x23, 0x7E])
    assert torch.equal(page, expected)


def test_rows_are_read_as_they_were_written() -> None:
    for layout, row in ((v41_fp8(), 448.0), (v41_fp4(), 6.0)):
        cache = PagedCache(layout, 2, 5)
        rows = torch.zeros(2, 512)
        rows[:, ::16] = row
        rows[1] *= -0.5
        write_kv(rows, cache, torch.tensor([7, 2]))
        assert torch.equal(cache.read(torch.tensor([7, 2, -1])), torch.cat((rows, torch.zeros(1, 512))))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nan_and_infinity(layout: Layout) -> None:
    """NaN makes its tile NaN where values have none, and itself otherwise. An infinity is the largest number."""
    rows = torch.ones(1, layout.width)
    rows[0, 1], rows[0, layout.tile] = torch.nan, torch.inf
    cache = PagedCache(layout, 1, 2)
    write_kv(rows, cache, torch.tensor([1]))
    found = cache.read(torch.tensor([1]))[0]
    assert found.isnan().tolist() == [
        (column < layout.tile if layout.packed else column == 1) for column in range(layout.width)
    ]
    assert found[layout.tile] == (6.0 * 448.0 if layout.packed else 448.0 * 2.0**120)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_kernels_write_and_read_the_references_bytes(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    generator = seeded(6)
    rows = torch.randn(40, layout.width, generator=generator) * torch.logspace(-9, 9, 40).unsqueeze(1)
    rows[3, 5], rows[4, 6], rows[5, 7], rows[6] = torch.nan, torch.inf, -torch.inf, 0.0
    rows, slots = rows.to(dtype), torch.randperm(44, generator=generator)[:40]
    host, there = PagedCache(layout, 4, 11), PagedCache(layout, 4, 11, device)
    write_kv(rows, host, slots)
    write_kernels.write_kv(WriteKv(rows.to(device), None, slots.to(device), there, "triton"))
    found, expected = there.storage.cpu(), host.storage
    if layout is FP8:
        # The sign of a NaN is that of the device's arithmetic, and of torch's own conversions to bf16.
        found, expected = (torch.where((b & 0x7F) == 0x7F, 0x7F, b) for b in (found, expected))
    assert torch.equal(found, expected)
    every = torch.arange(-1, 45)
    found = read_kernels.read_kv(ReadKv(every.to(device), there, torch.float32, "triton"))
    expected = read_kv(host, every)
    assert torch.equal(found.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), index_mxfp4(dim=32)], ids=[*LAYOUTS, "mxfp4"])
def test_kernels_attend(layout: Layout, heads: int, device: torch.device) -> None:
    generator = seeded(7)
    cache = PagedCache(layout, 6, 5)
    write_kv(torch.randn(30, layout.width, generator=generator), cache, torch.arange(30))
    slots = torch.randint(-2, 33, (4, 23), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([23, 9, 0, 30], dtype=torch.int32)
    q, sink = torch.randn(4, heads, layout.width, generator=generator), torch.randn(heads, generator=generator)
    exact = selected_attention(q, [Selection(cache, slots, lengths)], sink=sink, scale=0.3, value_dim=layout.width)
    there = Selection(PagedCache.wrap(cache.storage.to(device), layout), slots.to(device), lengths.to(device))
    out = torch.empty(4, heads, layout.width, device=device)
    call = attend_call(q.to(device), [there], scale=0.3, sink=sink.to(device), splits=2, out=out)
    attend_kernels.check_attend(call)
    attend_kernels.attend(call)
    bounds.agree(out.cpu(), exact.out, exact.out_error)
