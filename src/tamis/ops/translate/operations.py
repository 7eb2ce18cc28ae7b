"""The operation of stage `translate`; see `tamis.ops.library`."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.ops.library import Operation


class TranslatePositions(NamedTuple):
    """Translate request-local positions to physical slots."""

    positions: Tensor
    """int32 [T, K], negative where there is none."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W], page ids; negative for absent pages."""
    page_size: int
    """Positions per page."""
    rows_per_page: int
    """The distance between two pages in the numbering of slots."""
    workspace_ids: Tensor | None
    """int32 [T], the index of each token's start in `workspace_starts`; -1 for tokens that get slots of the cache."""
    workspace_starts: Tensor | None
    """int32 [P], the first workspace row of each prefill; given with the ids."""
    shard: tuple[int, int, int]
    """(ranks that share each request's rows, this rank, consecutive positions per rank)"""
    compact: bool
    """Whether the valid slots of a row are moved to its front."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> tuple[Tensor, Tensor]:
        """Slots int32 [T, K], and how many of each row are valid."""
        slots = self.positions.new_empty(self.positions.shape, dtype=torch.int32)
        return slots, slots.new_empty(slots.shape[:1], dtype=torch.int32)


translate_positions = Operation("translate", TranslatePositions, TranslatePositions.fake)
