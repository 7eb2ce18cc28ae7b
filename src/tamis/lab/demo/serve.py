"""The serving loop: requests arrive, steps run, pages come and go."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, named, rows
from tamis.cache.paged import PagedCache
from tamis.cache.pool import PagePool
from tamis.cache.selection import Caches
from tamis.lab.demo.model import AttentionInputs, Model
from tamis.lab.demo.probe import LayerErrors, Probe
from tamis.lab.demo.requests import Piece, Request, Scheduler, make_requests
from tamis.lab.demo.shape import ModelShape, V4Shape, Workload
from tamis.layers.mla import LayerOutput
from tamis.step.plan import Limits, Plan
from tamis.step.planner import Planner
from tamis.step.v4_plan import V4Plan

if TYPE_CHECKING:
    from tamis.lab.demo.v4_probe import V4Probe

Windows: TypeAlias = Mapping[str, tuple[PagePool, int]]
ReportProgress = Callable[[int, int], None]
"""Called after each step with the tokens that have run and how many will have in the end."""


@dataclass(frozen=True)
class RowSize:
    """Bytes that one token takes in one layer."""

    what: str
    layout: str
    stored: float
    bf16: float
    """The same numbers in bf16."""

    @classmethod
    def of(cls, what: str, layout: Layout, tokens: int = 1) -> Self:
        """A row that stands for some tokens."""
        stored, bf16 = layout.row_bytes, layout.width * torch.bfloat16.itemsize
        return cls(what, layout.name, stored / tokens if tokens > 1 else stored, bf16 / tokens if tokens > 1 else bf16)

    @property
    def ratio(self) -> float:
        """Stored bytes against bf16."""
        return self.stored / self.bf16


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
    sizes: list["RowSize"]
    """Of what is kept of a token."""
    errors: list[LayerErrors] | None
    """Per layer; None if nothing was compared."""

    @property
    def tokens(self) -> int:
        """Tokens that ran."""
        return self.prefill_tokens + self.decode_tokens


def serve(shape: ModelShape | V4Shape, workload: Workload, report: ReportProgress | None = None) -> Served:
    """Serve a workload with continuous batching and return what happened. Deterministic but for the times."""
    if isinstance(shape, V4Shape):
        from tamis.lab.demo.v4_serve import V4Server

        return run_server(V4Server(shape, workload), report)
    return run_server(_V32Server(shape, workload), report)


def run_server(server: "Server", report: ReportProgress | None) -> Served:
    """Run steps until every request is done."""
    total = sum(r.cache_length for r in server.scheduler.waiting)
    while not server.scheduler.finished:
        server.run_step()
        if report is not None:
            report(server.tokens, total)
    return server.result()


class Server:
    """The state of one run. What a model adds: its plan, its forward pass, and how much it attends to."""

    planner: Any
    probe: "Probe | V4Probe | None"
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

    def logits(self, pieces: list[Piece], tokens: Tensor, plan: Any, last: Tensor) -> Tensor:
        """Logits after the tokens `last` of the step."""
        raise NotImplementedError

    def attends(self, visible: int) -> float:
        """How many rows a token with so many tokens in its context attends to, on average over layers."""
        raise NotImplementedError

    @torch.inference_mode()
    def run_step(self) -> None:
        """Run whatever can run now."""
        pieces = self.scheduler.next_pieces()
        if not pieces:
            return
        checked = self.probe.seconds if self.probe else 0.0
        began = time.perf_counter()
        plan = self.planner.plan(self.scheduler.batch(pieces))
        predicted = self._forward(pieces, plan)
        self.seconds += time.perf_counter() - began
        self.seconds -= self.probe.seconds - checked if self.probe else 0.0
        self._count(pieces, plan.step if isinstance(plan, V4Plan) else plan)
        self.scheduler.complete(pieces, predicted)
        if self.probe:
            for piece in pieces:
                if piece.request not in self.scheduler.running:
                    self.probe.forget(piece.request.name)

    def _forward(self, pieces: list[Piece], plan: Any) -> list[int]:
        tokens = torch.tensor([t for p in pieces for t in p.tokens], dtype=torch.int64, device=self.device)
        ends = torch.tensor([len(p.tokens) for p in pieces], dtype=torch.int64, device="cpu").cumsum(0) - 1
        last = ends[torch.tensor([p.predicts for p in pieces], dtype=torch.bool, device="cpu")].to(self.device)
        predicted: list[int] = self.logits(pieces, tokens, plan, last).argmax(-1).tolist()
        return predicted

    def _count(self, pieces: list[Piece], plan: Plan) -> None:
        split = plan.split
        kind = "mixed" if split.decodes and split.prefills else "prefill" if split.prefills else "decode"
        self.steps[kind] += 1
        self.prefill_tokens += split.prefill_tokens
        self.decode_tokens += split.decode_tokens
        for piece in pieces:
            visible = range(piece.start + 1, piece.end + 1)
            self.in_context += sum(visible)
            self.attended += sum(self.attends(n) for n in visible)
        self.peak_pages = max(self.peak_pages, self.pool.pages - 1 - self.pool.free_pages)

    def result(self) -> Served:
        """What happened so far."""
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


class _V32Server(Server):
    """Layers that attend to tokens selected by an indexer."""

    probe: Probe | None

    def __init__(self, shape: ModelShape, workload: Workload) -> None:
        requests = make_requests(shape.vocab, workload)
        longest = max(r.cache_length for r in requests)
        super().__init__(requests, make_pool([r.cache_length for r in requests], workload), workload)
        self.shape = shape
        self.latent = named(workload.cache, latent=shape.latent, rope=shape.rope)
        exact = workload.cache == "v32-fp32"
        # Exact rows deserve exact keys: a rounded key can flip which of two close positions is selected.
        index = rows(latent=shape.index_dim, rope=0, dtype=torch.float32) if exact else index_fp8(dim=shape.index_dim)
        key, row = RowSize.of("index key", index), RowSize.of("latent row", self.latent)
        self.sizes = [row, key, RowSize("both", "", row.stored + key.stored, row.bf16 + key.bf16)]
        limits = Limits(
            max_tokens=workload.token_budget,
            max_requests=workload.requests,
            max_length=longest,
            page_size=workload.page_size,
        )
        self.planner = Planner(shape.spec, limits, self.device, layout=self.latent, mode=workload.mode)
        self.caches = [
            Caches(
                PagedCache(self.latent, self.pool.pages, workload.page_size, self.device),
                PagedCache(index, self.pool.pages, workload.page_size, self.device, recipe=shape.recipe),
            )
            for _ in range(shape.layers)
        ]
        dtype = torch.bfloat16 if self.device.type == "cuda" and not exact else torch.float32
        self.model = Model(shape, max_length=longest, device=self.device, dtype=dtype, seed=workload.seed)
        self.probe = Probe(shape.spec, shape.layers) if workload.check else None

    def logits(self, pieces: list[Piece], tokens: Tensor, plan: Plan, last: Tensor) -> Tensor:
        observe = partial(self._observe, pieces) if self.probe else None
        return self.model.forward(tokens, plan, self.caches, last, observe)

    def attends(self, visible: int) -> int:
        return min(self.shape.topk, visible)

    def _observe(self, pieces: list[Piece], layer: int, inputs: AttentionInputs, attended: LayerOutput) -> None:
        assert self.probe is not None
        self.probe.compare(layer, pieces, inputs, attended.positions, attended.out)


def make_pool(lengths: list[int], workload: Workload) -> PagePool:
    """Pages for two thirds of all requests at once, so that late ones wait and pages are used again."""
    needed = [ceil_div(length, workload.page_size) for length in lengths]
    pages = max(max(needed), ceil_div(2 * sum(needed), 3))
    return PagePool(pages + 1, workload.page_size, seed=workload.seed)
