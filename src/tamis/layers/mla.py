"""`SparseMLA`: one layer's attention, stage by stage."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches, Selection
from tamis.layers.mla_checks import Call, CallChecks, PositionsCall
from tamis.model.spec import LayerSpec
from tamis.ops import Attended, IndexInputs
from tamis.ops.attention import folded_scale, new_output
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.gather import gather_unchecked
from tamis.ops.index import WORKSPACE_BYTES
from tamis.ops.index import registered as index_ops
from tamis.ops.translate import check_shard
from tamis.ops.translate.operations import TranslatePositions, translate_positions
from tamis.ops.write import join_parts, write_kv_unchecked
from tamis.step.lease import needs_latest_plan
from tamis.step.plan import Plan, PrefillPart

FIXED_COLUMNS = 512
"""Columns per split in batch-invariant mode: few enough to fill a GPU with a handful of requests at top-k 2048."""


@dataclass(frozen=True)
class Shard:
    """Which part of each request's rows this rank holds, for context-parallel decode."""

    ranks: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        """Refuse a part that no rank has."""
        check_shard(self.ranks, self.rank, self.interleave)


class LayerOutput(NamedTuple):
    """What a layer call returns: what attention gave, and to what it attended."""

    out: Tensor
    """[rows, H, V]; zeros where nothing was selected."""
    lse: Tensor
    """float32 [rows, H], without the sink; -inf where nothing was selected."""
    max_logits: Tensor | None
    """float32 [rows, H], the largest scaled logit; -inf where nothing was selected."""
    positions: Tensor
    """int32 [rows, K], selected or given: for the layers that share them, or for a `Recording`."""


class SparseMLA:
    """The attention of one layer: write, index (or given positions), translate, attend, combine.

    The object holds no state of a step; the caches, the plan and the inputs are arguments.
    """

    def __init__(
        self,
        spec: LayerSpec,
        *,
        backend: str = "auto",
        shard: Shard | None = None,
        batch_invariant: bool = False,
        index_workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        """Remember what to compute.

        Args:
            spec: the layer.
            backend: a name from `tamis backends`, or "auto". A named backend runs or the call fails.
            shard: for context parallelism; the caller merges the ranks' results with `combine_parts`.
            batch_invariant: cut each row's columns in the same way whatever the batch, so that the bits of a request's
                output do not depend on its neighbours. Costs speed in small batches on a GPU. (Selections never do.)
            index_workspace_bytes: what selecting positions may take in memory; see `index_topk`.
        """
        checks.instance("spec", spec, LayerSpec)
        self.spec, self.backend, self.shard = spec, backend, shard or Shard()
        checks.instance("shard", self.shard, Shard)
        self.batch_invariant = checks.flag("batch_invariant", batch_invariant)
        most = checks.INT64_MAX
        self.index_workspace_bytes = checks.integer("index_workspace_bytes", index_workspace_bytes, low=1, high=most)
        self._shard = (self.shard.ranks, self.shard.rank, self.shard.interleave)
        self._checks = CallChecks(spec, backend, self._shard, index_workspace_bytes)

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
        """Attend the step's tokens.

        Args:
            q: [rows, H, width], absorbed, or the pair (latent part, rope part).
            kv: [rows, width] or a pair: the new tokens' rows, written first. None: already written.
            caches: the latent cache, with the index cache where `index` is given.
            plan: of this step.
            positions: int32 [rows, topk], request-local positions to attend to, -1 padded: those of an earlier
                layer's output, of a `Recording`, or of an engine's indexer. Never written to. On the host, positions
                that a token cannot see are refused.
            index: the indexer's inputs, if this layer selects its own positions. Exactly one of the two is needed, and
                a layer that shares an earlier layer's selection (`LayerSpec.reuse_topk`) takes positions only.
            sink: float32 [H].
            q_scale: the factor of an e4m3 query.
            out: [rows, H, value_dim] to write into.
        """
        return self._run(self._prepare(q, kv, caches, plan, positions, index, sink, q_scale, out))

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
        return self._prepare(q, kv, caches, plan, positions, index, sink, q_scale, out)

    def run(self, call: Call) -> LayerOutput:
        """The second half of a layer call: run what `prepare` has checked."""
        with call.plan.using():
            return self._run(call)

    def _prepare(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches | PagedCache,
        plan: Plan,
        *rest: Any,
    ) -> Call:
        checks.instance("plan", plan, Plan)
        caches = caches if isinstance(caches, Caches) else Caches(caches)
        # Everything is checked before anything is written: a refused call leaves the caches as they were.
        call = Call(join_parts("q", q), kv, caches, plan, *rest)
        self._checks.call(call)
        return call

    def _run(self, call: Call) -> LayerOutput:
        q, kv, caches, plan, positions, index, sink, q_scale, out = call
        if plan.requests == 0:
            return self._nothing(call)
        self.write_unchecked(kv, caches, plan, index)
        if index is not None:
            positions = self.select_unchecked(index, caches, plan)
        assert positions is not None
        prefill = plan.prefill
        if prefill is not None and prefill.chunks:
            attended = self._attend_gathered(q, positions, caches.latent, plan, prefill, sink, q_scale, out)
        else:
            selection = Selection(caches.latent, positions, None, plan.request_ids, plan.block_table)
            attended = self._attend_directly(q, selection, sink, q_scale, out)
        return LayerOutput(*attended, positions)

    def _nothing(self, call: Call) -> LayerOutput:
        """The result of a step without requests: its rows, if there are any, are padding."""
        rows, heads, q = call.plan.rows, self.spec.heads, call.q
        out = new_output(q, self.spec.value_dim) if call.out is None else call.out
        lse = torch.full((rows, heads), -torch.inf, dtype=torch.float32, device=q.device)
        positions = call.positions
        if positions is None:
            positions = torch.full((rows, self.spec.topk or 0), -1, dtype=torch.int32, device=q.device)
        return LayerOutput(out.zero_(), lse, lse.clone(), positions)

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
        """Attend to given positions of rows that are in the cache: what a layer call does without prefills to gather.

        Args:
            q: [rows, H, width], absorbed.
            cache: of latent rows.
            positions: int32 [rows, topk], as in a layer call. That tokens can see them is not checked.
            request_ids: int32 [rows], the block-table row of each token.
            block_table: int32 [requests, pages].
            sink: as in a layer call, like the others.
            q_scale: the factor of an e4m3 query.
            out: [rows, H, value_dim] to write into.
        """
        return self._attend_directly(
            *self.prepare_positions(q, cache, positions, request_ids, block_table, sink=sink, q_scale=q_scale, out=out)
        )

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
    ) -> PositionsCall:
        """The first half of `attend_positions`: check its arguments and write nothing."""
        selection = Selection(cache, positions, None, request_ids, block_table)
        call = PositionsCall(q, selection, sink, q_scale, out)
        self._checks.given_positions(*call)
        return call

    def run_positions(self, call: PositionsCall) -> Attended:
        """The second half of `attend_positions`: run what `prepare_positions` has checked."""
        return self._attend_directly(*call)

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
        self._checks.write(kv, caches, plan, index)
        self.write_unchecked(kv, caches, plan, index)

    def write_unchecked(
        self,
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches,
        plan: Plan,
        index: IndexInputs | None,
    ) -> None:
        """As `write`, of inputs that were checked: what a layer call runs."""
        if kv is not None:
            write_kv_unchecked(kv, caches.latent, plan.slots, self.backend)
        if index is not None and index.keys is not None and caches.index is not None:
            write_kv_unchecked(index.keys, caches.index, plan.slots, self.backend)

    def select(self, index: IndexInputs, caches: Caches, plan: Plan) -> Tensor:
        """Positions int32 [rows, topk] by this layer's indexer, in ascending order; later layers may share them.

        The keys of the step's tokens must be in the index cache: `write` puts them there.
        """
        checks.instance("plan", plan, Plan)
        checks.instance("caches", caches, Caches)
        self._checks.index(index, caches, plan)
        if plan.requests == 0:
            return torch.full((plan.rows, self.spec.topk or 0), -1, dtype=torch.int32, device=plan.positions.device)
        return self.select_unchecked(index, caches, plan)

    def select_unchecked(self, index: IndexInputs, caches: Caches, plan: Plan) -> Tensor:
        """As `select`, of inputs that were checked: what a layer call runs."""
        assert self.spec.topk is not None
        assert caches.index is not None
        return index_ops.index_topk(
            index.q,
            index.weights,
            caches.index,
            plan.request_ids,
            plan.block_table,
            plan.positions + 1,
            self.spec.topk,
            self.index_workspace_bytes,
            self.backend,
        )

    def _translate(
        self, selection: Selection, request_ids: Tensor, block_table: Tensor, workspace: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        size = selection.cache.page_size
        ids, starts = workspace or (None, None)
        call = TranslatePositions(
            selection.slots, request_ids, block_table, size, size, ids, starts, self._shard, False, self.backend
        )
        return translate_positions(call)[0]

    def _attend_directly(
        self, q: Tensor, selection: Selection, sink: Tensor | None, q_scale: float | Tensor, out: Tensor | None
    ) -> Attended:
        if self.shard.ranks > 1:
            assert selection.request_ids is not None
            assert selection.block_table is not None
            slots = self._translate(selection, selection.request_ids, selection.block_table, None)
            selection = Selection(selection.cache, slots)
        return self._attend_rows(q, selection, sink, q_scale, out)

    def _attend_gathered(
        self,
        q: Tensor,
        positions: Tensor,
        cache: PagedCache,
        plan: Plan,
        prefill: PrefillPart,
        sink: Tensor | None,
        q_scale: float | Tensor,
        out: Tensor | None,
    ) -> Attended:
        workspace_rows, workspace = (prefill.ids, prefill.starts), plan.workspace
        slots = self._translate(Selection(cache, positions), plan.request_ids, plan.block_table, workspace_rows)
        if out is None:
            out = new_output(q, self.spec.value_dim)
        out[plan.tokens :].zero_()  # padding, which belongs to no chunk
        lse = torch.full((plan.rows, self.spec.heads), -torch.inf, dtype=torch.float32, device=q.device)
        top = torch.full_like(lse, -torch.inf)

        def fill(rows: slice, source: PagedCache) -> None:
            part = self._attend_rows(q[rows], Selection(source, slots[rows]), sink, q_scale, out[rows])
            lse[rows] = part.lse
            top[rows] = part.max_logits if part.max_logits is not None else top[rows]

        if plan.decode is not None:
            fill(slice(0, plan.decode.tokens), cache)
        assert workspace is not None
        for chunk in prefill.chunks:
            room = workspace[: chunk.rows]
            gather_unchecked(cache, chunk.block_table, chunk.lengths, chunk.starts, None, room, self.backend)
            layout = self._checks.gathered[workspace.dtype]
            fill(chunk.tokens, PagedCache.rebuilt(room.unsqueeze(1), layout, 1.0))
        return Attended(out, lse, top)

    def _attend_rows(
        self,
        q: Tensor,
        selection: Selection,
        sink: Tensor | None,
        q_scale: float | Tensor,
        out: Tensor | None,
    ) -> Attended:
        spec = self.spec
        splits = ceil_div(selection.slots.shape[1], FIXED_COLUMNS) if self.batch_invariant else None
        scale, factor = folded_scale(spec.scale, q_scale)
        out = new_output(q, spec.value_dim) if out is None else out
        sink = contiguous_sink(sink)
        lse, max_logits = attend(Attend(q, [selection], scale, factor, splits, sink, out, True, self.backend))
        return Attended(out, lse, max_logits)
