"""Continuous batching: which requests run in a step, and how many of their tokens."""

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
    """One prompt and what has been generated for it."""

    name: int
    prompt: list[int]
    arrival: int
    """The step from which on it may run."""
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
        """Tokens in the caches when it is done: all but the last generated one, which never runs."""
        return len(self.prompt) + self.new_tokens - 1


def make_requests(vocab: int, workload: Workload) -> list[Request]:
    """Random prompts of all lengths, in random order of arrival; the same for the same seed."""
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
class Piece:
    """The tokens of one request that run in one step."""

    request: Request
    start: int
    """Position of the first one in the request."""
    tokens: list[int]

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + len(self.tokens)

    @property
    def span(self) -> RequestSpan:
        """As a probe takes it."""
        return RequestSpan(self.request.name, self.start, self.end, self.request.cache_length)

    @property
    def predicts(self) -> bool:
        """Whether the last token's successor is wanted; inside a prompt it is known."""
        return self.end >= len(self.request.prompt)


class Scheduler:
    """Decodes first, then as much prefill as the token budget allows, in order of arrival.

    A request is admitted when the pool has pages for its whole life, so that it never has to be preempted.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pool: PagePool,
        token_budget: int,
        windows: Mapping[str, tuple[PagePool, int]] | None = None,
    ) -> None:
        """Queue all requests; none runs before its arrival step. `windows` are further pools with how many of a
        request's last tokens they must hold; older pages are given back while it runs."""
        self.pool, self.token_budget, self.windows = pool, token_budget, windows or {}
        self.waiting = sorted(requests, key=lambda r: r.arrival)
        self.running: list[Request] = []
        self.step = 0

    @property
    def finished(self) -> bool:
        """Whether every request is done."""
        return not self.waiting and not self.running

    def next_pieces(self) -> list[Piece]:
        """What to run now, decodes first; empty while nothing has arrived."""
        self._admit()
        self.step += 1
        pieces = [Piece(r, r.cached, r.generated[-1:]) for r in self.running if not r.prefilling]
        room = self.token_budget - len(pieces)
        for request in self.running:
            if request.prefilling and room > 0:
                tokens = request.prompt[request.cached : request.cached + room]
                pieces.append(Piece(request, request.cached, tokens))
                room -= len(tokens)
        return pieces

    def batch(self, pieces: Sequence[Piece]) -> Batch:
        """The step as the planner takes it."""
        batch = Batch.build(
            [len(p.tokens) for p in pieces],
            [p.end for p in pieces],
            self.pool,
            requests=[p.request.name for p in pieces],
            other_pools={name: pool for name, (pool, _) in self.windows.items()},
        )
        # A one-token rest of a prompt must not be taken for a decode.
        return replace(batch, prefilling=[p.request.prefilling for p in pieces])

    def complete(self, pieces: Sequence[Piece], predicted: Sequence[int]) -> None:
        """Record a step that has run; `predicted` has a token for each piece that predicts. Frees finished requests."""
        following = iter(predicted)
        for piece in pieces:
            request = piece.request
            request.cached = piece.end
            if piece.predicts:
                request.generated.append(next(following))
            if len(request.generated) == request.new_tokens:
                self.running.remove(request)
                self.pool.release(request.name)
            for pool, kept in self.windows.values():
                # The next token sees itself and so many less one before it.
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
