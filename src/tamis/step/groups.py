"""The part of a plan that layers with pooled index keys need: which groups of tokens a step completes and sees."""

import torch
from torch import Tensor

from tamis import checks
from tamis.model.spec import LayerSpec
from tamis.ops.select import select_entries
from tamis.step.plan import GroupPlan, Limits, Plan
from tamis.step.v4_plan import state_pool


class GroupBuffers:
    """Buffers for the largest step, which never move."""

    def __init__(self, spec: LayerSpec, limits: Limits, device: torch.device) -> None:
        """Allocate them; see `Planner`."""
        self.size, self.pool = spec.kpool, state_pool(spec.kpool)
        if limits.page_size % self.size:
            raise checks.refuse("page_size", f"a multiple of kpool={self.size}", limits.page_size, "use 64")
        if self.pool not in limits.other_page_sizes:
            remedy = "name the pool of tokens whose group is not complete"
            raise checks.refuse("other_page_sizes", f"one with {self.pool!r}", list(limits.other_page_sizes), remedy)
        self._page_size, self._state_page_size = limits.page_size // self.size, limits.other_page_sizes[self.pool]
        self._slots = torch.full((limits.max_tokens,), -1, dtype=torch.int64, device=device)
        self._visible = torch.zeros(limits.max_tokens, dtype=torch.int32, device=device)
        self._rows_before = 0

    def check(self, pools: list[str]) -> None:
        """Refuse a batch without the pool of single tokens."""
        if self.pool not in pools:
            raise checks.refuse("other_pages", f"one with {self.pool!r}", pools, "pass its pages")

    def fill(self, step: Plan) -> GroupPlan:
        """The groups of a step, which is planned except for them."""
        written = step.rows if step.requests else 0
        old = slice(written, self._rows_before)
        self._rows_before = written
        self._slots[old].fill_(-1)
        self._visible[old].zero_()
        slots, visible = self._rows(step.rows)
        if step.requests:
            select_entries(
                step.positions,
                step.request_ids,
                step.block_table,
                ratio=self.size,
                page_size=self._page_size,
                completed=slots,
                visible=visible,
                own=step.slots,
            )
        return GroupPlan(self.size, slots, visible, step.other_pages[self.pool], self._state_page_size)

    def _rows(self, count: int) -> tuple[Tensor, Tensor]:
        return self._slots[:count], self._visible[:count]
