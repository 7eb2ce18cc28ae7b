"""`SparseMLA`: the attention of one DeepSeek-V3.2 or GLM-5 layer, from the cache writes to the output."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches, Selection
from tamis.cache.shard import Shard
from tamis.layers.batch_invariance import fixed_splits
from tamis.layers.mla_checks import Arguments, Call, MlaChecks, Write, no_positions
from tamis.layers.mla_gathered import attend_chunks, chunk_gathers
from tamis.layers.mla_memory import KnownCall, LayerMemory, number_of, run_write
from tamis.layers.selecting import run_selection
from tamis.model.spec import LayerSpec
from tamis.ops import Attended, IndexInputs
from tamis.ops.attention import folded_scale, new_output
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.index import WORKSPACE_BYTES, ranks_of_layer
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import new_positions
from tamis.ops.lse import LseForm
from tamis.ops.translate.operations import TranslatePositions, translate_positions
from tamis.ops.write import write_call
from tamis.step.lease import needs_latest_plan
from tamis.step.plan import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KNOWN = LayerMemory()
_LSE = LseForm()


class LayerOutput(NamedTuple):
    """The result of a layer call: attention's output, and the positions that it attended to."""

    out: Tensor
    """[rows, H, V]; zeros where nothing was selected."""
    lse: Tensor
    """float32 [rows, H], without the sink; -inf where nothing was selected."""
    max_logits: Tensor | None
    """float32 [rows, H], the largest scaled logit; -inf where nothing was selected."""
    positions: Tensor
    """int32 [rows, spec.columns], selected or given: for the layers that share them, or for a `Recording`."""


class SparseMLA:
    """The attention of one layer: write, index (or given positions), attend.

    A call builds the operations of its stages, checks all of them, and then runs them in order (`prepare` and `run` are
    its two halves). The object holds no state of a step: the caches, the plan and the inputs are arguments.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        backend: str = "auto",
        shard: Shard | None = None,
        batch_invariant: bool = False,
        index_workspace_bytes: int = WORKSPACE_BYTES,
        index_group: "ProcessGroup | None" = None,
        index_share: str = "auto",
    ) -> None:
        """Remember what to compute.

        Args:
            spec: the layer.
            backend: a name from `tamis backends`, or "auto". A named backend runs or the call fails.
            shard: this rank's part under context parallelism; the caller merges the ranks' results with
                `combine_parts`.
            batch_invariant: split each row's columns in the same way whatever the batch, so that the bits of a
                request's output do not depend on the other requests. Costs speed in small batches on a GPU. Selections
                never depend on other requests.
            index_workspace_bytes: the memory that selecting positions may take; see `index_topk`.
            index_group: ranks that select together, each of which makes every call: those that hold the same index keys
                or, with a shard of several ranks, those that hold the other shards. See `index_topk`.
            index_share: whether ranks with the same keys divide the tokens, "always" or "auto"; see `index_topk`.
        """
        checks.instance("spec", spec, LayerSpec)
        self.spec, self.backend, self.shard = spec, backend, Shard() if shard is None else shard
        checks.instance("shard", self.shard, Shard)
        self.batch_invariant = checks.flag("batch_invariant", batch_invariant)
        most = checks.INT64_MAX
        self.index_workspace_bytes = checks.integer("index_workspace_bytes", index_workspace_bytes, low=1, high=most)
        self._shard = (self.shard.ranks, self.shard.rank, self.shard.interleave)
        self._checks = MlaChecks(spec, backend)
        self._pooled = self._checks.pooled
        own = self.shard if self.shard.ranks > 1 else None
        if own is not None and self._pooled is not None:
            remedy = "the tokens of a group would be on several ranks"
            raise checks.refuse("shard", "of one rank for a layer with pooled index keys", own, remedy)
        self._over = ranks_of_layer(index_group, own, index_share)
        self._kind = number_of(spec, backend, self._shard, batch_invariant, index_workspace_bytes, self._over is None)

    @needs_latest_plan
    def __call__(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches | PagedCache,
        plan: Plan,
        *,
        positions: Tensor | None = None,
        index: IndexInputs | None = None,
        sink: Tensor | None = None,
        q_scale: float | Tensor = 1.0,
        out: Tensor | None = None,
    ) -> LayerOutput:
        """Attend the step's tokens. Everything is checked before the first write.

        Args:
            q: [rows, H, width], absorbed, or the pair (latent part, rope part).
            kv: [rows, width] or a pair: the new tokens' rows, which are written first. None: already written.
            caches: the latent cache, with the index cache where `index` is given.
            plan: the step's plan.
            positions: int32 [rows, topk], request-local positions to attend to, -1 padded: those of an earlier
                layer's output, of a `Recording`, or of an engine's indexer. Never written to. On the host, positions
                that a token cannot see are refused.
            index: the indexer's inputs, if this layer selects its own positions. Either `positions` or `index` must be
                given; a layer that shares an earlier layer's selection (`LayerSpec.reuse_topk`) takes positions only.
            sink: float32 [H].
            q_scale: the factor of an e4m3 query.
            out: [rows, H, value_dim] to write into.
        """
        return self._run(self._prepare_step(q, kv, caches, plan, positions, index, sink, q_scale, out))

    @needs_latest_plan
    def prepare(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches | PagedCache,
        plan: Plan,
        *,
        positions: Tensor | None = None,
        index: IndexInputs | None = None,
        sink: Tensor | None = None,
        q_scale: float | Tensor = 1.0,
        out: Tensor | None = None,
    ) -> Call:
        """The first half of a layer call: check all arguments and write nothing. The second half is `run`.

        Adapters that write to a cache themselves do so between the two halves, so that a refused call has no effect.
        """
        return self._prepare_step(q, kv, caches, plan, positions, index, sink, q_scale, out)

    def run(self, call: Call) -> LayerOutput:
        """The second half of a layer call: run what `prepare` or `prepare_positions` has checked."""
        if call.plan is None:
            return self._run(call)
        with call.plan.using():
            return self._run(call)

    def attend_positions(
        self,
        q: Tensor,
        cache: PagedCache,
        positions: Tensor,
        request_ids: Tensor,
        block_table: Tensor,
        *,
        sink: Tensor | None = None,
        q_scale: float | Tensor = 1.0,
        out: Tensor | None = None,
    ) -> Attended:
        """Attend to given positions of rows that are in the cache: a layer call without a plan, which writes no rows.

        Args:
            q: [rows, H, width], absorbed.
            cache: the cache of latent rows.
            positions: int32 [rows, topk], as in a layer call. That tokens can see them is not checked.
            request_ids: int32 [rows], the block-table row of each token.
            block_table: int32 [requests, pages].
            sink: float32 [H].
            q_scale: the factor of an e4m3 query.
            out: [rows, H, value_dim] to write into.
        """
        table = (request_ids, block_table)
        call = self._prepare(Arguments(q, None, Caches(cache), None, table, positions, None, sink, q_scale, out))
        found = self._run(call)
        return Attended(found.out, found.lse, found.max_logits)

    def prepare_positions(
        self,
        q: Tensor,
        cache: PagedCache,
        positions: Tensor,
        request_ids: Tensor,
        block_table: Tensor,
        *,
        sink: Tensor | None = None,
        q_scale: float | Tensor = 1.0,
        out: Tensor | None = None,
    ) -> Call:
        """The first half of `attend_positions`: check all arguments and write nothing. The second half is `run`."""
        table = (request_ids, block_table)
        return self._prepare(Arguments(q, None, Caches(cache), None, table, positions, None, sink, q_scale, out))

    @needs_latest_plan
    def write(
        self,
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches,
        plan: Plan,
        index: IndexInputs | None = None,
    ) -> None:
        """Insert the new tokens' rows, and their index keys if given."""
        checks.instance("plan", plan, Plan)
        checks.instance("caches", caches, Caches)
        self._checks.caches(caches, plan)
        self._checks.rows(kv, index, caches, plan)
        calls = self._writes(kv, index, caches, plan)
        self._checks.writes(calls, caches)
        for call in calls:
            run_write(call)

    def select(self, index: IndexInputs, caches: Caches, plan: Plan) -> Tensor:
        """Positions int32 [rows, spec.columns] by this layer's indexer, ascending; later layers may share them.

        The keys of the step's tokens must be in the index cache: `write` puts them there.
        """
        with nullcontext() if self._over is None else self._over.telling():
            checks.instance("plan", plan, Plan)
            checks.instance("caches", caches, Caches)
            self._checks.index(index, caches, plan)
            if plan.requests == 0:
                return no_positions(self.spec, plan)
            call = self._index(index, caches, plan)
            self._checks.index_topk(call, plan)
        return self._selected(call, plan)

    def _prepare_step(self, *given: Any) -> Call:
        """The operations of a call with a plan. If ranks select together, all of them pass their checks, or none."""
        over, positions = self._over, given[4]
        if over is None or positions is not None:
            return self._prepare(Arguments.of(*given))
        with over.telling():
            call = self._prepare(Arguments.of(*given))
            device, plan = call.attend.q.device, given[3]
            over.check(device)
        over.agree(device, (("rows", plan.rows), ("empty", plan.requests == 0), ("topk", self.spec.topk)))
        return call

    def _prepare(self, given: Arguments) -> Call:
        """The operations of a call, checked."""
        signature = None
        if not torch.compiler.is_compiling():
            # A default device is a mode, which would put a Python function around every attribute of a tensor.
            with torch._C.DisableTorchFunction():
                signature = _KNOWN.sign(self._kind, self.spec.scale, given)
                known = _KNOWN.find(signature)
                if known is not None and known.fits(given):
                    return self._build(given, known)
        self._checks.arguments(given)
        call = self._build(given)
        self._checks.operations(given, call)
        if signature is not None:
            positions = self._checks.placeholder(given.q) if given.positions is None else given.positions
            _KNOWN.keep(signature, KnownCall.of(given, call, positions))
        return call

    def _build(self, given: Arguments, known: KnownCall | None = None) -> Call:
        """Build the operations of a call from checked arguments. A known call makes its output when it runs."""
        q, cache, plan, positions = given.q, given.caches.latent, given.plan, given.positions
        out: Any = new_output(q, self.spec.value_dim) if given.out is None and known is None else given.out
        splits = None
        if self.batch_invariant:
            splits = fixed_splits((self.spec.columns or 0) if positions is None else positions.shape[1])
        scales, sink = folded_scale(self.spec.scale, given.q_scale), contiguous_sink(given.sink)
        attention = Attend(q, [], *scales, splits, sink, out, True, _LSE, self.backend)
        writes: list[Write] = []
        gathers, index, translate = [], None, None
        if plan is not None and plan.requests:
            writes = self._writes(given.kv, given.index_inputs, given.caches, plan)
            if given.index_inputs is not None:
                index = self._index(given.index_inputs, given.caches, plan, known)
            gathers = chunk_gathers(cache, plan, self.backend)
        if gathers or self._shard[0] > 1:
            translate = self._translation(given, cache)
        return Call(plan, cache, given.table, writes, index, positions, translate, gathers, attention, known)

    def _writes(
        self, kv: Tensor | tuple[Tensor, Tensor] | None, index: IndexInputs | None, caches: Caches, plan: Plan
    ) -> list[Write]:
        calls: list[Write] = [] if kv is None else [write_call(kv, caches.latent, plan.slots, self.backend)]
        if index is None or index.keys is None or caches.index is None:
            return calls
        if self._pooled is None:
            calls.append(write_call(index.keys, caches.index, plan.slots, self.backend))
        elif plan.requests:
            calls.append(self._pooled.write(index, caches, plan))
        return calls

    def _index(self, index: IndexInputs, caches: Caches, plan: Plan, known: KnownCall | None = None) -> IndexTopk:
        topk, keys, prepared = self.spec.index_topk, caches.index, None if known is None else known.index_topk
        visible = plan.visible if self._pooled is None else self._pooled.groups(plan).visible
        assert topk is not None
        assert keys is not None
        # Inputs may be wrong here, but the plan has rows.
        out = new_positions(plan.request_ids, topk) if prepared is None else prepared.rooms()[0]
        return IndexTopk(
            index.q,
            index.weights,
            keys,
            plan.request_ids,
            plan.block_table,
            visible if self._over is None else self._over.local_lengths(visible),
            topk,
            self.index_workspace_bytes,
            plan.rows,
            out,
            None,
            self.backend,
        )

    def _translation(self, given: Arguments, cache: PagedCache) -> TranslatePositions:
        """The translation of positions for shards and gathered prefills. If the indexer selects the positions, a
        placeholder is checked in their place."""
        positions, prefill = given.positions, None if given.plan is None else given.plan.prefill
        if positions is None:
            positions = self._checks.placeholder(given.q)
        ids, starts = (prefill.ids, prefill.starts) if prefill is not None and prefill.chunks else (None, None)
        size, backend = cache.page_size, self.backend
        return TranslatePositions(positions, *given.table, size, size, ids, starts, self._shard, False, backend)

    def _run(self, call: Call) -> LayerOutput:
        if call.known is None:
            return self._run_operations(call, None)
        with torch._C.DisableTorchFunction():
            return self._run_operations(call, call.known)

    def _run_operations(self, call: Call, known: KnownCall | None) -> LayerOutput:
        if call.plan is not None and call.plan.requests == 0:
            return self._nothing(call)
        for number, write in enumerate(call.writes):
            run: Any = run_write if known is None else known.writes[number]
            run(write)
        positions, attention = call.positions, call.attend
        if call.index_topk is not None:
            assert call.plan is not None
            positions = self._selected(call.index_topk, call.plan, known)
        assert positions is not None
        found = None if known is None else known.attended(call, positions)
        if found is not None:
            return LayerOutput(*found, positions)
        if attention.out is None:
            attention = attention._replace(out=new_output(attention.q, self.spec.value_dim))
        selection = Selection(call.cache, positions, None, *call.table)
        if call.translate is not None:
            slots = call.slots
            if slots is None:
                slots = translate_positions(call.translate._replace(positions=positions))[0]
            if call.gathers:
                return LayerOutput(attention.out, *attend_chunks(call, slots, self._checks.workspace_cache), positions)
            selection = Selection(call.cache, slots)
        return LayerOutput(attention.out, *attend(attention._replace(selections=[selection])), positions)

    def _selected(self, call: IndexTopk, plan: Plan, known: KnownCall | None = None) -> Tensor:
        """The positions that the indexer selects; those of whole groups if its keys are pooled."""
        chosen = self._select(call, plan, known)
        return chosen if self._pooled is None else self._pooled.positions(chosen, plan)

    def _select(self, call: IndexTopk, plan: Plan, known: KnownCall | None = None) -> Tensor:
        """Run the indexer. Tools that watch a layer override this."""
        return run_selection(call, plan, known and known.index_topk, self._over, self.spec.kpool)

    def _nothing(self, call: Call) -> LayerOutput:
        """The result of a step without requests: all of its rows are padding."""
        assert call.plan is not None
        out = call.attend.out
        lse = torch.full((call.plan.rows, self.spec.heads), -torch.inf, dtype=torch.float32, device=out.device)
        positions = no_positions(self.spec, call.plan) if call.positions is None else call.positions
        return LayerOutput(out.zero_(), lse, lse.clone(), positions)
