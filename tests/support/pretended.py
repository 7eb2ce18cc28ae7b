"""Host tensors that count as those of an H200: calls are remembered, launches are recorded and run nothing.

The real code runs up to the driver, `cuLaunchKernelEx`, and up to Triton's compiled kernels. `Pretended.launches` has
an entry for each launch, with all parameters by name. Addresses are replaced by the names of the tensors that a test
has named, or by "new" for memory that the call allocated.
"""

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tamis import backends, checks
from tamis.cuda import device, launch, tile_map
from tamis.cuda.params import field_places, params_format
from tamis.ops import library, memory
from tamis.ops.attention.hopper import few_heads, many_heads, splits
from tamis.ops.index import scoring
from tamis.ops.index.hopper import scores, topk, topk_rows
from tamis.ops.select import triton_kernels as select_kernels
from tamis.ops.translate import triton_kernels as translate_kernels
from tamis.ops.write import triton_kernels as write_kernels

SMS = 132
STREAM = 0x700


class Launched(NamedTuple):
    """One launch."""

    kernel: str
    grid: tuple[int, ...]
    params: dict[str, Any]


class Cuda:
    """The driver."""

    def __init__(self, seen: Callable[[str, tuple[int, ...], dict[str, Any]], None]) -> None:
        self.seen, self.functions, self.params = seen, {}, {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def cuDeviceGetAttribute(self, value: Any, *given: Any) -> int:
        value._obj.value = 232448
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 0x1000 + len(self.functions)
        self.functions[function._obj.value] = name.decode()
        return 0

    def cuTensorMapEncodeTiled(self, made: Any, kind: int, rank: int, address: Any, *shape: Any) -> int:
        ctypes.memmove(made.value, struct.pack("P", address.value), struct.calcsize("P"))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        params = self.params[function.value]
        letters = f"@{params_format(params).letters}"
        packed = ctypes.string_at(pointers[0], struct.calcsize(letters))
        values = struct.unpack(letters, packed)
        places = field_places(params)
        named = {
            name: Pointed(value) if place.letter == "P" else value
            for (name, place), value in zip(places.items(), values, strict=True)
        }
        for second in pointers[1:]:
            named["map"] = Pointed(ctypes.c_void_p.from_address(second).value)
        assert config._obj.stream == STREAM
        self.seen(self.functions[function.value], tuple(config._obj.grid), named)
        return 0


class Pointed(int):
    """An address."""


class TritonKernel:
    """A Triton kernel that is never compiled. It says what it is launched with, by way of Triton or of its launcher."""

    def __init__(self, kernel: Any, seen: Callable[[str, tuple[int, ...], dict[str, Any]], None]) -> None:
        self.name, self.arg_names, self.seen = kernel.fn.__name__, kernel.arg_names, seen
        self.by_triton, self.pointers = 0, set()
        self.function, self.packed_metadata = 0x2000, (4, 1, 0)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*values: Any, **named: Any) -> "TritonKernel":
            self.by_triton += 1
            self._see((*grid, *(1,) * (3 - len(grid))), dict(zip(self.arg_names, values, strict=False)) | named)
            return self

        return launched

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: Any, *rest: Any) -> None:
        assert (stream, function, metadata, rest[:3]) == (STREAM, 0x2000, self.packed_metadata, (None,) * 3)
        self._see((x, y, z), dict(zip(self.arg_names, rest[3:], strict=True)))

    def _see(self, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        params = {}
        for name in self.arg_names:  # without num_warps and other options
            value = given[name]
            if hasattr(value, "data_ptr"):
                self.pointers.add(name)
                value = value.data_ptr()
            params[name] = Pointed(value) if name in self.pointers and value is not None else value
        self.seen(self.name, grid, params)


class Pretended:
    """What was launched, and the settings of a pretended device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: list[Launched] = []
        self.remembers = True
        fake = Cuda(self._see)
        initialise = launch.Launch.__init__

        def register(made: launch.Launch, kernel: launch.Kernel, params: type, **options: Any) -> None:
            fake.params[kernel.function.value] = params
            initialise(made, kernel, params, **options)

        monkeypatch.setattr(launch.Launch, "__init__", register)
        for module in (launch, tile_map):
            monkeypatch.setattr(module, "driver", lambda: launch.Driver(fake))
        monkeypatch.setattr(launch, "compiled", lambda *given, **options: b"")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 0))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        monkeypatch.setattr(backends.Backend, "device_refusals", lambda *given: [])
        monkeypatch.setattr(checks, "visible", lambda tensor: False)
        monkeypatch.setattr(memory, "remembered_on", lambda tensor: self.remembers and tensor.device.type == "cpu")
        for module in (few_heads, many_heads, scores, topk, scoring, device):
            monkeypatch.setattr(module, "sm_count", lambda where: SMS)
        self.triton = {}
        for module, name in (
            (write_kernels, "write_rows"),
            (scoring, "score_keys"),
            (translate_kernels, "translate_rows"),
            (select_kernels, "window_rows"),
            (select_kernels, "entry_rows"),
        ):
            self.triton[name] = TritonKernel(getattr(module, name), self._see)
            monkeypatch.setattr(module, name, self.triton[name])
            monkeypatch.setattr(module, "can_prepare", lambda kernel: True)
        self.forget()

    def _see(self, kernel: str, grid: tuple[int, ...], params: dict[str, Any]) -> None:
        self._seen.append(Launched(kernel, grid, params))

    def forget(self) -> None:
        """Forget all calls, and all that depends on this device."""
        for cached in (few_heads._launch, many_heads._launch, splits._merge_launch, launch.kernel):
            cached.cache_clear()
        for cached in (scores._launch, topk._launch, tile_map.tile_map):
            cached.cache_clear()
        for cached in (library._module, few_heads.plan_launch, topk._planned, topk_rows.launch):
            cached.cache_clear()
        memory.forget_all()

    def launches(self, **named: Tensor | None) -> list[Launched]:
        """The launches since the last time, with addresses as (name of a tensor, offset), "new" or 0."""
        found, self._seen = self._seen, []
        return [one._replace(params={n: _named(v, named) for n, v in one.params.items()}) for one in found]


def _named(value: Any, named: dict[str, Tensor | None]) -> Any:
    if not isinstance(value, Pointed) or value == 0:
        return 0 if isinstance(value, Pointed) else value
    for name, tensor in named.items():
        if tensor is not None:
            begin = tensor.data_ptr()
            if begin <= value < begin + max(1, checks.reach(tensor)):
                return name, value - begin
    return "new"
