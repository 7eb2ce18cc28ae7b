"""Selections that were prepared for others like them; see `tamis.ops.memory`."""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tamis.cuda.device import Rooms
from tamis.ops import memory
from tamis.ops.index.operations import IndexTopk, index_topk


class PreparedTopk(NamedTuple):
    """What runs calls like one that passed all checks, and allocates their positions."""

    run: Callable[[IndexTopk], None]
    rooms: Rooms
    """For the positions, int32 [T, k]."""
    apart: memory.Apart | None
    """Whether a given output is separate from all that is read; None if calls are given none."""

    @classmethod
    def of(cls, call: IndexTopk, *, given_out: bool = False) -> Self:
        """Prepare a checked call as far as its backend can."""
        rooms = Rooms(call.q.device, ((call.q.shape[0], call.k), torch.int32))
        apart = memory.Apart(call.out, *call.read) if given_out else None
        return cls(index_topk.prepared(call) or index_topk, rooms, apart)


def new_positions(q: Tensor, k: int) -> Tensor:
    """Memory for the positions of queries, int32 [T, k]."""
    return torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
