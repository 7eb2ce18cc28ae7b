"""Properties of CUDA devices, and memory on them."""

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


class Room:
    """Memory of one shape on one device: each call allocates a new contiguous tensor, in less time than torch.empty."""

    __slots__ = ("_device", "_dtype", "_fast", "_shape", "_strides")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Remember what to allocate."""
        self._shape, self._dtype, self._device = shape, dtype, device
        strides = [1]
        for size in shape[:0:-1]:
            strides.append(strides[-1] * max(size, 1))
        self._strides = tuple(reversed(strides[: len(shape)]))
        self._fast = _fast_empty if device.type == "cuda" else None

    def __call__(self) -> Tensor:
        """Allocate. The device must be the current one."""
        # Under deterministic algorithms torch.empty fills memory, so that reads of unwritten values show.
        if self._fast is None or torch._C._get_deterministic_algorithms():
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        made: Tensor = self._fast(self._shape, self._strides, self._dtype)
        return made
