"""`Batch`: the requests of one step, as the caller describes them. `Batch.parse` reads a short notation of a shape."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.pool import PagePool

_GROUP = re.compile(r"(?P<count>\d+)?q(?P<query>\d+)(?P<query_k>k)?(?:s(?P<length>\d+)(?P<length_k>k)?)?")


@dataclass(frozen=True, eq=False)
class PageMap:
    """The pages and slots of a step's requests in one pool."""

    block_table: Tensor
    """int32 [B, W] page ids, on the planner's device or on the host; negative for absent pages."""
    slots: Tensor
    """int32 or int64 [T], the slot of each new token; tokens with a negative slot (padding) are not written."""
    page_size: int | None = field(default=None, kw_only=True)
    """The pool's page size, if known. A planner made for another page size then refuses the batch."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One step: requests in decode-first order, each with some new tokens.

    The planner reads the query starts and the lengths on the host, so that it never waits for the device. If only the
    device knows the exact lengths, pass them as `lengths`, and as `host_lengths` numbers that are exact for prefills
    and upper bounds for decodes.
    """

    query_starts: Tensor
    """int32 [B + 1] on the host: running sum of new tokens per request."""
    lengths: Tensor
    """int32 [B]: context plus new tokens."""
    pages: PageMap
    """The pool of latent rows (and index keys)."""
    host_lengths: Tensor | None = None
    """int32 [B] on the host; not needed if `lengths` is on the host."""
    padded_tokens: int | None = None
    """The number of token rows if a captured graph pads the step; otherwise that of new tokens."""
    prefilling: Sequence[bool] | None = None
    """Which requests have an unfinished prompt, so that the short end of a prompt does not count as decode."""
    other_pages: Mapping[str, PageMap] = field(default_factory=dict)
    """Further pools by name, for layers with several caches (a sliding window, compressor state)."""

    @classmethod
    def build(
        cls,
        query_lengths: Sequence[int],
        lengths: Sequence[int],
        pool: PagePool,
        *,
        requests: Sequence[object] | None = None,
        other_pools: Mapping[str, PagePool] | None = None,
    ) -> Self:
        """A batch whose pages come from a pool. If the batch is refused, no page is allocated.

        Args:
            query_lengths: new tokens of each request.
            lengths: context plus new tokens of each request.
            pool: the pool of latent rows.
            requests: the pool's names for the requests; 0, 1, ... if not given.
            other_pools: further pools by name, which become `other_pages`.
        """
        for name, numbers in (("query_lengths", query_lengths), ("lengths", lengths)):
            checks.sequence(name, numbers)
        if other_pools is not None and not isinstance(other_pools, Mapping):
            raise checks.refuse_type("other_pools", "a dictionary", checks.describe(other_pools), "name each pool")
        given = range(len(lengths)) if requests is None else checks.sequence("requests", requests)
        names: list[object] = list(given)
        others = dict(other_pools or {})
        _check_lengths(names, query_lengths, lengths)
        for what, one in (("pool", pool), *others.items()):
            _check_room(what, one, names, query_lengths, lengths)
        new = torch.tensor([0, *query_lengths], dtype=torch.int32, device="cpu")
        return cls(
            new.cumsum(0, dtype=torch.int32),
            torch.tensor(list(lengths), dtype=torch.int32, device="cpu"),
            _pages(pool, names, query_lengths, lengths),
            other_pages={name: _pages(one, names, query_lengths, lengths) for name, one in others.items()},
        )

    @classmethod
    def parse(cls, shape: str, pool: PagePool) -> Self:
        """A batch from its shape, such as `"32q1s1k_2q1k"`: 32 requests with 1 new token and 1024 tokens in all, then 2
        prompts of 1024 new tokens. `k` means 1024. A group without `s` has no earlier context."""
        query_lengths, lengths = parse_shape(shape)
        return cls.build(query_lengths, lengths, pool)


def _check_lengths(names: list[object], query_lengths: Sequence[int], lengths: Sequence[int]) -> None:
    for what, given, noun in (("requests", names, "names"), ("query_lengths", query_lengths, "numbers")):
        if len(given) != len(lengths):
            raise checks.refuse(what, f"{len(lengths)} {noun}, one per length", len(given), "pass one per request")
    for number, (query, length) in enumerate(zip(query_lengths, lengths, strict=True)):
        checks.integer(f"lengths[{number}]", length, low=0)
        checks.integer(f"query_lengths[{number}]", query, low=0, high=length)
    seen: set[object] = set()
    for name in names:
        checks.hashable("requests", name)
        if name in seen:
            raise checks.refuse("requests", "different names", f"{name!r} twice", "one name stands for one request")
        seen.add(name)


def _check_room(
    what: str, pool: PagePool, names: list[object], query_lengths: Sequence[int], lengths: Sequence[int]
) -> None:
    checks.instance("pool" if what == "pool" else f"other_pools[{what!r}]", pool, PagePool)
    missing = sum(pool.missing(name, length) for name, length in zip(names, lengths, strict=True))
    if missing > pool.free_pages:
        raise checks.refuse(what, f"of at least {missing} free pages", pool.free_pages, "release requests")
    for name, query, length in zip(names, query_lengths, lengths, strict=True):
        if query:
            pool.check_kept(name, length - query)


def _pages(pool: PagePool, names: list[object], query_lengths: Sequence[int], lengths: Sequence[int]) -> PageMap:
    for name, length in zip(names, lengths, strict=True):
        pool.extend(name, length)
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    slots = [
        pool.slots(name, length - query, length)
        for name, query, length in zip(names, query_lengths, lengths, strict=True)
    ]
    return PageMap(pool.block_table(names), torch.cat([none, *slots]), page_size=pool.page_size)


def parse_shape(shape: str) -> tuple[list[int], list[int]]:
    """Query lengths and total lengths of the requests that a shape such as `"32q1s1k_2q1k"` describes."""
    query_lengths: list[int] = []
    lengths: list[int] = []
    for group in checks.instance("shape", shape, str).split("_"):
        found = _GROUP.fullmatch(group)
        if found is None:
            remedy = "write [count]q<new tokens>[s<all tokens>]"
            raise checks.refuse("shape", "groups like 32q1s1k joined by _", repr(group), remedy)
        query = int(found["query"]) * (1024 if found["query_k"] else 1)
        length = int(found["length"]) * (1024 if found["length_k"] else 1) if found["length"] else query
        if length < query:
            expected = f"of totals that include the new tokens (s >= q={query})"
            raise checks.refuse("shape", expected, repr(group))
        count = int(found["count"] or 1)
        query_lengths += [query] * count
        lengths += [length] * count
    return query_lengths, lengths
