"""`V4Plan`: the metadata of a DeepSeek-V4 step, which is a `Plan` plus window, compressed entries and state.

A V4 model has three kinds of pools. Raw tokens are in the pool "window" of `Batch.other_pages`. Compressed entries and
index keys of every ratio are in the batch's main pool; one of its pages stands for `page_size` tokens, so it holds
`page_size // ratio` entries. The compressors' state is in pools named by ratio: "state4", "state128".

Window and entries are two `Selection`s, each with its own slots and lengths.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.step.batch import PageMap
from tamis.step.plan import Plan

_NUMBERS = count()
"""No number is given twice, so a shape that was forgotten counts as a new one."""

WINDOW_POOL = "window"
"""The name of the window's pool in `Batch.other_pages` and `Limits.other_page_sizes`."""

ALIGN_COLUMNS = 128
"""The width of a table with all entries is a multiple of this, which suits kernel tiles of 64 and of 128 columns."""
ALIGN_DRAFTS = 64
"""The width of a window that also holds a block of draft tokens is a multiple of this."""


@lru_cache(maxsize=4096)
def _numbered(seen: tuple[object, ...]) -> int:
    return next(_NUMBERS)


def state_pool(ratio: int) -> str:
    """The name of the pool that holds the state of compressors of this ratio."""
    return f"state{ratio}"


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The window of each token: the last raw tokens up to itself."""

    size: int
    """The most tokens in a window."""
    page_size: int
    pages: PageMap
    """int32 [requests, pages] block table, and int64 [rows] slots for the step's raw rows; -1 for rows that are not
    written."""
    slots: Tensor
    """int32 [rows, size]: slots of each token's window, oldest first; -1 beyond the length."""
    lengths: Tensor
    """int32 [rows]: min(position + 1, size); 0 for padding and for tokens that are not written."""

    def selection(self, cache: PagedCache) -> Selection:
        """The window's rows in its cache, for attention."""
        return Selection(cache, self.slots, self.lengths)


@dataclass(frozen=True, eq=False)
class EntryPlan:
    """Compressed entries of one ratio. Entry j stands for tokens j * ratio to j * ratio + ratio - 1 of its request."""

    ratio: int
    page_size: int
    """Entries per page."""
    block_table: Tensor
    """int32 [requests, pages], shared by all ratios; -1 for absent pages."""
    slots: Tensor
    """int64 [rows]: the slot of the entry that this token completes; -1 for tokens that complete none."""
    visible: Tensor
    """int32 [rows]: the number of entries that are complete at this token, (position + 1) // ratio; 0 for padding. The
    indexer scores these."""
    lengths: Tensor
    """int32 [rows]: the number of entries that the token attends to, min(visible, columns)."""
    columns: int
    """The most entries that a token attends to: the indexer's top-k, or all of the longest request."""
    request_ids: Tensor
    """int32 [rows]: the block-table row of each token."""
    every: Tensor | None
    """int32 [rows, columns]: slots of all complete entries, for layers without an indexer; -1 beyond the length."""
    state: PageMap | None
    """Block table of the compressor's state, and int64 [rows] slots for the step's tokens; None if the batch has no
    such pool."""
    state_page_size: int
    """Tokens per page of the state's pool; 0 if the planner has no such pool."""

    def selection(self, cache: PagedCache, chosen: Tensor | None = None) -> Selection:
        """The entries in their cache, for attention.

        Args:
            cache: the entries' cache.
            chosen: int32 [rows, k] numbers of entries within the request, valid ones first, as the indexer returns
                them. Layers without an indexer attend to all entries.
        """
        if chosen is None:
            if self.every is None:
                expected = f"given for ratio {self.ratio}"
                raise checks.refuse("chosen", expected, None, "pass the entries that the indexer selected")
            return Selection(cache, self.every, self.lengths)
        return Selection(cache, chosen, self.lengths, self.request_ids, self.block_table)


@dataclass(frozen=True, eq=False)
class PrefillGroup:
    """Prefills whose rows are dequantised into the workspace together.

    Request k of the group owns the workspace rows k * rows to (k + 1) * rows - 1. Its entries begin at k * rows, and
    its raw tokens begin at k * rows + entries.
    """

    requests: slice
    """Their rows in the plan's block tables."""
    tokens: slice
    """Their rows in the query."""
    entries: int
    """Workspace rows for the entries of a request."""
    rows: int
    """Workspace rows of a request: for its entries and for the most raw tokens of any request of the group."""


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """How prefills are gathered into the workspace, for layers of one ratio (1 for layers with only a window)."""

    groups: tuple[PrefillGroup, ...]
    lengths: Tensor
    """int32 [prefills]: raw tokens to gather: the new ones and up to window - 1 before them."""
    first: Tensor
    """int32 [prefills]: position of the first raw token to gather."""
    entries: Tensor
    """int32 [prefills]: entries that are complete at the end of the step; 0 for ratio 1."""
    slots: Tensor
    """int32 [rows, columns]: the workspace rows of each token. A layer fills it, group by group, while it runs."""
    row_lengths: Tensor
    """int32 [rows]: how many of a token's columns are filled."""


@dataclass(frozen=True, eq=False)
class V4Plan:
    """The metadata of one V4 step, which all layers share. Tensors are views of the planner's buffers."""

    step: Plan
    """The part that V4 shares with V3.2: requests, tokens, positions, request ids, the decode/prefill split, and the
    main pool's pages. Its `slots` count tokens and not entries, so they say only which tokens are real."""
    window: WindowPlan
    entries: Mapping[int, EntryPlan]
    """The compressed entries, by ratio."""
    gathers: Mapping[int, GatherPlan]
    """How prefills are gathered, by ratio, with 1 for layers with only a window; empty if they read pages directly."""
    workspace: Tensor | None
    """bf16 [workspace rows, width]; None if prefills read pages directly."""

    def using(self) -> AbstractContextManager[None]:
        """The block in which a layer runs on this plan; see `Plan.using`. One lease covers all buffers of the step."""
        return self.step.using()

    def signature(self, ratio: int) -> int | None:
        """A number for all that the checks of a layer of this ratio depend on in a plan for a device; None if they must
        run in every call, because prefills are gathered. All layers share a plan, so it is made once for each ratio."""
        if ratio not in self._signatures:
            self._signatures[ratio] = None if self.gathers else _numbered(self._sign(ratio))
        return self._signatures[ratio]

    @cached_property
    def _signatures(self) -> dict[int, int | None]:
        return {}

    def _sign(self, ratio: int) -> tuple[object, ...]:
        step, window, entries = self.step, self.window, self.entries.get(ratio)
        seen: list[object] = [step.rows, step.requests == 0, window.size, window.page_size, self.workspace is None]
        tensors: list[Tensor | None] = [step.positions, step.request_ids]
        tensors += [window.pages.slots, window.slots, window.lengths]
        if entries is not None:
            seen += (entries.page_size, entries.state_page_size, entries.columns, entries.state is None)
            tensors += [entries.block_table, entries.slots, entries.visible, entries.lengths, entries.every]
            tensors += [] if entries.state is None else [entries.state.slots, entries.state.block_table]
        for value in tensors:
            seen += (None,) if value is None else (value.shape, value.stride(), value.dtype, value.device)
        return tuple(seen)
