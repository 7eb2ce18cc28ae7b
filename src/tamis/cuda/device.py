"""Properties of CUDA devices, and memory on them."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_fast_empty: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)
"""The allocation that code from torch.compile uses. It takes a third of the time of `torch.empty`, which looks for
modes, subclasses and defaults first."""


@cache
def sm_count(device: torch.device) -> int:
    """The number of streaming multiprocessors (SMs) of a CUDA device; 1 for the CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def device_index(device: torch.device) -> int:
    """The index of a CUDA device; that of the current device if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def current_stream(device: int) -> int:
    """The handle of torch.cuda.current_stream() of a device, without making a Stream object."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


class Rooms:
    """Memory for the tensors of a call: each call allocates contiguous ones, in less time than torch.empty takes."""

    def __init__(self, device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype]) -> None:
        """Remember shapes and dtypes."""
        self._device = device
        self._wanted = [(tuple(shape), contiguous_strides(shape), dtype) for shape, dtype in wanted]
        self._fast = _fast_empty if device.type == "cuda" else None

    def reshape(self, number: int, shape: tuple[int, ...]) -> None:
        """Give a tensor another shape of as many elements."""
        before, _, dtype = self._wanted[number]
        if math.prod(before) != math.prod(shape):
            raise ValueError(f"shape must have as many elements as {before}, got {shape}")
        self._wanted[number] = shape, contiguous_strides(shape), dtype

    def __call__(self) -> list[Tensor]:
        """Allocate. The device must be the current one."""
        fast = self._fast
        # Under deterministic algorithms torch.empty fills memory, so that reads of unwritten values show.
        if fast is None or torch._C._get_deterministic_algorithms():
            return [torch.empty(shape, dtype=dtype, device=self._device) for shape, _, dtype in self._wanted]
        return [fast(shape, strides, dtype) for shape, strides, dtype in self._wanted]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))
