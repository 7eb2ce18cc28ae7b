"""DeepSeek-V4 attention in the manner of engines whose prefill kernels read 16-bit rows only: `attend_gathered`.

Decode tokens read the pages. Prefills, group by group, have their entries and the raw tokens of their windows gathered
into a workspace, and attend to that through one list of rows. `SparseV4` has no need of it: its prefills read the pages
as well, which gives the same result up to rounding and saves the copy.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import rows
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops.attention import check_attend, check_query, check_scales, new_output
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.gather import check_gather_kv, gather_unchecked
from tamis.ops.select import select_gathered_unchecked
from tamis.ops.select.arguments import check_select_gathered
from tamis.step.lease import needs_latest_plan
from tamis.step.v4_plan import GatherPlan, PrefillGroup, V4Plan


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
    numbers = (ratio, scale, value_dim, sink, backend)
    check_attend_gathered(
        q,
        plan,
        window,
        entries,
        chosen,
        ratio=ratio,
        scale=scale,
        value_dim=value_dim,
        sink=sink,
        backend=backend,
    )
    return gathered_unchecked(q, plan, window, entries, chosen, *numbers)


def check_attend_gathered(
    q: Tensor,
    plan: V4Plan,
    window: PagedCache,
    entries: PagedCache | None,
    chosen: Tensor | None,
    *,
    ratio: int,
    scale: float,
    value_dim: int,
    sink: Tensor | None,
    backend: str,
) -> None:
    """Refuse what `attend_gathered` refuses."""
    checks.instance("plan", plan, V4Plan)
    rows = plan.step.rows
    checks.tensor("q", q, "T H D", checks.FLOATS, T=rows, remedy="one row per token of the plan, with padding")
    checks.instance("window", window, PagedCache)
    if plan.workspace is None:
        raise checks.refuse("plan", "one with a workspace", None, "make the V4Planner with mode='separate'")
    checks.integer("ratio", ratio, low=1)
    if (ratio == 1) != (entries is None):
        raise checks.refuse("entries", f"{'None' if ratio == 1 else 'given'} for ratio {ratio}", entries, "pass both")
    if window.page_size != plan.window.page_size:
        raise checks.refuse("window", f"of the plan's page size {plan.window.page_size}", window.page_size, "match it")
    if entries is not None:
        _check_entries(plan, entries, chosen, ratio, q.device)
    elif chosen is not None:
        raise checks.refuse("chosen", "None without entries", checks.describe(chosen), "pass the entries too")
    if plan.step.requests == 0:
        return
    checks.tensor("plan.workspace", plan.workspace, "N D", checks.FLOATS, D=window.layout.width, device=q.device)
    selections = _selections(plan, window, entries, chosen, ratio)
    check_query(q, selections, value_dim)
    check_scales(scale, 1.0, q.device)
    out, sink = new_output(q, value_dim), contiguous_sink(sink)
    check_attend(Attend(q, selections, scale, None, None, sink, out, False, backend))
    if plan.step.prefill is None:
        return
    if ratio not in plan.gathers:
        raise checks.refuse("ratio", f"among those the plan gathers ({sorted(plan.gathers)})", ratio, "plan for it")
    gather = plan.gathers[ratio]
    for group in gather.groups:
        for cache, arguments in _gathered(plan, gather, group, window, entries, ratio):
            check_gather_kv(cache, **arguments, out=plan.workspace, backend=backend)
        check_select_gathered(**_workspace_rows(plan, gather, group, chosen, ratio), backend=backend)
    gathered = [Selection(_one_row_pages(plan, window), gather.slots)]
    check_query(q, gathered, value_dim)
    check_attend(Attend(q, gathered, scale, None, None, sink, out, False, backend))


def _check_entries(plan: V4Plan, entries: PagedCache, chosen: Tensor | None, ratio: int, device: torch.device) -> None:
    checks.instance("entries", entries, PagedCache)
    if ratio not in plan.entries:
        raise checks.refuse("ratio", f"among the plan's ({sorted(plan.entries)})", ratio, "plan for it")
    part = plan.entries[ratio]
    if entries.page_size != part.page_size:
        raise checks.refuse("entries", f"of the plan's page size {part.page_size}", entries.page_size, "match it")
    if chosen is not None:
        expected = {"T": plan.step.rows, "K": part.columns}
        checks.tensor("chosen", chosen, "T K", (torch.int32,), device=device, **expected)  # type: ignore[arg-type]


def gathered_unchecked(
    q: Tensor,
    plan: V4Plan,
    window: PagedCache,
    entries: PagedCache | None,
    chosen: Tensor | None,
    ratio: int,
    scale: float,
    value_dim: int,
    sink: Tensor | None,
    backend: str,
) -> Tensor:
    """As `attend_gathered`, for callers who know that `check_attend_gathered` would pass."""
    step = plan.step
    out = torch.zeros(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
    if step.requests == 0:
        return out

    sink = contiguous_sink(sink)

    def run(tokens: slice, selections: list[Selection]) -> None:
        attend(Attend(q[tokens], selections, scale, None, None, sink, out[tokens], False, backend))

    direct = step.split.decode_tokens if step.prefill is not None else step.rows
    if direct:
        run(slice(direct), [s.rows(0, direct) for s in _selections(plan, window, entries, chosen, ratio)])
    if step.prefill is not None:
        gather = plan.gathers[ratio]
        assert plan.workspace is not None
        for group in gather.groups:
            for cache, where in _gathered(plan, gather, group, window, entries, ratio):
                gather_unchecked(cache, **where, out=plan.workspace, backend=backend)
            rows = _workspace_rows(plan, gather, group, chosen, ratio)
            select_gathered_unchecked(**rows, backend=backend)
            run(group.tokens, [Selection(_one_row_pages(plan, window), rows["slots"], rows["lengths"])])
    return out


def _selections(
    plan: V4Plan, window: PagedCache, entries: PagedCache | None, chosen: Tensor | None, ratio: int
) -> list[Selection]:
    selections = [plan.window.selection(window)]
    if entries is not None:
        selections.append(plan.entries[ratio].selection(entries, chosen))
    return selections


def _gathered(
    plan: V4Plan,
    gather: GatherPlan,
    group: PrefillGroup,
    window: PagedCache,
    entries: PagedCache | None,
    ratio: int,
) -> Iterator[tuple[PagedCache, dict[str, Any]]]:
    """The caches that a group is gathered from, and which rows of them go where."""
    mine = _prefills(plan, group)
    starts = torch.arange(mine.stop - mine.start, dtype=torch.int32, device=window.device) * group.rows
    yield (
        window,
        {
            "block_table": plan.window.pages.block_table[group.requests],
            "lengths": gather.lengths[mine],
            "starts": starts + group.entries,
            "first": gather.first[mine],
        },
    )
    if entries is not None:
        table = plan.entries[ratio].block_table[group.requests]
        yield entries, {"block_table": table, "lengths": gather.entries[mine], "starts": starts, "first": None}


def _workspace_rows(
    plan: V4Plan, gather: GatherPlan, group: PrefillGroup, chosen: Tensor | None, ratio: int
) -> dict[str, Any]:
    """Arguments of `select_gathered`, which finds a group's rows in the workspace."""
    part = plan.entries.get(ratio)
    return {
        "positions": plan.step.positions[group.tokens],
        "request_ids": plan.step.request_ids[group.tokens],
        "first": gather.first[_prefills(plan, group)],
        "chosen": None if chosen is None else chosen[group.tokens],
        "ratio": 1 if part is None else part.ratio,
        "window": plan.window.size,
        "entries": group.entries,
        "rows": group.rows,
        "columns": 0 if part is None else part.columns,
        "slots": gather.slots[group.tokens],
        "lengths": gather.row_lengths[group.tokens],
        "first_request": group.requests.start,
    }


def _one_row_pages(plan: V4Plan, like: PagedCache) -> PagedCache:
    """The workspace as a cache."""
    assert plan.workspace is not None
    layout = rows(plan.workspace.dtype, latent=like.layout.latent, rope=like.layout.rope)
    return PagedCache.wrap(plan.workspace.unsqueeze(1), layout)


def _prefills(plan: V4Plan, group: PrefillGroup) -> slice:
    """The group's requests, counted from the first prefill."""
    first = plan.step.split.decodes
    return slice(group.requests.start - first, group.requests.stop - first)
