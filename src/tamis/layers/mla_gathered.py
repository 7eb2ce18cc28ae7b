"""Prefills of a `SparseMLA` step whose rows are gathered: each chunk attends to 16-bit rows in the plan's workspace."""

from collections.abc import Callable

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.layers.mla_checks import Call
from tamis.ops.attention.operations import attend
from tamis.ops.gather.operations import GatherKv, gather_kv
from tamis.step.plan import Plan


def chunk_gathers(cache: PagedCache, plan: Plan, backend: str) -> list[GatherKv]:
    """The gathers of a plan's prefills, one per chunk; none if prefills read the pages."""
    calls = []
    for chunk in () if plan.prefill is None else plan.prefill.chunks:
        assert plan.workspace is not None
        first, room = torch.zeros_like(chunk.lengths), plan.workspace[: chunk.rows]
        calls.append(GatherKv(chunk.block_table, chunk.lengths, chunk.starts, first, cache, room, backend))
    return calls


def attend_chunks(call: Call, slots: Tensor, workspace_cache: Callable[[Tensor], PagedCache]) -> tuple[Tensor, Tensor]:
    """Write the call's output: decodes read the cache, prefills the workspace, chunk by chunk. Returns lse and max
    logits.

    Args:
        call: a call with gathers.
        slots: int32 [rows, topk], rows of the cache for decodes and rows of the workspace for prefills.
        workspace_cache: makes a cache of gathered rows.
    """
    plan, (q, out) = call.plan, (call.attend.q, call.attend.out)
    assert plan is not None
    assert plan.prefill is not None
    out[plan.tokens :].zero_()  # no chunk covers the padding
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    max_logits = torch.full_like(lse, -torch.inf)

    def fill(rows: slice, cache: PagedCache) -> None:
        selections = [Selection(cache, slots[rows])]
        lse[rows], max_logits[rows] = attend(call.attend._replace(q=q[rows], selections=selections, out=out[rows]))

    if plan.decode is not None:
        fill(slice(0, plan.decode.tokens), call.cache)
    for chunk, gather in zip(plan.prefill.chunks, call.gathers, strict=True):
        gather_kv(gather)
        fill(chunk.tokens, workspace_cache(gather.out))
    return lse, max_logits
