"""Where `TamisCache` puts tokens: what a step writes to its slots, later steps find through their block tables.

Steps of any size, padding anywhere, and requests that are repeated, chosen and cropped, against lists of numbers.
"""

import copy
import random

import pytest
import torch
from seeds import seed_of
from torch import Tensor

from tamis import Batch
from tamis.cache.layout import rows
from tamis.integrations.hf.cache import CacheShape, Held, Pool, TamisCache

NUMBERS = rows(torch.float32, latent=1, rope=0)
POOLS = {"": Pool(4), "window": Pool(3, keep=5), "state": Pool(2, keep=4)}


class Requests:
    """A cache, and the numbers that stand for the tokens of each request."""

    def __init__(self, pools: dict[str, Pool], requests: int, chance: random.Random) -> None:
        held = [{name: Held(name, NUMBERS, pool.page_size) for name, pool in pools.items()}]
        self.cache, self.pools = TamisCache(CacheShape(pools, held, torch.device("cpu"))), pools
        self.tokens: list[list[float]] = [[] for _ in range(requests)]
        self.kept, self.chance, self.count = torch.zeros(requests, 0, dtype=torch.bool), chance, 0

    def step(self) -> None:
        """Some new columns, in which some tokens are padding."""
        columns, padding = self.chance.choice([1, 1, 2, 5, 17]), self.chance.choice([0.0, 0.0, 0.6])
        drawn = [[self.chance.random() >= padding for _ in range(columns)] for _ in self.tokens]
        new, before = torch.tensor(drawn), [len(one) for one in self.tokens]
        self.kept = torch.cat((self.kept, new), dim=1)
        assert torch.equal(self.cache.new_tokens(len(new), columns, self.kept.int()), new)
        batch = self.cache.batch(new)
        written = []
        for one, count in zip(self.tokens, new.sum(1).tolist(), strict=True):
            written += [float(self.count + number) for number in range(count)]
            self.count += count
            one += written[len(written) - count :]
        assert batch.lengths.tolist() == [len(one) for one in self.tokens]
        assert batch.query_starts.diff().tolist() == new.sum(1).tolist()
        for name in self.pools:
            self.check(name, batch, before, torch.tensor(written))
        self.cache.commit(new)

    def check(self, name: str, batch: Batch, before: list[int], written: Tensor) -> None:
        """Write a pool's rows, and read all that a step may need of them."""
        pool, pages = self.pools[name], batch.other_pages[name] if name else batch.pages
        storage = self.cache.paged[0][name].storage
        assert len(pages.slots.unique()) == len(written)
        storage.view(-1)[pages.slots] = written
        for table, one, seen in zip(pages.block_table, self.tokens, before, strict=True):
            for position in range(0 if pool.keep is None else max(0, seen - pool.keep), len(one)):
                page = int(table[position // pool.page_size])
                assert page >= 0
                assert storage[page, position % pool.page_size, 0] == one[position]

    def change(self) -> None:
        """Repeat, choose or crop requests, or go on with a copy."""
        kind, count = self.chance.choice(["repeat", "select", "reorder", "crop", "copy"]), len(self.tokens)
        chosen = [self.chance.randrange(count) for _ in range(self.chance.randint(1, 4))]
        if kind == "repeat":
            self.cache.batch_repeat_interleave(2)
            self.take([number // 2 for number in range(2 * count)])
        elif kind == "select":
            self.cache.batch_select_indices(torch.tensor(chosen))
            self.take(chosen)
        elif kind == "reorder":
            self.cache.reorder_cache(torch.tensor(chosen))
            self.take(chosen)
        elif kind == "crop" and self.cache.is_croppable:
            left = self.chance.randint(0, self.kept.shape[1])
            self.cache.crop(left - self.kept.shape[1])
            self.kept = self.kept[:, :left]
            self.tokens = [one[: int(kept.sum())] for one, kept in zip(self.tokens, self.kept, strict=True)]
        elif kind == "copy":
            self.cache = copy.deepcopy(self.cache)

    def take(self, chosen: list[int]) -> None:
        self.tokens, self.kept = [list(self.tokens[number]) for number in chosen], self.kept[chosen]


@pytest.mark.parametrize("pools", [POOLS, {"": Pool(4)}], ids=["some let go", "all kept"])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_stay_where_they_are_found(pools: dict[str, Pool], seed: int) -> None:
    chance = random.Random(seed_of(seed))
    requests = Requests(pools, chance.randint(1, 4), chance)
    for _ in range(12):
        requests.step()
        if chance.random() < 0.5 and len(requests.tokens) < 9:
            requests.change()
