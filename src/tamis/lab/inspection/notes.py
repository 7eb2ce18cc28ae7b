"""`LayerNotes`: what is kept of one layer's selections, in memory that does not grow with top-k times the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tamis.lab.inspection.statistics import (
    DISTANCE_BINS,
    Shares,
    distance_counts,
    evenly_spaced,
    tied_at_cut,
    visible_counts,
)
from tamis.model.spec import LayerSpec

PAGE_BYTES = 13 << 20
"""What the arrays of a page may take, before base64 adds a third."""
PLACE_BYTES = 3
"""Approximate bytes that a selected candidate takes in a page, with its score."""
KEPT_QUERIES = 256


@dataclass(frozen=True)
class Extent:
    """How much is looked at. What is counted (how many, how far, how often tied) is counted for every query."""

    tokens: int
    """Length of the prompt."""
    compared: Tensor
    """Queries, ascending, for which dense attention is computed as well."""
    kept: Tensor
    """Queries, ascending, whose selections are kept one by one."""
    shown: Tensor
    """Indices into the kept queries of those that a page has room for."""
    grid: int
    """Rows and columns of the maps of everything."""

    @classmethod
    def plan(cls, specs: Sequence[LayerSpec], tokens: int, compared: int, asked: Sequence[int]) -> "Extent":
        """For a model's layers and a prompt.

        Args:
            specs: of all layers.
            tokens: in the prompt.
            compared: for how many queries to compute dense attention.
            asked: queries whose selections must be kept.
        """
        selecting = [spec for spec in specs if spec.topk is not None]
        # Maps of many layers are made smaller, so that the page of a large model stays one.
        grid = min(tokens, 512 if len(selecting) <= 12 else 256)
        maps = 3 * len(selecting) * grid * grid // 2
        each = sum(min(s.topk or 0, max(1, tokens // s.compress)) for s in selecting if not s.reuse_topk)
        room = max(8, (PAGE_BYTES - maps) // (PLACE_BYTES * max(each, 1)))
        wanted = torch.tensor(asked, dtype=torch.int64, device="cpu")
        kept = torch.cat((evenly_spaced(tokens, max(room, KEPT_QUERIES)), wanted)).unique()
        shown = torch.cat((evenly_spaced(len(kept), room), torch.searchsorted(kept, wanted[:room]))).unique()
        return cls(tokens, evenly_spaced(tokens, compared), kept, shown, grid)


class LayerNotes:
    """One selecting layer. Arrays of queries are on the host; NaN where nothing was computed."""

    def __init__(
        self, number: int, spec: LayerSpec, extent: Extent, source: int | None = None, score_factor: float = 1.0
    ) -> None:
        """Start empty. A layer that shares the selection of another has that one's number as `source`. Scores are noted
        times a factor that the model has and its layer, for which it changes no order, leaves out."""
        assert spec.topk is not None
        self.number, self.spec, self.extent, self.source = number, spec, extent, source
        self.topk, self.ratio, self.score_factor = spec.topk, spec.compress, score_factor
        self.candidates = max(1, extent.tokens // self.ratio)
        """What can be selected: tokens, or entries."""
        tokens, grid = extent.tokens, extent.grid
        self.selected = np.zeros(tokens, np.int32)
        self.visible = np.zeros(tokens, np.int32)
        self.tied = np.zeros(tokens, np.int32)
        """Places at the score of the cut; see `tied_at_cut`. Of a layer that selects for itself."""
        self.cut = np.full(tokens, np.nan, np.float32)
        """The lowest selected score."""
        self.recall, self.top1, self.effective, self.window = np.full((4, tokens), np.nan, np.float32)
        """As in `Shares`, and for V4 the window's share of all attention; of the compared queries."""
        self.distances = np.zeros(DISTANCE_BINS, np.int64)
        self.possible = np.zeros(DISTANCE_BINS, np.int64)
        columns = min(grid, self.candidates)
        self.counts = np.zeros((grid, columns), np.int64)
        """Selected candidates by blocks of queries and candidates."""
        self.best = np.full((grid, columns), -np.inf, np.float32)
        """Highest selected score in a block."""
        self.mass = np.zeros((grid, columns), np.float64)
        """Dense attention's weights in a block, summed over the compared queries."""
        self.mass_rows = np.zeros(grid, np.int64)
        """How many queries were compared in a row of blocks."""
        self.rows = np.full((len(extent.kept), self.topk), -1, np.int32)
        """What the kept queries select, ascending, then -1."""
        self.scores = np.zeros((len(extent.kept), self.topk), np.float32)

    def add_selection(self, own: Tensor, visible: Tensor, positions: Tensor, scores: Tensor | None) -> None:
        """Add what some queries selected.

        Args:
            own: int [n], their positions.
            visible: int [n], how many candidates they saw.
            positions: int32 [n, topk], ascending, then -1.
            scores: float32 [n, S] of all candidates; None if another layer selected.
        """
        self.distances += distance_counts(positions, own, self.ratio).cpu().numpy()
        self.possible += visible_counts(own, self.ratio).cpu().numpy()
        at = own.cpu().numpy()
        candidates = positions.cpu().numpy()
        there = candidates >= 0
        self.selected[at] = there.sum(1)
        self.visible[at] = visible.cpu().numpy()
        chosen = np.zeros(candidates.shape, np.float32)
        if scores is not None:
            found = scores.gather(1, positions.clamp_min(0).long())
            chosen = found.mul(self.score_factor).cpu().numpy()
            self.tied[at] = tied_at_cut(scores, positions).cpu().numpy()
            self.cut[at] = np.where(there, chosen, np.inf).min(1)
        self._add_blocks(at, candidates, there, chosen)
        kept = self.extent.kept.numpy()
        where = np.searchsorted(kept, at)
        mine = (where < len(kept)) & (kept[np.minimum(where, len(kept) - 1)] == at)
        self.rows[where[mine]] = candidates[mine]
        self.scores[where[mine]] = chosen[mine]

    def _add_blocks(self, at: np.ndarray, candidates: np.ndarray, there: np.ndarray, scores: np.ndarray) -> None:
        grid, columns = self.counts.shape
        block = (at * grid // self.extent.tokens)[:, None] * columns + candidates * columns // self.candidates
        block = block[there]
        self.counts += np.bincount(block, minlength=grid * columns).reshape(grid, columns)
        np.maximum.at(self.best.reshape(-1), block, scores[there])

    def compared_among(self, own: Tensor) -> Tensor:
        """int64: which of the queries at these positions are to be compared with dense attention."""
        return torch.isin(own.cpu(), self.extent.compared).nonzero().flatten().to(own.device)

    def add_shares(self, own: Tensor, shares: Shares, window: Tensor | None) -> None:
        """Add how much of dense attention the selections of some queries cover, and, for V4, the window's share of all
        attention."""
        at = own.cpu().numpy()
        self.recall[at], self.top1[at], self.effective[at] = (part.cpu().numpy() for part in shares[:3])
        if window is not None:
            self.window[at] = window.cpu().numpy()
        grid, columns = self.mass.shape
        weights = shares.weights.double()
        column = torch.arange(weights.shape[1], dtype=torch.int64, device=weights.device) * columns // self.candidates
        wide = (
            weights.new_zeros(len(weights), columns, dtype=weights.dtype).index_add_(1, column, weights).cpu().numpy()
        )
        row = at * grid // self.extent.tokens
        np.add.at(self.mass, row, wide)
        np.add.at(self.mass_rows, row, 1)

    @property
    def choosing(self) -> np.ndarray:
        """bool [tokens]: queries that see more than they can select, where the indexer has a choice to make."""
        return self.visible > self.topk
