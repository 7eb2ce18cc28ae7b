"""Serves the V4 model: pools for entries, windows and compressor state.

Pages of windows and state are freed as tokens leave the window, so that a request of any length needs few of them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, named, rows
from tamis.cache.pool import PagePool
from tamis.cache.v4_caches import STATE_PAGE_SIZES, V4Caches
from tamis.lab.demo.outcome import RowSize
from tamis.lab.demo.requests import Chunk, make_requests
from tamis.lab.demo.server import Server, Windows, make_pool
from tamis.lab.demo.shape import V4Shape, Workload
from tamis.lab.demo.v4_model import V4Model
from tamis.lab.testing.v4_probe import V4Probe
from tamis.model.spec import LayerSpec
from tamis.step.plan import Limits
from tamis.step.v4_plan import WINDOW_POOL, V4Plan, state_pool
from tamis.step.v4_planner import V4Planner

WINDOW_PAGE = 64


class V4Server(Server):
    """Serves layers that attend to a window of raw tokens and to compressed entries."""

    probe: V4Probe | None

    def __init__(self, shape: V4Shape, workload: Workload) -> None:
        """Make model, caches and pools."""
        self.shape = shape
        self.specs = [shape.spec(number) for number in range(shape.layers)]
        requests = make_requests(shape.vocab, workload)
        longest = max(r.cache_length for r in requests)
        windows = _make_windows(shape, self.specs, workload)
        super().__init__(requests, make_pool([r.cache_length for r in requests], workload), workload, windows)
        self.latent = named(workload.cache, latent=shape.latent, rope=shape.rope)
        exact = workload.cache == "v4-fp32"
        # Exact rows get exact keys, since a rounded key can change which of two close entries is selected.
        index = rows(torch.float32, latent=shape.index_dim, rope=0) if exact else index_fp8(dim=shape.index_dim)
        self.sizes = _row_sizes(shape, self.latent, index)
        limits = Limits(
            max_tokens=workload.token_budget,
            max_requests=workload.requests,
            max_length=longest,
            page_size=workload.page_size,
            other_page_sizes={name: pool.page_size for name, (pool, _) in windows.items()},
        )
        mode = "mixed" if workload.mode == "auto" else workload.mode
        self.planner = V4Planner(self.specs, limits, self.device, layout=self.latent, mode=mode)
        self.caches = [self._allocate(spec, windows, index) for spec in self.specs]
        dtype = torch.bfloat16 if self.device.type == "cuda" and not exact else torch.float32
        self.model = V4Model(shape, max_length=longest, device=self.device, dtype=dtype, seed=workload.seed)
        self.probe = None
        if workload.check:
            layers = self.model.attention
            self.probe = V4Probe(self.specs, [a.weights for a in layers], [a.cos_sin for a in layers])

    def _allocate(self, spec: LayerSpec, windows: Windows, index: Layout) -> V4Caches:
        state = None if spec.kind == "window" else windows[state_pool(spec.compress)][0]
        return V4Caches.allocate(
            spec,
            pages=self.pool.pages,
            window_pages=windows[WINDOW_POOL][0].pages,
            state_pages=1 if state is None else state.pages,
            page_size=self.workload.page_size,
            window_page_size=WINDOW_PAGE,
            state_page_size=None if state is None else state.page_size,
            layout=self.latent,
            index_layout=index,
            device=self.device,
        )

    def logits(self, chunks: list[Chunk], tokens: Tensor, plan: V4Plan, last: Tensor) -> Tensor:
        """Logits after the tokens `last` of the step."""
        observe = partial(self._observe, chunks) if self.probe else None
        return self.model.forward(tokens, plan, self.caches, last, observe)

    def attends(self, visible: int) -> float:
        """The number of rows attended to, raw and compressed, mean over layers."""
        total = 0
        for spec in self.specs:
            entries = visible // spec.compress if spec.kind != "window" else 0
            total += min(visible, self.shape.window) + min(entries, spec.topk or entries)
        return total / len(self.specs)

    def _observe(
        self, chunks: list[Chunk], layer: int, given: Tensor, select: Callable[[], Tensor | None], out: Tensor
    ) -> None:
        assert self.probe is not None
        self.probe.compare(layer, [chunk.span for chunk in chunks], given, select, out)


def _make_windows(shape: V4Shape, specs: list[LayerSpec], workload: Workload) -> Windows:
    """Pools of window and state pages, each with the number of a request's last tokens that it must hold."""
    kept = {WINDOW_POOL: (WINDOW_PAGE, shape.window)}
    for spec in specs:
        if spec.kind != "window":
            tokens = spec.compress * (2 if spec.kind == "overlapping" else 1)
            kept[state_pool(spec.compress)] = (STATE_PAGE_SIZES[spec.kind], tokens)
    found = {}
    for name, (page_size, tokens) in kept.items():
        each = ceil_div(tokens + workload.token_budget, page_size) + 1
        found[name] = (PagePool(workload.requests * each + 1, page_size, seed=workload.seed), tokens)
    return found


def _row_sizes(shape: V4Shape, latent: Layout, index: Layout) -> list[RowSize]:
    return [
        RowSize.of(f"entry of {shape.overlapping} tokens", latent, shape.overlapping),
        RowSize.of("index key of the same", index, shape.overlapping),
        RowSize.of(f"entry of {shape.plain} tokens", latent, shape.plain),
        RowSize.of(f"raw row, for the last {shape.window} tokens", latent),
    ]
