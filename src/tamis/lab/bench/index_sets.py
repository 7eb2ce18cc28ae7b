"""Input sets for the indexer's stages: scores of cached keys, top-k of given scores, and both in one call."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tamis.cache.layout import named
from tamis.cache.paged import PagedCache
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.random_inputs import RandomInputs
from tamis.lab.bench.roofline import Cost, index_cost, scores_cost, topk_cost
from tamis.lab.bench.timing import set_count
from tamis.lab.testing import compare, oracle
from tamis.ops import index_scores, index_topk, topk_positions
from tamis.step.batch import parse_shape

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class ScoreSet:
    """One scoring call: FP8 queries over cached keys."""

    q: Tensor
    weights: Tensor
    cache: PagedCache
    request_ids: Tensor
    block_table: Tensor
    lengths: Tensor
    """int32 [T]: the last token of a request sees all of its keys, every token before it one fewer."""
    width: int
    """The largest of the lengths."""
    queries: int | None
    """New tokens per request; None if requests differ."""
    out: Tensor | None = None
    """float32 [T, width], where tamis writes the scores. The sets of a job share it, as calls of a layer would."""

    bound = 5e-3

    def run(self, backend: str) -> Tensor:
        """The scores from tamis."""
        paged = self.q, self.weights, self.cache, self.request_ids, self.block_table, self.lengths
        return index_scores(*paged, width=self.width, out=self.out, backend=backend)

    def error(self, result: Tensor) -> float:
        """Relative error of a few tokens' scores against float64, over the keys that those tokens see."""
        found = [result[token, : len(scores)].cpu() for token, scores in self.true_scores.items()]
        return compare.relative_error(torch.cat(found), torch.cat(list(self.true_scores.values())))

    @cached_property
    def true_scores(self) -> dict[int, Tensor]:
        """float64 scores of a few tokens on the host, over the keys that those tokens see."""
        return {token: self._true_scores_of(token) for token in sample(len(self.q))}

    @cached_property
    def request_keys(self) -> list[tuple[slice, Tensor]]:
        """The tokens and the key slots of each request; computed once, since several calls need them."""
        found, size = [], self.cache.page_size
        ids, lengths = self.request_ids.tolist(), self.lengths.tolist()
        for request, table in enumerate(self.block_table.long()):
            first, count = ids.index(request), ids.count(request)
            position = torch.arange(lengths[first + count - 1], dtype=torch.int64, device=table.device)
            found.append((slice(first, first + count), table[position // size] * size + position % size))
        return found

    def _true_scores_of(self, token: int) -> Tensor:
        one = slice(token, token + 1)
        q, weights = self.q[one].float().cpu(), self.weights[one].cpu()
        keys = self.request_ids[one].cpu(), self.block_table.cpu(), self.lengths[one].cpu()
        scores = oracle.index_scores(q, weights, self.cache, *keys)
        return scores[0, : int(self.lengths[token])]


@dataclass(frozen=True, eq=False)
class IndexSet:
    """One call that scores cached keys for FP8 queries and selects the top k."""

    scored: ScoreSet
    k: int

    bound = 5e-3

    def run(self, backend: str) -> Tensor:
        """The positions from tamis."""
        s = self.scored
        return index_topk(s.q, s.weights, s.cache, s.request_ids, s.block_table, s.lengths, self.k, backend=backend)

    def error(self, result: Tensor) -> float:
        """The largest `selection_error` of a few tokens, by float64 scores."""
        true = self.scored.true_scores
        return max(selection_error(result[token], scores, self.k) for token, scores in true.items())


@dataclass(frozen=True, eq=False)
class TopkSet:
    """One top-k call on given scores."""

    scores: Tensor
    lengths: Tensor
    k: int
    decode: bool
    """Whether each row is a request of its own; otherwise rows are the tokens of a prompt."""

    bound = 1e-6

    def run(self, backend: str) -> Tensor:
        """The positions from tamis."""
        return topk_positions(self.scores, self.lengths, self.k, backend=backend)

    def error(self, result: Tensor) -> float:
        """The largest `selection_error` of a few rows."""
        rows = sample(len(self.scores))
        seen = {row: self.scores[row, : int(self.lengths[row])].double().cpu() for row in rows}
        return max(selection_error(result[row], scores, self.k) for row, scores in seen.items())


def sample(count: int) -> list[int]:
    """The first, the middle and the last index below `count`."""
    return sorted({0, count // 2, count - 1})


def selection_error(row: Tensor, scores: Tensor, k: int) -> float:
    """By how much the highest score left out exceeds the lowest one selected, relative to the largest score.

    The choice among equal scores and the order do not count. Infinite if the row is not k different positions.

    Args:
        row: [k] positions in any order; negative ones stand for nothing.
        scores: float64 [n] on the host, finite.
        k: how many to select.
    """
    chosen = row.long().cpu()
    chosen = chosen[chosen >= 0]
    if len(chosen) != min(k, len(scores)) or len(chosen.unique()) != len(chosen) or bool((chosen >= len(scores)).any()):
        return math.inf
    if len(chosen) in (0, len(scores)):
        return 0.0
    left = scores.clone()
    left[chosen] = -math.inf
    excess = float(left.max() - scores[chosen].min())
    return max(0.0, excess) / max(float(scores.abs().max()), 1e-30)


def score_sets(job: Job, drawn: RandomInputs) -> tuple[list[ScoreSet], Cost]:
    """Sets for scoring, each with its own keys."""
    assert job.heads is not None
    requests = _requests(job)
    cost = scores_cost(requests, heads=job.heads, layout=named(job.layout), page_size=job.page_size)
    sets = _scored(job, drawn, requests, set_count(cost.bytes, drawn.device))
    out = torch.empty(len(sets[0].q), sets[0].width, dtype=torch.float32, device=drawn.device)
    return [replace(item, out=out) for item in sets], cost


def index_sets(job: Job, drawn: RandomInputs) -> tuple[list[IndexSet], Cost]:
    """Sets for scoring and top-k in one call."""
    assert job.heads is not None
    assert job.topk is not None
    requests, layout = _requests(job), named(job.layout)
    cost = index_cost(requests, heads=job.heads, topk=job.topk, layout=layout, page_size=job.page_size)
    scored = _scored(job, drawn, requests, set_count(cost.bytes, drawn.device))
    return [IndexSet(one, job.topk) for one in scored], cost


def topk_sets(job: Job, drawn: RandomInputs) -> tuple[list[TopkSet], Cost]:
    """Sets for top-k: normally distributed scores, or for topk-ties scores of which all but a few percent are 0."""
    assert job.topk is not None
    requests = _requests(job)
    cost = topk_cost(requests, topk=job.topk)
    lengths = _lengths(requests, drawn.device)
    decode = all(new == 1 for new, _ in requests)
    width = max(length for _, length in requests)
    sets = []
    # Rows of scores are small, so that it takes many sets to exceed the cache.
    for _ in range(set_count(cost.bytes, drawn.device, most=1024)):
        scores = drawn.normal(len(lengths), width, dtype=torch.float32)
        if job.stage == "topk-ties":
            # Fewer scores are positive than are selected, so that the k-th score is one of the equal ones.
            scores = torch.where(scores > _above(job.topk / 2 / width), scores, 0.0)
        sets.append(TopkSet(scores, lengths, job.topk, decode))
    return sets, cost


def _above(share: float) -> float:
    """The number that this share of standard normal numbers exceeds."""
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - 2 * min(share, 0.5), dtype=torch.float64, device="cpu")))


def _requests(job: Job) -> list[tuple[int, int]]:
    return list(zip(*parse_shape(job.shape), strict=True))


def _lengths(requests: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """How many keys each token sees, as in a chunk of a prompt: the new tokens are the last ones of their request."""
    seen = [n for new, length in requests for n in range(length - new + 1, length + 1)]
    return torch.tensor(seen, dtype=torch.int32, device=device)


def _scored(job: Job, drawn: RandomInputs, requests: Sequence[tuple[int, int]], count: int) -> list[ScoreSet]:
    assert job.heads is not None
    layout, lengths = named(job.layout), _lengths(requests, drawn.device)
    numbers = [number for number, (new, _) in enumerate(requests) for _ in range(new)]
    ids = torch.tensor(numbers, dtype=torch.int32, device=drawn.device)
    contexts = [length for _, length in requests]
    first = requests[0][0]
    queries = first if all(new == first for new, _ in requests) else None
    sets = []
    for _ in range(count):
        table, pages = drawn.block_table(contexts, job.page_size)
        sets.append(
            ScoreSet(
                drawn.normal(len(ids), job.heads, layout.width, dtype=FP8),
                drawn.normal(len(ids), job.heads, dtype=torch.float32),
                drawn.cache(layout, pages, job.page_size),
                ids,
                table,
                lengths,
                max(contexts),
                queries,
            )
        )
    return sets
