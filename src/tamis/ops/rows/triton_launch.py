"""Launches of Triton kernels whose arguments are known, except for addresses.

`kernel[grid](...)` examines every argument of every launch to find the compiled kernel: whether a number is 1 or a
multiple of 16, whether an address is a multiple of 16, dtypes, constants. That takes longer than the launch itself. A
`TritonLaunch` lets Triton do it once for each alignment of the addresses, since everything else stays the same, and
then calls the compiled kernel.
"""

from collections.abc import Sequence
from functools import cache
from inspect import getsource
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from tamis.ops.rows.triton_rows import launching_on

LAUNCHING = """kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"""
"""How Triton itself calls a compiled kernel, which is not a documented interface. Where its source says something else,
every launch goes through `kernel[grid]`."""


class Address:
    """Stands for a tensor among the arguments of a Triton kernel."""

    __slots__ = ("_address", "dtype")

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        """Remember what Triton asks for."""
        self.dtype, self._address = dtype, address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


def can_prepare(kernel: object) -> bool:
    """Whether launches of a kernel can be prepared: not in Triton's interpreter, which needs tensors, and not for AMD's
    devices, where the size of a tensor matters too."""
    return isinstance(kernel, JITFunction) and torch.version.hip is None


class TritonLaunch:
    """A launch of a Triton kernel, prepared for arguments that differ in their addresses only."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], changing: Sequence[str], **options: int
    ) -> None:
        """Prepare a launch.

        Args:
            kernel: the kernel.
            grid: its grid.
            arguments: all arguments by name. The tensors among them are not kept.
            changing: names of arguments whose addresses each launch gives, in this order. All tensors are among them.
            **options: Triton's options, such as `num_warps`.
        """
        self._kernel, self._options = kernel, options
        self._grid = (*grid, *(1,) * (3 - len(grid)))
        self._names: list[str] = kernel.arg_names
        self._dtypes = {name: value.dtype for name, value in arguments.items() if isinstance(value, Tensor)}
        if left := self._dtypes.keys() - set(changing):
            raise ValueError(f"changing must name all tensors, got none of {sorted(left)}")
        self._device = arguments[changing[0]].device
        self._changing = [(self._names.index(name), self._dtypes[name]) for name in changing]
        self._places = [place for place, _ in self._changing]
        self._values = [None if name in self._dtypes else arguments[name] for name in self._names]
        self._compiled: dict[tuple[bool, ...], Any] = {}

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on the current stream, whose handle is given, of the current device."""
        together = 0
        for address in addresses:
            together |= address
        compiled = self._compiled.get(tuple([address & 15 == 0 for address in addresses]) if together & 15 else ())
        if compiled is None or _watched():
            self._launch_by_triton(addresses)
            return
        values = self._values.copy()
        for place, address in zip(self._places, addresses, strict=True):
            values[place] = address
        run, function, metadata = compiled
        run(*self._grid, stream, function, metadata, None, None, None, *values)

    def _launch_by_triton(self, addresses: Sequence[int]) -> None:
        values = self._values.copy()
        for (place, dtype), address in zip(self._changing, addresses, strict=True):
            values[place] = Address(dtype, address)
        with launching_on(self._device):
            found = self._kernel[self._grid](*values, **self._options)
        if found is not None and _launches_as_expected():
            aligned = tuple(address & 15 == 0 for address in addresses)
            self._compiled[() if all(aligned) else aligned] = found.run, found.function, found.packed_metadata


def _watched() -> bool:
    """Whether a profiler wants to see launches. Triton keeps its hooks in a chain; older versions had one or None."""
    runtime = triton.knobs.runtime
    begin, end = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(begin, "calls", begin) or getattr(end, "calls", end))


@cache
def _launches_as_expected() -> bool:
    """Whether Triton calls compiled kernels as this module does."""
    try:
        source = getsource(JITFunction.run)
    except (OSError, TypeError):
        return False
    return "".join(LAUNCHING.split()) in "".join(source.split())
