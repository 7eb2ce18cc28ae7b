"""Reads and gathers under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from guarded import Guards
from hostile import HIGHEST, LOWEST, filled, hostile, on_host

from tamis.lab.testing import oracle
from tamis.ops.gather import triton_kernels as gather_kernels
from tamis.ops.gather.operations import GatherIndex, GatherKv, ReadKv


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16"])
def test_reads_of_slots_that_do_not_exist_are_zeros(
    guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = guards.keep(filled(guards, layout, 5, 7))
    slots = hostile(60, 35, 2)
    with guards.allocations(monkeypatch):
        found = gather_kernels.read_kv(ReadKv(guards.given(slots), cache, torch.float32, "triton"))
    guards.check()
    inside = (slots >= 0) & (slots < 35)
    wanted = oracle.rows_of(on_host(cache), torch.where(inside, slots, 0)).masked_fill(~inside[:, None], 0.0)
    assert torch.equal(found.cpu(), wanted.float())


@pytest.mark.parametrize("seed", range(4))
def test_gathering_leaves_rows_that_no_request_covers(
    guards: Guards, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = guards.keep(filled(guards, "v32-fp8", 5, 7))
    keys = guards.keep(filled(guards, "index-fp8", 5, 7))
    table = hostile(12, 5, seed).view(3, 4)
    lengths, first = hostile(3, 20, seed + 10), hostile(3, 20, seed + 20)
    starts = torch.tensor([0, 9, 21] if seed < 2 else [LOWEST, 4, HIGHEST - 2], dtype=torch.int32)
    given = [guards.given(t) for t in (table, lengths, starts, first)]
    out = guards.output(torch.full((30, 576), 7.0))
    wanted = out.cpu().clone()
    with guards.allocations(monkeypatch):
        gather_kernels.gather_kv(GatherKv(*given, cache, out, "triton"))
        values, scales = gather_kernels.gather_index(GatherIndex(*given, keys, 30, "triton"))
    guards.check()
    covered = torch.zeros(30, dtype=torch.bool)
    host = on_host(cache)
    for row in range(30):
        begun = [r for r in range(3) if starts[r] <= row]
        if not begun:
            continue
        r = begun[-1]
        offset = row - int(starts[r])
        position = offset + int(first[r])
        if offset < int(lengths[r]) and 0 <= position < 28 and 0 <= table[r, position // 7] < 5:
            slot = torch.tensor([int(table[r, position // 7]) * 7 + position % 7])
            wanted[row] = oracle.rows_of(host, slot)[0].float()
            covered[row] = True
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal(values.view(torch.uint8).any(1).cpu(), covered)
    assert torch.equal((scales != 0).cpu(), covered)
