"""Rotation under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from guarded import Guards
from hostile import distinct, hostile, on_host

from tamis import PagedCache
from tamis.ops.output import triton_kernels as output_kernels
from tamis.ops.output.operations import RotateToFp8
from tamis.ops.rotate import reference as rotate_reference
from tamis.ops.rotate import triton_kernels as rotate_kernels
from tamis.ops.rotate.operations import RotateAndWrite, RotateHeads


@pytest.mark.parametrize("layout", ["v4-fp8", "v4-bf16"])
def test_rotation_at_positions_without_angles(guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = guards.cache(layout, 5, 7)
    q, kv, table, weight = torch.randn(20, 2, 512), torch.randn(20, 512), torch.randn(9, 64), torch.randn(512)
    positions, slots = hostile(20, 9, 13, wide=True), distinct(20, 35, 14)
    inside = (slots >= 0) & (slots < 35)
    at = torch.where((positions >= 0) & (positions < 9), positions, 9)
    angles = torch.cat((table, torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)))
    given = [guards.given(t) for t in (positions, table, weight)]
    with guards.allocations(monkeypatch):
        tokens = (guards.given(q), guards.given(kv), cache, guards.given(slots))
        found, _ = rotate_kernels.rotate_and_write(RotateAndWrite(*tokens, *given, 1e-6, None, False, True, "triton"))
        turned = rotate_kernels.rotate_heads(RotateHeads(guards.given(q), *given[:2], None, True, "triton"))
        to_fp8 = RotateToFp8(guards.given(q), *given[:2], 128, True, "triton")
        codes, exponents = output_kernels.rotate_to_fp8(to_fp8)
    guards.check()
    host = PagedCache(cache.layout, 5, 7)
    written = torch.where(inside, slots, -1)
    rest = (at, angles, weight, 1e-6, None, False, True, "reference")
    wanted, _ = rotate_reference.rotate_and_write(RotateAndWrite(q, kv, host, written, *rest))
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    expected = rotate_reference.rotate_heads(RotateHeads(q, at, angles, None, True, "reference"))
    torch.testing.assert_close(turned.cpu(), expected, rtol=1e-5, atol=1e-5)
    eight = codes.cpu().float().unflatten(2, (4, 128)) * torch.exp2(exponents.cpu().float() - 127).unsqueeze(3)
    torch.testing.assert_close(eight.flatten(2), expected, rtol=0.07, atol=0.02)
    rows = on_host(cache).read(written[inside])
    torch.testing.assert_close(rows, host.read(written[inside]), rtol=0.07, atol=0.02)
    others = torch.tensor(sorted(set(range(35)) - set(written.tolist())))
    assert (
        cache.field(cache.layout.values).cpu().contiguous().view(torch.uint8)[others // 7, others % 7] == 0xFF
    ).all()
