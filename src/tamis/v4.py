"""`SparseV4`: one DeepSeek-V4 attention layer, from hidden states to hidden states."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from tamis import checks
from tamis.cache import PagedCache
from tamis.layout import Layout, compressor_state, named
from tamis.ops import (
    Rotated,
    StatePages,
    attend,
    compress_kv,
    index_topk,
    lower_groups,
    norm_rows,
    rotate_and_write,
    rotate_heads,
    rotate_to_fp8,
)
from tamis.pipeline import FIXED_COLUMNS
from tamis.products import float32_products, without_autocast
from tamis.recipe import IndexRecipe
from tamis.spec import LayerSpec
from tamis.v4_plan import EntryPlan, V4Plan
from tamis.v4_serving import attend_gathered
from tamis.v4_weights import CompressorWeights, V4Weights


@dataclass(frozen=True, eq=False)
class V4Caches:
    """The caches of one layer. Layers with a window only have no others, and only overlapping ones have index keys."""

    window: PagedCache
    """Raw tokens."""
    entries: PagedCache | None = None
    """Compressed entries."""
    state: PagedCache | None = None
    """What their compressor carries."""
    index: PagedCache | None = None
    """Index keys, one per entry."""
    index_state: PagedCache | None = None

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        *,
        pages: int,
        window_pages: int,
        state_pages: int,
        page_size: int = 256,
        window_page_size: int = 64,
        state_page_size: int | None = None,
        layout: str | Layout = "v4-fp8",
        index_layout: str | Layout = "index-fp8",
        hadamard: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Zeroed caches for a layer, in pages of the sizes that a `V4Plan` is made for.

        Args:
            spec: the layer.
            pages: how many pages of entries (and index keys).
            window_pages: how many pages of raw tokens.
            state_pages: how many pages of compressor state.
            page_size: how many tokens a page of entries stands for.
            window_page_size: tokens per page.
            state_page_size: tokens per page; 4 for overlapping spans and 8 for plain ones if not given.
            layout: of raw tokens and entries.
            index_layout: of index keys.
            hadamard: index keys are turned by the Hadamard matrix, and so will be the queries that meet them: the same
                scores, a smaller quantisation error.
            device: where the caches are.
        """
        layout = named(layout)
        window = PagedCache(layout, window_pages, window_page_size, device)
        if spec.kind == "window":
            return cls(window)
        entries_per_page, rest = divmod(checks.integer("page_size", page_size, low=1), spec.compress)
        if rest:
            raise checks.refuse("page_size", f"a multiple of the ratio {spec.compress}", page_size, "pad it to one")
        overlapping = spec.kind == "overlapping"
        rows = state_page_size or (4 if overlapping else 8)

        def state(dim: int) -> PagedCache:
            return PagedCache(compressor_state(dim=dim, overlapping=overlapping), state_pages, rows, device)

        entries = PagedCache(layout, pages, entries_per_page, device)
        if not overlapping:
            return cls(window, entries, state(spec.head_dim))
        recipe = IndexRecipe.of_v4(spec.rope_dim, hadamard=hadamard)
        recipe.check_width(spec.index_dim)
        index = PagedCache(index_layout, pages, entries_per_page, device, recipe=recipe)
        return cls(window, entries, state(spec.head_dim), index, state(spec.index_dim))


class SparseV4:
    """The attention of one V4 layer of any kind: projections, norms and rotations, the writes to all of its caches,
    compression, selection, attention over window and entries with sinks, and the grouped output projection.

    The object holds weights and no state of a step; caches, plan and hidden states are arguments.
    """

    def __init__(
        self,
        spec: LayerSpec,
        weights: V4Weights,
        cos_sin: Tensor,
        *,
        eps: float = 1e-6,
        backend: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        """Remember what to compute.

        Args:
            spec: the layer; its kind decides what there is besides the window.
            weights: of this layer, for the spec's heads.
            cos_sin: float32 [max_positions, rope_dim] of this kind of layer, from `Rope.from_hf_v4`; layers with a
                window only have another theta than the rest, and no YaRN.
            eps: of all norms.
            backend: a name from `tamis backends`, or "auto". A named backend runs or the call fails.
            batch_invariant: as in `SparseMLA`; without effect on prefills that a plan gathers.
        """
        if spec.kind == "tokens":
            raise checks.refuse("spec", "of a V4 kind", repr(spec.kind), "use SparseMLA, or LayerSpec.from_hf")
        weights.check(spec)
        checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=spec.rope_dim, device=weights.kv.device)
        self.spec, self.weights, self.cos_sin, self.eps = spec, weights, cos_sin, checks.positive_number("eps", eps)
        self.backend, self.batch_invariant = backend, batch_invariant

    def __call__(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor:
        """Attend the step's tokens: hidden states [rows, hidden] to hidden states of the same shape and dtype.

        The tokens' rows, state and entries are written first, since a token attends to itself and to the entry that it
        completes. Padded rows come out as zeros.
        """
        entries = self._check(hidden, caches, plan)
        if plan.step.requests == 0:
            return torch.zeros_like(hidden)
        q, index_q = self.write(hidden, caches, plan)
        chosen = None if index_q is None else self.select(hidden, index_q, caches, plan)
        return self.output(self._attend(q, chosen, caches, entries, plan), plan)

    def write(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> Rotated:
        """Insert the new tokens' raw rows, remember them for compression, and insert what they complete; the queries
        [rows, H, D] and the indexer's, which are rotated in the same pass as the rows."""
        weights, spec = self.weights, self.spec
        compressed_q = norm_rows(project(hidden, weights.q_a), weights.q_norm, self.eps, backend=self.backend)
        index_q = None
        if weights.indexer is not None:
            index_q = project(compressed_q, weights.indexer.q).unflatten(1, (spec.index_heads, spec.index_dim))
        queries = rotate_and_write(
            project(compressed_q, weights.q_b).unflatten(1, (spec.heads, -1)),
            project(hidden, weights.kv),
            caches.window,
            plan.window.pages.slots,
            positions=plan.step.positions,
            cos_sin=self.cos_sin,
            norm_weight=weights.kv_norm,
            eps=self.eps,
            index_q=index_q,
            index_hadamard=_hadamard(caches.index),
            backend=self.backend,
        )
        if weights.compressor is not None:
            self._compress(hidden, weights.compressor, caches.state, caches.entries, plan)
        if weights.indexer is not None:
            self._compress(hidden, weights.indexer.compressor, caches.index_state, caches.index, plan)
        return queries

    def select(self, hidden: Tensor, index_q: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor:
        """Entries int32 [rows, topk] by this layer's indexer, -1 where there are no more. `index_q` is what `write`
        returned."""
        spec, entries, indexer = self.spec, plan.entries[self.spec.compress], self.weights.indexer
        assert indexer is not None
        assert caches.index is not None
        assert spec.topk is not None
        return index_topk(
            index_q,
            # The model's constant factor, positive, would change no order.
            project(hidden, indexer.weights, torch.float32),
            caches.index,
            plan.step.request_ids,
            entries.block_table,
            entries.visible,
            spec.topk,
            backend=self.backend,
        )

    def output(self, attended: Tensor, plan: V4Plan) -> Tensor:
        """Hidden states [rows, hidden] from attention's [rows, H, D], whose values were rotated as keys are."""
        weights = self.weights
        if weights.o_a_scales is not None:
            return project(self._lower_in_fp8(attended, plan.step.positions, weights.o_a_scales), weights.o_b)
        turned = rotate_heads(attended, plan.step.positions, self.cos_sin, inverse=True, backend=self.backend)
        grouped = turned.flatten(1).unflatten(1, (weights.o_a.shape[0], -1)).transpose(0, 1)
        wide = _product_dtype(turned)
        with without_autocast(turned.device):
            lowered = torch.bmm(grouped.to(wide), weights.o_a.to(wide).transpose(1, 2)).transpose(0, 1).to(turned.dtype)
        return project(lowered.flatten(1), weights.o_b)

    def _lower_in_fp8(self, attended: Tensor, positions: Tensor, weight_scales: Tensor) -> Tensor:
        """[rows, groups * o rank]"""
        groups, _, width = self.weights.o_a.shape
        tile = width // weight_scales.shape[2]
        values, scales = rotate_to_fp8(attended, positions, self.cos_sin, tile=tile, backend=self.backend)
        grouped, exponents = (part.flatten(1).unflatten(1, (groups, -1)) for part in (values, scales))
        weight, dtype = self.weights.o_a, attended.dtype
        lowered = lower_groups(grouped, exponents, weight, weight_scales, dtype=dtype, backend=self.backend)
        return lowered.flatten(1)

    def _attend(
        self, q: Tensor, chosen: Tensor | None, caches: V4Caches, entries: EntryPlan | None, plan: V4Plan
    ) -> Tensor:
        spec = self.spec
        if plan.workspace is not None:
            return attend_gathered(
                q,
                plan,
                caches.window,
                caches.entries,
                chosen,
                ratio=spec.compress,
                scale=spec.scale,
                value_dim=spec.value_dim,
                sink=self.weights.sink,
                backend=self.backend,
            )
        selections = [plan.window.selection(caches.window)]
        if entries is not None and caches.entries is not None:
            selections.append(entries.selection(caches.entries, chosen))
        columns = sum(s.slots.shape[1] for s in selections)
        return attend(
            q,
            selections,
            scale=spec.scale,
            value_dim=spec.value_dim,
            sink=self.weights.sink,
            splits=-(-columns // FIXED_COLUMNS) if self.batch_invariant else None,
            backend=self.backend,
        ).out

    def _compress(
        self,
        hidden: Tensor,
        weights: CompressorWeights,
        state: PagedCache | None,
        cache: PagedCache | None,
        plan: V4Plan,
    ) -> None:
        entries = plan.entries[self.spec.compress]
        assert state is not None
        assert cache is not None
        assert entries.state is not None
        compress_kv(
            project(hidden, weights.values, torch.float32),
            project(hidden, weights.scores, torch.float32),
            state,
            cache,
            positions=plan.step.positions,
            pages=StatePages(entries.state.slots, plan.step.request_ids, entries.state.block_table),
            slots=entries.slots,
            bias=weights.bias,
            norm_weight=weights.norm,
            cos_sin=self.cos_sin,
            eps=self.eps,
            backend=self.backend,
        )

    def _check(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> EntryPlan | None:
        """Everything that can be refused is refused before the first write."""
        spec = self.spec
        sizes = {"rows": plan.step.rows, "X": self.weights.kv.shape[1]}
        checks.tensor("hidden", hidden, "rows X", checks.FLOATS, **sizes, device=self.cos_sin.device)  # type: ignore[arg-type]
        if plan.window.size != spec.window:
            raise checks.refuse("plan.window.size", f"the layer's {spec.window}", plan.window.size, "plan with it")
        _same_pages("window", caches.window, plan.window.page_size)
        if spec.kind == "window":
            return None
        entries = plan.entries.get(spec.compress)
        if entries is None or entries.state is None:
            expected = f"with entries and a state pool for ratio {spec.compress}"
            raise checks.refuse("plan", expected, f"ratios {sorted(plan.entries)}", "plan for every layer of the model")
        for name in ("entries", "state", *(("index", "index_state") if spec.kind == "overlapping" else ())):
            cache = getattr(caches, name)
            if cache is None:
                raise checks.refuse(f"caches.{name}", f"given for a layer of kind {spec.kind!r}", None, "allocate it")
        if caches.index is not None and caches.index.recipe is not None:
            recipe = IndexRecipe.of_v4(spec.rope_dim, hadamard=caches.index.recipe.hadamard)
            if caches.index.recipe != recipe:
                expected = f"{recipe}, which this layer follows"
                raise checks.refuse("caches.index.recipe", expected, caches.index.recipe, "use V4Caches.allocate")
            recipe.check_width(spec.index_dim)
        _same_pages("entries", caches.entries, entries.page_size)
        _same_pages("index", caches.index, entries.page_size)
        return entries


def _hadamard(index: PagedCache | None) -> bool:
    """Whether index keys, and with them index queries, are turned by the Hadamard matrix."""
    return index is not None and index.recipe is not None and index.recipe.hadamard


def _same_pages(name: str, cache: PagedCache | None, page_size: int) -> None:
    if cache is not None and cache.page_size != page_size:
        raise checks.refuse(f"caches.{name}", f"of the plan's page size {page_size}", cache.page_size, "plan with it")


def project(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T in x's dtype, or another; on a CPU the product runs in float32."""
    wide = _product_dtype(x)
    with without_autocast(x.device):
        if dtype == torch.float32 and wide in (torch.bfloat16, torch.float16):
            # What the product sums in float32 anyway is not rounded in between.
            return torch.mm(x, weight.to(wide).T, out_dtype=dtype)
        return linear(x.to(wide), weight.to(wide)).to(x.dtype if dtype is None else dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    # 16-bit matrix products are not usable on every CPU, and a reference should not round twice. On a device, float32
    # products follow what the program allows, as those of every other linear layer of the model do.
    return float32_products(x.device) if x.device.type == "cpu" else x.dtype
