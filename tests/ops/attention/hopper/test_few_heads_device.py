"""Attention of few heads in CUDA C++, on a device."""

import pytest
import torch
from attention_calls import attend_call
from few_heads_rows import KINDS, SCALE, filled
from seeds import reseed
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.lab.testing import oracle
from tamis.ops.attention.hopper import few_heads


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "dtype"), KINDS)
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 100])
@pytest.mark.parametrize(("tokens", "splits"), [(3, None), (3, 1), (3, 7), (300, None)])
def test_the_device_computes_attention(
    heads: int, mode: str, dtype: torch.dtype, tokens: int, splits: int | None
) -> None:
    reseed(heads)
    host = filled(1000, 61, gap=48, mode=mode, spread=8.0)
    slots = torch.randint(-5, 1010, (tokens, 333), dtype=torch.int32)
    lengths = torch.randint(0, 334, (tokens,), dtype=torch.int32)
    lengths[:2] = torch.tensor([333, 0])
    q, sink = torch.randn(tokens, heads, 576).to(dtype), torch.randn(heads)
    wanted, wanted_lse = oracle.attend(q, [Selection(host, slots, lengths)], scale=SCALE, value_dim=512, sink=sink)
    whole = host.storage.untyped_storage().nbytes() // host.storage.itemsize
    raw = host.storage.as_strided((whole,), (1,), 0).cuda()
    cache = PagedCache.wrap(raw.as_strided(host.storage.shape, host.storage.stride()), host.layout)
    out = torch.empty(tokens, heads, 512, device="cuda")
    lse, _ = few_heads.attend(
        attend_call(
            q.cuda(),
            [Selection(cache, slots.cuda(), lengths.cuda())],
            scale=SCALE,
            splits=splits,
            sink=sink.cuda(),
            out=out,
        )
    )
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, empty)
    assert torch.allclose(lse.cpu()[~empty].double(), wanted_lse[~empty], atol=2e-3, rtol=1e-5)
    norm = wanted.unflatten(2, (4, 128)).norm(dim=3)
    error = (out.cpu() - wanted).unflatten(2, (4, 128)).norm(dim=3)
    assert (error <= 1.5e-3 * norm + 1e-30).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["pow2", "bf16"])
def test_a_captured_launch_sees_new_slots_lengths_and_queries(mode: str) -> None:
    cache = filled(640, 64, mode=mode)
    cache = PagedCache.wrap(cache.storage.cuda(), cache.layout)
    q = torch.randn(40, 16, 576, device="cuda").bfloat16()
    slots = torch.zeros(40, 200, dtype=torch.int32, device="cuda")
    lengths = torch.full((40,), 200, dtype=torch.int32, device="cuda")
    selection, out = Selection(cache, slots, lengths), torch.empty(40, 16, 512, device="cuda", dtype=torch.bfloat16)

    def run(into: Tensor) -> None:
        few_heads.attend(attend_call(q, [selection], scale=SCALE, splits=None, sink=None, out=into))

    run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(out)
    for _ in range(3):
        slots.random_(-3, 650)
        lengths.random_(0, 201)
        q.normal_()
        graph.replay()
        wanted = torch.empty_like(out)
        run(wanted)
        assert torch.equal(out, wanted)
