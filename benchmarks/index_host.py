"""What `index_topk` costs the host per chunk, without a GPU: `python -m benchmarks.index_host`.

Calls are remembered and launched as on an H200, but tensors are on the host, and instead of `cuLaunchKernelEx` ctypes
calls a C function that does nothing. So this is the time of Python: the driver's, 5.4 us per launch on an H200's host,
comes on top. Time is that of the thread, so that other programs on the machine do not count.
"""

import ctypes
from collections.abc import Callable, Iterable
from statistics import median
from time import thread_time_ns
from unittest.mock import patch

import torch

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, SparseMLA
from tamis.ops import IndexInputs, index_topk
from tools import walk

TOKENS, PAGES, CHUNKS, ROUNDS, CALLS = 512, 16, (1, 2, 4, 8), 41, 100
LIMITS = (1, 2, 8)
"""The longest request that a planner admits, as a multiple of the one that runs."""


def selection(chunks: int) -> Callable[[], object]:
    """A call whose workspace makes so many chunks."""
    cache = PagedCache("index-fp8", PAGES, 64)
    q = torch.zeros(TOKENS, 64, 128, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    weights = torch.zeros(TOKENS, 64, dtype=torch.float32, device="cpu")
    ids = torch.zeros(TOKENS, dtype=torch.int32, device="cpu")
    table, lengths = torch.zeros(1, PAGES, dtype=torch.int32, device="cpu"), torch.full_like(ids, PAGES * 64)
    room = TOKENS // chunks * PAGES * 64 * 4
    return lambda: index_topk(q, weights, cache, ids, table, lengths, 64, workspace_bytes=room)


def prompt(limit: int) -> Callable[[], object]:
    """A call of a layer whose workspace holds the scores of the columns that its prompt needs, and no more."""
    spec, keys = LayerSpec(heads=16, scale=0.05, topk=256), PAGES * 64
    caches = Caches(PagedCache("v32-fp8", PAGES + 1, 64), PagedCache("index-fp8", PAGES + 1, 64))
    planner = Planner(spec, Limits(max_tokens=TOKENS, max_requests=1, max_length=limit * keys))
    plan = planner.plan(Batch.build([TOKENS], [keys], PagePool(PAGES + 1, 64)))
    q, kv, new = (
        torch.zeros(TOKENS, *shape, dtype=torch.bfloat16, device="cpu") for shape in ((16, 576), (576,), (128,))
    )
    queries = torch.zeros(TOKENS, 64, 128, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    index = IndexInputs(queries, torch.zeros(TOKENS, 64, dtype=torch.float32, device="cpu"), new)
    layer = SparseMLA(spec, index_workspace_bytes=4 * TOKENS * keys)
    return lambda: layer(q, kv, caches, plan, index=index)


def launches(calls: Iterable[Callable[[], object]]) -> list[int]:
    """How many CUDA C++ kernels each call launches once it is remembered, in a process that has launched none yet."""
    found: list[int] = []
    seen: list[object] = []

    def launch(*given: object) -> int:
        seen.append(given)
        return 0

    with walk.like_an_h200(), torch.no_grad(), patch.object(walk._Driver, "cuLaunchKernelEx", launch, create=True):
        for call in calls:
            for _ in range(3):
                seen.clear()
                call()
            found.append(len(seen))
    return found


def main() -> None:
    """Print microseconds per call, and of a chunk more."""
    # It compares its first two arguments, which differ, and returns 0 like a launch.
    nothing = ctypes.CDLL(None).pthread_equal
    with walk.like_an_h200(), torch.no_grad(), patch.object(walk._Driver, "cuLaunchKernelEx", nothing, create=True):
        calls = {f"{chunks} chunks": selection(chunks) for chunks in CHUNKS}
        calls |= {f"a layer for requests {limit} x as long": prompt(limit) for limit in LIMITS}
        for _ in range(2):
            for call in calls.values():
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                start = thread_time_ns()
                for _ in range(CALLS):
                    call()
                times[name].append((thread_time_ns() - start) / CALLS / 1000)
    for name, found in times.items():
        print(f"{name}: {median(found):.1f} us, least {min(found):.1f}")
    more = [(last - first) / 7 for first, last in zip(times["1 chunks"], times["8 chunks"], strict=True)]
    print(f"a chunk more: {median(more):.2f} us")


if __name__ == "__main__":
    main()
