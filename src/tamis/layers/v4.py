"""`SparseV4`: one DeepSeek-V4 attention layer, from hidden states to hidden states."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import without_autocast
from tamis.cache.paged import PagedCache
from tamis.cache.v4_caches import V4Caches
from tamis.layers.batch_invariance import fixed_splits
from tamis.layers.selecting import run_selection
from tamis.layers.v4_checks import KnownV4, Projected, V4Call, V4Checks, V4Writes
from tamis.layers.v4_gathered import Gathered, run_gathered
from tamis.layers.v4_memory import sign_call
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
from tamis.layers.v4_weights import CompressorWeights, V4Weights
from tamis.model.spec import LayerSpec
from tamis.ops import Rotated
from tamis.ops.attention import new_output, read_by
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.compress import has_hadamard
from tamis.ops.compress.operations import CompressKv, compress_kv
from tamis.ops.index import WORKSPACE_BYTES, ranks_of_layer
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import new_positions
from tamis.ops.lse import LseForm
from tamis.ops.output.operations import RotateToFp8
from tamis.ops.rotate import run_rotate_and_write
from tamis.ops.rotate.operations import RotateHeads
from tamis.step.lease import needs_latest_plan
from tamis.step.v4_plan import V4Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SparseV4", "V4Caches"]


class SparseV4:
    """The attention of one V4 layer of any kind: projections, norms and rotations, the writes to all of its caches,
    compression, selection, attention over window and entries with sinks, and the grouped output projection.

    A call projects its hidden states, builds the operations of its stages, checks all of them, and then runs them in
    order. The object holds weights and no state of a step: caches, plan and hidden states are arguments.
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
        index_group: "ProcessGroup | None" = None,
        index_share: str = "auto",
    ) -> None:
        """Remember what to compute.

        Args:
            spec: the layer; its kind decides what there is besides the window.
            weights: the layer's weights, for the spec's heads.
            cos_sin: float32 [max_positions, rope_dim] for this kind of layer, from `Rope.from_hf_v4`; layers with a
                window only have another theta than the rest, and no YaRN.
            eps: the eps of all norms.
            backend: a name from `tamis backends`, or "auto". A named backend runs or the call fails.
            batch_invariant: as in `SparseMLA`; no effect on prefills that a plan gathers.
            index_group: ranks that hold the same index keys and select together, as in `SparseMLA`; no effect on layers
                without an indexer.
            index_share: as in `SparseMLA`.
        """
        self._checks = V4Checks(spec, weights, cos_sin, eps, backend)
        self.spec, self.weights, self.cos_sin, self.eps = spec, weights, cos_sin, float(eps)
        self.backend, self.batch_invariant = backend, checks.flag("batch_invariant", batch_invariant)
        over = ranks_of_layer(index_group, None, index_share)
        self._over = None if weights.indexer is None else over

    @needs_latest_plan
    def __call__(self, hidden: Tensor, caches: V4Caches, plan: V4Plan, *, selected: Tensor | None = None) -> Tensor:
        """Attend the step's tokens: hidden states [rows, hidden] to hidden states of the same shape and dtype.

        The tokens' rows, state and entries are written first, since a token attends to itself and to the entry that it
        completes. Padded rows come out as zeros. Everything is checked before the first write.

        Args:
            hidden: [rows, hidden].
            caches: the layer's caches.
            plan: the step's plan.
            selected: int32 [rows, topk] that the entries selected by this layer's indexer are written to, for a
                `Recording`; -1 where there are no more. Layers without an indexer refuse it.
        """
        if not isinstance(plan, V4Plan):
            checks.instance("plan", plan, V4Plan)
        over = self._over
        if over is None:
            call = self._prepare(hidden, caches, plan, selected)
        else:
            with over.telling():
                call = self._prepare(hidden, caches, plan, selected)
                over.check(hidden.device)
            over.agree(hidden.device, (("rows", plan.step.rows), ("empty", call is None), ("topk", self.spec.topk)))
        if call is None:
            if selected is not None:
                selected.fill_(-1)
            return torch.zeros_like(hidden)
        queries = self._write(call.writes)
        chosen = None if call.index_topk is None else self._select(call, queries)
        if selected is not None and chosen is not None:
            selected.copy_(chosen)
        return self._output(self._attend(call, queries.q, chosen), call.output)

    def _prepare(self, hidden: Tensor, caches: V4Caches, plan: V4Plan, selected: Tensor | None) -> V4Call | None:
        """The operations of a call, checked; None for a step without requests."""
        if selected is not None:
            self._checks.selected(selected, plan)
        seen = sign_call(hidden, caches, plan, self.spec.compress)
        known = self._checks.seen_before(hidden, seen)
        if known is None:
            self._checks.arguments(hidden, caches, plan)
        if plan.step.requests == 0:
            return None
        call = self._build(self._project(hidden), caches, plan, known)
        return call if known is not None else self._checks.operations(call, seen)

    @needs_latest_plan
    def write(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> Rotated:
        """Insert the new tokens' raw rows and compressor state, and the entries that they complete.

        Returns the queries [rows, H, D] and the indexer's queries, which are rotated in the same launch as the rows.
        """
        checks.instance("plan", plan, V4Plan)
        self._checks.arguments(hidden, caches, plan)
        made = self._project(hidden)
        if plan.step.requests == 0:
            return Rotated(made.queries.q, made.index_q)
        writes = self._writes(made, caches, plan)
        self._checks.writes(writes)
        return self._write(writes)

    def select(self, hidden: Tensor, index_q: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor:
        """Entries int32 [rows, topk] by this layer's indexer, -1 where there are no more. `index_q` is what `write`
        returned."""
        with nullcontext() if self._over is None else self._over.telling():
            checks.instance("plan", plan, V4Plan)
            indexer = self.weights.indexer
            if indexer is None:
                expected = "called on a layer with an indexer"
                raise checks.refuse("select", expected, self.spec.kind, "others attend to all")
            self._checks.arguments(hidden, caches, plan)
            if plan.step.requests == 0:
                return torch.full((len(hidden), self.spec.topk or 0), -1, dtype=torch.int32, device=hidden.device)
            call = self._index(index_q, project(hidden, indexer.weights, torch.float32), caches, plan)
            self._checks.index(call)
        return run_selection(call, plan.step, None, self._over, self.spec.compress)

    def output(self, attended: Tensor, plan: V4Plan) -> Tensor:
        """Hidden states [rows, hidden] from attention's [rows, H, D], whose values were rotated as keys are."""
        checks.instance("plan", plan, V4Plan)
        self._checks.attended(attended, plan)
        call = self._output_rotation(attended, plan)
        self._checks.output(call)
        return self._output(attended, call)

    def _project(self, hidden: Tensor) -> Projected:
        """The projections of the hidden states. They write nothing, so the operations that take them can be checked
        afterwards."""
        weights, spec, wide = self.weights, self.spec, product_dtype(hidden)
        indexer, compressor = weights.indexer, weights.compressor
        entry, index_q, index_weights, index_entry = None, None, None, None
        with without_autocast(hidden.device):
            made = project_queries(hidden, weights, spec, self.eps, self.backend, wide)
            if compressor is not None:
                entry = float_product(hidden, compressor.values, wide), float_product(hidden, compressor.scores, wide)
            if indexer is not None:
                keys = indexer.compressor
                index_q = product(made.low, indexer.q, wide).view(-1, spec.index_heads, spec.index_dim)
                # The model's constant factor is left out: it is positive, so it changes no order.
                index_weights = float_product(hidden, indexer.weights, wide)
                index_entry = float_product(hidden, keys.values, wide), float_product(hidden, keys.scores, wide)
        return Projected(made, entry, index_q, index_weights, index_entry)

    def _build(self, made: Projected, caches: V4Caches, plan: V4Plan, known: KnownV4 | None) -> V4Call:
        """Build the operations of a call. The rotated queries and attention's output do not exist yet, so tensors of
        the same shape are checked in their place."""
        index = None
        if made.index_q is not None and made.index_weights is not None:
            index = self._index(made.index_q, made.index_weights, caches, plan, known)
        return V4Call(
            plan,
            caches,
            self._writes(made, caches, plan),
            index,
            self._attention(made.queries.q, caches, plan, known),
            self._output_rotation(made.queries.q, plan),
            known,
        )

    def _writes(self, made: Projected, caches: V4Caches, plan: V4Plan) -> V4Writes:
        weights, numbers = self.weights, (self.cos_sin, self.eps, True, self.backend)
        rotation = rotate_and_write(made.queries, made.index_q, weights, caches, plan, *numbers)
        compressions = []
        if weights.compressor is not None and made.entry is not None:
            assert caches.state is not None
            assert caches.entries is not None
            call = self._compression(weights.compressor, made.entry, caches.state, caches.entries, plan)
            compressions.append(call)
        if weights.indexer is not None and made.index_entry is not None:
            assert caches.index_state is not None
            assert caches.index is not None
            keys = weights.indexer.compressor
            compressions.append(self._compression(keys, made.index_entry, caches.index_state, caches.index, plan))
        return V4Writes(rotation, compressions)

    def _compression(
        self,
        weights: CompressorWeights,
        entry: tuple[Tensor, Tensor],
        state: PagedCache,
        cache: PagedCache,
        plan: V4Plan,
    ) -> CompressKv:
        entries, step, angles = plan.entries[self.spec.compress], plan.step, self.cos_sin
        assert entries.state is not None
        where = (step.positions, entries.state.slots, step.request_ids, entries.state.block_table, entries.slots)
        bias, norm, hadamard = weights.bias, weights.norm, has_hadamard(cache)
        return CompressKv(*entry, state, cache, *where, bias, norm, angles, self.eps, hadamard, self.backend)

    def _index(
        self, index_q: Tensor, index_weights: Tensor, caches: V4Caches, plan: V4Plan, known: KnownV4 | None = None
    ) -> IndexTopk:
        entries, topk, prepared = plan.entries[self.spec.compress], self.spec.topk, known and known.index_topk
        assert caches.index is not None
        assert topk is not None
        where = (plan.step.request_ids, entries.block_table, entries.visible)
        out = new_positions(plan.step.request_ids, topk) if prepared is None else prepared.rooms()[0]
        numbers = (topk, WORKSPACE_BYTES, plan.step.rows)
        return IndexTopk(index_q, index_weights, caches.index, *where, *numbers, out, None, self.backend)

    def _attention(self, q: Tensor, caches: V4Caches, plan: V4Plan, known: KnownV4 | None) -> Attend | Gathered:
        """Attention over the window and, if the layer has them, entries. The entries that an indexer chooses are added
        once it has run."""
        spec, sink = self.spec, contiguous_sink(self.weights.sink)
        if plan.workspace is not None:
            chosen = self._checks.placeholder(plan) if spec.kind == "overlapping" else None
            numbers = (spec.compress, spec.scale, spec.value_dim, sink, self.backend)
            return Gathered(q, plan, caches.window, caches.entries, chosen, *numbers)
        selections, splits = [plan.window.selection(caches.window)], None
        if spec.kind == "plain" and caches.entries is not None:
            selections.append(plan.entries[spec.compress].selection(caches.entries))
        if self.batch_invariant:
            chosen_columns = (spec.topk or 0) if spec.kind == "overlapping" else 0
            splits = fixed_splits(sum(selection.slots.shape[1] for selection in selections) + chosen_columns)
        # A prepared call makes its own output.
        out: Any = new_output(q, spec.value_dim) if known is None or known.attend is None else None
        return Attend(q, selections, spec.scale, None, splits, sink, out, False, LseForm(), self.backend)

    def _output_rotation(self, attended: Tensor, plan: V4Plan) -> RotateHeads | RotateToFp8:
        return output_rotation(self.weights, self.cos_sin, attended, plan, self.backend)

    def _write(self, writes: V4Writes) -> Rotated:
        queries = run_rotate_and_write(writes.rotation)
        for compression in writes.compressions:
            compress_kv(compression)
        return queries

    def _select(self, call: V4Call, queries: Rotated) -> Tensor:
        """Run the indexer. Tools that watch a layer override this."""
        assert call.index_topk is not None
        assert queries.index_q is not None
        selection, prepared = call.index_topk._replace(q=queries.index_q), call.known and call.known.index_topk
        return run_selection(selection, call.plan.step, prepared, self._over, self.spec.compress)

    def _attend(self, call: V4Call, q: Tensor, chosen: Tensor | None) -> Tensor:
        if isinstance(call.attend, Gathered):
            return run_gathered(call.attend._replace(q=q, chosen=chosen))
        selections = call.attend.selections
        if chosen is not None and call.caches.entries is not None:
            entries = call.plan.entries[self.spec.compress]
            selections = [*selections, entries.selection(call.caches.entries, chosen)]
        attention, known = call.attend._replace(q=q, selections=selections), call.known
        usual = q.is_contiguous() and (chosen is None or chosen.is_contiguous())
        if known is not None and known.attend is not None and usual:
            found = known.attend.run(q, read_by(selections), attention.scale, attention.sink, None)
            if found is not None:
                return found[0]
        if attention.out is None:
            attention = attention._replace(out=new_output(q, self.spec.value_dim))
        attend(attention)
        return attention.out

    def _output(self, attended: Tensor, call: RotateHeads | RotateToFp8) -> Tensor:
        return project_output(self.weights, attended, call)
