"""What a caller knows about one step: `Batch`, and a short notation for its shape."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from tamis import checks
from tamis.pages import PagePool

_GROUP = re.compile(r"(?P<count>\d+)?q(?P<query>\d+)(?P<query_k>k)?(?:s(?P<length>\d+)(?P<length_k>k)?)?")


@dataclass(frozen=True, eq=False)
class PageMap:
    """Where the requests of a step live in one paged pool."""

    block_table: Tensor
    """int32 [B, W] page ids, on the planner's device or on the host; negative entries are absent pages."""
    slots: Tensor
    """int32 or int64 [T], the slot of each new token; negative: do not write (padding)."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One step: requests in decode-first order, each with some new tokens.

    The planner needs the query starts and the lengths on the host, so that it never waits for the device. Where the
    exact lengths are known on the device only, pass them as `lengths` and a host copy that is exact for prefills and
    an upper bound for decodes as `host_lengths`.
    """

    query_starts: Tensor
    """int32 [B + 1] on the host: running sum of new tokens per request."""
    lengths: Tensor
    """int32 [B]: context plus new tokens."""
    pages: PageMap
    """The pool of latent rows (and index keys)."""
    host_lengths: Tensor | None = None
    """int32 [B] on the host; `lengths` itself if that is on the host."""
    padded_tokens: int | None = None
    """How many token rows the step runs if a captured graph pads it; the number of new tokens if not given."""
    prefilling: Sequence[bool] | None = None
    """Marks requests whose prompt is not finished, so that short pieces of a prompt are not taken for decodes."""
    other_pages: Mapping[str, PageMap] = field(default_factory=dict)
    """Further pools by name, for layers with more than one (a sliding window, compressor state)."""

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
        """A batch over a page pool; pages are allocated as needed. `requests` are the pool's names for them, and
        `other_pools` become `other_pages`."""
        names: list[object] = list(range(len(lengths))) if requests is None else list(requests)
        starts = torch.tensor([0, *query_lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        pages, *others = (_pages(one, names, query_lengths, lengths) for one in (pool, *(other_pools or {}).values()))
        other_pages = dict(zip(other_pools or {}, others, strict=True))
        return cls(starts, torch.tensor(list(lengths), dtype=torch.int32, device="cpu"), pages, other_pages=other_pages)

    @classmethod
    def parse(cls, shape: str, pool: PagePool) -> Self:
        """A batch from its shape: `"32q1s1k_2q1k"` is 32 requests with 1 new token after 1023 others, then 2 prompts
        of 1024 new tokens. `k` is 1024; without `s` a request has no earlier context."""
        query_lengths, lengths = parse_shape(shape)
        return cls.build(query_lengths, lengths, pool)


def _pages(pool: PagePool, names: list[object], query_lengths: Sequence[int], lengths: Sequence[int]) -> PageMap:
    for name, length in zip(names, lengths, strict=True):
        pool.extend(name, length)
    slots = [
        pool.slots(name, length - query, length)
        for name, query, length in zip(names, query_lengths, lengths, strict=True)
    ]
    return PageMap(
        pool.block_table(names), torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64, device="cpu")
    )


def parse_shape(shape: str) -> tuple[list[int], list[int]]:
    """Query lengths and total lengths of the requests that a shape such as `"32q1s1k_2q1k"` describes."""
    query_lengths: list[int] = []
    lengths: list[int] = []
    for group in shape.split("_"):
        found = _GROUP.fullmatch(group)
        if found is None:
            raise checks.refuse("shape", "groups like 32q1s1k joined by _", repr(group), "count, q<new>, s<total>")
        query = int(found["query"]) * (1024 if found["query_k"] else 1)
        length = int(found["length"]) * (1024 if found["length_k"] else 1) if found["length"] else query
        if length < query:
            raise checks.refuse("shape", "totals that include the new tokens", repr(group), "s counts q too")
        count = int(found["count"] or 1)
        query_lengths += [query] * count
        lengths += [length] * count
    return query_lengths, lengths
