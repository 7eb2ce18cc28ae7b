"""The serving loop: requests arrive, steps run, pages come and go."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tamis.cache import Caches, PagedCache
from tamis.demo.model import AttentionInputs, Model
from tamis.demo.probe import LayerErrors, Probe
from tamis.demo.requests import Piece, Scheduler, make_requests
from tamis.demo.shape import ModelShape, Workload
from tamis.layout import Layout, index_fp8, named, rows
from tamis.pages import PagePool
from tamis.pipeline import LayerOutput
from tamis.plan import Limits, Plan
from tamis.planner import Planner

ReportProgress = Callable[[int, int], None]
"""Called after each step with the tokens that have run and how many will have in the end."""


@dataclass(frozen=True)
class Served:
    """What happened in a run."""

    mode: str
    steps: dict[str, int]
    """How many steps had only prefills, both kinds, and only decodes."""
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    """Of serving, without the comparison."""
    check_seconds: float
    generated: list[list[int]]
    """Per request, in order of arrival."""
    tokens_attended: int
    tokens_in_context: int
    """Summed over all tokens that ran, per layer."""
    pages: int
    """Pages that requests could use."""
    peak_pages: int
    free_pages: int
    """At the end."""
    latent: Layout
    index: Layout
    errors: list[LayerErrors] | None
    """Per layer; None if nothing was compared."""

    @property
    def tokens(self) -> int:
        """Tokens that ran."""
        return self.prefill_tokens + self.decode_tokens


def serve(shape: ModelShape, workload: Workload, report: ReportProgress | None = None) -> Served:
    """Serve a workload with continuous batching and return what happened. Deterministic but for the times."""
    server = _Server(shape, workload)
    total = sum(r.cache_length for r in server.scheduler.waiting)
    while not server.scheduler.finished:
        server.run_step()
        if report is not None:
            report(server.tokens, total)
    return server.result()


class _Server:
    """The state of one run."""

    def __init__(self, shape: ModelShape, workload: Workload) -> None:
        self.shape, self.workload = shape, workload
        device = torch.device(workload.device)
        self.device = device
        self.latent = named(workload.cache, latent=shape.latent, rope=shape.rope)
        exact = workload.cache == "v32-fp32"
        # Exact rows deserve exact keys: a rounded key can flip which of two close positions is selected.
        self.index = (
            rows(latent=shape.index_dim, rope=0, dtype=torch.float32) if exact else index_fp8(dim=shape.index_dim)
        )
        self.requests = make_requests(shape, workload)
        longest = max(r.cache_length for r in self.requests)
        self.pool = _make_pool([r.cache_length for r in self.requests], workload)
        limits = Limits(
            max_tokens=workload.token_budget,
            max_requests=workload.requests,
            max_length=longest,
            page_size=workload.page_size,
        )
        self.planner = Planner(shape.spec, limits, device, layout=self.latent, mode=workload.mode)
        self.caches = [
            Caches(
                PagedCache(self.latent, self.pool.pages, workload.page_size, device),
                PagedCache(self.index, self.pool.pages, workload.page_size, device, recipe=shape.recipe),
            )
            for _ in range(shape.layers)
        ]
        dtype = torch.bfloat16 if device.type == "cuda" and not exact else torch.float32
        self.model = Model(shape, max_length=longest, device=device, dtype=dtype, seed=workload.seed)
        self.scheduler = Scheduler(self.requests, self.pool, workload.token_budget)
        self.probe = Probe(shape.spec, shape.layers) if workload.check else None
        self.steps = {"prefill": 0, "mixed": 0, "decode": 0}
        self.prefill_tokens = self.decode_tokens = 0
        self.attended = self.in_context = 0
        self.peak_pages = 0
        self.seconds = 0.0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @torch.inference_mode()
    def run_step(self) -> None:
        pieces = self.scheduler.next_pieces()
        if not pieces:
            return
        checked = self.probe.seconds if self.probe else 0.0
        began = time.perf_counter()
        plan = self.planner.plan(self.scheduler.batch(pieces))
        predicted = self._forward(pieces, plan)
        self.seconds += time.perf_counter() - began
        self.seconds -= self.probe.seconds - checked if self.probe else 0.0
        self._count(pieces, plan)
        self.scheduler.complete(pieces, predicted)
        if self.probe:
            for piece in pieces:
                if piece.request not in self.scheduler.running:
                    self.probe.forget(piece.request.name)

    def _forward(self, pieces: list[Piece], plan: Plan) -> list[int]:
        tokens = torch.tensor([t for p in pieces for t in p.tokens], device=self.device)
        ends = torch.tensor([len(p.tokens) for p in pieces]).cumsum(0) - 1
        last = ends[torch.tensor([p.predicts for p in pieces])].to(self.device)
        observe = partial(self._observe, pieces) if self.probe else None
        logits = self.model.forward(tokens, plan, self.caches, last, observe)
        predicted: list[int] = logits.argmax(-1).tolist()
        return predicted

    def _observe(self, pieces: list[Piece], layer: int, inputs: AttentionInputs, attended: LayerOutput) -> None:
        assert self.probe is not None
        self.probe.compare(layer, pieces, inputs, attended.positions, attended.out)

    def _count(self, pieces: list[Piece], plan: Plan) -> None:
        split = plan.split
        kind = "mixed" if split.decodes and split.prefills else "prefill" if split.prefills else "decode"
        self.steps[kind] += 1
        self.prefill_tokens += split.prefill_tokens
        self.decode_tokens += split.decode_tokens
        for piece in pieces:
            visible = range(piece.start + 1, piece.end + 1)
            self.in_context += sum(visible)
            self.attended += sum(min(self.shape.topk, n) for n in visible)
        self.peak_pages = max(self.peak_pages, self.pool.pages - 1 - self.pool.free_pages)

    def result(self) -> Served:
        return Served(
            mode=self.planner.mode,
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            seconds=self.seconds,
            check_seconds=self.probe.seconds if self.probe else 0.0,
            generated=[r.generated for r in self.requests],
            tokens_attended=self.attended,
            tokens_in_context=self.in_context,
            pages=self.pool.pages - 1,
            peak_pages=self.peak_pages,
            free_pages=self.pool.free_pages,
            latent=self.latent,
            index=self.index,
            errors=self.probe.errors() if self.probe else None,
        )


def _make_pool(lengths: list[int], workload: Workload) -> PagePool:
    """Pages for two thirds of all requests at once, so that late ones wait and pages are used again."""
    needed = [-(-length // workload.page_size) for length in lengths]
    pages = max(max(needed), -(-2 * sum(needed) // 3))
    return PagePool(pages + 1, workload.page_size, seed=workload.seed)
