"""Selections that were prepared for others like them; see `tamis.ops.memory`."""

from collections.abc import Callable
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cuda.device import Rooms
from tamis.ops import memory
from tamis.ops.index.operations import IndexTopk, index_topk

Given: TypeAlias = tuple[Tensor, Tensor, PagedCache, Tensor, Tensor, Tensor, int, int]
"""The arguments of `tamis.ops.index_topk` from the queries to the workspace."""


class PreparedTopk(NamedTuple):
    """What runs calls like one that passed all checks, and allocates their positions."""

    run: Callable[[IndexTopk], None]
    rooms: Rooms
    """For the positions, int32 [T, k]."""
    apart: memory.Apart | None
    """Whether a given output is separate from all that is read; None if calls are given none."""
    shorter: dict[int, Callable[[IndexTopk], None]]
    """What runs such calls with fewer columns of their block table, by the number of columns."""

    @classmethod
    def of(cls, call: IndexTopk, *, given_out: bool = False) -> Self:
        """Prepare a checked call as far as its backend can."""
        rooms = Rooms(call.q.device, ((call.q.shape[0], call.k), torch.int32))
        apart = memory.Apart(call.out, *call.read) if given_out else None
        return cls(index_topk.prepared(call) or index_topk, rooms, apart, {})

    def run_short(self, call: IndexTopk) -> None:
        """Run a call with fewer columns of its block table than those for which this was prepared."""
        columns = call.block_table.shape[1]
        run = self.shorter.get(columns)
        if run is None:
            run = self.shorter[columns] = index_topk.prepared(call) or index_topk
        run(call)


KNOWN: memory.Memory[PreparedTopk] = memory.Memory()
"""The calls of `tamis.ops.index_topk`."""
_PARTS: memory.Memory[PreparedTopk] = memory.Memory()


def sign_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    workspace_bytes: int,
    out: Tensor | None,
    backend: str,
) -> memory.Signature | None:
    """The signature of a call of `tamis.ops.index_topk`."""
    try:
        if not memory.remembered_on(q) or memory.has_gradient(q, weights, out):
            return None
        if out is not None and checks.frozen(out):
            return None
        tensors = map(memory.sign, (q, weights, request_ids, block_table, lengths, out))
        return (backend, k, type(k), workspace_bytes, type(workspace_bytes), *tensors, *memory.sign_cache(cache))
    except memory.NOT_ARGUMENTS:
        return None


def run_remembered(call: IndexTopk) -> None:
    """Run a part of a checked call, and remember it: parts of calls of one signature have one signature."""
    with torch._C.DisableTorchFunction():
        signature = sign_topk(*call[:8], call.out, call.backend)
        if signature is not None:
            signature = (call.batch, call.scores is None, *signature)
            known = _PARTS.find(signature)
            if known is not None:
                known.run(call)
                return
    index_topk(call)
    if signature is not None:
        _PARTS.keep(signature, PreparedTopk.of(call))


def new_positions(q: Tensor, k: int) -> Tensor:
    """Memory for the positions of queries, int32 [T, k]."""
    return torch.empty(q.shape[0], k, dtype=torch.int32, device=q.device)
