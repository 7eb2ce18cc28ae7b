"""Serves the V3.2 model: one pool of pages for latent rows and index keys."""

from functools import partial

import torch
from torch import Tensor

from tamis.cache.layout import index_fp8, named, rows
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches
from tamis.lab.demo.model import AttentionInputs, Model
from tamis.lab.demo.outcome import RowSize
from tamis.lab.demo.requests import Chunk, make_requests
from tamis.lab.demo.server import Server, make_pool
from tamis.lab.demo.shape import ModelShape, Workload
from tamis.lab.testing.mla_probe import MLAProbe
from tamis.layers.mla import LayerOutput
from tamis.step.plan import Limits, Plan
from tamis.step.planner import Planner


class MLAServer(Server):
    """Serves layers that attend to tokens selected by an indexer."""

    probe: MLAProbe | None

    def __init__(self, shape: ModelShape, workload: Workload) -> None:
        """Make model, caches and pool."""
        requests = make_requests(shape.vocab, workload)
        longest = max(r.cache_length for r in requests)
        super().__init__(requests, make_pool([r.cache_length for r in requests], workload), workload)
        self.shape = shape
        self.latent = named(workload.cache, latent=shape.latent, rope=shape.rope)
        exact = workload.cache == "v32-fp32"
        # Exact rows get exact keys, since a rounded key can change which of two close positions is selected.
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
        self.probe = MLAProbe(shape.spec, shape.layers) if workload.check else None

    def logits(self, chunks: list[Chunk], tokens: Tensor, plan: Plan, last: Tensor) -> Tensor:
        """Logits after the tokens `last` of the step."""
        observe = partial(self._observe, chunks) if self.probe else None
        return self.model.forward(tokens, plan, self.caches, last, observe)

    def attends(self, visible: int) -> int:
        """The number of tokens attended to, at most top-k."""
        return min(self.shape.topk, visible)

    def _observe(self, chunks: list[Chunk], layer: int, inputs: AttentionInputs, attended: LayerOutput) -> None:
        assert self.probe is not None
        spans = [chunk.span for chunk in chunks]
        self.probe.compare(layer, spans, inputs.q, inputs.rows, attended.positions, attended.out)
