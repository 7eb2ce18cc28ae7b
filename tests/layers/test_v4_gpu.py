"""The V4 layer on a GPU: what the host gives, without waiting, and step after step from one captured graph."""

from dataclasses import replace

import pytest
import torch
from bounds import relative_error

from tamis import LayerSpec
from tamis.lab.verify.check import Target
from tamis.lab.verify.v4_layer import V4Served

pytestmark = pytest.mark.gpu
WINDOW = LayerSpec(8, 448, 64, 512, 512**-0.5, window=20, sink=True, kind="window")
PLAIN = replace(WINDOW, kind="plain", compress=16)
# Every entry is selected, so that no rounding decides which.
OVERLAPPING = replace(WINDOW, kind="overlapping", compress=4, topk=80, index_heads=32, index_dim=128)
BOUND = 2e-2


def both(spec: LayerSpec) -> tuple[V4Served, V4Served]:
    """The same weights and inputs on the host and on the GPU."""
    return tuple(V4Served(Target(torch.device(name)), spec, "v4-bf16") for name in ("cpu", "cuda"))


def run(host: V4Served, gpu: V4Served, new_tokens: list[int], padding: int = 0) -> None:
    plans = [served.plan(new_tokens, padding=padding) for served in (host, gpu)]
    hidden = [served.inputs(plan) for served, plan in zip((host, gpu), plans, strict=True)]
    assert torch.equal(*hidden)
    expected = host.layer(hidden[0], host.caches, plans[0])
    found = gpu.layer(hidden[1].cuda(), gpu.caches, plans[1])
    assert relative_error(found.cpu(), expected) < BOUND


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
def test_layer_agrees_with_the_host(spec: LayerSpec) -> None:
    host, gpu = both(spec)
    for new_tokens in ([70, 33, 1], [1, 1, 1], [1, 4, 60, 90], [4, 4, 4, 4]):
        run(host, gpu, new_tokens, padding=3)
    for name in ("window", "entries", "state", "index", "index_state"):
        ours, theirs = (getattr(served.caches, name) for served in (gpu, host))
        if ours is not None:
            every = torch.arange(ours.rows)
            assert relative_error(ours.read(every.cuda()).cpu(), theirs.read(every)) < BOUND


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
def test_a_captured_step_is_replayed_for_the_steps_after_it(spec: LayerSpec) -> None:
    host, gpu = both(spec)
    run(host, gpu, [70, 33, 15])
    run(host, gpu, [1, 1, 1], padding=2)
    plan = gpu.plan([1, 1, 1], padding=2)
    hidden = gpu.inputs(plan)
    host_plan = host.plan([1, 1, 1], padding=2)
    held = hidden.cuda()
    gpu.layer(held, gpu.caches, plan)  # kernels are compiled, which waits
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.layer(held, gpu.caches, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu.layer(held, gpu.caches, plan)
    expected = host.layer(host.inputs(host_plan), host.caches, host_plan)
    graph.replay()
    assert relative_error(out.cpu(), expected) < BOUND
    # 40 steps cross several entries of 16 tokens; plans write into the buffers that the graph reads.
    for _ in range(40):
        host_plan, plan = host.plan([1, 1, 1], padding=2), gpu.plan([1, 1, 1], padding=2)
        hidden = host.inputs(host_plan)
        assert torch.equal(hidden, gpu.inputs(plan))
        held.copy_(hidden)
        graph.replay()
        assert relative_error(out.cpu(), host.layer(hidden, host.caches, host_plan)) < BOUND
