"""The guard zones of `tests/support/guarded.py` notice what they are for."""

import pytest
import torch
from guarded import Guards

from tamis.cache.layout import named


def test_guards_notice_a_single_byte(device: torch.device) -> None:
    for spoil in range(4):
        guards = Guards(device)
        held, cache = guards.given(torch.zeros(3)), guards.keep(guards.cache("v32-fp8", 2, 4))
        raw = held.as_strided((1,), (1,), held.storage_offset() + (3 if spoil == 0 else -1 if spoil == 1 else 0))
        if spoil < 3:
            raw.fill_(1.0)
        else:
            cache.storage.as_strided((1,), (1,), cache.storage.storage_offset() + 656 * 4).fill_(0)
        with pytest.raises(AssertionError, match="written to"):
            guards.check()
    assert named("v32-fp8").row_bytes == 656
