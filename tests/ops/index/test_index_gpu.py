"""The fused selection at the size it was made for: 16K query tokens over a million keys, in bounded memory."""

import pytest
import torch
from seeds import reseed

from tamis import PagedCache
from tamis.ops import index_topk

WORKSPACE = 256 << 20
SLACK = 64 << 20
"""Bytes for what is neither output nor workspace: the allocator's rounding."""


def choose(tokens: int, context: int, k: int, device: str) -> None:
    """Random keys and queries; some tokens again by themselves must select the same."""
    reseed(0)
    cache = PagedCache("index-fp8", context // 64, 64, device)
    codes = cache.field(cache.layout.values)
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=device) & 0xBF)  # no NaN
    scales = cache.field(cache.layout.scales)
    scales.copy_(torch.rand(scales.shape, device=device) + 0.5)
    q = torch.randn(tokens, 64, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, 64, device=device)
    ids = torch.zeros(tokens, dtype=torch.int32, device=device)
    table = torch.arange(context // 64, dtype=torch.int32, device=device).unsqueeze(0)
    lengths = torch.arange(context - tokens + 1, context + 1, dtype=torch.int32, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = index_topk(q, weights, cache, ids, table, lengths, k, workspace_bytes=WORKSPACE)
    if device == "cuda":
        used = torch.cuda.max_memory_allocated() - before
        assert used <= WORKSPACE + found.numel() * found.element_size() + SLACK, used
    assert found.shape == (tokens, k)
    assert (found[:, 1:] > found[:, :-1]).all()
    assert (found[:, -1] < lengths).all()
    for t in (0, tokens // 2, tokens - 1):
        one = slice(t, t + 1)
        alone = index_topk(q[one], weights[one], cache, ids[one], table, lengths[one], k)
        assert torch.equal(alone, found[one])


def test_a_small_one_on_the_host() -> None:
    choose(20, 256, 16, "cpu")


@pytest.mark.gpu
def test_sixteen_thousand_tokens_over_a_million_keys() -> None:
    choose(16 * 1024, 1 << 20, 2048, "cuda")
