"""What a step of DeepSeek-V4 is made of beyond a `Plan`: window, compressed entries, state, gathered prefills.

A V4 model keeps raw tokens in a pool of their own, named "window" in `Batch.other_pages`; compressed entries (and index
keys) of every ratio in the batch's main pool, whose pages stand for so many *tokens* and hold `page_size // ratio`
entries each; and the compressor's state in pools named "state4", "state128" and so on, by ratio.

Every list of slots comes with true lengths: window and entries are two `Selection`s, and neither knows of the other.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.step.batch import PageMap
from tamis.step.plan import Plan

WINDOW_POOL = "window"
"""The name of the window's pool in `Batch.other_pages` and `Limits.other_page_sizes`."""

ALIGN_COLUMNS = 128
"""The width of a table with all entries is a multiple of this, which suits kernel tiles of 64 and of 128 columns."""
ALIGN_DRAFTS = 64
"""The width of a window that also holds a block of draft tokens is a multiple of this."""


def state_pool(ratio: int) -> str:
    """The name of the pool that holds the state of compressors of this ratio."""
    return f"state{ratio}"


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The last raw tokens of each query token, its own included."""

    size: int
    """How many there are at most."""
    page_size: int
    pages: PageMap
    """Block table int32 [requests, pages], and int64 [rows] slots to write the step's raw rows to; -1: do not."""
    slots: Tensor
    """int32 [rows, size]: what each token attends to, oldest first; -1 beyond the length."""
    lengths: Tensor
    """int32 [rows]: min(position + 1, size); 0 for padding and for tokens that are not written."""

    def selection(self, cache: PagedCache) -> Selection:
        """What the window contributes to attention."""
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
    """int64 [rows]: where the entry goes that this token completes; -1 for all tokens that complete none."""
    visible: Tensor
    """int32 [rows]: how many entries are complete at this token, (position + 1) // ratio; 0 for padding. What an
    indexer scores."""
    lengths: Tensor
    """int32 [rows]: how many of them are attended to, min(visible, columns)."""
    columns: int
    """At most how many entries a token attends to: the indexer's top-k, or room for all of the longest request."""
    request_ids: Tensor
    """int32 [rows], the block-table row of each token."""
    every: Tensor | None
    """int32 [rows, columns]: slots of all complete entries, for layers without an indexer; -1 beyond the length."""
    state: PageMap | None
    """Block table of the compressor's state, and int64 [rows] slots for the step's tokens; None if the batch has no
    such pool."""
    state_page_size: int
    """Tokens per page of it; 0 without such a pool."""

    def selection(self, cache: PagedCache, chosen: Tensor | None = None) -> Selection:
        """What the entries contribute to attention: the `chosen` ones (int32 [rows, k] numbers of entries within the
        request, left-packed, as the indexer returns them), or all."""
        if chosen is None:
            if self.every is None:
                raise ValueError(
                    f"chosen must be given for ratio {self.ratio}, got None; pass the entries that the indexer selected"
                )
            return Selection(cache, self.every, self.lengths)
        return Selection(cache, chosen, self.lengths, self.request_ids, self.block_table)


@dataclass(frozen=True, eq=False)
class PrefillGroup:
    """Prefills whose rows are dequantised into the workspace together. Request k of the group owns `rows` of its rows
    from k * rows on: entries first, raw tokens from k * rows + entries on."""

    requests: slice
    """Rows of the batch's block tables."""
    tokens: slice
    """Rows of the query."""
    entries: int
    """Room for entries per request (N)."""
    rows: int
    """Workspace rows per request (M): N and the longest run of raw tokens."""


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """How the prefills of one ratio (1: window only) go through the workspace."""

    groups: tuple[PrefillGroup, ...]
    lengths: Tensor
    """int32 [prefills]: raw tokens to gather, the new ones and up to window - 1 before them."""
    first: Tensor
    """int32 [prefills]: position of the first of them."""
    entries: Tensor
    """int32 [prefills]: complete entries at the end of the step; 0 for ratio 1."""
    slots: Tensor
    """int32 [rows, columns]: rows of the workspace, filled group by group while a layer runs."""
    row_lengths: Tensor
    """int32 [rows]"""


@dataclass(frozen=True, eq=False)
class V4Plan:
    """Everything about a step that is the same in all layers. Tensors are views of the planner's buffers."""

    step: Plan
    """Requests, tokens, rows, positions, request ids, the decode/prefill split, and the main pool's page map, whose
    slots count tokens, not entries: they only mark which tokens are real."""
    window: WindowPlan
    entries: Mapping[int, EntryPlan]
    """By ratio."""
    gathers: Mapping[int, GatherPlan]
    """By ratio, with 1 for layers that have only a window; empty unless prefills are gathered."""
    workspace: Tensor | None
    """[workspace rows, width] bf16; None unless prefills are gathered."""

    def using(self) -> AbstractContextManager[None]:
        """As of `Plan`, whose buffers are refilled together with these."""
        return self.step.using()
