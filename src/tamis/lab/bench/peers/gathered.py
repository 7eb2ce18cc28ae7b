"""Gathering and FlashMLA's 16-bit prefill as one peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.lab.bench.inputs import AttendSet, GatherSet, InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, load, need_gpu
from tamis.lab.bench.peers.flash_mla import FlashMLA, find_first
from tamis.lab.bench.peers.vllm import upconverting


@dataclass(frozen=True)
class GatheredFlashMLA:
    """vLLM's path for prompts over FP8 rows from 32 heads on: a vLLM kernel gathers whole requests into a bf16
    workspace, then FlashMLA's sparse prefill attends to the workspace. One call does both."""

    operators: Any
    flash_mla: FlashMLA
    name: str = "flashmla-gather"
    capturable: bool = True

    @property
    def build(self) -> str:
        """The build of FlashMLA that attends."""
        return self.flash_mla.build

    @classmethod
    def find(cls, device: torch.device) -> "GatheredFlashMLA":
        """The gather from an installed vLLM, and the first build of FlashMLA that is found."""
        need_gpu(device)
        flash_mla = find_first(device)
        return cls(load("vllm._custom_ops"), flash_mla)

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Slots become workspace rows and heads are padded here; all calls share one workspace."""
        if job.stage != "attend":
            raise Unsupported(f"it has no {job.stage}")
        if job.layout != "v32-fp8":
            raise Unsupported(f"it upconverts v32-fp8 rows, not {job.layout}")
        if job.window:
            raise Unsupported("it reads one cache")
        items = [item for item in sets if isinstance(item, AttendSet)]
        if any(len(item.q) == len(item.lengths) for item in items):
            raise Unsupported("it is for prompts: of a decode, a gather would move far more than is read")
        rows = max(int(item.lengths.sum()) for item in items)
        workspace = torch.zeros(rows, items[0].q.shape[2], dtype=torch.bfloat16, device=items[0].q.device)
        return [self._call(item, workspace) for item in items]

    def _call(self, item: AttendSet, workspace: Tensor) -> Callable[[], Any]:
        (selection,) = item.selections
        starts = (item.lengths.cumsum(0) - item.lengths).int()
        rows = workspace[: int(item.lengths.sum())]
        gather = upconverting(
            self.operators, GatherSet(selection.cache, item.block_table, item.lengths, starts, out=rows)
        )
        attend = self.flash_mla.sparse_prefill(item.q, rows, gathered_rows(item, starts), item.scale)

        def call() -> Any:
            gather()
            return attend()

        return call


def gathered_rows(item: AttendSet, starts: Tensor) -> Tensor:
    """The workspace rows of the selected slots, where request b begins at starts[b]: int32 [T, K], -1 padded."""
    (selection,) = item.selections
    size, table = selection.cache.page_size, item.block_table.long()
    firsts = starts.unsqueeze(1) + size * torch.arange(table.shape[1], dtype=torch.int64, device=table.device)
    first_of_page = torch.zeros(selection.cache.pages, dtype=torch.long, device=table.device)
    first_of_page[table[table >= 0]] = firsts[table >= 0]
    slots = selection.slots.long().clamp_min(0)
    return torch.where(selection.slots >= 0, first_of_page[slots // size] + slots % size, -1).int()
