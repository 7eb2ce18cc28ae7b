"""The V4 model served: pools for entries, windows and compressor state, of which the latter two stay small."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import index_fp8, named, rows
from tamis.cache.pool import PagePool
from tamis.cache.v4_caches import STATE_PAGE_SIZES, V4Caches
from tamis.lab.demo.requests import Piece, make_requests
from tamis.lab.demo.serve import RowSize, Server, make_pool
from tamis.lab.demo.shape import V4Shape, Workload
from tamis.lab.demo.v4_model import V4Model
from tamis.lab.demo.v4_probe import V4Probe
from tamis.step.plan import Limits
from tamis.step.v4_plan import WINDOW_POOL, V4Plan, state_pool
from tamis.step.v4_planner import V4Planner

WINDOW_PAGE = 64


class V4Server(Server):
    """Layers that attend to a window of raw tokens and to compressed entries."""

    probe: V4Probe | None

    def __init__(self, shape: V4Shape, workload: Workload) -> None:
        """Make model, caches and pools."""
        self.shape = shape
        self.specs = [shape.spec(number) for number in range(shape.layers)]
        requests = make_requests(shape.vocab, workload)
        longest = max(r.cache_length for r in requests)
        # Pages of windows and state are given back as tokens leave them, so a request needs few, whatever its length.
        sizes, kept = {WINDOW_POOL: WINDOW_PAGE}, {WINDOW_POOL: shape.window}
        for spec in self.specs:
            if spec.kind != "window":
                name = state_pool(spec.compress)
                sizes[name] = STATE_PAGE_SIZES[spec.kind]
                kept[name] = spec.compress * (2 if spec.kind == "overlapping" else 1)
        pools = {}
        for name, size in sizes.items():
            each = ceil_div(kept[name] + workload.token_budget, size) + 1
            pools[name] = PagePool(workload.requests * each + 1, size, seed=workload.seed)
        windows = {name: (pool, kept[name]) for name, pool in pools.items()}
        super().__init__(requests, make_pool([r.cache_length for r in requests], workload), workload, windows)
        self.latent = named(workload.cache, latent=shape.latent, rope=shape.rope)
        exact = workload.cache == "v4-fp32"
        # Exact rows deserve exact keys: a rounded key can flip which of two close entries is selected.
        index = rows(torch.float32, latent=shape.index_dim, rope=0) if exact else index_fp8(dim=shape.index_dim)
        self.sizes = [
            RowSize.of(f"entry of {shape.overlapping} tokens", self.latent, shape.overlapping),
            RowSize.of("index key of the same", index, shape.overlapping),
            RowSize.of(f"entry of {shape.plain} tokens", self.latent, shape.plain),
            RowSize.of(f"raw row, for the last {shape.window} tokens", self.latent),
        ]
        limits = Limits(
            max_tokens=workload.token_budget,
            max_requests=workload.requests,
            max_length=longest,
            page_size=workload.page_size,
            other_page_sizes=sizes,
        )
        mode = "mixed" if workload.mode == "auto" else workload.mode
        self.planner = V4Planner(self.specs, limits, self.device, layout=self.latent, mode=mode)
        self.caches = [
            V4Caches.allocate(
                spec,
                pages=self.pool.pages,
                window_pages=pools[WINDOW_POOL].pages,
                state_pages=pools[state_pool(spec.compress)].pages if spec.kind != "window" else 1,
                page_size=workload.page_size,
                window_page_size=WINDOW_PAGE,
                layout=self.latent,
                index_layout=index,
                device=self.device,
            )
            for spec in self.specs
        ]
        dtype = torch.bfloat16 if self.device.type == "cuda" and not exact else torch.float32
        self.model = V4Model(shape, max_length=longest, device=self.device, dtype=dtype, seed=workload.seed)
        self.probe = None
        if workload.check:
            layers = self.model.attention
            self.probe = V4Probe(self.specs, [a.weights for a in layers], [a.cos_sin for a in layers])

    def logits(self, pieces: list[Piece], tokens: Tensor, plan: V4Plan, last: Tensor) -> Tensor:
        """Logits after the tokens `last` of the step."""
        observe = partial(self._observe, pieces) if self.probe else None
        return self.model.forward(tokens, plan, self.caches, last, observe)

    def attends(self, visible: int) -> float:
        """Rows attended to, raw and compressed, on average over layers."""
        total = 0
        for spec in self.specs:
            entries = visible // spec.compress if spec.kind != "window" else 0
            total += min(visible, self.shape.window) + min(entries, spec.topk or entries)
        return total / len(self.specs)

    def _observe(
        self, pieces: list[Piece], layer: int, given: Tensor, select: Callable[[], Tensor | None], out: Tensor
    ) -> None:
        assert self.probe is not None
        self.probe.compare(layer, pieces, given, select, out)
