"""Checks of whole V4 layer calls, over prompts, decodes and mixed steps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tamis.cache.layout import Layout, named
from tamis.cache.pool import PagePool
from tamis.cache.v4_caches import V4Caches
from tamis.lab.testing.cases import Draw, to_device
from tamis.lab.testing.probe import RequestSpan
from tamis.lab.testing.v4_probe import V4Probe
from tamis.lab.verify.check import Check, Target, Trial
from tamis.lab.verify.repeat import graph_check
from tamis.lab.verify.v4_inputs import LENGTH, ROTARY
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights, V4Weights
from tamis.model.spec import LayerSpec
from tamis.step.batch import Batch, PageMap
from tamis.step.plan import Limits
from tamis.step.v4_plan import V4Plan
from tamis.step.v4_planner import V4Planner

V4_LAYER_STAGES = ("rotate", "compress", "index", "attend", "combine")
LAYER_BOUNDS = {"v4-bf16": 1.5e-2, "v4-fp8": 6e-2}
"""Bounds of a whole bf16 layer against exact rows and the same selection, by layout."""


def v4_layer_checks(target: Target) -> Iterator[Check]:
    """Layers of all kinds over prompts, decodes and mixed steps."""
    for layout, bound in LAYER_BOUNDS.items():
        found = [spec for spec in _specs() if _takes(target, spec, named(layout))]
        trials = [(spec.kind, partial(_serve, target, spec, layout)) for spec in found]
        yield Check("v4-layer", f"prompts, decodes, mixed steps, {layout}", bound, trials)
    found = [spec for spec in _specs() if _takes(target, spec, named("v4-fp8"))]
    replays = [(spec.kind, partial(_again, target, spec)) for spec in found]
    yield graph_check(target, "v4-layer", V4_LAYER_STAGES, replays)


def _specs() -> list[LayerSpec]:
    window = LayerSpec(8, 448, 64, 512, 512**-0.5, window=20, sink=True, kind="window")
    indexed = replace(window, kind="overlapping", compress=4, topk=9, index_heads=32, index_dim=128)
    return [window, indexed, replace(window, kind="plain", compress=16)]


def _takes(target: Target, spec: LayerSpec, layout: Layout) -> bool:
    stages = ["rotate", "select", "combine"]
    stages += ["compress"] * (spec.kind != "window") + ["index"] * (spec.kind == "overlapping")
    claimed = target.takes("attend", layout, heads=spec.heads, dtype=torch.bfloat16, sink=True)
    return claimed and all(target.runs(stage) is not None for stage in stages)


def _weights(spec: LayerSpec, draw: Draw) -> V4Weights:
    hidden, rank = 64, 32

    def matrix(*size: int) -> Tensor:
        scaled: Tensor = draw.normal(*size, dtype=torch.bfloat16) * size[-1] ** -0.5
        return scaled

    def compressor(width: int) -> CompressorWeights:
        channels = width * (2 if spec.kind == "overlapping" else 1)
        bias, norm = draw.normal(spec.compress, channels), draw.normal(width).abs() + 0.5
        return CompressorWeights(matrix(channels, hidden), matrix(channels, hidden), bias, norm)

    indexer = None
    if spec.kind == "overlapping":
        q = matrix(spec.index_heads * spec.index_dim, rank)
        indexer = IndexerWeights(q, matrix(spec.index_heads, hidden), compressor(spec.index_dim))
    return V4Weights(
        matrix(rank, hidden),
        draw.normal(rank).abs() + 0.5,
        matrix(spec.heads * 512, rank),
        matrix(512, hidden),
        draw.normal(512).abs() + 0.5,
        draw.normal(spec.heads),
        matrix(2, 16, spec.heads * 256),
        matrix(hidden, 32),
        None if spec.kind == "window" else compressor(512),
        indexer,
    )


class V4Served:
    """Requests served step by step through one layer on the target."""

    def __init__(self, target: Target, spec: LayerSpec, layout: str) -> None:
        """Start with empty caches."""
        self.target, self.spec, self.draw = target, spec, Draw(f"V4 {spec.kind}")
        self.weights, self.table = _weights(spec, self.draw), ROTARY.cos_sin_table(LENGTH)
        moved = to_device(self.weights, target.device)
        self.layer = SparseV4(spec, moved, target.here(self.table), backend=target.backend)
        sizes = {"window": 16, f"state{spec.compress}": 4}
        limits = Limits(192, 4, LENGTH, 64, sizes)
        self.planner = V4Planner([spec], limits, target.device, layout=layout, backend=target.backend)
        self.pool, self.others = PagePool(24, 64, seed=3), {n: PagePool(330, s, seed=4) for n, s in sizes.items()}
        self.caches = V4Caches.allocate(
            spec,
            pages=24,
            window_pages=330,
            state_pages=330,
            page_size=64,
            window_page_size=16,
            state_page_size=4,
            layout=layout,
            device=target.device,
        )
        self.lengths: list[int] = []

    def plan(self, new_tokens: Sequence[int], *, padding: int = 0) -> V4Plan:
        """Plan the next step with these numbers of new tokens per request; additional numbers start new requests."""
        self.lengths += [0] * (len(new_tokens) - len(self.lengths))
        self.lengths = [length + new for length, new in zip(self.lengths, new_tokens, strict=True)]
        batch = Batch.build(new_tokens, self.lengths, self.pool, other_pools=self.others)

        def moved(pages: PageMap) -> PageMap:
            return PageMap(*self.target.here([pages.block_table, pages.slots]))

        others = {name: moved(pages) for name, pages in batch.other_pages.items()}
        padded = sum(new_tokens) + padding
        return self.planner.plan(replace(batch, pages=moved(batch.pages), other_pages=others, padded_tokens=padded))

    def inputs(self, plan: V4Plan) -> Tensor:
        """Hidden states of the step, on the host."""
        return self.draw.normal(plan.step.rows, 64, dtype=torch.bfloat16)


def _serve(target: Target, spec: LayerSpec, layout: str) -> Trial:
    served = V4Served(target, spec, layout)
    probe = V4Probe([spec], [served.weights], [served.table])
    for number, new_tokens in enumerate(([70, 33, 1], [1, 1, 1], [1, 1, 60, 90])):
        plan = served.plan(new_tokens, padding=3 * (number == 1))
        hidden = served.inputs(plan)
        here = target.here(hidden)
        out = served.layer(here, served.caches, plan).cpu()
        chosen = None
        if spec.kind == "overlapping":
            index_q = served.layer.write(here, served.caches, plan).index_q
            assert index_q is not None
            chosen = served.layer.select(here, index_q, served.caches, plan).cpu()
        ends = zip(served.lengths, new_tokens, strict=True)
        spans = [RequestSpan(request, end - new, end, LENGTH) for request, (end, new) in enumerate(ends)]
        probe.compare(0, spans, hidden, partial(_same, chosen), out)
    return Trial(probe.errors()[0].quantisation_error)


def _same(value: Tensor | None) -> Tensor | None:
    return value


def _again(target: Target, spec: LayerSpec) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    """A decode step captured with some hidden states and replayed with others."""
    served = V4Served(target, spec, "v4-fp8")
    prompt = served.plan([70, 33, 15])
    served.layer(target.here(served.inputs(prompt)), served.caches, prompt)
    plan = served.plan([1, 1, 1], padding=2)
    first, second = target.here([served.inputs(plan), served.inputs(plan)])
    return [first], [second], partial(_layer_call, served, plan)


def _layer_call(served: V4Served, plan: V4Plan, hidden: Tensor) -> list[Tensor]:
    return [served.layer(hidden, served.caches, plan)]
