"""Invalid slots and positions, which checks on the host would refuse, and guarded caches to use them on."""

import random

import torch
from guarded import Guards
from torch import Tensor

from tamis import PagedCache
from tamis.lab.testing import oracle

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def hostile(count: int, limit: int, seed: int, *, wide: bool = False) -> Tensor:
    """Integers of which about half are valid (0 to limit - 1) and the others out of range."""
    rng = random.Random(seed)
    bad = [LOWEST, LOWEST + 1, -limit, -2, -1, limit, limit + 1, 2 * limit, 2**30, HIGHEST - 1, HIGHEST]
    bad += [2**32 + 1, 2**32 + 3, -(2**40), 2**62, 2**63 - 1, -(2**63)] if wide else []
    found = [rng.choice(bad) if rng.random() < 0.5 else rng.randrange(limit) for _ in range(count)]
    return torch.tensor(found, dtype=torch.int64 if wide else torch.int32)


def distinct(count: int, limit: int, seed: int) -> Tensor:
    """As `hostile`, but no valid slot occurs twice, since two rows for one slot are a caller's error."""
    found, taken = hostile(count, limit, seed, wide=True), set()
    for place, slot in enumerate(found.tolist()):
        if 0 <= slot < limit:
            found[place] = -1 if slot in taken else slot
            taken.add(slot)
    return found


def filled(guards: Guards, layout: str, pages: int, page_size: int, kept: Tensor | None = None) -> PagedCache:
    """A cache with random rows at the slots `kept`; all other bytes are 0xFF, which is NaN, also in scales."""
    cache = guards.cache(layout, pages, page_size)
    slots = torch.arange(cache.rows) if kept is None else kept
    host = PagedCache(cache.layout, pages, page_size)
    oracle.write(torch.randn(len(slots), cache.layout.width), host, slots)
    for field in (cache.layout.values, cache.layout.scales, cache.layout.tail):
        if field is not None:
            page, row = slots // page_size, slots % page_size
            cache.field(field)[page.to(cache.device), row.to(cache.device)] = host.field(field)[page, row].to(
                cache.device
            )
    return cache


def same_bytes(found: PagedCache, wanted: PagedCache) -> bool:
    """Whether two caches hold the same bytes."""
    return torch.equal(
        found.storage.contiguous().view(torch.uint8).cpu(), wanted.storage.contiguous().view(torch.uint8)
    )


def on_host(cache: PagedCache) -> PagedCache:
    """A copy of the cache on the host, for the oracle."""
    return PagedCache.wrap(cache.storage.cpu().contiguous(), cache.layout, scale=cache.scale)
