"""`Arena`: the small arrays of a step in one buffer, so that they reach the device in one copy."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tamis.step.split import INT


class Arena:
    """int32 arrays of fixed sizes, one after the other in one buffer on a device.

    A step takes a `blank` copy on the host, writes into its arrays, and sends it with `upload`.

    Attributes:
        views: the arrays on the device, by name. They never move.
    """

    def __init__(self, arrays: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        """Allocate the arrays: for each name its size, and the value of the elements that a step does not write."""
        self._blank = np.concatenate([np.full(size, fill, np.int32) for size, fill in arrays.values()])
        self._buffer = torch.from_numpy(self._blank).to(device, copy=True)
        self.device = self._buffer.device
        self.views: dict[str, Tensor] = {}
        self._spans: dict[str, slice] = {}
        start = 0
        for name, (size, _) in arrays.items():
            self._spans[name] = span = slice(start, start + size)
            self.views[name] = self._buffer[span]
            start += size

    def blank(self) -> INT:
        """A host copy in which no array has been written yet."""
        return self._blank.copy()

    def array(self, host: INT, name: str) -> INT:
        """One array of a host copy."""
        return host[self._spans[name]]

    def upload(self, host: INT) -> None:
        """Copy a host copy to the device, without waiting for it."""
        self._buffer.copy_(staged(torch.from_numpy(host), self.device), non_blocking=True)


def staged(value: Tensor, device: torch.device) -> Tensor:
    """A tensor in memory from which a copy to the device is asynchronous; tensors on a device are returned as they are.

    Host values go into a fresh pinned block. The caching host allocator keeps the block until the copy is done, while
    writing into one fixed block could overtake the copy of the step before.
    """
    return value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
