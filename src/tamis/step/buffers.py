"""Buffers that a planner allocates once and fills for every step. Captured graphs rely on their addresses.

`Arena` holds the small arrays that the host computes, in one buffer, so that they reach the device in one copy.
`PageBuffers` holds the block table and the slots of one pool.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.step.batch import PageMap
from tamis.step.plan import Limits
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


class PageBuffers:
    """Room for the largest step of one pool. Elements that the latest step did not write are -1."""

    def __init__(self, limits: Limits, page_size: int, device: torch.device) -> None:
        """Allocate a block table int32 [max_requests, pages of max_length] and slots int64 [max_tokens]."""
        self.page_size = page_size
        self.width = ceil_div(limits.max_length, page_size)
        self._device = device
        self._block_table = torch.full((limits.max_requests, self.width), -1, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_tokens,), -1, dtype=torch.int64, device=device)
        self._filled = (0, 0, 0)
        """The numbers of requests, pages and slots that the previous step wrote."""

    def fill(self, pages: PageMap, requests: int, rows: int) -> PageMap:
        """Copy the pages of a step into the buffers, and return views of its requests and token rows."""
        count, width = len(pages.slots), pages.block_table.shape[1]
        self._block_table[:requests, :width].copy_(staged(pages.block_table, self._device), non_blocking=True)
        self._slots[:count].copy_(staged(pages.slots, self._device), non_blocking=True)
        # Clear what the previous step wrote and this one does not. Between steps of the same shape there is nothing.
        last_requests, last_width, last_count = self._filled
        if requests < last_requests:
            self._block_table[requests:last_requests, :last_width].fill_(-1)
        if width < last_width:
            self._block_table[:requests, width:last_width].fill_(-1)
        if count < last_count:
            self._slots[count:last_count].fill_(-1)
        self._filled = requests, width, count
        return PageMap(self._block_table[:requests], self._slots[:rows])


def staged(value: Tensor, device: torch.device) -> Tensor:
    """A tensor in memory from which a copy to the device is asynchronous; tensors on a device are returned as they are.

    Host values go into a fresh pinned block. The caching host allocator keeps the block until the copy is done, while
    writing into one fixed block could overtake the copy of the previous step.
    """
    return value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
