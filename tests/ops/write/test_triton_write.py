"""The Triton write kernel: bytes equal to the reference's, whatever is written."""

import math

import pytest
import torch
import triton
import triton.language as tl
from byte_formats import BF16, FP16, FP32, MAGNITUDES, engine_cache, hostile_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded
from torch import Tensor

from tamis import PagedCache
from tamis.arithmetic import ceil_div
from tamis.cache.codec import to_e4m3
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, plain_fp8, rows, v4_fp8, v32_fp8
from tamis.ops.rows.triton_rows import encode_e4m3, interpreted, round_to_bf16
from tamis.ops.write import reference, triton_kernels
from tamis.ops.write.operations import WriteKv
from tamis.ops.write.triton_kernels import write_kv, write_rows

LAYOUTS = {
    "v32-pow2": v32_fp8(),
    "v32-exact": v32_fp8(scale_mode="exact"),
    "v32-512+0": v32_fp8(rope=0),
    "v32-448+64": v32_fp8(latent=448, tile=64),
    "v32-128+32": v32_fp8(latent=128, rope=32, scale_mode="exact"),
    "v32-tile96": v32_fp8(latent=288, rope=6, tile=96),
    "v4": v4_fp8(),
    "v4-unrounded": v4_fp8(rounding="none", page_align=512),
    "v4-512+64": v4_fp8(latent=512),
    "v4-128+32": v4_fp8(latent=128, rope=32),
    "v4-576+0": v4_fp8(latent=576, rope=0),
    "plain": plain_fp8(),
    "plain-512+0": plain_fp8(rope=0),
    "plain-130+10": plain_fp8(latent=130, rope=10),
    "index": index_fp8(),
    "index-unrounded": index_fp8(rounding="none"),
    "index-100": index_fp8(dim=100),
    "index-mxfp4": index_mxfp4(),
    "index-mxfp4-96": index_mxfp4(dim=96, rounding="none"),
    "bf16": rows(BF16),
    "fp16-448+64": rows(FP16, latent=448),
    "fp32-128+32": rows(FP32, latent=128, rope=32),
    "bf16-512+0": rows(BF16, rope=0),
    "bf16-7+3": rows(BF16, latent=7, rope=3),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
INT_MIN = -(2**31)


def check_write(
    layout: Layout,
    kv: Tensor,
    slots: Tensor,
    device: torch.device,
    *,
    pages: int = 3,
    page_size: int = 4,
    gap: int = 64,
    lead: int = 0,
    scale: float | Tensor = 1.0,
    apart: bool = False,
) -> None:
    """Write with kernel and reference into equal buffers of random bytes, and compare all of them."""
    # Pages must start aligned, which a layout's own padding does not always see to.
    gap += -(layout.page_bytes(page_size) + lead) % 16
    expected, host = engine_cache(layout, pages, page_size, gap=gap, lead=lead)
    found = expected.clone().to(device)
    shape, strides = host.storage.shape, host.storage.stride()
    cache = PagedCache.wrap(
        torch.as_strided(found.view(layout.element), shape, strides, host.storage.storage_offset()), layout
    )
    if layout.scale_mode == "tensor":
        host = host.with_scale(scale)
        cache = cache.with_scale(scale.to(device) if isinstance(scale, Tensor) else scale)
    reference.write_kv(WriteKv(kv, None, slots, host, "reference"))
    if apart:
        latent, rope = (part.to(device) for part in kv.split([layout.latent, layout.rope], 1))
        # A stride of its own for each part, as engines' views have it.
        rope = torch.cat((rope, rope), 1)[:, : layout.rope]
        write_kv(WriteKv(latent, rope, slots.to(device), cache, "triton"))
    else:
        write_kv(WriteKv(kv.to(device), None, slots.to(device), cache, "triton"))
    found = found.cpu()
    if device.type != "cpu" or (layout.rounding == "bf16" and kv.dtype != BF16):
        # Devices make NaNs of their own in arithmetic, and torch's own conversions to bf16 differ in its sign.
        found, expected = (torch.where((b & 0x7F) == 0x7F, 0x7F, b) for b in (found, expected))
    different = (found != expected).nonzero().tolist()
    assert not different, f"{len(different)} bytes differ, first at {different[0]}"


# --- Numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def convert(numbers, codes, rounded, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(numbers + index)
    tl.store(codes + index, encode_e4m3(x))
    tl.store(rounded + index, round_to_bf16(x, NATIVE_BF16))


def interesting_numbers() -> Tensor:
    """Every bf16 number; everything near a number of e4m3 or the middle of two; 2**19 random bit patterns."""
    every = torch.arange(2**16, dtype=torch.int32) << 16
    grid = torch.tensor(MAGNITUDES)
    edges = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([464.0, 480.0, 512.0, 2.0**-126, 2.0**-149])))
    near = (edges.view(torch.int32).unsqueeze(1) + torch.arange(-3, 4, dtype=torch.int32)).flatten()
    near = near[near >= 0]
    random = torch.randint(INT_MIN, 2**31, (2**19,), dtype=torch.int64).to(torch.int32)
    bits = torch.cat((every, near, near | INT_MIN, random))
    padded = torch.zeros(ceil_div(len(bits), 2**16) * 2**16, dtype=torch.int32)
    padded[: len(bits)] = bits
    return padded.view(FP32)


def test_conversions_agree_with_torch_on_every_interesting_number(device: torch.device) -> None:
    x = interesting_numbers()
    codes = torch.empty(len(x), dtype=torch.uint8, device=device)
    rounded = torch.empty(len(x), dtype=torch.int16, device=device).view(torch.uint16)
    block = 2**16 if interpreted(convert) else 1024
    convert[(len(x) // block,)](x.to(device), codes, rounded, not interpreted(convert), block)
    assert torch.equal(codes.cpu(), to_e4m3(x))
    found, expected = rounded.cpu().view(BF16), x.to(BF16)
    assert torch.equal(found.isnan(), x.isnan())
    finite = ~x.isnan()
    assert torch.equal(found.view(torch.int16)[finite], expected.view(torch.int16)[finite])


# --- Bytes ------------------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_bytes_of_hostile_rows(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    width = max(layout.width, 192)
    kv = hostile_rows(width, dtype)[:, : layout.width]
    check_write(layout, kv, torch.tensor([11, 3, 7, 0, 4]), device, scale=0.037)


@every_layout
@pytest.mark.parametrize(("page_size", "lead", "gap"), [(1, 0, 128), (2, 64, 0), (61, 16, 576), (64, 0, 0)])
def test_pages_of_any_size_and_distance(
    layout: Layout, page_size: int, lead: int, gap: int, device: torch.device
) -> None:  # fmt: skip
    pages = ceil_div(12, page_size) + 1
    slots = torch.tensor([pages * page_size - 1, 3, 11, 0, page_size])
    kv = hostile_rows(max(layout.width, 192), BF16, seed=1)[:, : layout.width]
    check_write(layout, kv, slots, device, pages=pages, page_size=page_size, lead=lead, gap=gap, scale=3.0)


@every_layout
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_values_that_are_not_numbers(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    kv = torch.randn(7, layout.width)
    latent = kv[:, : layout.latent]
    latent[0] = math.nan
    latent[1, ::3] = torch.tensor([math.nan, -math.nan, math.inf]).repeat(layout.latent)[: latent[1, ::3].numel()]
    latent[2, 1::2] = -math.inf
    latent[3, :2] = torch.tensor([3.4028234663852886e38, -1e38])
    latent[4] = 0.0
    latent[4, 5] = -math.nan
    latent[5] *= 2.0**-130
    latent[6] = -0.0
    kv = kv.to(dtype)
    if layout.scale_mode == "none" and layout.element != dtype:
        kv = kv.nan_to_num(0.0)  # conversions may make different NaNs
    check_write(layout, kv, torch.tensor([5, 4, 3, 2, 1, 0, 8]), device, scale=torch.tensor(0.5))


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.rope])
def test_parts_that_lie_apart(name: str, device: torch.device) -> None:
    layout = LAYOUTS[name]
    kv = torch.randn(9, layout.width).to(BF16)
    check_write(layout, kv, torch.tensor([5, 4, -1, 2, 1, 0, 8, 99, 7]), device, scale=0.5, apart=True)


def test_rope_keeps_its_bits_even_those_of_a_nan(device: torch.device) -> None:
    kv = torch.randn(2, 576).to(BF16)
    odd = torch.tensor([0x7FA1, -0x55, 0x7F80, 1, -0x8000, 0x7FFF, 0x8001 - 2**16, 0x1234], dtype=torch.int16)
    kv.view(torch.int16)[:, 512:] = odd.repeat(8)
    for layout in (LAYOUTS["v32-pow2"], LAYOUTS["bf16"]):
        check_write(layout, kv, torch.tensor([2, 7]), device)


@pytest.mark.parametrize("scale", [1.0, 0.037, 12.5, torch.tensor(0.3), torch.tensor(2.0**-40)], ids=str)
def test_one_scale_as_number_or_tensor(scale: float | Tensor, device: torch.device) -> None:
    kv = torch.cat((hostile_rows(576, FP32), torch.randn(3, 576) * 1e4))
    check_write(LAYOUTS["plain"], kv, torch.arange(8), device, scale=scale)


@pytest.mark.parametrize("mode", ["pow2", "exact"])
def test_scales_around_powers_of_two(mode: str, device: torch.device) -> None:
    exponents = torch.arange(-126, 120, 3, dtype=torch.float64)
    amax = (448.0 * torch.exp2(exponents)).to(FP32).view(torch.int32)
    amax = torch.stack((amax - 1, amax, amax + 1), dim=1).flatten().clamp_min(0).view(FP32)
    kv = torch.randn(len(amax), 128).clamp(-1, 1) * amax.unsqueeze(1)
    kv[:, 17] = amax
    layout = v32_fp8(latent=128, rope=0, scale_mode=mode)  # type: ignore[arg-type]
    check_write(layout, kv, torch.randperm(256)[: len(amax)], device, pages=4, page_size=64)


def test_many_rows(device: torch.device) -> None:
    kv = torch.randn(203, 576).to(BF16) * torch.logspace(-6, 4, 203, dtype=BF16).unsqueeze(1)
    slots = torch.randperm(256)[:203]
    slots[::9] = -1
    for name in ("v32-pow2", "plain", "bf16"):
        check_write(LAYOUTS[name], kv, slots, device, pages=4, page_size=64)


# --- Which rows are written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["v32-pow2", "v4", "bf16", "plain", "index"])
def test_slots_outside_the_cache_are_skipped(name: str, dtype: torch.dtype, device: torch.device) -> None:
    layout = LAYOUTS[name]
    outside = [-1, -7, 12, 13, 2**31 - 1, INT_MIN]
    if dtype == torch.int64:
        outside += [2**40, 2**32 + 5, -(2**32) + 5, -(2**63)]
    slots = torch.tensor([5, *outside, 3], dtype=dtype)
    check_write(layout, torch.randn(len(slots), layout.width), slots, device)


@every_layout
def test_nothing_to_write(layout: Layout, device: torch.device) -> None:
    check_write(layout, torch.randn(0, layout.width), torch.zeros(0, dtype=torch.int32), device)
    check_write(layout, torch.randn(2, layout.width), torch.tensor([-1, -1]), device)


@pytest.mark.parametrize("name", ["v32-pow2", "v4", "bf16"])
def test_strided_rows_and_slots(name: str, device: torch.device) -> None:
    layout = LAYOUTS[name]
    kv = hostile_rows(layout.width, FP32)
    slots = torch.tensor([5, 0, -1, 3, 2])
    wide = torch.cat((kv, torch.full((5, 24), math.nan)), dim=1)
    for given_kv in (wide[:, : layout.width], kv.T.contiguous().T, kv.repeat_interleave(2, dim=1)[:, ::2]):
        # `to` keeps strides only where nothing has to be moved
        moved = torch.empty_strided(given_kv.shape, given_kv.stride(), device=device).copy_(given_kv)
        for given_slots in (slots, torch.stack((slots, slots - 1), dim=1)[:, 0], slots.flip(0).int().flip(0)):
            found = PagedCache(layout, 2, 4, device=device)
            expected = PagedCache(layout, 2, 4)
            write_kv(WriteKv(moved, None, given_slots.to(device), found, "triton"))
            reference.write_kv(WriteKv(kv, None, slots, expected, "reference"))
            assert torch.equal(found.storage.cpu(), expected.storage)


@pytest.mark.gpu
def test_rows_beyond_two_gib_are_addressed(device: torch.device) -> None:
    page_stride = 2**30 + 576 * 16
    far = torch.zeros(2 * page_stride + 4096, dtype=torch.uint8, device=device)
    cache = PagedCache.wrap(torch.as_strided(far, (3, 2, 584), (page_stride, 584, 1)), "v4-fp8")
    kv, slots = torch.full((2, 512), 2.0, device=device), torch.tensor([4, 5], device=device)
    write_kv(WriteKv(kv, None, slots, cache, "triton"))
    assert far[2 * page_stride] == 0x78
    assert far[2 * page_stride + 2 * 576 + 8] == 127 - 7
    assert not far[:page_stride].any()


@st.composite
def writes(draw: st.DrawFn) -> tuple[Layout, Tensor, Tensor, dict[str, int]]:
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    page_size, pages = draw(st.sampled_from([1, 2, 61, 64])), draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    generator = seeded(seed)
    count = draw(st.integers(0, min(9, pages * page_size)))
    slots = torch.randperm(pages * page_size, generator=generator)[:count]
    slots[torch.rand(count, generator=generator) < 0.2] = draw(st.sampled_from([-1, pages * page_size, INT_MIN]))
    kv = torch.randn(count, layout.width, generator=generator) * 10.0 ** draw(st.integers(-9, 6))
    kv = (kv * torch.rand(count, 1, generator=generator)).to(draw(st.sampled_from([BF16, FP16, FP32])))
    slots = slots.to(draw(st.sampled_from([torch.int32, torch.int64])))
    return layout, kv, slots, {"pages": pages, "page_size": page_size, "gap": 16 * draw(st.integers(0, 20))}


@settings(deadline=None, max_examples=60)
@given(case=writes())
def test_any_write(case: tuple[Layout, Tensor, Tensor, dict[str, int]], device: torch.device) -> None:
    layout, kv, slots, pages = case
    check_write(layout, kv, slots, device, scale=0.37, **pages)


def test_the_kernel_runs_as_meant(device: torch.device) -> None:
    assert interpreted(write_rows) == (device.type == "cpu")


def test_rounding_follows_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of a layout must not say whether the kernel is interpreted, which a process may change."""
    cache = PagedCache("index-fp8", 2, 64)
    rows, slots = torch.zeros(1, 128, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    call = WriteKv(rows, None, slots, cache, "triton")
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "write_rows", object())
        assert triton_kernels.launch_arguments(call)["NATIVE_BF16"]
    assert triton_kernels.launch_arguments(call)["NATIVE_BF16"] != interpreted(write_rows)
