"""Translation under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from guarded import Guards
from hostile import hostile

from tamis.ops.translate import reference as translate_reference
from tamis.ops.translate import triton_kernels as translate_kernels
from tamis.ops.translate.operations import TranslatePositions


@pytest.mark.parametrize("options", [{}, {"compact": True}, {"shard": (3, 1, 4)}, {"workspace": True}])
def test_translation_of_anything(guards: Guards, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, ids = hostile(9 * 20, 40, 3).view(9, 20), hostile(9, 3, 4)
    table = hostile(3 * 10, 2**26, 5).view(3, 10)
    workspace = (hostile(9, 2, 6), torch.tensor([5, 60], dtype=torch.int32)) if options.get("workspace") else None
    rest = (options.get("shard", (1, 0, 1)), options.get("compact", False), "auto")
    call = TranslatePositions(positions, ids, table, 4, 9, *(workspace or (None, None)), *rest)
    held = TranslatePositions(*(guards.given(part) if isinstance(part, torch.Tensor) else part for part in call))
    with guards.allocations(monkeypatch):
        slots, counts = translate_kernels.translate_positions(held)
    guards.check()
    wanted = translate_reference.translate_positions(call)
    assert torch.equal(slots.cpu(), wanted[0])
    assert torch.equal(counts.cpu(), wanted[1])
