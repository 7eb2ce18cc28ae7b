"""`V4Planner.plan(batch)`: the metadata of one DeepSeek-V4 step, in buffers that never move."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.backends import backend_for_stage
from tamis.cache.layout import Layout, named
from tamis.model.spec import LayerSpec
from tamis.ops import select_entries, select_window
from tamis.step.batch import Batch
from tamis.step.buffers import outside_modes
from tamis.step.plan import Limits, Plan
from tamis.step.planner import Planner, Prepared
from tamis.step.split import group_prefills
from tamis.step.v4_plan import (
    ALIGN_COLUMNS,
    ALIGN_DRAFTS,
    WINDOW_POOL,
    EntryPlan,
    GatherPlan,
    PrefillGroup,
    V4Plan,
    WindowPlan,
    state_pool,
)

_PREFILLS_IN_WORKSPACE = 4
"""By default the workspace holds this many of the largest prefills."""


class V4Planner:
    """Turns batches into plans for all layers of a V4 model. A plan is valid until the next one is made.

    A `Planner` inside makes the part that V4 shares with V3.2. Beyond that, a step launches one kernel for the window
    and one per ratio.
    """

    # The buffers outlive this call. If it ran in inference_mode, they could not be written outside of that mode.
    @torch.inference_mode(False)
    def __init__(
        self,
        specs: Sequence[LayerSpec],
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        layout: str | Layout = "v4-fp8",
        mode: Literal["mixed", "separate"] = "mixed",
        draft_tokens: int = 0,
        backend: str = "auto",
    ) -> None:
        """Allocate buffers for the largest step.

        Args:
            specs: the model's layers, or one of each kind.
            limits: the largest step. `page_size` counts the *tokens* that a page of entries stands for (256 in V4).
                `other_page_sizes` must have "window" and, for each ratio whose compressor runs here, "state4" and so
                on. `uniform_decodes` is taken as False.
            device: where the tensors of a step live.
            layout: the format of window and entries.
            mode: "mixed" lets prefills read the pages directly; "separate" prepares for gathering them into a 16-bit
                workspace, as engines do whose prefill kernels cannot read pages.
            draft_tokens: the size of draft blocks, which have no causal mask; the window gets room for them.
            backend: a name from `tamis backends`, or "auto".
        """
        checks.option("mode", mode, ("mixed", "separate"))
        checks.instance("limits", limits, Limits)
        for number, spec in enumerate(checks.sequence("specs", specs, "pass a V4 model's specs")):
            checks.instance(f"specs[{number}]", spec, LayerSpec)
        if mode == "separate" and any(spec.kind == "indexed" for spec in specs):
            raise checks.refuse("mode", "'mixed' for layers of V4.1", repr(mode), "their prefills read the pages")
        by_ratio = _by_ratio(specs)
        window = _one_window(specs)
        _check_pools(limits, list(by_ratio))
        self.limits = replace(limits, uniform_decodes=False)
        self.mode, self.backend, self.layout = mode, backend, named(layout)
        self._planner = Planner(specs[0], self.limits, device, layout=self.layout, mode="mixed")
        self.device = self._planner.device
        backend_for_stage("select", backend, self.device)
        self._entries = {ratio: self._entry_buffers(spec) for ratio, spec in by_ratio.items()}
        self._window = window
        drafts = checks.integer("draft_tokens", draft_tokens, low=0)
        self._window_slots = self._per_token_columns(round_up(window + drafts, ALIGN_DRAFTS) if drafts else window)
        self._window_lengths = self._per_token()
        self._rows_before = 0
        self._gathers: dict[int, _GatherBuffers] = {}
        self._workspace = None
        if mode == "separate":
            ratios = [1] * any(spec.kind == "window" for spec in specs) + list(by_ratio)
            self._gathers = {ratio: self._gather_buffers(ratio) for ratio in ratios}
            rows = max(gather.budget for gather in self._gathers.values())
            self._workspace = torch.zeros(rows, self.layout.width, dtype=torch.bfloat16, device=self.device)

    @outside_modes
    def plan(self, batch: Batch, *, causal: bool = True) -> V4Plan:
        """The metadata of one step. The batch is only read, and nothing waits for the device.

        With `causal=False` all new tokens of a request (a draft block) see each other and the window before them.
        """
        if WINDOW_POOL not in batch.other_pages:
            raise checks.refuse("other_pages", f"one with {WINDOW_POOL!r}", list(batch.other_pages), "pass its pages")
        prepared = self._planner.prepare(batch)
        groups = {ratio: self._group(ratio, prepared) for ratio in self._gathers} if prepared.split.prefills else {}
        with self._planner.lease.renewed() as use:
            step = self._planner.fill(prepared, use)
            self._clear(step.rows if step.requests else 0)
            window = self._plan_window(step, causal)
            entries = {ratio: self._plan_entries(ratio, step) for ratio in self._entries}
            gathers = {ratio: self._plan_gather(ratio, step, some) for ratio, some in groups.items()}
            return V4Plan(step, window, entries, gathers, self._workspace)

    def _clear(self, written: int) -> None:
        """Clear the rows that the previous step wrote and this one will not write."""
        old = slice(written, self._rows_before)
        self._rows_before = written
        if old.start >= old.stop:
            return
        for buffer in (self._window_slots, *(b.every for b in self._entries.values() if b.every is not None)):
            buffer[old].fill_(-1)
        self._window_lengths[old].zero_()
        for held in self._entries.values():
            held.completed[old].fill_(-1)
            held.visible[old].zero_()
            held.lengths[old].zero_()

    def _plan_window(self, step: Plan, causal: bool) -> WindowPlan:
        pages, rows = step.other_pages[WINDOW_POOL], step.rows
        slots, lengths = self._window_slots[:rows], self._window_lengths[:rows]
        page_size = self.limits.other_page_sizes[WINDOW_POOL]
        blocks = None
        if not causal:
            blocks = (step.lengths - (step.query_starts[1:] - step.query_starts[:-1]), step.lengths)
        if step.requests:
            select_window(
                step.positions,
                step.request_ids,
                pages.block_table,
                page_size=page_size,
                window=self._window,
                slots=slots,
                lengths=lengths,
                own=pages.slots,
                blocks=blocks,
                backend=self.backend,
            )
        return WindowPlan(self._window, page_size, pages, slots, lengths)

    def _plan_entries(self, ratio: int, step: Plan) -> EntryPlan:
        held, rows = self._entries[ratio], step.rows
        page_size = self.limits.page_size // ratio
        completed, visible, lengths = held.completed[:rows], held.visible[:rows], held.lengths[:rows]
        every = None if held.every is None else held.every[:rows]
        if step.requests:
            select_entries(
                step.positions,
                step.request_ids,
                step.block_table,
                ratio=ratio,
                page_size=page_size,
                completed=completed,
                visible=visible,
                lengths=lengths,
                every=every,
                columns=held.columns,
                own=step.slots,
                backend=self.backend,
            )
        return EntryPlan(
            ratio=ratio,
            page_size=page_size,
            block_table=step.block_table,
            slots=completed,
            visible=visible,
            lengths=lengths,
            columns=held.columns,
            request_ids=step.request_ids,
            every=every,
            state=step.other_pages.get(state_pool(ratio)),
            state_page_size=self.limits.other_page_sizes.get(state_pool(ratio), 0),
        )

    def _group(self, ratio: int, prepared: Prepared) -> tuple[PrefillGroup, ...]:
        """How prefills of layers of one ratio share the workspace. A prefill that does not fit is refused."""
        first, starts = prepared.split.decodes, prepared.known.starts.tolist()
        lengths, new = prepared.prefill_lengths, prepared.known.queries[first:].tolist()
        raw = [n + min(length - n, self._window - 1) for n, length in zip(new, lengths, strict=True)]
        entries = [length // ratio if ratio > 1 else 0 for length in lengths]
        return tuple(
            PrefillGroup(
                requests=slice(first + group.first, first + group.end),
                tokens=slice(starts[first + group.first], starts[first + group.end]),
                entries=group.entries,
                rows=group.rows,
            )
            for group in group_prefills(entries, raw, self._gathers[ratio].budget)
        )

    def _plan_gather(self, ratio: int, step: Plan, groups: tuple[PrefillGroup, ...]) -> GatherPlan:
        held, first, count = self._gathers[ratio], step.split.decodes, step.split.prefills
        # `_group` computed the same numbers on the host. Computing them on the device again saves a copy.
        context = step.lengths[first:] - (step.query_starts[first + 1 :] - step.query_starts[first:-1])
        begin = (context - (self._window - 1)).clamp_min_(0)
        buffers = held.requests[:, :count]
        buffers[0].copy_(step.lengths[first:] - begin)
        buffers[1].copy_(begin)
        if ratio > 1:
            buffers[2].copy_(step.lengths[first:] // ratio)
        return GatherPlan(
            groups=groups,
            lengths=buffers[0],
            first=buffers[1],
            entries=buffers[2],
            slots=held.slots[: step.rows],
            row_lengths=held.lengths[: step.rows],
        )

    def _per_token_columns(self, columns: int) -> Tensor:
        return torch.full((self.limits.max_tokens, columns), -1, dtype=torch.int32, device=self.device)

    def _per_token(self) -> Tensor:
        return torch.zeros(self.limits.max_tokens, dtype=torch.int32, device=self.device)

    def _entry_buffers(self, spec: LayerSpec) -> "_EntryBuffers":
        columns = spec.topk
        if spec.kind == "plain" or columns is None:
            columns = round_up(ceil_div(self.limits.max_length, spec.compress), ALIGN_COLUMNS)
        return _EntryBuffers(
            columns,
            torch.full((self.limits.max_tokens,), -1, dtype=torch.int64, device=self.device),
            self._per_token(),
            self._per_token(),
            self._per_token_columns(columns) if spec.kind == "plain" else None,
        )

    def _gather_buffers(self, ratio: int) -> "_GatherBuffers":
        columns = self._entries[ratio].columns if ratio > 1 else 0
        limits = self.limits
        entries = ceil_div(limits.max_length, ratio) if ratio > 1 else 0
        return _GatherBuffers(
            limits.workspace_rows or _PREFILLS_IN_WORKSPACE * (entries + self._window + limits.max_tokens),
            self._per_token_columns(round_up(columns + self._window, ALIGN_COLUMNS)),
            self._per_token(),
            torch.zeros(3, limits.max_requests, dtype=torch.int32, device=self.device),
        )


@dataclass(frozen=True, eq=False)
class _EntryBuffers:
    """The buffers of an `EntryPlan`, for the largest step."""

    columns: int
    completed: Tensor
    """int64 [max_tokens]: slots of the entries that tokens complete."""
    visible: Tensor
    lengths: Tensor
    every: Tensor | None


@dataclass(frozen=True, eq=False)
class _GatherBuffers:
    """The buffers of a `GatherPlan`, for the largest step."""

    budget: int
    """The most workspace rows of a group."""
    slots: Tensor
    lengths: Tensor
    requests: Tensor
    """int32 [3, max_requests]: raw tokens to gather, position of the first one, entries."""


def _by_ratio(specs: Sequence[LayerSpec]) -> dict[int, LayerSpec]:
    """One layer of each ratio. Layers of one ratio share buffers, so they must select entries in the same way."""
    found: dict[int, LayerSpec] = {}
    for spec in specs:
        if spec.kind not in ("overlapping", "plain", "indexed"):
            continue
        other = found.setdefault(spec.compress, spec)
        if (other.kind, other.topk) != (spec.kind, spec.topk):
            differing = f"{other.kind} (top-k {other.topk}) and {spec.kind} (top-k {spec.topk})"
            raise checks.refuse("specs", f"of one kind for ratio {spec.compress}", differing, "use two planners")
    return found


def _one_window(specs: Sequence[LayerSpec]) -> int:
    windows = {spec.window for spec in specs}
    window = next(iter(windows), None)
    if len(windows) != 1 or window is None:
        raise checks.refuse(
            "specs", "layers with one window size", sorted(map(str, windows)), "pass a V4 model's specs"
        )
    return window


def _check_pools(limits: Limits, ratios: list[int]) -> None:
    if WINDOW_POOL not in limits.other_page_sizes:
        raise checks.refuse(
            "other_page_sizes", f"one with {WINDOW_POOL!r}", list(limits.other_page_sizes), "name the window's pool"
        )
    for ratio in ratios:
        if limits.page_size % ratio:
            raise checks.refuse("page_size", f"a multiple of the ratio {ratio}", limits.page_size, "use 256")
