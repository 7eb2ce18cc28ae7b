"""What one call costs the host, counted and timed on a machine without a GPU: launches are stubs.

`pretended_h200` makes tamis choose an H200's kernels, and gives Triton a driver that launches nothing. What surrounds a
launch runs: checks, allocations, small torch operations on CPU tensors, and what Triton does in Python to find its
compiled kernel. The driver's own time for a launch (5 to 7 us) is missing, and small operations take other times than
on a GPU, so that counts say more than times. Times are those of the thread, not of the clock, since others may share
the machine.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tamis.cuda import launch as cuda_launch
from tamis.ops import memory
from tools import walk

CALLS, ROUNDS = 20, 41
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


@dataclass(frozen=True)
class Profile:
    """One call, warm."""

    functions: int
    """Python functions."""
    launches: int
    """Kernels of tamis, of Triton and of an engine's extension."""
    operations: int
    """torch operations that would launch a kernel or copy on a GPU."""
    allocations: int
    views: int
    us: float
    """The median of a call that the library has seen before."""
    first_us: float
    """The median of the first call of its shapes, as each chunk of a prompt may be."""


class Launches:
    """Counts launches."""

    count = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.count += 1


class _Counted(TorchDispatchMode):
    """Counts torch operations by kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if args and found is args[0] and not func._schema.is_mutable:
            return found  # a conversion of what needs none
        if func.__name__.partition(".")[0] in ALLOCATIONS:
            self.kinds["allocations"] += 1
        elif not func._schema.is_mutable and _shares_memory(found, args):
            self.kinds["views"] += 1
        else:
            self.kinds["operations"] += 1
        return found


def _shares_memory(found: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a result is a view of one of the arguments."""
    result = found[0] if isinstance(found, list | tuple) and found else found
    if not isinstance(result, torch.Tensor):
        return True  # a question about a tensor
    held = result.untyped_storage().data_ptr()
    return any(isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() == held for one in arguments)


class _Kernel:
    """A compiled Triton kernel that runs nothing."""

    function, packed_metadata = 0, (4, 1, 0)

    def __init__(self, launches: Launches) -> None:
        self.run = launches

    def launch_metadata(self, *_: Any) -> None:
        return None


class _Driver:
    """A driver for Triton that says it is an H200."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def pretended_h200() -> Iterator[Launches]:
    """Within it, launches are counted and do nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches, run = Launches(), JITFunction.run

    def compiled(self: Any, key: Any, signature: Any, device: Any, *_: Any) -> _Kernel:
        kernel = _Kernel(launches)
        self.device_caches[device][0][key] = kernel
        return kernel

    class Cuda(walk._Driver):
        def cuLaunchKernelEx(self, *_: Any) -> int:
            launches.count += 1
            return 0

    with walk.like_an_h200():
        active = driver._active
        driver.set_active(_Driver())
        with (
            patch.object(JITFunction, "run", run),
            patch.object(JITFunction, "_do_compile", compiled),
            patch.object(cuda_launch, "driver", lambda: cuda_launch.Driver(Cuda())),
        ):
            try:
                yield launches
            finally:
                driver._active = active


def functions_of(run: Callable[[], object]) -> list[str]:
    """The Python functions that a function calls, directly and by way of others."""
    found: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            found.append(f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}")

    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[1:]


def median_us(run: Callable[[], object], calls: int, prepare: Callable[[int], None]) -> float:
    """The median time of a call. `prepare` runs before each round, outside of the time."""
    times = []
    for _ in range(ROUNDS):
        prepare(calls)
        start = time.thread_time_ns()
        for _ in range(calls):
            run()
        times.append((time.thread_time_ns() - start) / calls / 1e3)
    return statistics.median(times)


def profile(run: Callable[[], object], launches: Launches, prepare: Callable[[int], None]) -> Profile:
    """Count and time a call. `prepare` readies as many calls as it is told."""

    def forget(calls: int) -> None:
        memory.forget_all()
        prepare(calls)

    prepare(5)
    for _ in range(3):
        run()
    functions, before = functions_of(run), launches.count
    with _Counted() as counted:
        run()
    launched, kinds = launches.count - before, counted.kinds
    return Profile(
        len(functions),
        launched,
        kinds["operations"],
        kinds["allocations"],
        kinds["views"],
        median_us(run, CALLS, prepare),
        median_us(run, 1, forget),
    )
