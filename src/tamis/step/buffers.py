"""Buffers that a planner allocates once and fills for every step. Captured graphs rely on their addresses.

`Arena` holds the arrays with one number per token or per request, so that they reach the device in one copy.
`TableBuffer` holds the block table of one pool.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.step.plan import Limits
from tamis.step.split import INT

_WHOLE_BYTES = 64 << 10
"""An arena of at most this size is copied whole. A copy of leading columns takes a second kernel on the device."""
_MOST_VIEWS = 1024


P = ParamSpec("P")
R = TypeVar("R")


def outside_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside of torch's function modes. A default device is one, and would put a Python function around
    every attribute of a tensor."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


class Staging(NamedTuple):
    """What a step writes into an arena, on the host."""

    block: Tensor
    """[arrays, columns] of int64, or of int32 if the arena has no arrays of int64, in memory from which a copy to the
    device is asynchronous."""
    narrow: INT
    """int32 [arrays, columns or more], a view of the block: the arrays of int32 by `Arena.row`."""
    wide: NDArray[np.int64]
    """int64 [arrays, columns], the block itself if it is of int64: the arrays of int64 by `Arena.row`."""


class Arena:
    """Arrays of int32 and int64 with a common greatest length, as the rows of one buffer on a device.

    A step takes a `stage` on the host, in which every array has its fill value, writes into its arrays, and sends it
    with `upload`. Columns past the staged ones keep what they hold.

    Attributes:
        row: the row of each array, by name.
        views: the arrays on the device, by name. They never move.
        narrow: the arrays of int32 on the device as one tensor [arrays, columns], by `row`.
    """

    def __init__(self, narrow: Mapping[str, int], wide: Mapping[str, int], columns: int, device: torch.device) -> None:
        """Allocate arrays of int32 (`narrow`) and int64 (`wide`): for each name, the value of elements not written."""
        fills: NDArray[Any] = np.array(list(narrow.values()), np.int32).reshape(-1, 1)
        if wide:
            twice = fills.repeat(2, 1).view(np.int64).flatten()
            fills = np.array([*twice, *wide.values()], np.int64).reshape(-1, 1)
        self._fills = fills
        self._buffer = torch.from_numpy(self._fills.repeat(columns, 1)).to(device, copy=True)
        self.device, self.columns = self._buffer.device, columns
        self._pinned = self.device.type == "cuda"
        self._whole = self._buffer.nbytes <= _WHOLE_BYTES
        self.row = {name: number for number, name in enumerate((*narrow, *wide))}
        self.narrow = self._buffer.view(torch.int32)[:, :columns]
        self.views = {name: self.narrow[self.row[name]] for name in narrow}
        self.views |= {name: self._buffer[self.row[name]] for name in wide}

    def stage(self, columns: int) -> Staging:
        """Room on the host for at least the leading `columns` of every array, with the fill values.

        The room is new for every step. The caching host allocator keeps it until its copy is done, while writing into
        one fixed block could overtake the copy of the step before.
        """
        columns = self.columns if self._whole else columns
        shape = (self._fills.shape[0], columns)
        block = torch.empty(shape, dtype=self._buffer.dtype, device="cpu", pin_memory=self._pinned)
        host = block.numpy()
        host[:] = self._fills
        return Staging(block, host.view(np.int32), host)

    def upload(self, staging: Staging) -> None:
        """Copy what was staged to the device, without waiting for it."""
        target, columns = self._buffer, staging.wide.shape[1]
        if columns < self.columns:
            target = target[:, :columns]
        target.copy_(staging.block, non_blocking=True)


class Views:
    """Parts of buffers that never move. A view takes time to make, and the sizes of steps repeat, so they are kept."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the buffers by name."""
        self._buffers = dict(buffers)
        self._kept: dict[tuple[str, int, int], Tensor] = {}

    def __call__(self, name: str, end: int, begin: int = 0) -> Tensor:
        """Rows `begin` to `end` (exclusive) of a buffer."""
        key = (name, begin, end)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == _MOST_VIEWS:
                self._kept.clear()
            with torch.inference_mode(False):  # they outlive the step: see `Planner`
                found = self._kept[key] = self._buffers[name][begin:end]
        return found


class TableBuffer:
    """Room for the largest block table of one pool. Elements that the latest step did not write are -1."""

    def __init__(self, limits: Limits, page_size: int, device: torch.device) -> None:
        """Allocate int32 [max_requests, pages of max_length]."""
        self.page_size = page_size
        self.width = ceil_div(limits.max_length, page_size)
        self._device = device
        self._table = torch.full((limits.max_requests, self.width), -1, dtype=torch.int32, device=device)
        self._filled = (0, 0)
        """The numbers of requests and pages that the previous step wrote."""
        self._target, self._found = self._table[:0, :0], self._table[:0]
        """What the previous step wrote, and the rows of its requests. Most steps have the shape of the one before."""

    def fill(self, table: Tensor) -> Tensor:
        """Copy the block table of a step into the buffer, and return a view of its requests' rows."""
        requests, width = shape = table.shape[0], table.shape[1]
        last_requests, last_width = self._filled
        if shape != self._filled:
            with torch.inference_mode(False):  # the views are kept for later steps: see `Planner`
                self._target, self._found = self._table[:requests, :width], self._table[:requests]
            self._filled = shape
        self._target.copy_(staged(table, self._device), non_blocking=True)
        # Clear what the previous step wrote and this one does not.
        if requests < last_requests:
            self._table[requests:last_requests, :last_width].fill_(-1)
        if width < last_width:
            self._table[:requests, width:last_width].fill_(-1)
        return self._found


def staged(value: Tensor, device: torch.device) -> Tensor:
    """A tensor in memory from which a copy to the device is asynchronous; tensors on a device are returned as they are.

    Host values go into a fresh pinned block, for the reason given in `Arena.stage`.
    """
    return value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
