"""`LayerNotes`: a summary of one layer's selections whose size does not grow with top-k times the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tamis.lab.inspection.needle import NeedleNotes
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
"""The most bytes of arrays in a page, before base64 adds a third."""
CANDIDATE_BYTES = 3
"""Approximate bytes that a selected candidate takes in a page, with its score."""
KEPT_QUERIES = 256
PARTS = ("window", "selected", "unselected", "sink")
"""Where the weight of V4's attention goes: the window's tokens, entries that are selected or not, and the sink."""


@dataclass(frozen=True)
class Extent:
    """The queries that are recorded in detail. Counts, distances and ties are recorded for every query."""

    tokens: int
    """Length of the prompt."""
    compared: Tensor
    """Queries, ascending, for which dense attention is computed."""
    kept: Tensor
    """Queries, ascending, whose full selections are kept."""
    shown: Tensor
    """Indices into `kept` of the queries that a page has room for."""
    grid: int
    """Rows and columns of the maps of the whole prompt."""

    @classmethod
    def plan(cls, specs: Sequence[LayerSpec | None], tokens: int, compared: int, asked: Sequence[int]) -> "Extent":
        """Choose the queries for a model's layers and a prompt.

        Args:
            specs: the specs of all layers; None for those of linear attention.
            tokens: length of the prompt.
            compared: number of queries for which to compute dense attention.
            asked: queries whose selections must be kept.
        """
        selecting = [spec for spec in specs if spec is not None and spec.topk is not None]
        # Models with many layers get smaller maps, so that the page stays small enough for a browser.
        grid = min(tokens, 512 if len(selecting) <= 12 else 256)
        maps = 4 * len(selecting) * grid * grid // 2
        each = sum(min(s.columns or 0, max(1, tokens // s.compress)) for s in selecting if not s.reuse_topk)
        room = max(8, (PAGE_BYTES - maps) // (CANDIDATE_BYTES * max(each, 1)))
        wanted = torch.tensor(asked, dtype=torch.int64, device="cpu")
        kept = torch.cat((evenly_spaced(tokens, max(room, KEPT_QUERIES)), wanted)).unique()
        shown = torch.cat((evenly_spaced(len(kept), room), torch.searchsorted(kept, wanted[:room]))).unique()
        return cls(tokens, evenly_spaced(tokens, compared), kept, shown, grid)


class LayerNotes:
    """The record of one layer with a selection. Arrays are on the host; NaN where nothing was computed."""

    def __init__(
        self,
        number: int,
        spec: LayerSpec,
        extent: Extent,
        source: int | None = None,
        score_factor: float = 1.0,
        needle: int | None = None,
    ) -> None:
        """Start empty.

        `source` is the number of the layer whose selection this one shares. Scores are recorded times `score_factor`,
        a factor of the model that the layer leaves out because it does not change the order. `needle` is a position
        of the prompt to follow.
        """
        assert spec.columns is not None
        self.number, self.spec, self.extent, self.source = number, spec, extent, source
        self.topk, self.ratio, self.score_factor = spec.columns, spec.compress, score_factor
        self.candidates = max(1, extent.tokens // self.ratio)
        """The number of candidates: tokens, or compressed entries."""
        tokens, grid = extent.tokens, extent.grid
        self.selected = np.zeros(tokens, np.int32)
        self.visible = np.zeros(tokens, np.int32)
        self.tied = np.zeros(tokens, np.int32)
        """Candidates tied at the cutoff score, see `tied_at_cut`; only for a layer with its own indexer."""
        self.cut = np.full(tokens, np.nan, np.float32)
        """The lowest selected score."""
        self.recall, self.top1, self.effective = np.full((3, tokens), np.nan, np.float32)
        """For the compared queries: as in `Shares`."""
        self.parts = np.full((len(PARTS), tokens), np.nan, np.float32)
        """For V4's compared queries: the shares of all attention, by `PARTS`."""
        self.needle = None if needle is None else NeedleNotes(needle, self.ratio, tokens)
        self.distances = np.zeros(DISTANCE_BINS, np.int64)
        self.possible = np.zeros(DISTANCE_BINS, np.int64)
        columns = min(grid, self.candidates)
        self.counts = np.zeros((grid, columns), np.int64)
        """Selected candidates by blocks of queries and candidates."""
        self.best = np.full((grid, columns), -np.inf, np.float32)
        """The highest selected score in each block."""
        self.mass = np.zeros((grid, columns), np.float64)
        """The weights of dense attention in each block, summed over the compared queries."""
        self.mass_rows = np.zeros(grid, np.int64)
        """The number of compared queries in each row of blocks."""
        self.rows = np.full((len(extent.kept), self.topk), -1, np.int32)
        """The selections of the kept queries, ascending, -1 padded."""
        self.scores = np.zeros((len(extent.kept), self.topk), np.float32)

    def add_selection(self, own: Tensor, visible: Tensor, positions: Tensor, scores: Tensor | None) -> None:
        """Add the selections of some queries.

        Args:
            own: int [n], the positions of the queries.
            visible: int [n], the number of candidates that each query sees.
            positions: int32 [n, topk], ascending, -1 padded.
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
        if self.needle is not None:
            self.needle.add_selection(own, visible, positions, scores, self.score_factor)
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
        """int64: indices of the queries in `own` for which dense attention is computed."""
        return torch.isin(own.cpu(), self.extent.compared).nonzero().flatten().to(own.device)

    def add_shares(self, own: Tensor, shares: Shares, parts: Tensor | None) -> None:
        """Add how much of dense attention the selections of some queries cover, and for V4 the shares [n, PARTS]."""
        at = own.cpu().numpy()
        self.recall[at], self.top1[at], self.effective[at] = (part.cpu().numpy() for part in shares[:3])
        if parts is not None:
            self.parts[:, at] = parts.T.cpu().numpy()
        if self.needle is not None:
            self.needle.add_weights(own, shares.weights)
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
        """bool [tokens]: queries that see more candidates than top-k, so that the indexer has a choice to make."""
        return self.visible > self.topk
