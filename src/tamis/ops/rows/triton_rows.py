"""Device functions for e4m3, e2m1 and bf16 bits, slots and row addresses, and launch settings of the Triton kernels.

Nothing here or in the kernels needs an architecture-specific instruction. bf16 numbers are converted to fp32 right
after a load and back right before a store, since the interpreter, in which these kernels are tested on a CPU, does
arithmetic on the raw bits of bf16.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache as remember
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tamis.cache.fields import Field, from_key
from tamis.cache.paged import PagedCache


@triton.jit
def decode_e4m3(codes, NATIVE: tl.constexpr):
    """Exact fp16 values of e4m3 bytes. Devices without the conversion shift the bits into place, which gives the value
    times 2**-8, and multiply."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = codes.to(tl.uint16)
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def encode_e4m3(x):
    """e4m3 bytes of fp32 numbers: to nearest even, saturating at 448, NaN as 0x7f with its sign.

    Adding a power of two that is 2**20 times larger rounds a number to the three mantissa bits of e4m3. For numbers
    below 2**-6, which are subnormal in e4m3, the power is that of 2**-6. Triton's own conversion is not used even where
    the hardware has it: on an H200, Triton 3.6 corrupted every second byte of rows that do not start on a 16-byte
    boundary, and writes are bound by memory either way.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    step = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000) + (20 << 23)
    rounded = (size + step.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    code = tl.where(x == x, rounded - step + (step >> 20) - (141 << 3), 0x7F)
    return (code | sign).to(tl.uint8)


@triton.jit
def encode_e2m1(x):
    """Bytes [rows, tiles, n / 2] of fp32 numbers [rows, tiles, n], rounded to e2m1 as `encode_e4m3` rounds: to one
    mantissa bit, or to halves below 1. Larger numbers saturate at 6, and NaN becomes 6."""
    x = tl.where(x == x, x, 6.0)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    size = tl.minimum(tl.abs(x), 6.0)
    step = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000) + (22 << 23)
    rounded = (size + step.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    code = (rounded - step + (step >> 22) - (149 << 1)) | sign
    even, odd = tl.split(tl.reshape(code, [code.shape[0], code.shape[1], code.shape[2] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8)


@triton.jit
def decode_e2m1(pairs):
    """Exact fp16 values [rows, tiles, 2 * n] of bytes [rows, tiles, n] with two e2m1 codes each. A code's bits, shifted
    into place, are its value times 2**-14."""
    bits = tl.join(pairs & 15, pairs >> 4).to(tl.uint16)
    value = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0
    return tl.reshape(value.to(tl.float16), [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])


@triton.jit
def power_of_two(exponent, PACKED: tl.constexpr):
    """fp32 factors of exponent bytes; beside packed values, 255 is NaN."""
    # Byte 0 stands for 2**-127, which is subnormal.
    bits = tl.where(exponent == 0, 0x400000, exponent.to(tl.int32) << 23)
    if PACKED:
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_bf16(bits):
    """fp32 values of bf16 bits. (The interpreter's own conversion gets subnormals wrong.)"""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(x, NATIVE: tl.constexpr):
    """Bits of fp32 numbers rounded to bf16, to nearest even. The interpreter's own conversion truncates, so integer
    arithmetic replaces it there."""
    if NATIVE:
        rounded = x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        rounded = (nearest >> 16).to(tl.uint16)
    return rounded


@triton.jit
def raw_pointers(pointers):
    """The same pointers, except that pointers to bf16 become pointers to uint16."""
    if pointers.dtype.element_ty == tl.bfloat16:
        raw = pointers.to(tl.pointer_type(tl.uint16), bitcast=True)
    else:
        raw = pointers
    return raw


@triton.jit
def load_wide(pointers, mask):
    """fp32 values of fp32, fp16 or bf16 numbers; zeros where masked."""
    found = tl.load(raw_pointers(pointers), mask=mask, other=0)
    if pointers.dtype.element_ty == tl.bfloat16:
        wide = decode_bf16(found)
    else:
        wide = found.to(tl.float32)
    return wide


@triton.jit
def store_rounded(pointers, x, mask, NATIVE_BF16: tl.constexpr):
    """Store fp32 values as fp32, fp16 or bf16 numbers, rounded to nearest even."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(raw_pointers(pointers), round_to_bf16(x, NATIVE_BF16), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def copy_rounded(source, destination, readable, writable, NATIVE_BF16: tl.constexpr):
    """Copy fp32, fp16 or bf16 numbers, bit for bit where both types are the same; zeros where not readable."""
    if source.dtype.element_ty == destination.dtype.element_ty:
        tl.store(raw_pointers(destination), tl.load(raw_pointers(source), mask=readable, other=0), mask=writable)
    else:
        store_rounded(destination, load_wide(source, readable), writable, NATIVE_BF16)


@triton.jit
def row_start(slots, page_stride, row_stride, PAGE_SIZE: tl.constexpr, FLAT: tl.constexpr):
    """64-bit offset of each slot's row, in elements of the field whose strides are given."""
    if FLAT:
        return slots.to(tl.int64) * row_stride
    page = slots // PAGE_SIZE
    return page.to(tl.int64) * page_stride + (slots - page * PAGE_SIZE).to(tl.int64) * row_stride


@triton.jit
def slot_of(position, wanted, table, page_id_stride, table_width, PAGE_SIZE: tl.constexpr):
    """int64 slots of positions, -1 where not wanted, negative, past the table, in an absent page, or past 32 bits.

    This is the rule of `tamis.cache.slots.slots_of`; `table` points to the request's row of the block table.
    """
    wanted = wanted & (position >= 0)
    page = tl.where(wanted, position, 0) // PAGE_SIZE
    wanted = wanted & (page < table_width)
    page_id = tl.load(table + page.to(tl.int64) * page_id_stride, mask=wanted, other=-1)
    slot = page_id.to(tl.int64) * PAGE_SIZE + (position - page * PAGE_SIZE)
    return tl.where(wanted & (page_id >= 0) & (slot < 2147483648), slot, -1)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels run on this device; Triton launches on the current one, wherever the tensors are."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def interpreted(kernel: object) -> bool:
    """Whether kernels run in Triton's interpreter (on host tensors) instead of on a device."""
    return isinstance(kernel, InterpretedFunction)


def has_native_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 in hardware: CUDA from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def strided_field(cache: PagedCache, field: Field | None) -> tuple[Tensor | None, int, int]:
    """A field's view and its page and row stride in elements; (None, 0, 0) for a field the layout does not have."""
    if field is None:
        return None, 0, 0
    view = cache.field(field)
    return view, view.stride(0), view.stride(1)


def row_arguments(cache: PagedCache) -> dict[str, Any]:
    """Arguments of kernels that read or write whole rows: where the rows of a cache are.

    Strides and starts are in elements of `cache`: bytes for FP8 layouts, numbers for the others.
    """
    layout = cache.layout
    storage = cache.storage.view(torch.uint8) if layout.quantised else cache.storage
    return {
        "cache": storage,
        "page_stride": cache.page_stride // storage.element_size(),
        "scale": cache.scale,
        "SCALE_IN_MEMORY": isinstance(cache.scale, Tensor),
        **layout_constants(layout.key, cache.page_size),
    }


@remember
def layout_constants(key: str, page_size: int) -> dict[str, Any]:
    """The part of `row_arguments` that depends on layout and page size only."""
    layout = from_key(key)  # the key is the argument because strings cache their hash and layouts do not
    size = 1 if layout.quantised else layout.element.itemsize
    tile = layout.tile or layout.latent
    constants: dict[str, Any] = {
        "PAGE_SIZE": page_size,
        "MODE": ("packed_e4m3" if layout.scale_mode == "e4m3" else "packed") if layout.packed else layout.scale_mode,
        "LATENT": layout.latent,
        "ROPE": layout.rope,
        "TILE": tile,
        "LATENT_BLOCK": triton.next_power_of_2(layout.latent),
        "ROPE_BLOCK": triton.next_power_of_2(max(1, layout.rope)),
        "TILES_BLOCK": triton.next_power_of_2(layout.latent // tile),
        "TILE_BLOCK": triton.next_power_of_2(tile),
    }
    for name, field in (("VALUES", layout.values), ("SCALES", layout.scales), ("TAIL", layout.tail)):
        constants[f"{name}_START"] = field.start(page_size) // size if field is not None else 0
        constants[f"{name}_STRIDE"] = field.stride // size if field is not None else 0
    return constants


def row_block(arguments: dict[str, Any]) -> int:
    """The number of values in the largest block that kernels make of one row, given its `row_arguments`."""
    blocks: tuple[int, ...] = tuple(arguments[f"{part}_BLOCK"] for part in ("LATENT", "ROPE", "TILES", "TILE"))
    return max(*blocks[:2], blocks[2] * blocks[3])
