"""What runs in the storms: small layers whose rows do not depend on how many others share a matrix product."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from small_v4 import HIDDEN, OVERLAPPING, PLAIN, WINDOW, weights
from storm import MAIN, MOST_LENGTH, MOST_REQUESTS, MOST_TOKENS
from torch import Tensor

from tamis import Caches, LayerSpec, Limits, PagedCache, Planner, SparseMLA, SparseV4, V4Caches, V4Planner
from tamis.cache.layout import index_fp8, named, rows, v32_fp8
from tamis.layers import v4, v4_products
from tamis.model.rope import Rope
from tamis.ops import IndexInputs

PAGE, TOPK = 16, 8
LATENT, ROPE, HEADS, INDEX_HEADS, INDEX_DIM = 16, 8, 2, 2, 16
WIDTH = LATENT + ROPE
LARGEST = 4.0
"""Inputs are cut off there, so that bounds can rest on it."""


def limits(**more: Any) -> Limits:
    # Draft tokens make some steps longer than the planner would call decode, on purpose.
    return Limits(MOST_TOKENS + 5, MOST_REQUESTS, MOST_LENGTH + 4, PAGE, speculative_tokens=1, **more)


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).clamp(-LARGEST, LARGEST)


class MLA:
    """`SparseMLA` with float64 queries: products and softmax then run in float64."""

    page_sizes: Mapping[str, int] = {MAIN: PAGE}
    scale = 0.1
    # Logits of WIDTH products below LARGEST**2 each are exact up to WIDTH roundings, weights follow them twice (in the
    # numerator and in the sum), the output sums TOPK values below LARGEST; and two such runs are compared. Stored rows
    # may be larger than what was stored by the step of e4m3, 1/16.
    bound = 2 * 2.0**-53 * (2 * scale * WIDTH * WIDTH * LARGEST**2 + 2 * TOPK + 16) * LARGEST * 1.125

    def __init__(self, layout: str, mode: Any, *, indexed: bool) -> None:
        self.spec = LayerSpec(HEADS, LATENT, ROPE, LATENT, self.scale, topk=TOPK, index_heads=2, index_dim=INDEX_DIM)
        plain = rows(torch.bfloat16, latent=LATENT, rope=ROPE)
        self.layout = v32_fp8(latent=LATENT, rope=ROPE, tile=LATENT) if layout == "v32-fp8" else plain
        self.mode, self.indexed, self.layer = mode, indexed, SparseMLA(self.spec)

    def planner(self) -> Planner:
        return Planner(self.spec, limits(), layout=self.layout, mode=self.mode)

    def caches(self, pages: Mapping[str, int]) -> dict[str, list[PagedCache]]:
        return {MAIN: [PagedCache(layout, pages[MAIN], PAGE) for layout in (self.layout, index_fp8(dim=INDEX_DIM))]}

    def first_needed(self, pool: str, cached: int) -> int:
        return 0

    def inputs(self, tokens: int, generator: torch.Generator) -> list[Tensor]:
        q, kv = drawn(generator, tokens, HEADS, WIDTH).double(), drawn(generator, tokens, WIDTH)
        if self.indexed:
            index = drawn(generator, tokens, INDEX_HEADS, INDEX_DIM), drawn(generator, tokens, INDEX_HEADS)
            return [q, kv, *index, drawn(generator, tokens, INDEX_DIM)]
        order = torch.rand(tokens, tokens, generator=generator)
        order[torch.ones(tokens, tokens).triu(1).bool()] = -1.0
        best = order.topk(min(TOPK, tokens), dim=1)
        chosen = torch.where(best.values >= 0, best.indices, -1).int()
        return [q, kv, torch.nn.functional.pad(chosen, (0, TOPK - chosen.shape[1]), value=-1)]

    def run(self, caches: dict[str, list[PagedCache]], plan: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
        q, kv, *rest = inputs
        given = {"index": IndexInputs(*rest)} if self.indexed else {"positions": rest[0]}
        result = self.layer(q, kv, Caches(*caches[MAIN]), plan, **given)
        return {"out": result.out, "positions": result.positions}


def product(x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    """In place of `tamis.layers.v4_products.product` (and, with float32 inputs, `float_product`): each row's sums by
    themselves. A matrix product of another size sums in another order, and a last bit of an index key can decide
    between two entries."""
    return (x.double().unsqueeze(1) * weight.double()).sum(2).to(x.dtype)


class Heads(SparseV4):
    """A V4 layer up to its heads, which are a function of their row; the projection after them is a matrix product."""

    def output(self, attended: Tensor, plan: Any) -> Tensor:
        return attended

    _output = output


class V4:
    """`SparseV4` of all three kinds, side by side over the same hidden states."""

    page_sizes: Mapping[str, int] = {MAIN: PAGE, "window": 8, "state4": 4, "state16": 8}

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.specs = [WINDOW, replace(OVERLAPPING, topk=3), PLAIN]
        torch.manual_seed(5)
        table = Rope(8).cos_sin_table(MOST_LENGTH + 8)
        self.layers = [Heads(spec, weights(spec.kind), table) for spec in self.specs]
        self.layout = named("v4-fp8", latent=24, rope=8, tile=8)
        self.bound = max(map(self._bound, self.layers))

    @staticmethod
    def _bound(layer: SparseV4) -> float:
        """As for MLA, in float32. Queries and rows are normed, rows with weights; no value is above its row's norm."""
        spec, given = layer.spec, layer.weights
        norms = [given.kv_norm] + ([given.compressor.norm] if given.compressor is not None else [])
        q = spec.head_dim**0.5
        row = q * max(float(norm.abs().max()) for norm in norms) * 1.125
        columns = WINDOW.window + MOST_LENGTH // 4
        return 2 * 2.0**-24 * (2 * spec.scale * spec.head_dim * q * row + 2 * columns + 16) * row

    def planner(self) -> V4Planner:
        sizes = {name: size for name, size in self.page_sizes.items() if name}
        return V4Planner(self.specs, limits(other_page_sizes=sizes), layout=self.layout, mode=self.mode)

    def caches(self, pages: Mapping[str, int]) -> dict[str, list[PagedCache]]:
        index = rows(torch.float32, latent=16, rope=0)
        layers = [
            V4Caches.allocate(
                spec,
                pages=pages[MAIN],
                window_pages=pages["window"],
                state_pages=pages[f"state{spec.compress}"] if spec.compress > 1 else 1,
                page_size=PAGE,
                window_page_size=8,
                state_page_size=self.page_sizes.get(f"state{spec.compress}"),
                layout=self.layout,
                index_layout=index,
            )
            for spec in self.specs
        ]
        held: dict[str, list[PagedCache]] = {name: [] for name in self.page_sizes}
        for spec, made in zip(self.specs, layers, strict=True):
            named_caches = (("window", made.window), (MAIN, made.entries), (MAIN, made.index))
            states = ((f"state{spec.compress}", state) for state in (made.state, made.index_state))
            for pool, cache in (*named_caches, *states):
                if cache is not None:
                    held[pool].append(cache)
        held["layers"] = layers  # type: ignore[assignment]
        return held

    def first_needed(self, pool: str, cached: int) -> int:
        if pool == "window":
            return max(0, cached + 1 - WINDOW.window)
        if pool.startswith("state"):
            ratio = int(pool.removeprefix("state"))
            return max(0, (cached // ratio - 1) * ratio)
        return 0

    def inputs(self, tokens: int, generator: torch.Generator) -> list[Tensor]:
        return [drawn(generator, tokens, HIDDEN)]

    def run(self, caches: dict[str, list[PagedCache]], plan: Any, inputs: list[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for spec, layer, held in zip(self.specs, self.layers, caches["layers"], strict=True):
            found[spec.kind] = layer(inputs[0], held, plan)
        return found


def patch_projections(monkeypatch: Any) -> None:
    for module, names in ((v4, ("product", "float_product")), (v4_products, ("product",))):
        for name in names:
            monkeypatch.setattr(module, name, product)
