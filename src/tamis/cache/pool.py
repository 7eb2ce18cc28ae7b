"""`PagePool`: a page allocator for programs without an engine, such as demonstrations, tests and benchmarks."""

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div


class PagePool:
    """Allocates pages to requests and builds their block tables and slots. Page 0 is never allocated."""

    def __init__(self, pages: int, page_size: int, *, seed: int | None = None) -> None:
        """Start with all pages free. A `seed` shuffles them, so that neighbouring positions lie in distant pages."""
        checks.integer("pages", pages, low=2)
        self.pages, self.page_size = pages, checks.integer("page_size", page_size, low=1)
        ids = torch.arange(1, pages, dtype=torch.int64, device="cpu")
        if seed is not None:
            checks.integer("seed", seed, low=0, high=checks.INT64_MAX)
            generator = torch.Generator("cpu").manual_seed(seed)
            ids = ids[torch.randperm(pages - 1, generator=generator, dtype=torch.int64, device="cpu")]
        self._free: list[int] = ids.tolist()
        self._held: dict[object, list[int]] = {}

    @property
    def free_pages(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def extend(self, request: object, length: int) -> None:
        """Allocate the pages that a request lacks for `length` tokens. If too few are free, nothing changes."""
        missing = self.missing(request, length)
        if missing > len(self._free):
            raise checks.refuse("length", f"within {len(self._free)} free pages", f"{missing} more", "release requests")
        if missing:
            self._held.setdefault(request, []).extend(self._free.pop() for _ in range(missing))

    def missing(self, request: object, length: int) -> int:
        """The number of pages that a request lacks for `length` tokens."""
        held = self._pages_of(request)
        needed = ceil_div(checks.integer("length", length, low=0), self.page_size)
        return max(0, needed - len(held))

    def release(self, request: object) -> None:
        """Free all pages of a request, if it has any."""
        checks.hashable("request", request)
        self._free.extend(page for page in self._held.pop(request, []) if page >= 0)

    def forget(self, request: object, before: int) -> None:
        """Free the pages of a request that hold only positions below `before`. Its block table has -1 there."""
        held = self._pages_of(request)
        for number in range(min(max(checks.integer("before", before), 0) // self.page_size, len(held))):
            if held[number] >= 0:
                self._free.append(held[number])
                held[number] = -1

    def block_table(self, requests: list[object], width: int | None = None) -> Tensor:
        """int32 [B, width]: the requests' pages, padded with -1."""
        held = [self._pages_of(request) for request in requests]
        most = max((len(h) for h in held), default=1)
        if width is not None and checks.integer("width", width) < most:
            raise checks.refuse("width", f"at least {most} pages, which one request holds", width, "raise the width")
        shape = len(requests), max(most if width is None else width, 1)
        table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        for row, ids in zip(table, held, strict=True):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32, device="cpu")
        return table

    def slots(self, request: object, start: int, end: int) -> Tensor:
        """int64 [end - start]: the slots of positions start to end - 1 of a request."""
        checks.integer("start", start, low=0, high=checks.integer("end", end, low=0))
        ids = torch.tensor(self._pages_of(request), dtype=torch.int64, device="cpu")
        if end > len(ids) * self.page_size:
            raise checks.refuse("end", f"at most {len(ids) * self.page_size}", end, "call extend first")
        if start < end:
            self.check_kept(request, start)
        position = torch.arange(start, end, dtype=torch.int64, device="cpu")
        return ids[position // self.page_size] * self.page_size + position % self.page_size

    def check_kept(self, request: object, start: int) -> None:
        """Refuse a position whose page was freed by `forget`."""
        number, held = start // self.page_size, self._pages_of(request)
        if number < len(held) and held[number] < 0:
            raise checks.refuse("start", "in a page that was not freed by forget", start, "ask for later positions")

    def _pages_of(self, request: object) -> list[int]:
        """The pages of a request in order, -1 for those that were freed by `forget`."""
        checks.hashable("request", request)
        return self._held.get(request, [])
