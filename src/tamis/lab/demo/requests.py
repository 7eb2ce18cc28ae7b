"""Continuous batching: a scheduler chooses the requests of a step, and how many tokens of each run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tamis.arithmetic import ceil_div
from tamis.cache.pool import PagePool
from tamis.lab.demo.shape import Workload
from tamis.lab.testing.probe import RequestSpan
from tamis.step.batch import Batch


@dataclass(eq=False)
class Request:
    """One prompt and the tokens generated for it."""

    name: int
    prompt: list[int]
    arrival: int
    """The first step in which the request may run."""
    new_tokens: int
    cached: int = 0
    """How many of its tokens are in the caches."""
    generated: list[int] = field(default_factory=list)

    @property
    def prefilling(self) -> bool:
        """Whether a part of the prompt has not run yet."""
        return self.cached < len(self.prompt)

    @property
    def cache_length(self) -> int:
        """Tokens in the caches at the end: all but the last generated token, which never runs."""
        return len(self.prompt) + self.new_tokens - 1


def make_requests(vocab: int, workload: Workload) -> list[Request]:
    """Requests with random prompts of the workload's lengths, arriving in random order; determined by the seed."""
    generator = torch.Generator("cpu").manual_seed(workload.seed)
    lengths = workload.prompt_lengths
    order = torch.randperm(len(lengths), generator=generator, dtype=torch.int64, device="cpu").tolist()
    return [
        Request(
            name,
            torch.randint(vocab, (lengths[which],), generator=generator, dtype=torch.int64, device="cpu").tolist(),
            arrival=name * workload.arrival_gap,
            new_tokens=workload.new_tokens,
        )
        for name, which in enumerate(order)
    ]


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tokens of one request that run in one step."""

    request: Request
    start: int
    """Position of the first token in the request."""
    tokens: list[int]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    @property
    def span(self) -> RequestSpan:
        """The tokens as a probe takes them."""
        return RequestSpan(self.request.name, self.start, self.end, self.request.cache_length)

    @property
    def predicts(self) -> bool:
        """Whether the token after the last one must be predicted; inside a prompt it is known."""
        return self.end >= len(self.request.prompt)


class Scheduler:
    """Runs decodes first, then as much prefill as the token budget allows, in order of arrival.

    A request is admitted when the pool has pages for its whole life, so that it never has to be preempted.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pool: PagePool,
        token_budget: int,
        windows: Mapping[str, tuple[PagePool, int]] | None = None,
    ) -> None:
        """Queue all requests; none runs before its arrival step.

        `windows` are further pools, each with the number of a request's last tokens that it must hold; pages of older
        tokens are freed while the request runs.
        """
        self.pool, self.token_budget, self.windows = pool, token_budget, windows or {}
        self.waiting = sorted(requests, key=lambda r: r.arrival)
        self.running: list[Request] = []
        self.step = 0

    @property
    def finished(self) -> bool:
        """Whether every request is done."""
        return not self.waiting and not self.running

    def next_chunks(self) -> list[Chunk]:
        """The tokens of the next step, decodes first; empty while no request has arrived."""
        self._admit()
        self.step += 1
        chunks = [Chunk(r, r.cached, r.generated[-1:]) for r in self.running if not r.prefilling]
        room = self.token_budget - len(chunks)
        for request in self.running:
            if request.prefilling and room > 0:
                tokens = request.prompt[request.cached : request.cached + room]
                chunks.append(Chunk(request, request.cached, tokens))
                room -= len(tokens)
        return chunks

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """The step as the planner's input."""
        batch = Batch.build(
            [len(chunk.tokens) for chunk in chunks],
            [chunk.end for chunk in chunks],
            self.pool,
            requests=[chunk.request.name for chunk in chunks],
            other_pools={name: pool for name, (pool, _) in self.windows.items()},
        )
        # The last token of a prompt, run alone, must not be taken for a decode.
        return replace(batch, prefilling=[chunk.request.prefilling for chunk in chunks])

    def complete(self, chunks: Sequence[Chunk], predicted: Sequence[int]) -> None:
        """Record a step that has run and free finished requests; `predicted` has a token per chunk that predicts."""
        following = iter(predicted)
        for chunk in chunks:
            request = chunk.request
            request.cached = chunk.end
            if chunk.predicts:
                request.generated.append(next(following))
            if len(request.generated) == request.new_tokens:
                self.running.remove(request)
                self.pool.release(request.name)
            for pool, kept in self.windows.values():
                # The next token sees itself and the kept - 1 tokens before it.
                pool.forget(request.name, request.cached + 1 - kept)
                if request not in self.running:
                    pool.release(request.name)

    def _admit(self) -> None:
        while self.waiting and self.waiting[0].arrival <= self.step:
            request = self.waiting[0]
            if ceil_div(request.cache_length, self.pool.page_size) > self.pool.free_pages:
                return
            self.pool.extend(request.name, request.cache_length)
            self.running.append(self.waiting.pop(0))
