"""`CheckedCache`: that a tensor of an engine was checked and described as a cache, without keeping it alive."""

from weakref import ref

from torch import Tensor

from tamis.cache.paged import PagedCache


class CheckedCache:
    """A cache that a layer has seen before.

    An engine passes the same tensor in every step, and checking it takes longer than launching a kernel. The tensor is
    not kept: vLLM allocates caches to measure the memory of graphs, and frees them before it allocates those that it
    serves from.
    """

    def __init__(self, storage: Tensor, found: PagedCache) -> None:
        """Remember what `PagedCache.wrap` made of a tensor. Its scale, if it has one, must be a number."""
        self._storage, self._shape = ref(storage), found.storage.shape
        self._layout, self._scale = found.layout, found.scale

    def find(self, storage: Tensor) -> PagedCache | None:
        """The cache of this tensor, or None if it is another one."""
        if self._storage() is not storage:
            return None
        # Some releases have a head axis.
        rows = storage if storage.dim() == 3 else storage.view(self._shape)
        return PagedCache.rebuilt(rows, self._layout, self._scale)
