"""Merging splits under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from attention_calls import combine_call
from guarded import Guards

from tamis.lab.testing import oracle
from tamis.ops.combine import triton_kernels as combine_kernels


def test_parts_that_hold_nothing_are_left_out(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, lses = torch.randn(3, 4, 2, 64), torch.randn(3, 4, 2)
    lses[0, 0], lses[:, 1], lses[1, 2] = -torch.inf, -torch.inf, -torch.inf
    parts[0, 0], parts[:, 1], parts[1, 2] = torch.nan, torch.inf, torch.nan
    sink = torch.tensor([torch.inf, -torch.inf])
    out = guards.output(torch.zeros(4, 2, 64))
    with guards.allocations(monkeypatch):
        lse = combine_kernels.combine_parts(
            combine_call(guards.given(parts), guards.given(lses), guards.given(sink), out)
        )
    guards.check()
    wanted, wanted_lse = oracle.combine(parts, lses, sink)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-6, atol=1e-6)
