"""Continuous batching as a serving engine does it: requests come, grow, are preempted, share prefixes, draft and go.

What a model must compute is a function of a request and a position, so a step's outputs can be compared with those of
the request alone. Pages that are given back are spoiled, and nothing that an engine leaves behind is cleaned up: unused
columns of page tables, slots behind the tokens and rows of padding hold what earlier steps put there.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div


class Pool:
    """Pages with owners, several where requests share a prefix; `spoil` is called with pages that nobody owns."""

    def __init__(self, pages: int, page_size: int, spoil: Callable[[list[int]], None], choice: random.Random) -> None:
        self.page_size, self.spoil, self.choice = page_size, spoil, choice
        self.free = list(range(1, pages))
        self.owners = dict.fromkeys(range(pages), 0)
        self.held: dict[int, list[int]] = {}

    def grow(self, name: int, length: int) -> bool:
        """Pages for so many tokens, if there are enough."""
        held = self.held.setdefault(name, [])
        missing = ceil_div(length, self.page_size) - len(held)
        if missing > len(self.free):
            return False
        for _ in range(missing):
            held.append(self.free.pop(self.choice.randrange(len(self.free))))
            self.owners[held[-1]] += 1
        return True

    def share(self, name: int, other: int, tokens: int) -> None:
        """Begin with the pages that hold the first tokens of another request."""
        self.held[name] = self.held[other][: tokens // self.page_size]
        for page in self.held[name]:
            if page >= 0:
                self.owners[page] += 1

    def has(self, name: int, begin: int, end: int) -> bool:
        """Whether the pages of these positions have not been given back."""
        return all(page >= 0 for page in self.held[name][begin // self.page_size : ceil_div(end, self.page_size)])

    def give_back(self, name: int, before: int | None = None) -> None:
        """All pages, or those that hold only positions below `before`; their place in the table is then absent."""
        held = self.held.get(name, [])
        count = len(held) if before is None else min(max(before, 0) // self.page_size, len(held))
        gone = []
        for number in range(count):
            page, held[number] = held[number], -1
            if page >= 0:
                self.owners[page] -= 1
                if self.owners[page] == 0:
                    gone.append(page)
        self.free += gone
        if gone:
            self.spoil(gone)
        if before is None:
            self.held.pop(name, None)

    def slot(self, name: int, position: int) -> int:
        return self.held[name][position // self.page_size] * self.page_size + position % self.page_size


@dataclass(eq=False)
class Request:
    name: int
    seed: int
    length: int
    """Tokens that it will have in the end."""
    prompt: int
    parent: "Request | None" = None
    shared: int = 0
    """Tokens at the front that are its parent's."""
    done: int = 0
    """Tokens that are in the caches."""
    outputs: dict[int, Tensor] = field(default_factory=dict)

    def source(self, position: int) -> tuple[int, int]:
        """What the content of a position is made from."""
        if self.parent is not None and position < self.shared:
            return self.parent.source(position)
        return self.seed, position


@dataclass(frozen=True)
class Token:
    request: Request
    position: int
    accepted: bool
    """A rejected draft has other content than its position will have."""


class Engine:
    """Runs requests through `model` until so many tokens have gone through; every finished one is handed to `check`.

    A model has `pools` (page sizes by name), `pages`, `drafts`, `max_tokens`, `max_requests`, `max_length`, `spoil`,
    `step(commons, tokens, rows)`, which returns one output per token, and `window` where pages of a pool of that name
    are given back as it moves on.
    """

    def __init__(self, model: Any, seed: int, check: Callable[[Request], None]) -> None:
        self.model, self.check, self.choice = model, check, random.Random(seed)
        self.pools = {
            name: Pool(model.pages[name], size, lambda gone, name=name: model.spoil(name, gone), self.choice)
            for name, size in model.pools.items()
        }
        self.tables = {
            name: torch.randint(0, model.pages[name], (model.max_requests + 2, 2 + model.max_length // size)).int()
            for name, size in model.pools.items()
        }
        self.slots = {name: torch.full((model.max_tokens,), 5) for name in model.pools}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.names, self.tokens, self.preempted, self.rejected, self.sharing = 0, 0, 0, 0, 0

    def run(self, tokens: int) -> None:
        while self.tokens < tokens:
            self._arrive()
            batch = self._schedule()
            if batch:
                self._step(batch)
            if self.running and self.choice.random() < 0.04:
                self._preempt(self.choice.choice(self.running))

    def _arrive(self) -> None:
        choice = self.choice
        while len(self.running) + len(self.waiting) < self.model.max_requests and choice.random() < 0.6:
            length = choice.randint(1, self.model.max_length - self.model.drafts - 1)
            made = Request(self.names, choice.getrandbits(40), length, choice.randint(1, length))
            self.names += 1
            if choice.random() < 0.6:
                _ = any(self._share(made, parent) for parent in choice.sample(self.running, len(self.running)))
            self.waiting.append(made)

    def _share(self, made: Request, parent: Request) -> bool:
        """Begin where another request's full pages end, if what the next token sees of them is still there."""
        size = self.model.pools["main"]
        shared = min(parent.done, made.length - 1) // size * size
        window = getattr(self.model, "window", None)
        if not shared or (
            window is not None and not self.pools["window"].has(parent.name, max(0, shared - window + 1), shared)
        ):
            return False
        for pool in self.pools.values():
            pool.share(made.name, parent.name, shared)
        made.parent, made.shared, made.done, self.sharing = parent, shared, shared, self.sharing + 1
        return True

    def _preempt(self, request: Request) -> None:
        """Its pages go to others; it starts again from its first token."""
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._release(request)
        request.done = 0
        self.preempted += 1

    def _release(self, request: Request) -> None:
        for pool in self.pools.values():
            pool.give_back(request.name)

    def _room(self, request: Request, length: int) -> bool:
        return all(pool.grow(request.name, length) for pool in self.pools.values())

    def _schedule(self) -> list[list[Token]]:
        """Decodes, some with drafts, then pieces of prompts; whoever finds no pages preempts somebody or waits."""
        budget, chosen = self.model.max_tokens - 3, []
        self.running += self.waiting
        self.waiting = []
        order = sorted(self.running, key=lambda r: r.done + 1 < r.prompt)
        for request in order:
            if request not in self.running:
                continue
            decodes = request.done + 1 >= request.prompt
            drafts = self.choice.randint(0, min(self.model.drafts, request.length - request.done - 1)) if decodes else 0
            new = 1 + drafts if decodes else self.choice.randint(1, request.prompt - request.done)
            new = min(new, budget)
            if not new or self.choice.random() < 0.1:
                continue
            if not self._room(request, request.done + new):
                if not chosen or self.choice.random() < 0.5:
                    self._preempt(request)
                continue
            budget -= new
            kept = 1 + self.choice.randint(0, new - 1) if decodes else new
            self.rejected += new - kept
            chosen.append([Token(request, request.done + i, i < kept) for i in range(new)])
        limit = 1 + self.model.drafts
        return sorted(chosen, key=lambda tokens: len(tokens) > limit)

    def _step(self, batch: list[list[Token]]) -> None:
        tokens = [token for mine in batch for token in mine]
        padding, empty = self.choice.choice([0, 0, 1, 3]), self.choice.choice([0, 0, 1, 2])
        rows = min(len(tokens) + padding, self.model.max_tokens)
        empty = min(empty, self.model.max_requests - len(batch))
        commons = {name: self._common(name, batch, tokens, rows, empty) for name in self.pools}
        outputs = self.model.step(commons, tokens, rows)
        for token, output in zip(tokens, outputs, strict=True):
            if token.accepted:
                token.request.outputs[token.position] = output
        self.tokens += len(tokens)
        for mine in batch:
            request = mine[0].request
            request.done += sum(token.accepted for token in mine)
            window = getattr(self.model, "window", None)
            if window is not None:
                self.pools["window"].give_back(request.name, before=request.done - window + 1)
            if request.done == request.length:
                self.running.remove(request)
                self._release(request)
                self.check(request)

    def _common(
        self, name: str, batch: list[list[Token]], tokens: list[Token], rows: int, empty: int
    ) -> SimpleNamespace:
        """The engine's record of the step, in tensors that it keeps from step to step."""
        pool, table, slots = self.pools[name], self.tables[name], self.slots[name]
        for row, mine in enumerate(batch):
            held = pool.held[mine[0].request.name]
            table[row, : len(held)] = torch.tensor(held, dtype=torch.int32)
        slots[: len(tokens)] = torch.tensor([pool.slot(t.request.name, t.position) for t in tokens])
        slots[len(tokens) : rows] = -1
        counts = [len(mine) for mine in batch] + [0] * empty
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = [mine[-1].position + 1 for mine in batch] + [0] * empty
        return SimpleNamespace(
            num_reqs=len(counts),
            num_actual_tokens=rows,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=slots,
        )


def alone(model: Any, request: Request) -> Tensor:
    """The outputs of all its tokens when nobody else is there, in as few steps as fit."""
    copy = Request(0, request.seed, request.length, request.length, request.parent, request.shared)
    engine = Engine(model, 0, lambda _: None)
    while copy.done < copy.length:
        new = min(copy.length - copy.done, model.max_tokens)
        assert engine._room(copy, copy.done + new)
        batch = [[Token(copy, copy.done + i, True) for i in range(new)]]
        commons = {name: engine._common(name, batch, batch[0], new, 0) for name in engine.pools}
        for token, output in zip(batch[0], model.step(commons, batch[0], new), strict=True):
            copy.outputs[token.position] = output
        copy.done += new
    return torch.stack([copy.outputs[position] for position in range(copy.length)])
