"""`attend_gathered`: DeepSeek-V4 attention as in engines whose prefill kernels read only 16-bit rows.

Decode tokens read the pages. Prefills are handled in groups: the entries of a group and the raw tokens of its windows
are gathered into a workspace, and its tokens attend to one list of workspace rows. `SparseV4` runs it for plans that a
planner made in mode "separate". In mode "mixed" prefills read the pages too, which gives the same result up to rounding
and saves the copy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import rows
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops.attention import check_attend, check_query, check_scales, new_output
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine import check_sink
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.gather import check_gather_kv
from tamis.ops.gather.operations import GatherKv, gather_kv
from tamis.ops.lse import LseForm
from tamis.ops.select import check_select_gathered
from tamis.ops.select.operations import SelectGathered, select_gathered
from tamis.step.lease import needs_latest_plan
from tamis.step.v4_plan import GatherPlan, PrefillGroup, V4Plan


class Group(NamedTuple):
    """Prefills that are gathered together."""

    tokens: slice
    """The rows of the group's tokens in the query."""
    gathers: list[GatherKv]
    """The gathers of the window's raw tokens and, if the layer has them, of entries."""
    rows: SelectGathered
    """The operation that finds each token's rows in the workspace."""


class Gathered(NamedTuple):
    """The attention of one step; the fields are the arguments of `attend_gathered`."""

    q: Tensor
    plan: V4Plan
    window: PagedCache
    entries: PagedCache | None
    chosen: Tensor | None
    ratio: int
    scale: float
    value_dim: int
    sink: Tensor | None
    backend: str
    groups: tuple[Group, ...] = ()
    """The operations of each group of prefills, which `prepare_gathered` adds."""

    @property
    def selections(self) -> list[Selection]:
        """The selections of tokens that read the pages."""
        found = [self.plan.window.selection(self.window)]
        if self.entries is not None:
            found.append(self.plan.entries[self.ratio].selection(self.entries, self.chosen))
        return found


@needs_latest_plan
def attend_gathered(
    q: Tensor,
    plan: V4Plan,
    window: PagedCache,
    entries: PagedCache | None = None,
    chosen: Tensor | None = None,
    *,
    ratio: int = 1,
    scale: float,
    value_dim: int,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of a step's tokens [rows, H, D] over window and entries: [rows, H, value_dim], zeros for padding.

    Args:
        q: rotated queries of all rows.
        plan: a plan made in mode "separate".
        window: the cache of raw tokens.
        entries: the cache of compressed entries; None for layers with a window only.
        chosen: int32 [rows, k], the entries that an indexer chose; None if the layer attends to all of them.
        ratio: the layer's compression ratio; 1 without entries.
        scale: softmax scale.
        value_dim: how many leading columns of a row are its value.
        sink: float32 [H].
        backend: a name from `tamis backends`, or "auto".
    """
    call = Gathered(q, plan, window, entries, chosen, ratio, scale, value_dim, contiguous_sink(sink), backend)
    return run_gathered(prepare_gathered(call))


def prepare_gathered(call: Gathered) -> Gathered:
    """The call with the operations of its groups. Everything is checked, and nothing is written."""
    plan, q, window = call.plan, call.q, call.window
    _check_arguments(call)
    if plan.step.requests == 0:
        return call
    assert plan.workspace is not None
    checks.tensor("plan.workspace", plan.workspace, "N D", checks.FLOATS, D=window.layout.width, device=q.device)
    selections = call.selections
    check_query(q, selections, call.value_dim)
    check_scales(call.scale, 1.0, q.device)
    check_sink(call.sink, q.shape[1], q.device)
    attention = _attend(call, q, selections, new_output(q, call.value_dim))
    check_attend(attention)
    if plan.step.prefill is None:
        return call
    ratio = call.ratio
    if ratio not in plan.gathers:
        raise checks.refuse("ratio", f"among those the plan gathers ({sorted(plan.gathers)})", ratio, "plan for it")
    gather = plan.gathers[ratio]
    groups = tuple(_group(call, gather, group) for group in gather.groups)
    for group in groups:
        for read in group.gathers:
            check_gather_kv(read)
        check_select_gathered(group.rows)
    gathered = [Selection(_workspace_cache(call), gather.slots)]
    check_query(q, gathered, call.value_dim)
    check_attend(attention._replace(selections=gathered))
    return call._replace(groups=groups)


def run_gathered(call: Gathered) -> Tensor:
    """Run what `prepare_gathered` has checked; the query and the chosen entries may have been replaced since."""
    step, q, chosen = call.plan.step, call.q, call.chosen
    out = torch.zeros(*q.shape[:2], call.value_dim, dtype=q.dtype, device=q.device)
    if step.requests == 0:
        return out
    direct = step.split.decode_tokens if step.prefill is not None else step.rows
    if direct:
        selections = [selection.rows(0, direct) for selection in call.selections]
        attend(_attend(call, q[:direct], selections, out[:direct]))
    workspace = _workspace_cache(call)
    for tokens, gathers, found in call.groups:
        for gather in gathers:
            gather_kv(gather)
        select_gathered(found if chosen is None else found._replace(chosen=chosen[tokens]))
        selections = [Selection(workspace, found.slots, found.lengths)]
        attend(_attend(call, q[tokens], selections, out[tokens]))
    return out


def _check_arguments(call: Gathered) -> None:
    plan, window, entries, chosen, ratio = call.plan, call.window, call.entries, call.chosen, call.ratio
    checks.instance("plan", plan, V4Plan)
    total, remedy = plan.step.rows, "one row per token of the plan, with padding"
    checks.tensor("q", call.q, "T H D", checks.FLOATS, T=total, remedy=remedy)
    checks.instance("window", window, PagedCache)
    if plan.workspace is None:
        raise checks.refuse("plan", "one with a workspace", None, "make the V4Planner with mode='separate'")
    checks.integer("ratio", ratio, low=1)
    if (ratio == 1) != (entries is None):
        raise checks.refuse(
            "entries", f"{'None' if ratio == 1 else 'given'} for ratio {ratio}", entries, "only ratio 1 has no entries"
        )
    if window.page_size != plan.window.page_size:
        raise checks.refuse(
            "window", f"of the plan's page size {plan.window.page_size}", window.page_size, "use one page size for both"
        )
    if entries is None:
        if chosen is not None:
            raise checks.refuse("chosen", "None without entries", checks.describe(chosen), "pass the entries too")
        return
    checks.instance("entries", entries, PagedCache)
    if ratio not in plan.entries:
        raise checks.refuse("ratio", f"among the plan's ({sorted(plan.entries)})", ratio, "plan for it")
    part = plan.entries[ratio]
    if entries.page_size != part.page_size:
        raise checks.refuse(
            "entries", f"of the plan's page size {part.page_size}", entries.page_size, "use one page size for both"
        )
    if chosen is not None:
        expected = {"T": total, "K": part.columns}
        checks.tensor("chosen", chosen, "T K", (torch.int32,), device=call.q.device, **expected)  # type: ignore[arg-type]


def _attend(call: Gathered, q: Tensor, selections: list[Selection], out: Tensor) -> Attend:
    return Attend(q, selections, call.scale, None, None, call.sink, out, False, LseForm(), call.backend)


def _group(call: Gathered, gather: GatherPlan, group: PrefillGroup) -> Group:
    """The operations of one group."""
    plan, workspace, backend = call.plan, call.plan.workspace, call.backend
    assert workspace is not None
    first = plan.step.split.decodes
    mine = slice(group.requests.start - first, group.requests.stop - first)
    starts = torch.arange(mine.stop - mine.start, dtype=torch.int32, device=workspace.device) * group.rows
    pages = plan.window.pages.block_table[group.requests]
    raw = (pages, gather.lengths[mine], starts + group.entries, gather.first[mine])
    gathers = [GatherKv(*raw, call.window, workspace, backend)]
    part = plan.entries.get(call.ratio)
    if call.entries is not None and part is not None:
        lengths = gather.entries[mine]
        entries = (part.block_table[group.requests], lengths, starts, torch.zeros_like(lengths))
        gathers.append(GatherKv(*entries, call.entries, workspace, backend))
    found = SelectGathered(
        positions=plan.step.positions[group.tokens],
        request_ids=plan.step.request_ids[group.tokens],
        first=gather.first[mine],
        chosen=None if call.chosen is None else call.chosen[group.tokens],
        first_request=group.requests.start,
        ratio=1 if part is None else part.ratio,
        window=plan.window.size,
        entries=group.entries,
        rows=group.rows,
        columns=0 if part is None else part.columns,
        slots=gather.slots[group.tokens],
        lengths=gather.row_lengths[group.tokens],
        backend=backend,
    )
    return Group(group.tokens, gathers, found)


def _workspace_cache(call: Gathered) -> PagedCache:
    """The workspace as a cache with pages of one row."""
    workspace, layout = call.plan.workspace, call.window.layout
    assert workspace is not None
    return PagedCache.wrap(workspace.unsqueeze(1), rows(workspace.dtype, latent=layout.latent, rope=layout.rope))
