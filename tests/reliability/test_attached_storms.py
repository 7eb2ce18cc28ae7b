"""Attached transformers models: requests that share a `TamisCache`, against each of them alone.

Requests pause and have padding, leave, change places, and run drafts that are cropped; pages that nobody holds are NaN.
Rows are kept in float32 and every visible token is selected, so that nothing is decided by a last bit: the two runs
then differ by rounding only. Selections between tenants are the business of the layers' own storms.
"""

import random
from typing import Any

import pytest
import torch
from hf_models import V4, V32, build
from torch import Tensor

from tamis.integrations.transformers import attach, new_cache

LENGTH = 80
CHANGES = {"v32": V32, "glm-shared": V32, "v4": V4}
TERMS, PRODUCTS = 128, 3 * 16
BOUND = 2 * TERMS * PRODUCTS * 2.0**-24
"""Of the largest logit: sums of at most 128 terms, some 16 of them one after the other in each of three layers, each
with an error of so many roundings at most; and two such runs are compared."""


class Tenants:
    """Some requests in one cache."""

    def __init__(self, name: str, seed: int) -> None:
        self.model = build(name, index_topk=LENGTH)
        attach(self.model, cache="fp32", chunk_tokens=24)
        self.choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 128, (5, LENGTH), generator=generator)
        self.wrong = torch.randint(1, 128, (5, LENGTH), generator=generator)
        self.names, self.done = list(range(5)), [0] * 5
        self.cache = new_cache(self.model)
        self.mask = torch.zeros(5, 0, dtype=torch.int64)
        self.found: list[dict[int, Tensor]] = [{} for _ in range(5)]

    def step(self, columns: int, *, drafts: bool = False) -> None:
        """The next columns, of which each request fills some; the others are padding."""
        counts = [min(self.choose.randint(0, columns), LENGTH - self.done[n]) for n in self.names]
        ids, new = torch.zeros(len(counts), columns, dtype=torch.int64), torch.zeros(len(counts), columns).long()
        source = self.wrong if drafts else self.tokens
        for row, (name, count) in enumerate(zip(self.names, counts, strict=True)):
            begin = self.done[name]
            ids[row, columns - count :] = source[name, begin : begin + count]
            new[row, columns - count :] = 1
        mask = torch.cat((self.mask, new), 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -columns:]
        with torch.no_grad():
            logits = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache
            ).logits
        if drafts:
            self.cache.crop(-columns)
        else:
            self.mask = mask
            for row, (name, count) in enumerate(zip(self.names, counts, strict=True)):
                for at in range(count):
                    self.found[name][self.done[name] + at] = logits[row, columns - count + at]
                self.done[name] += count
        self.poison()

    def poison(self) -> None:
        cached = self.cache.kept.sum(1).tolist()
        for held, paged in zip(self.cache.shape.layers, self.cache.paged, strict=True):
            for name, rows in held.items():
                pool, depth = self.cache.shape.pools[rows.pool], self.cache.depths[rows.pool]
                used = {(n % depth) * len(cached) + r for r, c in enumerate(cached) for n in pool.pages(c, c)}
                for page in set(range(paged[name].pages)) - used:
                    paged[name].storage.view(torch.uint8)[page].fill_(255)

    def move(self, rows: list[int]) -> None:
        """Keep these requests, in this order."""
        (self.cache.batch_select_indices if self.choose.random() < 0.5 else self.cache.reorder_cache)(
            torch.tensor(rows)
        )
        self.names, self.mask = [self.names[r] for r in rows], self.mask[rows]

    def storm(self, steps: int) -> None:
        for number in range(steps):
            self.step(self.choose.randint(1, 14))
            if self.cache.is_croppable and self.choose.random() < 0.4:
                self.step(self.choose.randint(1, 4), drafts=True)
            if number % 4 == 3:
                keep = len(self.names) - (number % 8 == 7 and len(self.names) > 2)
                self.move(self.choose.sample(range(len(self.names)), keep))

    def worst(self) -> float:
        """The largest difference from a request alone, relative to the largest logit."""
        worst = 0.0
        for name, found in enumerate(self.found):
            if found:
                with torch.no_grad():
                    alone = self.model(input_ids=self.tokens[name : name + 1, : len(found)]).logits[0]
                together = torch.stack([found[p] for p in range(len(found))])
                error = float((together - alone).abs().max() / alone.abs().max())
                worst = max(worst, error) if error == error else error
        return worst


@pytest.mark.parametrize("name", CHANGES)
def test_tenants_of_one_cache_do_not_reach_each_other(name: str, pytestconfig: pytest.Config) -> None:
    rounds = 1 + (pytestconfig.getoption("--tokens", None) or 0) // 50_000
    for seed in range(rounds):
        tenants = Tenants(name, seed)
        tenants.storm(16)
        assert sum(map(len, tenants.found)) > 150
        assert tenants.worst() < BOUND


def swap_pages(tenants: Tenants) -> None:
    """Two requests get each other's first page of one layer."""
    some: Any = tenants.cache.paged[1]
    storage = next(iter(some.values())).storage
    storage[[0, 1]] = storage[[1, 0]]


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_leak_is_found(name: str) -> None:
    tenants = Tenants(name, 0)
    tenants.storm(3)
    swap_pages(tenants)
    tenants.storm(3)
    assert not tenants.worst() < 10 * BOUND
