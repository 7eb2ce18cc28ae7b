"""Compression under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from guarded import Guards
from hostile import LOWEST, distinct, hostile, on_host
from torch import Tensor

from tamis import PagedCache
from tamis.cache.codec import write_rows
from tamis.cache.layout import compressor_state
from tamis.lab.testing import oracle
from tamis.ops.compress import reference as compress_reference
from tamis.ops.compress import triton_kernels as compress_kernels
from tamis.ops.compress.operations import CompressKv


@pytest.mark.parametrize("seed", range(3))
def test_compression_of_spans_of_any_kind(guards: Guards, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio, tokens = 4, 24
    state = guards.cache(compressor_state(dim=512), 6, 4)
    state.storage.normal_()
    entries = guards.cache("v4-bf16", 3, 5)
    host_state, host_entries = on_host(state), on_host(entries)
    values, scores = torch.randn(tokens, 1024), torch.randn(tokens, 1024)
    positions = hostile(tokens, 24, seed, wide=True)
    positions[: tokens // 2] = torch.arange(tokens // 2)
    ids, table = hostile(tokens, 2, seed + 1), hostile(2 * 6, 6, seed + 2).view(2, 6)
    ids[: tokens // 2] = 0
    # State slots agree with the block table or are -1: two different slots for one row would be a caller's error.
    told = [
        oracle.slot_of(p, table[i].tolist(), 4) if 0 <= i < 2 and p < 24 else -1
        for p, i in zip(positions.tolist(), ids.tolist(), strict=True)
    ]
    state_slots = torch.tensor([s if 0 <= s < 24 else LOWEST for s in told])
    for place, slot in enumerate(state_slots.tolist()):
        if slot in state_slots[:place].tolist():
            state_slots[place] = -7
    slots = distinct(tokens, 15, seed + 3)
    bias, weight, angles = torch.randn(ratio, 1024), torch.randn(512), torch.randn(9, 64)
    given = [guards.given(t) for t in (positions, state_slots, ids, table, slots, bias, weight, angles)]
    with guards.allocations(monkeypatch):
        inputs = (guards.given(values), guards.given(scores), state, entries)
        compress_kernels.compress_kv(CompressKv(*inputs, *given, 1e-6, False, "triton"))
    guards.check()
    turned = torch.cat((angles, torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)))
    _reference_compress(
        values, scores, host_state, host_entries, positions, state_slots, ids, table, slots, bias, weight, turned
    )
    torch.testing.assert_close(state.storage.cpu(), host_state.storage, rtol=0, atol=0)
    wrote = (entries.storage.cpu().view(torch.uint8) != 0xFF).any(2)
    assert torch.equal(wrote, (host_entries.storage.view(torch.uint8) != 0xFF).any(2))
    torch.testing.assert_close(entries.storage.cpu()[wrote], host_entries.storage[wrote], rtol=2e-2, atol=2e-2)


def _reference_compress(
    values: Tensor, scores: Tensor, state: PagedCache, entries: PagedCache, positions: Tensor, state_slots: Tensor,
    ids: Tensor, table: Tensor, slots: Tensor, bias: Tensor, weight: Tensor, angles: Tensor,
) -> None:  # fmt: skip
    """The definition; a position without angles is that of the last row, which turns nothing."""
    ratio = len(bias)
    positions = torch.where(positions < 2**31, positions, -1)
    first = positions + 1 - ratio
    known = (first < len(angles) - 1) & (positions >= 0)
    inside = (slots >= 0) & (slots < entries.rows)
    far = torch.where(known | (positions < 0), slots, -1)
    near = torch.where(inside, far, -1)
    rest = (ids, table, near, bias, weight, angles, 1e-6, False, "reference")
    compress_reference.compress_kv(CompressKv(values, scores, state, entries, positions, state_slots, *rest))
    # Those beyond the table, as if their angles were the last.
    beyond = torch.where(inside & ~known & (positions >= 0), slots, -1)
    for token in (beyond >= 0).nonzero().flatten().tolist():
        if (int(positions[token]) + 1) % ratio:
            continue
        span = compress_reference.span_slots(state, positions[token, None], ids[token, None], table, 2 * ratio)
        pooled = compress_reference.pool_rows(state, span, 512)
        normed = pooled / (pooled.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
        write_rows(normed, entries, beyond[token, None])
