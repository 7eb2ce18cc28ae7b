"""Random tensors and filled caches on one device, from a seed."""

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.ops import write_kv

FILL_ROWS = 2**17
"""Rows written at once while a cache is filled."""


class RandomInputs:
    """Random tensors and filled caches on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        """Seed the generator; every result depends on the seed and on the calls before it."""
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32).to(dtype)

    def picks(self, rows: int, k: int, below: int) -> Tensor:
        """int64 [rows, k]: each row has k different numbers below `below` in random order."""
        # Some rows at a time: a prefill over a long context would need gigabytes of random numbers at once.
        step = max(1, 2**26 // below)
        parts = []
        for begin in range(0, rows, step):
            shape = (min(step, rows - begin), below)
            drawn = torch.rand(shape, generator=self._generator, dtype=torch.float32, device=self.device)
            parts.append(drawn.topk(k, dim=1).indices)
        return torch.cat(parts)

    def cache(self, layout: Layout, pages: int, page_size: int, *, filled: bool = True) -> PagedCache:
        """A cache whose rows are all random numbers."""
        cache = PagedCache(layout, pages, page_size, self.device)
        return self.fill(cache) if filled else cache

    def fill(self, cache: PagedCache) -> PagedCache:
        """Write random numbers into all rows of a cache."""
        for begin in range(0, cache.rows, FILL_ROWS):
            slots = torch.arange(begin, min(begin + FILL_ROWS, cache.rows), dtype=torch.int64, device=self.device)
            write_kv(self.normal(len(slots), cache.layout.width), cache, slots)
        return cache

    def request_ids(self, queries: list[int]) -> Tensor:
        """The request of each token, int64, where request b has queries[b] tokens."""
        counts = torch.tensor(queries, dtype=torch.int64, device=self.device)
        return torch.repeat_interleave(counts, output_size=sum(queries))

    def block_table(self, lengths: list[int], page_size: int) -> tuple[Tensor, int]:
        """int32 [B, W], the shuffled pages of each request, -1 padded; and the number of pages."""
        counts = [ceil_div(length, page_size) for length in lengths]
        order = torch.randperm(sum(counts), generator=self._generator, dtype=torch.int64, device=self.device).int()
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=self.device)
        begin = 0
        for row, count in zip(table, counts, strict=True):
            row[:count] = order[begin : begin + count]
            begin += count
        return table, begin


class SharedInputs(RandomInputs):
    """Random tensors, and one filled cache per layout that all cells of a run share.

    Filling a cache takes longer than timing a call on it. Block tables take their pages from a shuffled list of all
    pages, each going on where the last one ended, so that sets with different tables share no rows until the list is
    used up.
    """

    def __init__(self, device: torch.device, seed: int, pages: int) -> None:
        """Remember how many pages each cache has."""
        super().__init__(device, seed)
        self.pages = pages
        self._caches: dict[tuple[str, int], PagedCache] = {}
        self._order = torch.randperm(pages, generator=self._generator, dtype=torch.int64, device=device).int()
        self._next = 0

    def cache(self, layout: Layout, pages: int, page_size: int, *, filled: bool = True) -> PagedCache:
        """The shared cache of the layout; a new one if it is to be empty."""
        if not filled:
            return super().cache(layout, pages, page_size, filled=False)
        key = (layout.name, page_size)
        if key not in self._caches:
            self._caches[key] = super().cache(layout, self.pages, page_size)
        return self._caches[key]

    def block_table(self, lengths: list[int], page_size: int) -> tuple[Tensor, int]:
        """int32 [B, W], pages of the shared caches for each request, -1 padded; and the number of their pages."""
        counts = [ceil_div(length, page_size) for length in lengths]
        if sum(counts) > self.pages:
            raise ValueError(f"lengths must be of at most {self.pages} pages together, got {sum(counts)}; share more")
        if self._next + sum(counts) > self.pages:
            self._next = 0
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=self.device)
        for row, count in zip(table, counts, strict=True):
            row[:count] = self._order[self._next : self._next + count]
            self._next += count
        return table, self.pages
