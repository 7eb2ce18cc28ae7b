"""Selection under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

from typing import Any

import pytest
import torch
from guarded import Guards
from hostile import hostile
from torch import Tensor

from tamis.ops.select import operations as select_ops
from tamis.ops.select import reference as select_reference
from tamis.ops.select import triton_kernels as select_kernels


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_follow_from_positions_of_any_kind(
    guards: Guards, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, width = 12, 10
    positions, ids = hostile(tokens, 40, seed), hostile(tokens, 3, seed + 1)
    table, own = hostile(3 * 6, 2**26, seed + 2).view(3, 6), hostile(tokens, 40, seed + 3, wide=True)
    chosen = hostile(tokens * width, 12, seed + 4).view(tokens, width)
    first = hostile(3, 20, seed + 5)
    blocks = (hostile(3, 30, seed + 6), hostile(3, 30, seed + 7))

    def compare(operation: Any, inputs: list[object], outputs: list[Tensor]) -> None:
        name, call = operation.name, operation.arguments
        held = [guards.given(i) if isinstance(i, Tensor) else i for i in inputs]
        found = [guards.output(o) for o in outputs]
        with guards.allocations(monkeypatch):
            getattr(select_kernels, name)(call(*held, *found, "triton"))
        guards.check()
        wanted = [o.clone() for o in outputs]
        getattr(select_reference, name)(call(*inputs, *wanted, "reference"))
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(one.cpu(), other), (name, place)

    rows, each = torch.full((tokens, width), 9, dtype=torch.int32), torch.full((tokens,), 9, dtype=torch.int32)
    for slots in (None, own):
        compare(select_ops.select_window, [positions, ids, table, slots, None, None, 4, 7], [rows, each])
        compare(select_ops.select_chosen, [chosen, ids, table, slots, 4], [rows, each])
        compare(select_ops.select_entries, [positions, ids, table, slots, 4, 2, 8, 5], [each.long(), each, each, rows])
    compare(select_ops.select_window, [positions, ids, table, None, *blocks, 4, 7], [rows, each])
    wide = torch.full((tokens, 25), 9, dtype=torch.int32)
    for picked in (chosen, None):
        compare(select_ops.select_gathered, [positions, ids, first, picked, 0, 4, 7, 9, 30, width], [wide, each])
