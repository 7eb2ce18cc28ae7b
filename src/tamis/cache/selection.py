"""`Selection` and `Rows`: the rows that each query token attends to, of a cache or of a tensor. `Caches`: the caches of
one V3.2 layer."""

from dataclasses import dataclass, replace

from torch import Tensor

from tamis.cache.paged import PagedCache


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows of `cache` that each query token attends to: the first `lengths` of its `slots`.

    Slots that are negative or past the cache are skipped. One attention call takes several selections (for example a
    sliding window and compressed entries) and runs one softmax over all of them.

    With `request_ids` and `block_table`, `slots` are positions in each token's request. Attention then translates them
    itself, which saves the pass of `translate_positions`.
    """

    cache: PagedCache
    slots: Tensor
    """int32 [T, K]"""
    lengths: Tensor | None = None
    """int32 [T]; None if all K columns count."""
    request_ids: Tensor | None = None
    """int32 [T], the block-table row of each token."""
    block_table: Tensor | None = None
    """int32 [B, W] page ids; negative for absent pages."""

    def rows(self, start: int, end: int) -> "Selection":
        """The selection of query tokens start to end - 1."""
        lengths = None if self.lengths is None else self.lengths[start:end]
        requests = None if self.request_ids is None else self.request_ids[start:end]
        return replace(self, slots=self.slots[start:end], lengths=lengths, request_ids=requests)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a tensor that each query token attends to: the first `lengths` of its `slots`.

    This is a `Selection` for training (`tamis.train`): the rows may require a gradient. Slots that are negative or past
    the rows are skipped; a slot that is listed twice counts twice.
    """

    rows: Tensor
    """[N, width] in the queries' dtype."""
    slots: Tensor
    """int32 [T, K], row numbers."""
    lengths: Tensor | None = None
    """int32 [T]; None if all K columns count."""


@dataclass(frozen=True, eq=False)
class Caches:
    """The caches of one layer: latent rows, and index keys if the layer has an indexer."""

    latent: PagedCache
    index: PagedCache | None = None
    """Index keys: one per token or, if they are pooled, one per group of tokens."""
    index_state: PagedCache | None = None
    """The keys and gates of tokens whose group is not complete, if index keys are pooled: a cache of
    `tamis.cache.layout.compressor_state`."""
