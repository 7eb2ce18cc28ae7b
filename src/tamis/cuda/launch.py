"""Cubins on a device: load a kernel once, prepare a launch once, then launch in a few microseconds.

A launch goes to the current torch stream, waits for nothing and allocates nothing, so it can be captured in a CUDA
graph. Loading may happen inside a capture as well.
"""

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tamis.arithmetic import round_up
from tamis.cuda.compiler import Program, architecture, compiled
from tamis.cuda.device import current_stream
from tamis.cuda.params import field_places, params_format

if TYPE_CHECKING:
    from tamis.cuda.tile_map import TileMap

# Constants of cuda.h.
SHARED_PER_BLOCK_OPTIN = 97
FUNCTION_STATIC_SHARED = 1
FUNCTION_MAX_DYNAMIC_SHARED = 8
FUNCTION_SHARED_CARVEOUT = 9
FUNCTION_NON_PORTABLE_CLUSTER = 14
LAUNCH_CLUSTER = 4
LAUNCH_PROGRAMMATIC_SERIALIZATION = 6
CAPTURE_RELAXED = 2
INVALID_CONTEXT, INVALID_HANDLE = 201, 400

PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
"""The largest cluster that every GPU with clusters can run, and the largest that any can."""
PLAIN_SHARED = 48 * 1024
"""Bytes of shared memory that a CTA gets without opting in to more."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier, padded to 8 bytes, and 64 bytes whose meaning depends on it."""

    _fields_ = (("name", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class Driver:
    """The CUDA driver's C interface; a status other than success is raised as an error."""

    def __init__(self, library: Any) -> None:
        """Wrap the loaded library `libcuda`."""
        self.library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function and check its status."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise self.error(name, status)

    def error(self, name: str, status: int) -> RuntimeError:
        """The error for a status other than success."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(status, ctypes.byref(text))
        return RuntimeError(f"{name} failed with CUDA status {status}: {(text.value or b'unknown').decode()}")

    @contextmanager
    def within(self, context: ctypes.c_void_p) -> Iterator[None]:
        """Make a context current in this thread, and allow every driver call during captures in other threads."""
        mode = ctypes.c_int(CAPTURE_RELAXED)
        self.call("cuCtxPushCurrent_v2", context)
        # The thread's own context is restored whatever fails, or torch would continue in this one.
        try:
            self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@cache
def driver() -> Driver:
    """The CUDA driver of this machine."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ImportError("CUDA C++ kernels need NVIDIA's driver, libcuda.so.1, which was not found") from error
    made = Driver(library)
    made.call("cuInit", 0)
    return made


class Kernel:
    """A function of a cubin, loaded on one device. The module stays loaded until the process ends."""

    def __init__(self, api: Driver, cubin: bytes, function: str, device: int) -> None:
        """Load the function, and allow it all the shared memory that a CTA on this device may have."""
        self.driver, self.device = api, device
        self.context, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        module, handle = ctypes.c_void_p(), ctypes.c_int()
        shared_limit, static_shared = ctypes.c_int(), ctypes.c_int()
        api.call("cuDeviceGet", ctypes.byref(handle), device)
        # The primary context is the one that torch uses.
        api.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), handle)
        api.call("cuDeviceGetAttribute", ctypes.byref(shared_limit), SHARED_PER_BLOCK_OPTIN, handle)
        with api.within(self.context):
            api.call("cuModuleLoadData", ctypes.byref(module), cubin)
            try:
                api.call("cuModuleGetFunction", ctypes.byref(self.function), module, function.encode())
                api.call("cuFuncGetAttribute", ctypes.byref(static_shared), FUNCTION_STATIC_SHARED, self.function)
                self.shared_limit = shared_limit.value - static_shared.value
                self.set_attribute(FUNCTION_MAX_DYNAMIC_SHARED, self.shared_limit)
            except BaseException:
                api.library.cuModuleUnload(module)
                raise

    def set_attribute(self, attribute: int, value: int) -> None:
        """Change how the function may be launched."""
        self.driver.call("cuFuncSetAttribute", self.function, attribute, value)


@cache
def kernel(program: Program, function: str, device: int, folder: Path | None = None) -> Kernel:
    """A function of a program, compiled for a device and loaded there, once."""
    arch = architecture(torch.cuda.get_device_capability(device))
    return Kernel(driver(), compiled(program, arch, folder=folder), function, device)


class Launch:
    """A kernel that is ready to launch: call it with a grid and parameters."""

    def __init__(
        self,
        kernel: Kernel,
        params: type[tuple[Any, ...]],
        *,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        overlap: bool = False,
        mapped: bool = False,
    ) -> None:
        """Prepare launches of a kernel.

        Args:
            kernel: the kernel to launch; its parameter is a struct.
            params: the NamedTuple that describes the struct (see `tamis.cuda.params`).
            threads: threads per CTA.
            shared: bytes of dynamic shared memory per CTA.
            cluster: CTAs per cluster, along the grid's first axis.
            overlap: programmatic dependent launch (PDL): start while the kernel before it in the stream still runs;
                the kernel itself must execute `griddepcontrol.wait` before it reads what the previous one writes.
            mapped: whether the kernel has a second parameter, a `TileMap`, which every launch gives.
        """
        if shared > kernel.shared_limit:
            raise ValueError(f"shared must be at most {kernel.shared_limit} on this device, got {shared}")
        self.kernel, self.params, self.mapped, self._cluster = kernel, params, mapped, cluster
        self._launch = kernel.driver.library.cuLaunchKernelEx
        self._get_current = kernel.driver.library.cuCtxGetCurrent
        self._block, self._shared = (ctypes.c_uint * 3)(threads, 1, 1), shared
        self._attributes = []
        if cluster > 1:
            self._attributes.append(_Attribute(LAUNCH_CLUSTER, (ctypes.c_uint32 * 16)(cluster, 1, 1)))
        if overlap:
            self._attributes.append(_Attribute(LAUNCH_PROGRAMMATIC_SERIALIZATION, (ctypes.c_uint32 * 16)(1)))
        with kernel.driver.within(kernel.context):
            if shared > PLAIN_SHARED:
                kernel.set_attribute(FUNCTION_SHARED_CARVEOUT, 100)
            if cluster > PORTABLE_CLUSTER:
                kernel.set_attribute(FUNCTION_NON_PORTABLE_CLUSTER, 1)
        self._own = threading.local()

    def __call__(self, grid: tuple[int, int, int], params: tuple[Any, ...], tile_map: "TileMap | None" = None) -> None:
        """Launch on the current stream of the kernel's device."""
        try:
            memory = self._own.memory
        except AttributeError:
            memory = self._own.memory = _Memory(self)
        memory.pack(params)
        if self.mapped:
            memory.pointers[1] = _address(tile_map)
        memory.config.grid[:] = grid
        memory.config.stream = current_stream(self.kernel.device)
        current = ctypes.c_void_p()
        self._get_current(ctypes.byref(current))
        if current.value == self.kernel.context.value:
            status = self._launch(memory.reference, self.kernel.function, memory.pointers, None)
        else:
            status = self._launch_within(memory)
        if status:
            raise self.kernel.driver.error("cuLaunchKernelEx", status)

    def active_clusters(self) -> int:
        """How many clusters of this launch the device runs at a time; 0 if it can run none of this size."""
        memory, found = _Memory(self), ctypes.c_int()
        memory.config.grid[:] = (self._cluster, 1, 1)  # grids are whole clusters
        with self.kernel.driver.within(self.kernel.context):
            query = self.kernel.driver.library.cuOccupancyMaxActiveClusters
            status = query(ctypes.byref(found), self.kernel.function, memory.reference)
        return 0 if status else found.value

    def prepared(
        self,
        grid: tuple[int, int, int],
        params: tuple[Any, ...],
        addresses: Sequence[str],
        factor: str | None = None,
    ) -> "PreparedLaunch":
        """A launch with this grid and these parameters, except for some that each launch gives.

        Args:
            grid: the grid.
            params: the parameters.
            addresses: names of fields that are addresses, as in `field_places`.
            factor: name of a field that is a float.
        """
        return PreparedLaunch(self, grid, params, addresses, factor)

    def _launch_within(self, memory: "_Memory") -> int:
        """Launch where this thread has not used the device yet, or another device is current."""
        with self.kernel.driver.within(self.kernel.context):
            status: int = self._launch(memory.reference, self.kernel.function, memory.pointers, None)
        return status


class _Memory:
    """The memory that a launch passes to the driver. Each thread has its own, since several may launch at once."""

    def __init__(self, launch: Launch) -> None:
        letters, self._plain, self._nested = params_format(launch.params)
        packing = struct.Struct(f"@{letters}")
        self._pack_into = packing.pack_into
        self.params = ctypes.create_string_buffer(round_up(packing.size, 8))  # can be seen as words
        self.pointers = (ctypes.c_void_p * (1 + launch.mapped))(ctypes.addressof(self.params))
        count = len(launch._attributes)
        self.attributes = (_Attribute * max(1, count))(*launch._attributes)
        self.config = _Config(
            block=launch._block, shared=launch._shared, attributes=self.attributes, attribute_count=count
        )
        self.reference = ctypes.byref(self.config)

    def pack(self, params: tuple[Any, ...]) -> None:
        """Pack all parameters."""
        if not self._nested:
            self._pack_into(self.params, 0, *params)
            return
        values = [*params[: self._plain]]
        for nested in params[self._plain :]:
            values += nested
        self._pack_into(self.params, 0, *values)


def _address(tile_map: "TileMap | None") -> int:
    """Where the second parameter of a kernel with a map is. The driver copies it at the launch."""
    if tile_map is None:
        raise TypeError("this kernel needs a tile map")
    return tile_map.address


class PreparedLaunch:
    """A launch whose grid and parameters are known, except for addresses and perhaps one factor: call it with these.

    Each thread packs the parameters once; after that, a launch writes only what changes.
    """

    def __init__(
        self,
        launch: Launch,
        grid: tuple[int, int, int],
        params: tuple[Any, ...],
        addresses: Sequence[str],
        factor: str | None,
    ) -> None:
        """See `Launch.prepared`."""
        places = field_places(launch.params)
        self._launch, self._grid, self._params = launch, grid, params
        self._run, self._function, self._mapped = launch._launch, launch.kernel.function, launch.mapped
        self._words = [places[name].number for name in addresses]
        self._factor = None if factor is None else places[factor].number
        wrong = [name for name in addresses if places[name].letter != "P"]
        if wrong or (factor is not None and places[factor].letter != "f"):
            raise TypeError(f"addresses must be pointers and factor a float, got {wrong or factor}")
        self._own = threading.local()

    def __call__(
        self, stream: int, addresses: Sequence[int], factor: float = 0.0, tile_map: "TileMap | None" = None
    ) -> None:
        """Launch on a stream, given by its handle, of the kernel's device, which must be the current one."""
        try:
            words, floats, config, reference, pointers, memory = self._own.memory
        except AttributeError:
            words, floats, config, reference, pointers, memory = self._prepare()
        for word, address in zip(self._words, addresses, strict=True):
            words[word] = address
        if self._factor is not None:
            floats[self._factor] = factor
        if self._mapped:
            pointers[1] = _address(tile_map)
        config.stream = stream
        status = self._run(reference, self._function, pointers, None)
        if status:
            self._try_again(status, memory)

    def _prepare(self) -> "tuple[memoryview[int], memoryview[float], _Config, Any, Any, _Memory]":
        memory = _Memory(self._launch)
        memory.pack(self._params)
        memory.config.grid[:] = self._grid
        # A buffer that is an array of characters can be cast to other types only by way of bytes.
        raw = memoryview(memory.params).cast("B")
        words, floats = raw.cast("P"), raw.cast("f")
        self._own.memory = found = words, floats, memory.config, memory.reference, memory.pointers, memory
        return found

    def _try_again(self, status: int, memory: _Memory) -> None:
        """The driver has refused a launch. A thread that has used no device yet has no context, although the device is
        the current one, and another library may have made its own context current."""
        if status in (INVALID_CONTEXT, INVALID_HANDLE):
            status = self._launch._launch_within(memory)
        if status:
            raise self._launch.kernel.driver.error("cuLaunchKernelEx", status)
