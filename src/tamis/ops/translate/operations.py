"""The operation of stage `translate`; see `tamis.ops.library`."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.ops.library import Operation


class TranslatePositions(NamedTuple):
    """Request-local positions to physical slots."""

    positions: Tensor
    """int32 [T, K]"""
    request_ids: Tensor
    """int32 [T]"""
    block_table: Tensor
    """int32 [B, W]"""
    page_size: int
    rows_per_page: int
    """Distance of two pages in the numbering of slots."""
    workspace_ids: Tensor | None
    """int32 [T], which of the starts a token has, -1 for a slot of the cache."""
    workspace_starts: Tensor | None
    """int32 [P], given with the ids."""
    shard: tuple[int, int, int]
    """Ranks that share a request's rows, which of them this is, and how many rows are neighbours on a rank."""
    compact: bool
    backend: str

    def fake(self) -> tuple[Tensor, Tensor]:
        """Slots int32 [T, K], and how many of each row are valid."""
        slots = self.positions.new_empty(self.positions.shape, dtype=torch.int32)
        return slots, slots.new_empty(slots.shape[:1], dtype=torch.int32)


translate_positions = Operation("translate", TranslatePositions, TranslatePositions.fake)
