"""`SparseV41`: one DeepSeek-V4.1 attention layer, from hidden states to hidden states.

It is V4's layer with other parts around the attention. Query heads are not normalised. Entries are made from latents of
one or two tokens, and index keys from the same latents. Layers share entries, index keys and selections: one that reads
another's entries has that layer's caches, and a selection goes from layer to layer as an argument.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import without_autocast
from tamis.cache.v4_caches import V4Caches
from tamis.layers.batch_invariance import fixed_splits
from tamis.layers.selecting import for_prompts, run_selection
from tamis.layers.v4_products import (
    float_product,
    output_rotation,
    product,
    product_dtype,
    project,
    project_output,
    project_queries,
    rotate_and_write,
)
from tamis.layers.v41_checks import KnownV41, Made, V41Call, V41Checks, V41Latents, V41Selection
from tamis.layers.v41_weights import V41Weights
from tamis.model.spec import LayerSpec
from tamis.ops import Rotated
from tamis.ops.attention import new_output, read_by
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.compress import has_hadamard
from tamis.ops.compress.operations import PoolKv, pool_kv
from tamis.ops.index import WORKSPACE_BYTES
from tamis.ops.index.block_operations import (
    IndexTopkAndBlocks,
    IndexTopkWithin,
    index_topk_and_blocks,
    index_topk_within,
)
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import new_positions
from tamis.ops.lse import LseForm
from tamis.ops.rotate import run_rotate_and_write
from tamis.ops.rotate.operations import NormRows, WriteRotated, norm_rows, write_rotated
from tamis.step.lease import needs_latest_plan
from tamis.step.v4_plan import V4Plan

__all__ = ["SparseV41", "V41Output", "V41Selection"]


class V41Output(NamedTuple):
    """The result of a layer call."""

    hidden: Tensor
    """[rows, hidden]; zeros for padding."""
    selection: V41Selection | None
    """The selection for the next layer: this layer's own, or the one that it was given."""


class SparseV41:
    """The attention of one V4.1 layer: projections, norms and rotations, the writes to its caches, selection in one or
    two levels, attention over window and entries with sinks, and the grouped output projection.

    A call projects its hidden states, builds the operations of its stages, checks all of them, and then runs them in
    order. The object holds weights and no state of a step. The layers of a model run one after another:

        selection = None
        for layer, caches in zip(layers, layer_caches):
            out, selection = layer(hidden, caches, plan, selection)
    """

    def __init__(
        self,
        spec: LayerSpec,
        weights: V41Weights,
        cos_sin: Tensor,
        *,
        eps: float = 1e-6,
        backend: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        """Remember what to compute.

        Args:
            spec: the layer, of kind "window" or "indexed".
            weights: the layer's weights, for the spec's heads.
            cos_sin: float32 [max_positions, rope_dim] for this kind of layer, from `Rope.from_hf_v4`; layers with a
                window only have another theta than the rest, and no YaRN.
            eps: the eps of all norms.
            backend: a name from `tamis backends`, or "auto". A named backend runs or the call fails.
            batch_invariant: as in `SparseMLA`.
        """
        self._checks = V41Checks(spec, weights, cos_sin, eps)
        self.spec, self.weights, self.cos_sin, self.eps = spec, weights, cos_sin, float(eps)
        self.backend, self.batch_invariant = backend, checks.flag("batch_invariant", batch_invariant)

    @needs_latest_plan
    def __call__(
        self, hidden: Tensor, caches: V4Caches, plan: V4Plan, selection: V41Selection | None = None
    ) -> V41Output:
        """Attend the step's tokens.

        The tokens' rows, state, entries and index keys are written first, since a token attends to itself and to the
        entry that it completes. Everything is checked before the first write.

        Args:
            hidden: [rows, hidden].
            caches: the layer's caches. A layer with `reuse_entries` gets the entries and index keys of its source.
            plan: the step, made for all layers of the model.
            selection: what the layer before returned; None for the first layer. Layers that take a selection, or
                candidate blocks, refuse None.
        """
        if not isinstance(plan, V4Plan):
            checks.instance("plan", plan, V4Plan)
        seen = self._checks.signature(hidden, caches, plan, selection)
        known = self._checks.seen_before(hidden, seen)
        if known is None:
            self._checks.arguments(hidden, caches, plan, selection)
        if plan.step.requests == 0:
            return V41Output(torch.zeros_like(hidden), self._checks.nothing(hidden, selection))
        call = self._build(self._project(hidden), caches, plan, selection, known)
        if known is None:
            self._checks.operations(call, seen)
        queries = run_rotate_and_write(call.rotation)
        if call.latents is not None:
            self._write_latents(call.latents)
        found = self._select(call, queries, selection)
        attended = self._attend(call, queries.q, plan, caches, found)
        return V41Output(project_output(self.weights.attention, attended, call.output), found)

    def _project(self, hidden: Tensor) -> Made:
        """The projections of the hidden states. They write nothing, so the operations that take them can be checked
        afterwards."""
        weights, spec, wide = self.weights.attention, self.spec, product_dtype(hidden)
        compressor, indexer = self.weights.compressor, self.weights.indexer
        index_q, index_weights, values, scores = None, None, None, None
        with without_autocast(hidden.device):
            made = project_queries(hidden, weights, spec, self.eps, self.backend, wide)
            if indexer is not None:
                index_q = product(made.low, indexer.q, wide).view(-1, spec.index_heads, spec.index_dim)
                # The model's constant factor is left out: it is positive, so it changes no order.
                index_weights = float_product(hidden, indexer.weights, wide)
            if compressor is not None:
                values = float_product(hidden, compressor.values, wide)
                scores = None if compressor.scores is None else float_product(hidden, compressor.scores, wide)
        return Made(made, index_q, index_weights, values, scores)

    def _build(
        self,
        made: Made,
        caches: V4Caches,
        plan: V4Plan,
        selection: V41Selection | None,
        known: KnownV41 | None,
    ) -> V41Call:
        """Build the operations of a call. Latents, rotated queries and attention's output do not exist yet, so tensors
        of the same shape are checked in their place."""
        weights, q, numbers = self.weights.attention, made.queries.q, (self.cos_sin, self.eps, False, self.backend)
        rotation = rotate_and_write(made.queries, made.index_q, weights, caches, plan, *numbers)
        index = None
        if made.index_q is not None and made.index_weights is not None:
            index = self._index(made.index_q, made.index_weights, caches, plan, selection, known)
        columns = plan.window.slots.shape[1] + (self.spec.topk or 0)
        splits = fixed_splits(columns) if self.batch_invariant else None
        # A prepared call makes its own output.
        out: Any = new_output(q, self.spec.value_dim) if known is None or known.attend is None else None
        window, sink = [plan.window.selection(caches.window)], contiguous_sink(weights.sink)
        attention = Attend(q, window, self.spec.scale, None, splits, sink, out, False, LseForm(), self.backend)
        output = output_rotation(weights, self.cos_sin, q, plan, self.backend)
        latents = self._latents(made, caches, plan)
        return V41Call(plan, caches, rotation, latents, index, attention, output, known)

    def _latents(self, made: Made, caches: V4Caches, plan: V4Plan) -> V41Latents | None:
        compressor, indexer, step = self.weights.compressor, self.weights.indexer, plan.step
        if compressor is None or made.values is None:
            return None
        assert caches.entries is not None
        assert caches.index is not None
        assert indexer is not None
        assert indexer.keys is not None
        (_, q, kv), entries = made.queries, plan.entries[self.spec.compress]
        dtype = q.dtype
        pool: PoolKv | NormRows = NormRows(made.values, compressor.norm, self.eps, self.backend)
        if made.scores is not None:
            assert caches.state is not None
            assert entries.state is not None
            where = (step.positions, entries.state.slots, step.request_ids, entries.state.block_table)
            numbers = (self.spec.compress, self.eps, dtype)
            pool = PoolKv(
                made.values, made.scores, caches.state, *where, compressor.norm, *numbers, self.backend
            )  # fmt: skip
        where_to = (entries.slots, step.positions, self.cos_sin)
        latents, keys = kv, kv.new_empty((len(kv), self.spec.index_dim), dtype=dtype)
        span, backend = self.spec.compress, self.backend
        return V41Latents(
            pool,
            dtype,
            WriteRotated(latents, caches.entries, *where_to, None, self.eps, span, False, backend),
            WriteRotated(
                keys,
                caches.index,
                *where_to,
                indexer.key_norm,
                self.eps,
                span,
                has_hadamard(caches.index),
                backend,
            ),
        )

    def _index(
        self,
        q: Tensor,
        weights: Tensor,
        caches: V4Caches,
        plan: V4Plan,
        selection: V41Selection | None,
        known: KnownV41 | None,
    ) -> IndexTopk | IndexTopkAndBlocks | IndexTopkWithin:
        entries, candidates, k = plan.entries[self.spec.compress], self.spec.candidates, self.spec.topk
        assert caches.index is not None
        assert k is not None
        given = (q, weights, caches.index, plan.step.request_ids, entries.block_table, entries.visible)
        topk, rows = known and known.topk, plan.step.rows
        out = new_positions(plan.step.request_ids, k) if topk is None else topk.rooms()[0]
        if candidates is None:
            return IndexTopk(*given, k, WORKSPACE_BYTES, rows, out, None, self.backend)
        size = candidates.block_size
        if candidates.source:
            blocks = new_positions(plan.step.request_ids, candidates.blocks)
            return IndexTopkAndBlocks(*given, k, size, WORKSPACE_BYTES, rows, out, blocks, self.backend)
        assert selection is not None
        assert selection.candidates is not None
        return IndexTopkWithin(*given, selection.candidates, k, size, WORKSPACE_BYTES, out, self.backend)

    def _write_latents(self, call: V41Latents) -> None:
        """Make latents, and write entries and index keys from them."""
        indexer = self.weights.indexer
        assert indexer is not None
        assert indexer.keys is not None
        if isinstance(call.pool, PoolKv):
            latents = pool_kv(call.pool)
        else:
            latents = norm_rows(call.pool).to(call.dtype)
        write_rotated(call.entries._replace(rows=latents))
        write_rotated(call.keys._replace(rows=project(latents, indexer.keys)))

    def _select(self, call: V41Call, queries: Rotated, selection: V41Selection | None) -> V41Selection | None:
        """This layer's selection, or the one that it was given."""
        index, held = call.select, None if selection is None else selection.candidates
        if index is None:
            return selection
        assert queries.index_q is not None
        step, span = call.plan.step, self.spec.compress
        if isinstance(index, IndexTopkAndBlocks):
            index_topk_and_blocks(for_prompts(index._replace(q=queries.index_q), step, span))
            return V41Selection(index.out, index.blocks)
        if isinstance(index, IndexTopkWithin):
            index_topk_within(index._replace(q=queries.index_q))
        else:
            run_selection(index._replace(q=queries.index_q), step, call.known and call.known.topk, None, span)
        return V41Selection(index.out, held)

    def _attend(
        self, call: V41Call, q: Tensor, plan: V4Plan, caches: V4Caches, selection: V41Selection | None
    ) -> Tensor:
        selections = call.attend.selections
        if self.spec.kind == "indexed":
            assert selection is not None
            assert caches.entries is not None
            entries = plan.entries[self.spec.compress]
            selections = [*selections, entries.selection(caches.entries, selection.entries)]
        attention, known = call.attend._replace(q=q, selections=selections), call.known
        usual = q.is_contiguous() and (selection is None or selection.entries.is_contiguous())
        if known is not None and known.attend is not None and usual:
            found = known.attend.run(q, read_by(selections), attention.scale, attention.sink, None)
            if found is not None:
                return found[0]
        if attention.out is None:
            attention = attention._replace(out=new_output(q, self.spec.value_dim))
        attend(attention)
        return attention.out
