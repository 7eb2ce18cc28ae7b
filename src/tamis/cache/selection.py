"""What attention reads: a `Selection` of rows for each query token, and the `Caches` of one layer."""

from dataclasses import dataclass, replace

from torch import Tensor

from tamis.cache.paged import PagedCache


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows each query token attends to: `slots` of `cache`, of which the first `lengths` count.

    Slots that are negative or past the cache are skipped, and so is everything beyond the length. One attention call
    takes several selections (a sliding window and compressed entries, say) and runs one softmax over all of them.

    With `request_ids` and `block_table`, `slots` are positions in each token's request, and attention translates them
    on the way, which saves the pass of `translate_positions`.
    """

    cache: PagedCache
    slots: Tensor
    """int32 [T, K]"""
    lengths: Tensor | None = None
    """int32 [T], or None: all K columns count."""
    request_ids: Tensor | None = None
    """int32 [T], the block-table row of each token."""
    block_table: Tensor | None = None
    """int32 [B, W] page ids; negative: absent."""

    def rows(self, start: int, end: int) -> "Selection":
        """The same selection for query tokens start..end only."""
        lengths = None if self.lengths is None else self.lengths[start:end]
        requests = None if self.request_ids is None else self.request_ids[start:end]
        return replace(self, slots=self.slots[start:end], lengths=lengths, request_ids=requests)


@dataclass(frozen=True, eq=False)
class Caches:
    """The caches one layer uses: latent rows, and index keys where the layer scores them itself."""

    latent: PagedCache
    index: PagedCache | None = None
