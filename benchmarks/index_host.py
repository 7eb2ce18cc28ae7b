"""What `index_topk` costs the host per chunk, without a GPU: `python -m benchmarks.index_host`.

Calls are remembered and launched as on an H200, but tensors are on the host, and instead of `cuLaunchKernelEx` ctypes
calls a C function that does nothing. So this is the time of Python: the driver's, 5.4 us per launch on an H200's host,
comes on top. Time is that of the thread, so that other programs on the machine do not count.
"""

import ctypes
from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from unittest.mock import patch

import torch

from tamis import PagedCache
from tamis.ops import index_topk
from tools import walk

TOKENS, PAGES, CHUNKS, ROUNDS, CALLS = 512, 16, (1, 2, 4, 8), 41, 100


def selection(chunks: int) -> Callable[[], object]:
    """A call whose workspace makes so many chunks."""
    cache = PagedCache("index-fp8", PAGES, 64)
    q = torch.zeros(TOKENS, 64, 128, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    weights = torch.zeros(TOKENS, 64, dtype=torch.float32, device="cpu")
    ids = torch.zeros(TOKENS, dtype=torch.int32, device="cpu")
    table, lengths = torch.zeros(1, PAGES, dtype=torch.int32, device="cpu"), torch.full_like(ids, PAGES * 64)
    room = TOKENS // chunks * PAGES * 64 * 4
    return lambda: index_topk(q, weights, cache, ids, table, lengths, 64, workspace_bytes=room)


def main() -> None:
    """Print microseconds per call, and of a chunk more."""
    # It compares its first two arguments, which differ, and returns 0 like a launch.
    nothing = ctypes.CDLL(None).pthread_equal
    with walk.like_an_h200(), torch.no_grad(), patch.object(walk._Driver, "cuLaunchKernelEx", nothing, create=True):
        calls = {chunks: selection(chunks) for chunks in CHUNKS}
        for _ in range(2):
            for call in calls.values():
                call()
        times: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
        for _ in range(ROUNDS):
            for chunks, call in calls.items():
                start = thread_time_ns()
                for _ in range(CALLS):
                    call()
                times[chunks].append((thread_time_ns() - start) / CALLS / 1000)
    for chunks, found in times.items():
        print(f"{chunks} chunks: {median(found):.1f} us, least {min(found):.1f}")
    more = [(last - first) / 7 for first, last in zip(times[1], times[8], strict=True)]
    print(f"a chunk more: {median(more):.2f} us")


if __name__ == "__main__":
    main()
