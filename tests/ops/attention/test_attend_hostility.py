"""Attention under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from attention_calls import attend_call, attend_slots_call
from guarded import Guards
from hostile import HIGHEST, LOWEST, filled, hostile, on_host

from tamis import Selection
from tamis.lab.testing import oracle
from tamis.ops.attention import triton_kernels as attend_kernels


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16", "plain-fp8"])
@pytest.mark.parametrize(
    ("heads", "dtype", "translate"), [(3, torch.bfloat16, False), (3, torch.float16, True), (17, torch.float32, True)]
)
def test_attention_skips_what_does_not_exist(
    guards: Guards, layout: str, heads: int, dtype: torch.dtype, translate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, columns, page_size, pages = 5, 24, 8, 6
    cache = filled(guards, layout, pages, page_size, kept=torch.arange(0, 48, 2))
    guards.keep(cache)
    slots = hostile(tokens * columns, 48, heads).view(tokens, columns)
    slots[(slots >= 0) & (slots < 48)] &= ~1  # odd rows are NaN
    lengths = torch.tensor([columns, LOWEST, HIGHEST, columns + 1, -1], dtype=torch.int32)
    ids = torch.tensor([0, 1, 2, LOWEST, 1], dtype=torch.int32)  # of two
    table = torch.tensor([[5, 3, -1, LOWEST, HIGHEST, 6, 2**28, 0]] * 2, dtype=torch.int32)
    lookup = (guards.given(ids), guards.given(table)) if translate else (None, None)
    selection = Selection(cache, guards.given(slots), guards.given(lengths), *lookup)
    width = cache.layout.width
    q, sink = torch.randn(tokens, heads, width).to(dtype), torch.randn(heads)
    counted = lengths.clamp(0, columns)
    if translate:
        counted[(ids < 0) | (ids >= 2)] = 0
        ids = ids.clamp(0, 1)
    known = Selection(on_host(cache), slots, counted, *((ids, table) if translate else (None, None)))
    wanted, wanted_lse = oracle.attend(q, [known], scale=0.05, value_dim=512, sink=sink)
    for splits in (1, 3) if heads == 3 else (1,):
        out = guards.output(torch.zeros(tokens, heads, 512, dtype=torch.float32))
        with guards.allocations(monkeypatch):
            lse, _ = attend_kernels.attend(
                attend_call(guards.given(q), [selection], scale=0.05, splits=splits, sink=guards.given(sink), out=out)
            )
        guards.check()
        assert torch.equal(lse.cpu() == -torch.inf, wanted_lse == -torch.inf)
        some = wanted_lse > -torch.inf
        torch.testing.assert_close(lse.cpu().double()[some], wanted_lse[some], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=2e-2, atol=2e-2)


def test_rows_of_nan_spoil_only_those_who_select_them(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = guards.keep(filled(guards, "v32-fp8", 2, 8, kept=torch.arange(15)))
    slots = torch.tensor([[0, 1, 2], [3, 15, 4], [5, 6, -1]], dtype=torch.int32)
    q = guards.given(torch.randn(3, 4, 576))
    with guards.allocations(monkeypatch):
        parts, _, _ = attend_kernels.attend_slots(
            attend_slots_call(q, [Selection(cache, guards.given(slots))], scale=0.1, value_dim=512, splits=1)
        )
    guards.check()
    assert parts[0].isnan().flatten(1).any(1).tolist() == [False, True, False]
