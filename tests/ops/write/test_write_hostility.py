"""Writes under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from guarded import Guards
from hostile import distinct, on_host, same_bytes

from tamis.cache.codec import write_rows
from tamis.ops.write import triton_kernels as write_kernels
from tamis.ops.write.operations import WriteKv


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "plain-fp8", "index-mxfp4", "v32-bf16"])
def test_writes_go_to_slots_that_exist(guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = guards.cache(layout, 5, 7)
    wanted = on_host(cache)
    kv = torch.randn(40, cache.layout.width).bfloat16()
    kv[3], kv[5, 0], kv[9] = torch.nan, torch.inf, 0.0
    slots = distinct(40, 35, 1)
    with guards.allocations(monkeypatch):
        write_kernels.write_kv(WriteKv(guards.given(kv), None, guards.given(slots), cache, "triton"))
    guards.check()
    write_rows(kv, wanted, torch.where((slots >= 0) & (slots < 35), slots, -1))
    assert same_bytes(cache, wanted)
