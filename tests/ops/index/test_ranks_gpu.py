"""Selections over an NCCL group of one rank: captured in a CUDA graph, they are replayed with other inputs.

A group of one selects by itself, so these tests also run what several ranks run, collectives included.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from seeds import reseed

from tamis import PagedCache, Shard
from tamis.ops import index_topk
from tamis.ops.index.merge import merge, select_candidates
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.over_ranks import OverRanks
from tamis.ops.index.prepared import new_positions
from tamis.ops.index.sharing import place_parts, select_part

pytestmark = pytest.mark.gpu
HEADS, DIM, PAGE, K = 64, 128, 64, 512


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=device)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Step:
    """A chunk of a prefill, or decodes, whose inputs can be replaced where they are."""

    def __init__(self, tokens: int, requests: int, context: int) -> None:
        reseed(0)
        pages = context // PAGE
        self.tokens, self.requests, self.context = tokens, requests, context
        self.cache = PagedCache("index-fp8", requests * pages, PAGE, "cuda")
        self.q = torch.empty(tokens, HEADS, DIM, dtype=torch.float8_e4m3fn, device="cuda")
        self.weights = torch.empty(tokens, HEADS, device="cuda")
        self.ids = torch.arange(tokens, dtype=torch.int32, device="cuda") % requests
        self.table = torch.arange(requests * pages, dtype=torch.int32, device="cuda").view(requests, pages)
        self.lengths = torch.empty(tokens, dtype=torch.int32, device="cuda")
        self.draw()

    def draw(self) -> None:
        """Other keys, queries and lengths, some of them 0."""
        codes, scales = (self.cache.field(field) for field in (self.cache.layout.values, self.cache.layout.scales))
        codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, device="cuda") & 0xBF)  # no NaN
        scales.copy_(torch.rand(scales.shape, device="cuda") + 0.5)
        self.q.copy_(torch.randn(self.q.shape, device="cuda"))
        self.weights.copy_(torch.randn(self.weights.shape, device="cuda"))
        self.lengths.copy_(torch.randint(-1, self.context + 1, self.lengths.shape, device="cuda"))

    @property
    def given(self) -> tuple[Any, ...]:
        return (self.q, self.weights, self.cache, self.ids, self.table, self.lengths, K)

    def alone(self) -> torch.Tensor:
        return index_topk(*self.given)


def compare(step: Step, run: Callable[[], torch.Tensor]) -> None:
    """Against the plain call: eagerly, without waiting for the device, and replayed with other inputs."""
    assert torch.equal(run(), step.alone())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, step.alone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = run()
    for _ in range(3):
        step.draw()
        found.fill_(-7)
        graph.replay()
        assert torch.equal(found, step.alone())


STEPS = {"prefill": (203, 1, 4096), "decode": (24, 24, 2048), "one token": (1, 1, 1024)}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("shard", [None, Shard(1, 0, 16)], ids=["shared", "divided keys"])
def test_a_group_of_one(one: Any, name: str, shard: Shard | None) -> None:
    step = Step(*STEPS[name])
    compare(step, lambda: index_topk(*step.given, group=one, shard=shard, share="always"))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("workspace", [256 << 20, 200_000], ids=["at once", "in chunks"])
@pytest.mark.parametrize("shard", [None, Shard(1, 0, 16)], ids=["shared", "divided keys"])
def test_what_several_ranks_run(one: Any, name: str, shard: Shard | None, workspace: int) -> None:
    step, over = Step(*STEPS[name]), OverRanks(one, shard, "always")

    def run() -> torch.Tensor:
        out = new_positions(step.q, K)
        over.run(IndexTopk(*step.given, workspace, step.tokens, out, None, "auto"))
        return out

    compare(step, run)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_parts_make_the_whole(backend: str) -> None:
    """As eight ranks would have them, on the kernels of a GPU, whose order of summation a part must not change."""
    for sizes in STEPS.values():
        step = Step(*sizes)
        out = new_positions(step.q, K)
        call = IndexTopk(*step.given, 256 << 20, step.tokens, out, None, backend)
        for ranks in (2, 8):
            every = torch.stack([select_part(call, ranks, rank) for rank in range(ranks)])
            place_parts(call, every, 0)
            assert torch.equal(out, index_topk(*step.given, backend=backend))


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("interleave", [1, 64])
def test_divided_keys_merge_to_the_whole(backend: str, interleave: int) -> None:
    """As four ranks would have them: the scores of a key do not depend on where it lies."""
    step, size = Step(203, 1, 4096), 4
    values = [step.cache.field(field) for field in (step.cache.layout.values, step.cache.layout.scales)]
    every = []
    for rank in range(size):
        shard = Shard(size, rank, interleave)
        own = PagedCache("index-fp8", 4096 // PAGE // size, PAGE, "cuda")
        held = shard.global_positions(torch.arange(4096 // size, device="cuda"))
        for mine, field in zip(values, (own.layout.values, own.layout.scales), strict=True):
            room = own.field(field)
            room.copy_(mine.reshape(4096, -1)[held].view(room.shape))
        table = step.table[:, : 4096 // PAGE // size]
        given = (step.q, step.weights, own, step.ids, table, shard.local_lengths(step.lengths), K)
        call = IndexTopk(*given, 256 << 20, step.tokens, new_positions(step.q, K), None, backend)
        every.append(select_candidates(call, shard))
    merge(torch.stack(every), call.out)
    assert torch.equal(call.out, index_topk(*step.given, backend=backend))
