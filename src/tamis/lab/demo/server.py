"""The serving loop of both models: requests arrive, steps run, pages are allocated and freed."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout
from tamis.cache.pool import PagePool
from tamis.lab.demo.outcome import RowSize, Served
from tamis.lab.demo.requests import Chunk, Request, Scheduler
from tamis.lab.demo.shape import Workload
from tamis.lab.testing.probe import Probe
from tamis.step.plan import Plan
from tamis.step.v4_plan import V4Plan

Windows: TypeAlias = Mapping[str, tuple[PagePool, int]]
ReportProgress = Callable[[int, int], None]
"""Called after each step with the number of tokens that have run and of all tokens."""


class Server:
    """The state of one run. A subclass adds the planner, the forward pass, and the number of rows attended to."""

    planner: Any
    probe: Probe[Any] | None
    latent: Layout
    sizes: list[RowSize]

    def __init__(
        self, requests: list[Request], pool: PagePool, workload: Workload, windows: Windows | None = None
    ) -> None:
        """Start with all requests waiting."""
        self.workload, self.requests, self.pool = workload, requests, pool
        self.device = torch.device(workload.device)
        self.scheduler = Scheduler(requests, pool, workload.token_budget, windows)
        self.steps = {"prefill": 0, "mixed": 0, "decode": 0}
        self.prefill_tokens = self.decode_tokens = 0
        self.attended, self.in_context = 0.0, 0
        self.peak_pages = 0
        self.seconds = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that have run."""
        return self.prefill_tokens + self.decode_tokens

    def logits(self, chunks: list[Chunk], tokens: Tensor, plan: Any, last: Tensor) -> Tensor:
        """Logits after the tokens `last` of the step."""
        raise NotImplementedError

    def attends(self, visible: int) -> float:
        """The number of rows that a token with `visible` tokens in its context attends to, mean over layers."""
        raise NotImplementedError

    @torch.inference_mode()
    def run_step(self) -> None:
        """Run one step, if any request can run."""
        chunks = self.scheduler.next_chunks()
        if not chunks:
            return
        checked = self.probe.seconds if self.probe else 0.0
        began = time.perf_counter()
        plan = self.planner.plan(self.scheduler.batch(chunks))
        predicted = self._forward(chunks, plan)
        self.seconds += time.perf_counter() - began
        self.seconds -= self.probe.seconds - checked if self.probe else 0.0
        self._count(chunks, plan.step if isinstance(plan, V4Plan) else plan)
        self.scheduler.complete(chunks, predicted)
        if self.probe:
            for chunk in chunks:
                if chunk.request not in self.scheduler.running:
                    self.probe.forget(chunk.request.name)

    def _forward(self, chunks: list[Chunk], plan: Any) -> list[int]:
        tokens = torch.tensor([t for chunk in chunks for t in chunk.tokens], dtype=torch.int64, device=self.device)
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks], dtype=torch.int64, device="cpu").cumsum(0) - 1
        last = ends[torch.tensor([chunk.predicts for chunk in chunks], dtype=torch.bool, device="cpu")].to(self.device)
        predicted: list[int] = self.logits(chunks, tokens, plan, last).argmax(-1).tolist()
        return predicted

    def _count(self, chunks: list[Chunk], plan: Plan) -> None:
        split = plan.split
        kind = "mixed" if split.decodes and split.prefills else "prefill" if split.prefills else "decode"
        self.steps[kind] += 1
        self.prefill_tokens += split.prefill_tokens
        self.decode_tokens += split.decode_tokens
        for chunk in chunks:
            visible = range(chunk.start + 1, chunk.end + 1)
            self.in_context += sum(visible)
            self.attended += sum(self.attends(n) for n in visible)
        self.peak_pages = max(self.peak_pages, self.pool.pages - 1 - self.pool.free_pages)

    def result(self) -> Served:
        """The outcome so far."""
        return Served(
            mode=self.planner.mode,
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            seconds=self.seconds,
            check_seconds=self.probe.seconds if self.probe else 0.0,
            generated=[r.generated for r in self.requests],
            tokens_attended=round(self.attended),
            tokens_in_context=self.in_context,
            pages=self.pool.pages - 1,
            peak_pages=self.peak_pages,
            free_pages=self.pool.free_pages,
            latent=self.latent,
            sizes=self.sizes,
            errors=self.probe.errors() if self.probe else None,
        )


def run_server(server: Server, report: ReportProgress | None) -> Served:
    """Run steps until every request is done."""
    total = sum(r.cache_length for r in server.scheduler.waiting)
    while not server.scheduler.finished:
        server.run_step()
        if report is not None:
            report(server.tokens, total)
    return server.result()


def make_pool(lengths: list[int], workload: Workload) -> PagePool:
    """A pool with pages for two thirds of all requests, so that late requests wait and pages are reused."""
    needed = [ceil_div(length, workload.page_size) for length in lengths]
    pages = max(max(needed), ceil_div(2 * sum(needed), 3))
    return PagePool(pages + 1, workload.page_size, seed=workload.seed)
