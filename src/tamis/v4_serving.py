"""DeepSeek-V4 attention in the manner of engines whose prefill kernels read 16-bit rows only: `attend_gathered`.

Decode tokens read the pages. Prefills, group by group, have their entries and the raw tokens of their windows gathered
into a workspace, and attend to that through one list of rows. `SparseV4` has no need of it: its prefills read the pages
as well, which gives the same result up to rounding and saves the copy.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache import PagedCache, Selection
from tamis.layout import rows
from tamis.lease import needs_latest_plan
from tamis.ops import attend, gather_kv, select_gathered
from tamis.v4_plan import EntryPlan, GatherPlan, PrefillGroup, V4Plan


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
        plan: made in mode "separate".
        window: raw tokens.
        entries: compressed entries; None for layers with a window only.
        chosen: int32 [rows, k], the entries that an indexer chose; None where a layer attends to all of them.
        ratio: of this layer; 1 without entries.
        scale: softmax scale.
        value_dim: how many leading columns of a row are its value.
        sink: float32 [H].
        backend: a name from `tamis backends`, or "auto".
    """
    step = plan.step
    checks.tensor("q", q, "T H D", checks.FLOATS, T=step.rows, remedy="one row per token of the plan, with padding")
    if plan.workspace is None:
        raise checks.refuse("plan", "one with a workspace", None, "make the V4Planner with mode='separate'")
    if (ratio == 1) != (entries is None):
        raise checks.refuse("entries", f"{'None' if ratio == 1 else 'given'} for ratio {ratio}", entries, "pass both")
    selections = [plan.window.selection(window)]
    if entries is not None:
        selections.append(plan.entries[ratio].selection(entries, chosen))
    out = torch.zeros(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)

    def run(tokens: slice, what: list[Selection]) -> None:
        attend(q[tokens], what, scale=scale, value_dim=value_dim, sink=sink, out=out[tokens], backend=backend)

    direct = step.split.decode_tokens if step.prefill is not None else step.rows
    if direct:
        run(slice(direct), [selection.rows(0, direct) for selection in selections])
    if step.prefill is not None:
        gather, part = plan.gathers[ratio], plan.entries.get(ratio)
        for group in gather.groups:
            _fill_workspace(plan, part, gather, group, window, entries, backend)
            picked = None if chosen is None else chosen[group.tokens]
            slots, lengths = _select_workspace(plan, part, gather, group, picked, backend)
            run(group.tokens, [Selection(_one_row_pages(plan, window), slots, lengths)])
    return out


def _fill_workspace(
    plan: V4Plan,
    part: EntryPlan | None,
    gather: GatherPlan,
    group: PrefillGroup,
    window: PagedCache,
    entries: PagedCache | None,
    backend: str,
) -> None:
    mine = _prefills(plan, group)
    count = mine.stop - mine.start
    starts = torch.arange(count, dtype=torch.int32, device=window.device) * group.rows
    table = plan.window.pages.block_table[group.requests]
    gather_kv(
        window,
        table,
        gather.lengths[mine],
        starts=starts + group.entries,
        first=gather.first[mine],
        out=plan.workspace,
        backend=backend,
    )
    if entries is not None and part is not None:
        table = part.block_table[group.requests]
        gather_kv(entries, table, gather.entries[mine], starts=starts, out=plan.workspace, backend=backend)


def _select_workspace(
    plan: V4Plan,
    part: EntryPlan | None,
    gather: GatherPlan,
    group: PrefillGroup,
    chosen: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    slots, lengths = gather.slots[group.tokens], gather.row_lengths[group.tokens]
    select_gathered(
        plan.step.positions[group.tokens],
        plan.step.request_ids[group.tokens],
        gather.first[_prefills(plan, group)],
        chosen,
        ratio=1 if part is None else part.ratio,
        window=plan.window.size,
        entries=group.entries,
        rows=group.rows,
        columns=0 if part is None else part.columns,
        slots=slots,
        lengths=lengths,
        first_request=group.requests.start,
        backend=backend,
    )
    return slots, lengths


def _one_row_pages(plan: V4Plan, like: PagedCache) -> PagedCache:
    """The workspace as a cache."""
    assert plan.workspace is not None
    layout = rows(plan.workspace.dtype, latent=like.layout.latent, rope=like.layout.rope)
    return PagedCache.wrap(plan.workspace.unsqueeze(1), layout)


def _prefills(plan: V4Plan, group: PrefillGroup) -> slice:
    """The group's requests, counted from the first prefill."""
    first = plan.step.split.decodes
    return slice(group.requests.start - first, group.requests.stop - first)
