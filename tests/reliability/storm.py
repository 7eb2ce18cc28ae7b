"""A small engine with continuous batching and no mercy, and each of its requests again by itself.

Requests arrive, run in chunks of any size, draft tokens of which some are rejected, are preempted and start again on
other pages, begin with the pages of another request, and end; steps have padded rows. Pages that nobody holds are NaN
throughout. Afterwards each request runs alone, in prefills over fresh pages, without the rejected drafts. What must be
the same in bits (selections) is compared in bits: a selection depends on its token and keys alone. Outputs are compared
within a bound that a model states, because a batch of another size sums in another order.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tamis import Batch, PagedCache, PageMap
from tamis.arithmetic import ceil_div

MOST_REQUESTS, MOST_TOKENS, MOST_LENGTH, MOST_DRAFTS = 10, 96, 96, 3
PAGES = 24
"""Of tokens 16 each: about two thirds of what the running requests would like to have."""
MAIN = ""


class Model(Protocol):
    """What runs in a storm: pools, planner, caches, and the layers' calls."""

    page_sizes: Mapping[str, int]
    """Tokens per page by pool; each divides that of the main pool."""

    def planner(self) -> Any: ...

    def caches(self, pages: Mapping[str, int]) -> dict[str, list[PagedCache]]:
        """By pool."""

    def first_needed(self, pool: str, cached: int) -> int:
        """The first position that a request with so many cached tokens still reads in a pool."""

    def inputs(self, tokens: int, generator: torch.Generator) -> list[Tensor]:
        """What tokens 0, 1, 2... of a request bring, row by row."""

    def run(self, caches: dict[str, list[PagedCache]], plan: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
        """Results row by row; integers are compared in bits."""

    bound: float
    """How far two runs of one token may differ."""


class Pages:
    """An allocator whose pages may be held by several requests."""

    def __init__(self, sizes: Mapping[str, int], tokens: int) -> None:
        self.sizes = sizes
        self.count = {name: tokens // size for name, size in sizes.items()}
        self.free = {name: list(range(count)) for name, count in self.count.items()}
        self.users = {name: [0] * count for name, count in self.count.items()}

    def missing(self, tables: dict[str, list[int]], length: int) -> dict[str, int]:
        return {name: max(0, ceil_div(length, size) - len(tables[name])) for name, size in self.sizes.items()}

    def fits(self, tables: dict[str, list[int]], length: int) -> bool:
        return all(count <= len(self.free[name]) for name, count in self.missing(tables, length).items())

    def grow(self, tables: dict[str, list[int]], length: int) -> None:
        for name, count in self.missing(tables, length).items():
            for _ in range(count):
                page = self.free[name].pop()
                self.users[name][page] = 1
                tables[name].append(page)

    def share(self, tables: dict[str, list[int]], length: int) -> dict[str, list[int]]:
        shared = {name: tables[name][: length // size] for name, size in self.sizes.items()}
        for name, pages in shared.items():
            for page in pages:
                self.users[name][page] += page >= 0
        return shared

    def drop(self, name: str, page: int) -> bool:
        """One user less; whether it was the last."""
        self.users[name][page] -= 1
        if not self.users[name][page]:
            self.free[name].append(page)
        return not self.users[name][page]


@dataclass(eq=False)
class Request:
    """What a request brings, holds and got."""

    name: int
    inputs: list[Tensor]
    drafts: list[Tensor]
    prompt: int
    total: int
    tables: dict[str, list[int]]
    cached: int = 0
    found: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By position, as long as nothing was wrong with it; runs after a preemption must find the same."""


@dataclass(frozen=True)
class Piece:
    request: Request
    start: int
    right: int
    """Tokens that are the request's own; the rest are drafts that will be rejected."""
    wrong: int

    @property
    def end(self) -> int:
        return self.start + self.right + self.wrong

    def rows(self) -> list[Tensor]:
        middle = self.start + self.right
        pairs = zip(self.request.inputs, self.request.drafts, strict=True)
        return [torch.cat((own[self.start : middle], other[middle : self.end])) for own, other in pairs]


Plant = Callable[["Storm", list[Piece], Batch], None]


class Storm:
    """Runs requests together and compares them with themselves alone."""

    def __init__(self, model: Model, seed: int, plant: Plant | None = None) -> None:
        self.model, self.plant = model, plant
        self.choose, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.pages = Pages(model.page_sizes, PAGES * model.page_sizes[MAIN])
        self.planner, self.caches = model.planner(), model.caches(self.pages.count)
        for name, count in self.pages.count.items():
            for page in range(count):
                self._poison(name, page)
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.tokens = self.arrived = 0
        self.counts = dict.fromkeys(("preempted", "shared", "rejected", "padded", "reused", "chunks", "decodes"), 0)
        self.differences: list[str] = []

    def run(self, tokens: int) -> list[str]:
        """Run until so many tokens have run; what differed, as sentences."""
        while self.tokens < tokens and not self.differences:
            self._arrive()
            self._preempt()
            pieces = self._pieces()
            if pieces:
                self._step(pieces)
            elif self.running:
                self._park(self.choose.choice(self.running))
        for request in [*self.running, *self.parked]:
            self._compare(request)
        return self.differences

    def _arrive(self) -> None:
        choose = self.choose
        if self.parked and choose.random() < 0.3 and len(self.running) < MOST_REQUESTS:
            self.running.append(self.parked.pop(0))
        while len(self.running) < MOST_REQUESTS and len(self.parked) < 3 and choose.random() < 0.4:
            self.arrived += 1
            total = choose.randint(4, MOST_LENGTH)
            prompt = choose.randint(1, total)
            inputs, drafts = (self.model.inputs(total + MOST_DRAFTS, self.generator) for _ in range(2))
            request = Request(self.arrived, inputs, drafts, prompt, total, {name: [] for name in self.pages.sizes})
            if self.running and choose.random() < 0.5:
                self._share(request, choose.choice(self.running))
            self.running.append(request)

    def _share(self, request: Request, other: Request) -> None:
        """Begin with another request's whole pages, if it still has what is needed."""
        size = self.pages.sizes[MAIN]
        length = min(other.cached, request.total - 1) // size * size
        for name, each in self.pages.sizes.items():
            first = self.model.first_needed(name, length) // each
            if any(page < 0 for page in other.tables[name][first : length // each]):
                return
        if not length:
            return
        self.counts["shared"] += 1
        request.tables, request.cached = self.pages.share(other.tables, length), length
        for own, known in zip(request.inputs, other.inputs, strict=True):
            own[:length] = known[:length]
        request.found.update({p: other.found[p] for p in range(length) if p in other.found})

    def _preempt(self) -> None:
        if len(self.running) > 1 and self.choose.random() < 0.08:
            self._park(self.choose.choice(self.running))

    def _park(self, request: Request) -> None:
        """Take a request's pages away. It starts again at its first token."""
        self.counts["preempted"] += 1
        self._release(request)
        self.running.remove(request)
        self.parked.append(request)

    def _pieces(self) -> list[Piece]:
        room, choose = MOST_TOKENS, self.choose
        pieces: list[Piece] = []
        for request in choose.sample(self.running, len(self.running)):
            left = request.total - request.cached
            if room < 1 + MOST_DRAFTS or choose.random() < 0.1:
                continue  # paused
            if request.cached < request.prompt:
                right, wrong = min(choose.randint(1, 30), request.prompt - request.cached, room), 0
            else:
                right = min(left, 1 + choose.randint(0, 1))
                wrong = choose.randint(0, MOST_DRAFTS - 1) if choose.random() < 0.4 else 0
            piece = Piece(request, request.cached, right, wrong)
            if not self.pages.fits(request.tables, piece.end):
                continue
            self.pages.grow(request.tables, piece.end)
            pieces.append(piece)
            room -= right + wrong
        return sorted(pieces, key=lambda p: p.end - p.start)

    def _step(self, pieces: list[Piece]) -> None:
        new = [piece.end - piece.start for piece in pieces]
        padding = self.choose.choice((0, 0, 1, 5))
        batch = make_batch(self.pages.sizes, pieces, padded=min(sum(new) + padding, MOST_TOKENS + 5))
        if self.plant is not None:
            self.plant(self, pieces, batch)
        found = self._call(self.planner, self.caches, batch, pieces, padding)
        self.tokens += sum(new)
        self.counts["padded"] += padding > 0
        for number, piece in enumerate(pieces):
            self.counts["chunks" if new[number] > 1 + MOST_DRAFTS else "decodes"] += 1
            self.counts["rejected"] += piece.wrong
            begin = sum(new[:number])
            for at in range(piece.right):
                self._keep(piece.request, piece.start + at, {k: v[begin + at] for k, v in found.items()})
            piece.request.cached += piece.right
            self._forget(piece.request)
            if piece.request.cached == piece.request.total:
                self._release(piece.request)
                self.running.remove(piece.request)
                self._compare(piece.request)

    def _call(
        self, planner: Any, caches: Any, batch: Batch, pieces: Sequence[Piece], padding: int
    ) -> dict[str, Tensor]:
        parts = [torch.cat(rows) for rows in zip(*(piece.rows() for piece in pieces), strict=True)]
        if padding:
            rows = batch.padded_tokens or 0
            # What stands in padded rows is nobody's business.
            parts = [torch.cat((part, part[:1].expand(rows - len(part), *part.shape[1:]))) for part in parts]
        return self.model.run(caches, planner.plan(batch), parts)

    def _keep(self, request: Request, position: int, found: dict[str, Tensor]) -> None:
        known = request.found.setdefault(position, found)
        if known is not found:
            self._same(request, position, found, known, "before it was preempted or shared")

    def _same(
        self, request: Request, position: int, found: Mapping[str, Tensor], other: Mapping[str, Tensor], when: str
    ) -> None:
        for name, value in found.items():
            if value.is_floating_point():
                error = float((value.double() - other[name].double()).abs().max())
                if not error <= self.model.bound:
                    self.differences.append(f"{name} of token {position} of {request.name} is {error:.3g} off {when}")
            elif not torch.equal(value, other[name]):
                self.differences.append(f"{name} of token {position} of {request.name} is another one {when}")

    def _compare(self, request: Request) -> None:
        """Against the same request alone: prefills over fresh pages."""
        length = max(request.found, default=-1) + 1
        if not length:
            return
        pages = Pages(self.pages.sizes, ceil_div(MOST_LENGTH, self.pages.sizes[MAIN]) * self.pages.sizes[MAIN])
        planner, caches = self.model.planner(), self.model.caches(pages.count)
        alone = Request(request.name, request.inputs, request.drafts, length, length, {n: [] for n in pages.sizes})
        for start in range(0, length, MOST_TOKENS):
            piece = Piece(alone, start, min(MOST_TOKENS, length - start), 0)
            pages.grow(alone.tables, piece.end)
            found = self._call(planner, caches, make_batch(pages.sizes, [piece]), [piece], 0)
            for at in range(piece.right):
                expected = {name: value[at] for name, value in found.items()}
                self._same(request, start + at, request.found[start + at], expected, "alone")

    def _release(self, request: Request) -> None:
        for name, table in request.tables.items():
            for page in table:
                self._drop(name, page)
            table.clear()
        request.cached = 0 if request.cached < request.total else request.cached

    def _forget(self, request: Request) -> None:
        """Give back pages that are behind the window."""
        for name, size in self.pages.sizes.items():
            table = request.tables[name]
            # Half of the requests keep what others need that begin with their whole pages.
            main = self.pages.sizes[MAIN]
            cached = request.cached // main * main if request.name % 2 else request.cached
            for number in range(self.model.first_needed(name, cached) // size):
                self._drop(name, table[number])
                table[number] = -1

    def _drop(self, name: str, page: int) -> None:
        if page >= 0 and self.pages.drop(name, page):
            self.counts["reused"] += 1
            self._poison(name, page)

    def _poison(self, name: str, page: int) -> None:
        for cache in self.caches[name]:
            # All bits set is NaN in every format: float32, bf16, e4m3, and the scales of each.
            cache.storage.view(torch.uint8)[page].fill_(255)


def make_batch(sizes: Mapping[str, int], pieces: Sequence[Piece], padded: int | None = None) -> Batch:
    """The step, from the pieces' block tables alone."""
    maps = {}
    for name, size in sizes.items():
        tables = [piece.request.tables[name] for piece in pieces]
        width = max(len(table) for table in tables)
        slots = [t[p // size] * size + p % size for t, piece in zip(tables, pieces, strict=True) for p in span(piece)]
        table = torch.tensor([t + [-1] * (width - len(t)) for t in tables], dtype=torch.int32)
        maps[name] = PageMap(table, torch.tensor(slots, dtype=torch.int64), page_size=size)
    starts = torch.tensor([0] + [p.end - p.start for p in pieces]).cumsum(0).int()
    lengths = torch.tensor([p.end for p in pieces], dtype=torch.int32)
    main = maps.pop(MAIN)
    return Batch(starts, lengths, main, padded_tokens=padded, other_pages=maps)


def span(piece: Piece) -> range:
    return range(piece.start, piece.end)
