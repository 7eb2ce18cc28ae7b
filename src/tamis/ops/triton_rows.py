"""What the portable Triton kernels share: decoding e4m3, addressing a row by its slot, launch settings of a device.

Nothing here or in the kernels needs an architecture-specific instruction. bf16 values are widened right after a load
and narrowed right before a store, since the interpreter, in which these kernels are tested on a CPU, does arithmetic
on the raw bits of bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tamis.cache import PagedCache
from tamis.layout import Field


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
def row_start(slots, page_stride, row_stride, PAGE_SIZE: tl.constexpr, FLAT: tl.constexpr):
    """64-bit offset of each slot's row, in elements of the field whose strides are given."""
    if FLAT:
        return slots.to(tl.int64) * row_stride
    page = slots // PAGE_SIZE
    return page.to(tl.int64) * page_stride + (slots - page * PAGE_SIZE).to(tl.int64) * row_stride


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
