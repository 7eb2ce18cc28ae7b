"""Everything that a call of `SparseV4` can be refused for, looked at once and before its first write.

The projections of a call write nothing, so they come first: each stage's own check then sees the stage's own arguments.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.cache.v4_caches import V4Caches
from tamis.layers.v4_gathered import check_attend_gathered
from tamis.layers.v4_weights import CompressorWeights, V4Weights
from tamis.model.spec import LayerSpec
from tamis.ops.attention import check_attend, check_query, new_output
from tamis.ops.attention.operations import Attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.compress import check_compress_kv, check_recipe, has_hadamard
from tamis.ops.compress.operations import CompressKv
from tamis.ops.index import WORKSPACE_BYTES, check_index_topk, check_layout
from tamis.ops.output import check_rotate_to_fp8
from tamis.ops.output.operations import RotateToFp8
from tamis.ops.rotate import check_rotate_and_write, check_rotate_heads
from tamis.ops.rotate.operations import RotateAndWrite, RotateHeads
from tamis.step.v4_plan import EntryPlan, V4Plan


class Projected(NamedTuple):
    """What the matrix products of a layer make of hidden states before anything is written."""

    q: Tensor
    """[rows, H, D]"""
    kv: Tensor
    """[rows, D]"""
    entry: tuple[Tensor, Tensor] | None
    """Values and scores [rows, C] of the compressor; None for layers with a window only."""
    index_q: Tensor | None
    """[rows, index heads, index dim]; this and the next two where an indexer selects."""
    index_weights: Tensor | None
    """[rows, index heads]"""
    index_entry: tuple[Tensor, Tensor] | None
    """Values and scores of the compressor that makes index keys."""


class V4Checks:
    """The checks of one layer; on a device what passed last passes again, as in `pipeline_checks`."""

    def __init__(self, spec: LayerSpec, weights: V4Weights, cos_sin: Tensor, eps: float, backend: str) -> None:
        """Remember the layer, and refuse parts of it that do not fit each other."""
        checks.instance("spec", spec, LayerSpec)
        if spec.kind == "tokens":
            raise checks.refuse("spec", "of a V4 kind", repr(spec.kind), "use SparseMLA, or LayerSpec.from_hf")
        checks.instance("weights", weights, V4Weights)
        weights.check(spec)
        checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=spec.rope_dim, device=weights.kv.device)
        checks.positive_number("eps", eps)
        self.spec, self.weights, self.cos_sin, self.eps, self.backend = spec, weights, cos_sin, eps, backend
        self._passed: tuple[object, ...] | None = None

    def arguments(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> None:
        """Refuse hidden states, caches and a plan that do not fit each other and the layer."""
        spec, device = self.spec, self.cos_sin.device
        checks.instance("caches", caches, V4Caches)
        for name in ("entries", "state", "index", "index_state"):
            if getattr(caches, name) is not None:
                checks.instance(f"caches.{name}", getattr(caches, name), PagedCache)
        self._check_hidden(hidden, plan)
        if plan.window.size != spec.window:
            raise checks.refuse("plan.window.size", f"the layer's {spec.window}", plan.window.size, "plan with it")
        _check_cache("window", caches.window, plan.window.page_size, spec.head_dim, device)
        if spec.kind == "window":
            return
        entries = entry_plan(spec, plan)
        overlapping = spec.kind == "overlapping"
        for name in ("entries", "state", *(("index", "index_state") if overlapping else ())):
            if getattr(caches, name) is None:
                raise checks.refuse(f"caches.{name}", f"given for a layer of kind {spec.kind!r}", None, "allocate it")
        assert caches.entries is not None
        _check_cache("entries", caches.entries, entries.page_size, spec.head_dim, device)
        check_recipe(caches.entries, spec.rope_dim, "caches.entries")
        spans = 2 if overlapping else 1
        _check_cache("state", caches.state, entries.state_page_size, 2 * spans * spec.head_dim, device)
        if overlapping:
            assert caches.index is not None
            _check_cache("index", caches.index, entries.page_size, spec.index_dim, device)
            _check_cache("index_state", caches.index_state, entries.state_page_size, 2 * spans * spec.index_dim, device)
            check_layout(caches.index, "caches.index")
            check_recipe(caches.index, spec.rope_dim, "caches.index")
            if entries.columns != spec.topk:
                raise checks.refuse("plan.entries", f"for top-k {spec.topk}", entries.columns, "plan with the layer")
        elif entries.every is None:
            raise checks.refuse("plan.entries", "with slots of all entries", None, "plan with the layer's spec")

    def stages(self, made: Projected, caches: V4Caches, plan: V4Plan) -> None:
        """Refuse what any stage of a layer call refuses."""
        self.writes(made, caches, plan)
        if made.index_q is not None and made.index_weights is not None:
            self.selects(made.index_q, made.index_weights, caches, plan)
        self._attends(made.q, caches, plan)
        self.outputs(made.q, plan)

    def writes(self, made: Projected, caches: V4Caches, plan: V4Plan) -> None:
        """Refuse what the stages refuse that write."""
        check_rotate_and_write(self.rotation(made, caches, plan), "caches.window")
        for names, call in self.compressions(made, caches, plan):
            check_compress_kv(call, names)

    def rotation(self, made: Projected, caches: V4Caches, plan: V4Plan) -> RotateAndWrite:
        """The call that rotates the queries and writes the raw rows."""
        return RotateAndWrite(
            made.q,
            made.kv,
            caches.window,
            plan.window.pages.slots,
            plan.step.positions,
            self.cos_sin,
            self.weights.kv_norm,
            self.eps,
            made.index_q,
            has_hadamard(caches.index),
            self.backend,
        )

    def compressions(
        self, made: Projected, caches: V4Caches, plan: V4Plan
    ) -> Iterator[tuple[tuple[str, str], CompressKv]]:
        """The calls of the layer's compressors, each with what errors call its two caches."""
        weights, step = self.weights, plan.step
        found: list[tuple[CompressorWeights, tuple[Tensor, Tensor], str, str]] = []
        if weights.compressor is not None and made.entry is not None:
            found.append((weights.compressor, made.entry, "state", "entries"))
        if weights.indexer is not None and made.index_entry is not None:
            found.append((weights.indexer.compressor, made.index_entry, "index_state", "index"))
        for own, (values, scores), state_name, name in found:
            entries, state, cache = entry_plan(self.spec, plan), getattr(caches, state_name), getattr(caches, name)
            assert entries.state is not None
            where = (step.positions, entries.state.slots, step.request_ids, entries.state.block_table, entries.slots)
            names = (f"caches.{state_name}", f"caches.{name}")
            weighting, hadamard = (own.bias, own.norm, self.cos_sin), has_hadamard(cache)
            yield names, CompressKv(values, scores, state, cache, *where, *weighting, self.eps, hadamard, self.backend)

    def selects(self, index_q: Tensor, index_weights: Tensor, caches: V4Caches, plan: V4Plan) -> None:
        """Refuse what the indexer refuses."""
        spec, entries = self.spec, entry_plan(self.spec, plan)
        if caches.index is None or spec.topk is None:
            raise checks.refuse("caches.index", "given for a layer that selects", None, "allocate it")
        check_index_topk(
            index_q,
            index_weights,
            caches.index,
            plan.step.request_ids,
            entries.block_table,
            entries.visible,
            spec.topk,
            WORKSPACE_BYTES,
            self.backend,
            prefix="index_",
            name="caches.index",
            sizes={"T": plan.step.rows, "H": spec.index_heads},
        )

    def outputs(self, attended: Tensor, plan: V4Plan) -> None:
        """Refuse what the output's stages refuse."""
        sizes = {"rows": plan.step.rows, "H": self.spec.heads, "D": self.spec.head_dim}
        checks.tensor("attended", attended, "rows H D", checks.FLOATS, device=self.cos_sin.device, **sizes)  # type: ignore[arg-type]
        checks.no_gradient(attended=attended)
        positions, tile = plan.step.positions, self.weights.output_tile
        if tile is None:
            check_rotate_heads(RotateHeads(attended, positions, self.cos_sin, None, True, self.backend))
        else:
            check_rotate_to_fp8(RotateToFp8(attended, positions, self.cos_sin, tile, True, self.backend))

    def passed(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> bool:
        """Whether such a call passed last time, on a device, where nothing but this can be seen."""
        seen = self._signature(hidden, caches, plan)
        return seen is not None and seen == self._passed

    def remember(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> None:
        """Note a call that passed all checks."""
        self._passed = self._signature(hidden, caches, plan)

    def no_gradient(self, hidden: Tensor) -> None:
        """Refuse hidden states and weights that require a gradient."""
        if torch.is_grad_enabled():
            checks.no_gradient(hidden=hidden, cos_sin=self.cos_sin, **self.weights.named())

    def _signature(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> tuple[object, ...] | None:
        if torch.compiler.is_compiling() or not isinstance(hidden, Tensor) or checks.visible(hidden) or plan.gathers:
            return None
        if not isinstance(caches, V4Caches):
            return None
        step, window, seen = plan.step, plan.window, list[Any]()
        tensors: list[Tensor | None] = [
            hidden,
            step.positions,
            step.request_ids,
            window.pages.slots,
            window.slots,
            window.lengths,
        ]
        for cache in (caches.window, caches.entries, caches.state, caches.index, caches.index_state):
            if isinstance(cache, PagedCache):
                seen += (cache.layout.key, cache.recipe, checks.frozen(cache.storage))
                tensors.append(cache.storage)
            else:
                seen.append(type(cache))
        entries = plan.entries.get(self.spec.compress)
        if entries is not None and entries.state is not None:
            seen += (entries.page_size, entries.state_page_size, entries.columns)
            tensors += [entries.block_table, entries.slots, entries.visible, entries.lengths, entries.every]
            tensors += [entries.state.slots, entries.state.block_table]
        numbers = (step.rows, step.requests == 0, window.size, window.page_size, plan.workspace is None)
        return (*numbers, *seen, *checks.signature(*tensors))

    def _check_hidden(self, hidden: Tensor, plan: V4Plan) -> None:
        rows, width, device = plan.step.rows, self.weights.kv.shape[1], self.cos_sin.device
        checks.tensor("hidden", hidden, "rows X", checks.FLOATS, rows=rows, X=width, device=device)
        if plan.step.positions.device != device:
            raise checks.refuse(
                "plan", f"on {device} like the layer", plan.step.positions.device, "plan for that device"
            )

    def _attends(self, q: Tensor, caches: V4Caches, plan: V4Plan) -> None:
        spec, sink, chosen = self.spec, self.weights.sink, None
        if spec.kind == "overlapping":
            # What the indexer will give.
            chosen = torch.empty((plan.step.rows, spec.topk or 0), dtype=torch.int32, device=q.device)
        if plan.workspace is not None:
            numbers = {"scale": spec.scale, "value_dim": spec.value_dim, "sink": sink, "backend": self.backend}
            check_attend_gathered(q, plan, caches.window, caches.entries, chosen, ratio=spec.compress, **numbers)  # type: ignore[arg-type]
            return
        selections = attended_rows(spec, chosen, caches, plan)
        check_query(q, selections, spec.value_dim)
        out, given = new_output(q, spec.value_dim), contiguous_sink(sink)
        check_attend(Attend(q, selections, spec.scale, None, None, given, out, False, self.backend))


def entry_plan(spec: LayerSpec, plan: V4Plan) -> EntryPlan:
    """What a plan says about entries of a layer's ratio."""
    entries = plan.entries.get(spec.compress)
    if entries is None or entries.state is None:
        expected = f"with entries and a state pool for ratio {spec.compress}"
        raise checks.refuse("plan", expected, f"ratios {sorted(plan.entries)}", "plan for every layer of the model")
    return entries


def attended_rows(spec: LayerSpec, chosen: Tensor | None, caches: V4Caches, plan: V4Plan) -> list[Selection]:
    """What a layer attends to: its window and, where it has them, entries."""
    selections = [plan.window.selection(caches.window)]
    if spec.kind != "window" and caches.entries is not None:
        selections.append(entry_plan(spec, plan).selection(caches.entries, chosen))
    return selections


def _check_cache(name: str, cache: PagedCache | None, page_size: int, width: int, device: torch.device) -> None:
    checks.instance(f"caches.{name}", cache, PagedCache)
    assert cache is not None
    if cache.page_size != page_size:
        raise checks.refuse(f"caches.{name}", f"of the plan's page size {page_size}", cache.page_size, "plan with it")
    if cache.layout.width != width:
        raise checks.refuse(f"caches.{name}", f"of rows {width} wide", repr(cache), "match the layer's spec")
    if cache.device != device:
        raise checks.refuse(f"caches.{name}", f"on {device} like the layer", cache.device, "keep both on one device")
