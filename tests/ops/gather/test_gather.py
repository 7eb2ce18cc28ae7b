"""Reading rows back: by slot, and whole requests into a workspace.

Caches are filled with bytes here, and the expected rows are decoded from those bytes by numpy code of this file.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from gathering import INT_MAX, REQUESTS, TABLE, TWO, int32, slot_of, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import numpy_seeded
from torch import Tensor

from tamis import PagedCache, ops
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, named


def _e4m3_values() -> np.ndarray:
    table = np.empty(256, dtype=np.float32)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        table[byte] = -size if byte & 0x80 else size
    table[[0x7F, 0xFF]] = np.nan
    return table


E4M3 = _e4m3_values()


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """Nearest even, as 16-bit patterns. Finite numbers only."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 patterns to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


Decoder = Callable[[np.ndarray, int, int], np.ndarray]
"""(page bytes, row, page size) -> float32 row."""


def v32_fp8(page: np.ndarray, row: int, page_size: int) -> np.ndarray:
    packed = page[656 * row : 656 * row + 656]
    scales = packed[512:528].copy().view(np.float32)
    return np.concatenate((E4M3[packed[:512]] * np.repeat(scales, 128), widen(packed[528:].copy().view(np.uint16))))


def v4_fp8(page: np.ndarray, row: int, page_size: int) -> np.ndarray:
    record = page[576 * row : 576 * row + 576]
    exponents = page[576 * page_size + 8 * row :][:7].astype(np.int32) - 127
    values = E4M3[record[:448]] * np.repeat(np.ldexp(np.float32(1), exponents), 64)
    return np.concatenate((values, widen(record[448:].copy().view(np.uint16))))


def plain_fp8(page: np.ndarray, row: int, page_size: int) -> np.ndarray:
    return E4M3[page[576 * row : 576 * row + 576]] * np.float32(0.37)


def v32_bf16(page: np.ndarray, row: int, page_size: int) -> np.ndarray:
    return widen(page[1152 * row : 1152 * row + 1152].copy().view(np.uint16))


DECODERS: dict[str, tuple[Layout, Decoder]] = {
    "v32-fp8": (named("v32-fp8"), v32_fp8),
    "v32-fp8-exact": (named("v32-fp8", scale_mode="exact"), v32_fp8),
    "v4-fp8": (named("v4-fp8"), v4_fp8),
    "plain-fp8": (named("plain-fp8"), plain_fp8),
    "v32-bf16": (named("v32-bf16"), v32_bf16),
}


class Filled:
    """A cache of arbitrary but finite content in pages that lie apart, and its rows as this file decodes them."""

    def __init__(self, name: str, pages: int, page_size: int, *, gap: int = 64) -> None:
        layout, self.decode = DECODERS[name]
        rng = numpy_seeded(0)
        used = layout.row_bytes * page_size
        self.bytes = rng.integers(0, 256, (pages, layout.page_bytes(page_size) + gap), dtype=np.uint8)
        storage = torch.from_numpy(self.bytes)[:, :used].unflatten(1, (page_size, -1)).view(layout.element)
        self.cache = PagedCache.wrap(storage, layout, scale=0.37 if name == "plain-fp8" else 1.0)
        values = self.cache.field(layout.values).view(torch.uint8)
        if layout.quantised:
            values.masked_fill_((values & 0x7F) == 0x7F, 0x42)
        if layout.scales is not None:
            scales = self.cache.field(layout.scales)
            if layout.scales.dtype == torch.float32:
                random = np.exp(rng.uniform(-6, 3, scales.shape)).astype(np.float32)
                scales.copy_(torch.from_numpy(random))
            else:
                scales.copy_(torch.from_numpy(rng.integers(100, 140, scales.shape, dtype=np.uint8)))
        sixteen = self.cache.field(layout.tail or layout.values)
        if sixteen.dtype == torch.bfloat16:
            bits = sixteen.view(torch.int16)
            bits.masked_fill_((bits & 0x7F80) == 0x7F80, 0x3FC1)  # finite, subnormals included

    def row(self, slot: int) -> np.ndarray:
        page, row = divmod(slot, self.cache.page_size)
        return self.decode(self.bytes[page], row, self.cache.page_size)


def check_workspace(
    filled: Filled, out: Tensor, table: Tensor, lengths: Sequence[int], starts: Sequence[int], first: Sequence[int]
) -> None:
    """Every covered row of a bf16 workspace, bit for bit."""
    found = out.view(torch.int16).numpy().view(np.uint16)
    for request, (length, start, begin) in enumerate(zip(lengths, starts, first, strict=True)):
        for i in range(length):
            wanted = bf16_bits(filled.row(slot_of(filled.cache, table, request, begin + i)))
            assert np.array_equal(found[start + i], wanted), f"request {request}, row {i}"


LENGTHS = [[1], [64], [128], [512], [256, 128, 384], [128] * 4, [64] * 16, [65, 0, 1, 0, 63]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_whole_requests_from_v32_pages(lengths: list[int]) -> None:
    filled = Filled("v32-fp8-exact", sum(ceil_div(n, 64) for n in lengths) + 1, 64)
    table = tables(filled.cache, lengths, width=9)
    out = ops.gather_kv(filled.cache, table, int32(lengths))
    assert (out.shape, out.dtype) == ((sum(lengths), 576), torch.bfloat16)
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    check_workspace(filled, out, table, lengths, starts, [0] * len(lengths))


@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 69, 256])
@pytest.mark.parametrize("name", DECODERS)
def test_whole_requests_from_every_format_and_page_size(name: str, page_size: int) -> None:
    lengths, first = [5, 0, 3], [0, 2, 4]
    filled = Filled(name, 14, page_size)
    table = tables(filled.cache, [5, 2, 7], width=8)
    out = ops.gather_kv(filled.cache, table, int32(lengths), first=int32(first))
    check_workspace(filled, out, table, lengths, [0, 5, 5], first)


@pytest.mark.parametrize("page_size", [64, 2])
def test_v4_window_and_compressed_pages(page_size: int) -> None:
    ends, lengths = [19, 8, 257], [6, 8, 129]
    first = [end - length for end, length in zip(ends, lengths, strict=True)]
    filled = Filled("v4-fp8", sum(ceil_div(n, page_size) for n in ends), page_size, gap=0)
    assert filled.cache.page_stride == {64: 37440, 2: 1728}[page_size]
    table = tables(filled.cache, ends, width=130)
    out = torch.zeros(5 + sum(lengths), 512, dtype=torch.bfloat16)
    ops.gather_kv(filled.cache, table, int32(lengths), starts=int32([5, 11, 19]), first=int32(first), out=out)
    check_workspace(filled, out, table, lengths, [5, 11, 19], first)
    assert not out[:5].any()


def test_first_positions_from_the_specification() -> None:
    lengths, first = [9, 23, 7], [3, 4, 5]
    filled = Filled("v32-fp8", 30, 4)
    table = tables(filled.cache, [n + f for n, f in zip(lengths, first, strict=True)], width=7)
    out = ops.gather_kv(filled.cache, table, int32(lengths), first=int32(first))
    check_workspace(filled, out, table, lengths, [0, 9, 32], first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_of_no_request_keep_their_content(dtype: torch.dtype) -> None:
    filled = Filled("v32-fp8", 8, 4)
    table = tables(filled.cache, [3, 0, 5], width=3)
    out = torch.full((20, 576), -77.0, dtype=dtype)
    result = ops.gather_kv(filled.cache, table, int32([3, 0, 5]), starts=int32([2, 7, 10]), out=out)
    assert result is out
    covered = [2, 3, 4, 10, 11, 12, 13, 14]
    slots = [slot_of(filled.cache, table, 0, i) for i in range(3)]
    slots += [slot_of(filled.cache, table, 2, i) for i in range(5)]
    assert torch.equal(out[covered], torch.from_numpy(np.stack([filled.row(s) for s in slots])).to(dtype))
    others = [row for row in range(20) if row not in covered]
    assert (out[others] == -77.0).all()


def test_gaps_are_zeros_in_a_new_workspace() -> None:
    filled = Filled("v32-fp8", 8, 4)
    table = tables(filled.cache, [3, 5], width=3)
    out = ops.gather_kv(filled.cache, table, int32([3, 5]), starts=int32([2, 10]))
    assert out.shape == (15, 576)
    assert not out[[0, 1, 5, 6, 7, 8, 9]].any()
    check_workspace(filled, out, table, [3, 5], [2, 10], [0, 0])


def test_strided_workspace_and_strided_tables() -> None:
    filled = Filled("v32-fp8", 8, 4)
    table = tables(filled.cache, [3, 5], width=3)
    wide = torch.full((9, 600), -77.0, dtype=torch.bfloat16)
    table_view = torch.stack((table, torch.full_like(table, INT_MAX)), dim=2)[..., 0]
    ops.gather_kv(filled.cache, table_view, int32([3, -5, 5])[::2], out=wide[:, 8:584])
    check_workspace(filled, wide[:, 8:584].contiguous(), table, [3, 5], [0, 3], [0, 0])
    assert (wide[:, :8] == -77.0).all()
    assert (wide[:, 584:] == -77.0).all()


@pytest.mark.parametrize("garbage", [-1, -(2**31), INT_MAX, 1_000_000, 9])
def test_garbage_in_unused_table_entries_is_harmless(garbage: int) -> None:
    filled = Filled("v4-fp8", 9, 4)
    lengths = [9, 0, 7]
    table = tables(filled.cache, lengths, width=6, unused=garbage)
    out = torch.full((30, 512), -77.0, dtype=torch.bfloat16)
    ops.gather_kv(filled.cache, table, int32(lengths), out=out)
    check_workspace(filled, out, table, lengths, [0, 9, 9], [0, 0, 0])
    assert (out[16:] == -77.0).all()


def test_upconversion_is_value_times_scale_rounded_once() -> None:
    storage = torch.zeros(1, 1, 656, dtype=torch.uint8)
    storage[0, 0, :4] = torch.tensor([0x39, 0xB9, 0x7E, 0x01])  # 1.125, -1.125, 448, 2**-9
    scale = torch.tensor([1.00390625 / 1.125], dtype=torch.float32)
    storage[0, 0, 512:516] = scale.view(torch.uint8)
    rope = torch.tensor([0x0001, 0x8000, 0x7F80, 0x3F81], dtype=torch.int32).to(torch.int16)
    storage[0, 0, 528:536] = rope.view(torch.uint8)
    out = ops.gather_kv(PagedCache.wrap(storage, "v32-fp8"), int32([0]).view(1, 1), int32([1]))
    wanted = bf16_bits(np.array([1.125, -1.125, 448.0, 2.0**-9], dtype=np.float32) * np.float32(scale.item()))
    assert out[0, :4].view(torch.int16).numpy().view(np.uint16).tolist() == wanted.tolist()
    assert out[0, 512:516].view(torch.int16).tolist() == rope.tolist()


def test_no_requests_leave_the_workspace_alone() -> None:
    cache = PagedCache("v32-fp8", 2, 4)
    empty, none = torch.zeros(0, 3, dtype=torch.int32), int32([])
    out = torch.full((4, 576), -77.0)
    ops.gather_kv(cache, empty, none, out=out)
    assert (out == -77.0).all()
    assert ops.gather_kv(cache, empty, none).shape == (0, 576)


def test_tables_without_columns_take_empty_requests() -> None:
    cache = PagedCache("v32-fp8", 2, 4)
    out = torch.full((4, 576), -77.0)
    ops.gather_kv(cache, torch.zeros(2, 0, dtype=torch.int32), int32([0, 0]), out=out)
    assert (out == -77.0).all()


def test_callers_tensors_are_left_unchanged() -> None:
    filled = Filled("v32-fp8", 8, 4)
    given_ = [tables(filled.cache, [3, 5], width=3), int32([3, 5]), int32([2, 10]), int32([0, 0])]
    kept, stored = [t.clone() for t in given_], filled.bytes.copy()
    ops.gather_kv(filled.cache, given_[0], given_[1], starts=given_[2], first=given_[3])
    assert all(torch.equal(a, b) for a, b in zip(given_, kept, strict=True))
    assert np.array_equal(filled.bytes, stored)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Lengths, first positions, gaps before each request, page size."""
    count = draw(st.integers(1, 5))
    sizes = st.integers(0, 9)
    lists = [draw(st.lists(sizes, min_size=count, max_size=count)) for _ in range(3)]
    return lists[0], lists[1], lists[2], draw(st.sampled_from([1, 2, 5, 61]))


@settings(deadline=None, max_examples=80)
@given(batches(), st.sampled_from(sorted(DECODERS)))
def test_any_batch_against_a_row_by_row_copy(batch: tuple[list[int], list[int], list[int], int], name: str) -> None:
    lengths, first, gaps, page_size = batch
    filled = Filled(name, 96 if page_size < 5 else 20, page_size)
    table = tables(filled.cache, [n + f for n, f in zip(lengths, first, strict=True)], width=18, unused=INT_MAX)
    starts, row = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        starts.append(row + gap)
        row += gap + length
    out = torch.full((row + 3, filled.cache.layout.width), -77.0, dtype=torch.bfloat16)
    ops.gather_kv(filled.cache, table, int32(lengths), starts=int32(starts), first=int32(first), out=out)
    check_workspace(filled, out, table, lengths, starts, first)
    covered = {start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)}
    others = [i for i in range(row + 3) if i not in covered]
    assert (out[others] == -77.0).all()


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 2, 2)], ids=str)
def test_read_kv_by_slot(name: str, shape: tuple[int, ...]) -> None:
    filled = Filled(name, 4, 3)
    slots = torch.randint(-1, 13, shape, dtype=torch.int32)
    found = ops.read_kv(filled.cache, slots)
    width = filled.cache.layout.width
    assert (found.shape, found.dtype) == ((*shape, width), torch.float32)
    for slot, row in zip(slots.flatten().tolist(), found.view(-1, width).numpy(), strict=True):
        wanted = filled.row(slot) if 0 <= slot < 12 else np.zeros(width, dtype=np.float32)
        assert np.array_equal(row, wanted)


def test_read_kv_takes_strided_slots() -> None:
    filled = Filled("v4-fp8", 4, 3)
    slots = torch.arange(12).view(3, 4).T
    assert torch.equal(ops.read_kv(filled.cache, slots), ops.read_kv(filled.cache, slots.contiguous()))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *REQUESTS,
        ({"out": torch.ones(4, 576)}, ValueError, "out must be at least 5 rows, got 4; make the workspace larger"),
        ({"starts": int32([0, INT_MAX])}, ValueError, f"out must be at least {INT_MAX + 3} rows, got 9; "),
        ({"out": torch.ones(9, 512)}, ValueError, r"out must be of shape \[N, D=576\], got \[9, 512\]; "),
        ({"out": torch.ones(9, 576).int()}, TypeError, "out must be bfloat16 or float16 or float32, got int32; "),
        ({"out": torch.ones(9, 576, device="meta")}, ValueError, "out must be on cpu, got a tensor on meta; "),
    ],
)
def test_gather_kv_refuses_wrong_input(change: dict[str, object], kind: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"block_table": TABLE, "lengths": TWO, "out": torch.full((9, 576), -77.0)} | change
    out = arguments["out"]
    assert isinstance(out, Tensor)
    before = out.clone()
    with pytest.raises(kind, match="^" + message):
        ops.gather_kv(PagedCache("v32-fp8", 2, 4), **arguments)  # type: ignore[arg-type]
    assert out.device.type == "meta" or torch.equal(out, before)


@pytest.mark.parametrize("page", [-1, 6, INT_MAX])
def test_a_page_that_a_request_needs_must_exist(page: int) -> None:
    cache = PagedCache("v32-fp8", 6, 4)
    table = torch.tensor([[1, page, 2], [page, 3, page]], dtype=torch.int32)
    for lengths, first in (([5, 0], [0, 0]), ([1, 1], [4, 4]), ([0, 5], [0, 4])):
        with pytest.raises(ValueError, match="block_table must be between 0 and 5, got a value of"):
            ops.gather_kv(cache, table, int32(lengths), first=int32(first))
    assert ops.gather_kv(cache, table, int32([4, 4]), first=int32([0, 4])).shape == (8, 576)
