"""What the portable Triton kernels share: e4m3 and bf16 as bits, the place of a row, launch settings of a device.

Nothing here or in the kernels needs an architecture-specific instruction. bf16 values are widened right after a load
and narrowed right before a store, since the interpreter, in which these kernels are tested on a CPU, does arithmetic
on the raw bits of bf16.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache as remember
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tamis.cache.layout import Field, from_key
from tamis.cache.paged import PagedCache


@triton.jit
def decode_e4m3(codes, NATIVE: tl.constexpr):
    """Exact fp16 values of e4m3 bytes. Devices without the conversion shift the bits into place, which leaves the
    value times 2**-8."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = codes.to(tl.uint16)
    value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def encode_e4m3(x):
    """e4m3 bytes of fp32 numbers: to nearest even, saturating at 448, NaN as 0x7f with its sign.

    One addition rounds: beside a power of two 20 binary places larger, only the three mantissa bits of e4m3 remain of a
    number, and below 2**-6, where e4m3 has no more exponents, the power stays what it is. Triton's own conversion is
    not used even where the hardware has it: on an H200, Triton 3.6 spoiled every second byte of rows that do not start
    on a 16-byte boundary, and the write is bound by memory either way.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    step = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000) + (20 << 23)
    rounded = (size + step.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    code = tl.where(x == x, rounded - step + (step >> 20) - (141 << 3), 0x7F)
    return (code | sign).to(tl.uint8)


@triton.jit
def encode_e2m1(x):
    """Bytes [rows, tiles, n / 2] of fp32 numbers [rows, tiles, n], rounded to e2m1 in the way of `encode_e4m3`: one
    mantissa bit, and steps of a half below 1; saturating at 6, which is also what NaN becomes."""
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
    """Exact fp16 values [rows, tiles, 2 * n] of bytes [rows, tiles, n] with two e2m1 codes each: shifted into place, a
    code is its value times 2**-14."""
    bits = tl.join(pairs & 15, pairs >> 4).to(tl.uint16)
    value = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0
    return tl.reshape(value.to(tl.float16), [pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])


@triton.jit
def power_of_two(exponent, PACKED: tl.constexpr):
    """fp32 factors of exponent bytes; beside packed values, 255 is NaN."""
    # 2**-127, which the smallest byte stands for, is no normal number.
    bits = tl.where(exponent == 0, 0x400000, exponent.to(tl.int32) << 23)
    if PACKED:
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen_bf16(bits):
    """fp32 numbers from the bits of bf16 ones. (The interpreter's own conversion spoils subnormals.)"""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16(x, NATIVE: tl.constexpr):
    """Bits of fp32 numbers rounded to bf16, to nearest even. Devices do that; the interpreter's conversion truncates,
    so there it takes integer arithmetic."""
    if NATIVE:
        rounded = x.to(tl.bfloat16).to(tl.uint16, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        rounded = (nearest >> 16).to(tl.uint16)
    return rounded


@triton.jit
def raw_pointers(pointers):
    """The same pointers, those to bf16 as pointers to its bits."""
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
        wide = widen_bf16(found)
    else:
        wide = found.to(tl.float32)
    return wide


@triton.jit
def store_rounded(pointers, x, mask, NATIVE_BF16: tl.constexpr):
    """fp32 values as fp32, fp16 or bf16 numbers, to nearest even."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(raw_pointers(pointers), round_to_bf16(x, NATIVE_BF16), mask=mask)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def copy_rounded(source, destination, readable, writable, NATIVE_BF16: tl.constexpr):
    """fp32, fp16 or bf16 numbers from one place to another, bit for bit where both hold the same type; zeros where
    not readable."""
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


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Within it kernels run on this device: Triton launches on the current device, wherever the tensors are."""
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
    """Where the rows of a cache are, for kernels that read or write whole rows. Distances are in elements of `cache`,
    which are bytes for FP8 layouts and numbers for the others."""
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
    """The part of `row_arguments` that a layout and a page size decide."""
    layout = from_key(key)  # a string knows its hash, a layout works it out on every call
    size = 1 if layout.quantised else layout.element.itemsize
    tile = layout.tile or layout.latent
    constants: dict[str, Any] = {
        "PAGE_SIZE": page_size,
        "MODE": "packed" if layout.packed else layout.scale_mode,
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
    """Values of the largest block that kernels make of one row, given its `row_arguments`."""
    blocks: tuple[int, ...] = tuple(arguments[f"{part}_BLOCK"] for part in ("LATENT", "ROPE", "TILES", "TILE"))
    return max(*blocks[:2], blocks[2] * blocks[3])
