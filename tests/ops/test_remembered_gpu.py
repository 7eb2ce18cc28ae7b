"""Remembered calls on a GPU: the same bits as those of calls that are not, in graphs, on other streams, in threads."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, Selection, SparseMLA
from tamis.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from tamis.ops import IndexInputs, attend, index_topk, memory, write_kv

pytestmark = pytest.mark.gpu
BF16, TOKENS, TOPK = torch.bfloat16, 5, 512
Door = Callable[[], list[Tensor]]


def doors(heads: int) -> dict[str, Door]:
    """One call of each function, over the same tensors."""
    where = torch.device("cuda")
    made = {"device": where, "dtype": BF16}
    spec = LayerSpec(heads=heads, scale=0.05, topk=TOPK, index_heads=16)
    planner = Planner(spec, Limits(max_tokens=16, max_requests=16, max_length=2048), where, mode="mixed")
    plan = planner.plan(Batch.build([1] * TOKENS, [1500] * TOKENS, PagePool(200, 64)))
    caches = Caches(PagedCache("v32-fp8", 200, 64, where), PagedCache("index-fp8", 200, 64, where))
    v4 = [PagedCache("v4-fp8", 40, 64, where) for _ in range(2)]
    for cache in (caches.latent, caches.index, *v4):
        rows = torch.randn(cache.rows, cache.layout.width, **made)
        write_kv(rows, cache, torch.arange(cache.rows, device=where))
    q, q4 = torch.randn(TOKENS, heads, 576, **made), torch.randn(TOKENS, heads, 512, **made)
    kv, listed = torch.randn(TOKENS, 576, **made), torch.randn(900, 1, 576, **made)
    inputs = IndexInputs(
        torch.randn(TOKENS, 16, 128, **made), torch.rand(TOKENS, 16, device=where), torch.randn(TOKENS, 128, **made)
    )
    positions = torch.randint(-1, 1500, (TOKENS, TOPK), dtype=torch.int32, device=where)
    slots = torch.randint(-1, 2000, (TOKENS, TOPK), dtype=torch.int32, device=where)
    sink, layer = torch.randn(heads, device=where), SparseMLA(spec)
    pages = [cache.storage.unsqueeze(2) for cache in (caches.latent, *v4)]
    given = (None, None, 512, None)
    extra = {"extra_k_cache": pages[2], "extra_indices_in_kvcache": slots.unsqueeze(1)}

    def written() -> list[Tensor]:
        write_kv(kv, caches.latent, plan.slots)
        return [caches.latent.storage.clone()]

    return {
        "attend": lambda: [*attend(q, Selection(caches.latent, slots), scale=0.05, value_dim=512, sink=sink)],
        "two selections": lambda: [
            *attend(q4, [Selection(v4[0], slots[:, :128]), Selection(v4[1], slots)], scale=0.05, value_dim=512)
        ],
        "write": written,
        "index": lambda: [
            index_topk(
                inputs.q, inputs.weights, caches.index, plan.request_ids, plan.block_table, plan.positions + 1, TOPK
            )
        ],
        "attend_positions": lambda: [
            *layer.attend_positions(q, caches.latent, positions, plan.request_ids, plan.block_table)
        ],
        "layer, positions": lambda: [*layer(q, kv, caches, plan, positions=positions)],
        "layer, index": lambda: [*layer(q, kv, caches, plan, index=inputs, sink=sink)],
        "decode": lambda: [
            *flash_mla_with_kvcache(q.unsqueeze(1), pages[0], *given, None, 0.05, False, True, slots.unsqueeze(1))
        ],
        "decode over two caches": lambda: [
            *flash_mla_with_kvcache(
                q4.unsqueeze(1), pages[1], *given, None, 0.05, False, True, slots.unsqueeze(1), sink, **extra
            )
        ],
        "prefill": lambda: [*flash_mla_sparse_fwd(q, listed, slots.unsqueeze(1), 0.05)],
    }


def equal(found: list[Any], expected: list[Any]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_remembered_calls_give_the_same_bits(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)  # memory is then allocated as in a program
    for name, door in doors(heads).items():
        with monkeypatch.context() as patch:
            patch.setattr(memory, "remembered_on", lambda tensor: False)
            expected = door()
        memory.forget_all()
        for _ in range(3):
            assert equal(door(), expected), name
        with torch.device("cuda"):
            assert equal(door(), expected), name
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = door()
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        assert equal(captured, expected), name
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = door()
        side.synchronize()
        assert equal(found, expected), name
        results: list[list[Tensor]] = []
        thread = threading.Thread(target=lambda door=door, results=results: results.append(door()))
        thread.start()
        thread.join()
        assert equal(results[0], expected), name


def test_unaligned_tensors_are_as_right_as_aligned_ones() -> None:
    """Signatures have no addresses; kernels that need alignment are not launched without it."""
    where = torch.device("cuda")
    cache = PagedCache("v32-fp8", 20, 64, where)
    rows = torch.randn(cache.rows, 576, device=where, dtype=BF16)
    write_kv(rows, cache, torch.arange(cache.rows, device=where))
    for offset in (0, 1, 4, 8):
        room = torch.zeros(TOKENS * 16 * 576 + offset, device=where, dtype=BF16)[offset:]
        q = room.view(TOKENS, 16, 576).normal_()
        lists = torch.zeros(TOKENS * TOPK + offset, device=where, dtype=torch.int32)[offset:].view(TOKENS, TOPK)
        lists.random_(0, cache.rows)
        for _ in range(3):
            found = attend(q, Selection(cache, lists), scale=0.05, value_dim=512)
            expected = attend(q.clone(), Selection(cache, lists.clone()), scale=0.05, value_dim=512)
            assert equal([*found], [*expected])
