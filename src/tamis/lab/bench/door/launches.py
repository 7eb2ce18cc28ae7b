"""How many kernels and copies a call puts on the device."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from tamis.cuda.launch import driver

KERNEL, COPY, FILL = 0, 1, 2
"""The driver's types of graph nodes: `CU_GRAPH_NODE_TYPE_KERNEL`, `_MEMCPY` and `_MEMSET`."""


class Launches(NamedTuple):
    """What one call starts on the device."""

    kernels: int
    copies: int
    """Copies and fills of memory."""


def count_launches(call: Callable[[], object], device: torch.device, *, capturable: bool) -> Launches | None:
    """The launches of one call; None on a CPU.

    A call that can be captured is captured, and the nodes of its graph are counted. A profiler would count them too,
    but it slows all later launches of the process.
    """
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    return _captured(call) if capturable else _profiled(call)


def _captured(call: Callable[[], object]) -> Launches | None:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    try:
        types = node_types(graph.raw_cuda_graph())
    except (AttributeError, RuntimeError):  # an older torch or driver: the times are worth more than the count
        return None
    return Launches(types.count(KERNEL), types.count(COPY) + types.count(FILL))


def node_types(graph: int) -> list[int]:
    """The types of the nodes of a graph, by its handle in the driver."""
    api, handle, count = driver(), ctypes.c_void_p(graph), ctypes.c_size_t(0)
    api.call("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    api.call("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    found = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        api.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        found.append(kind.value)
    return found


def _profiled(call: Callable[[], object]) -> Launches | None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or () if event.device_type.name == "CUDA"]
    if not names:  # the profiler has no access to the device's counters here
        return None
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return Launches(len(names) - copies, copies)
