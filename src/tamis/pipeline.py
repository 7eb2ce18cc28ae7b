"""`SparseMLA`: one layer's attention, stage by stage."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.backends import choose
from tamis.cache import Caches, PagedCache, Selection
from tamis.layout import rows as plain_rows
from tamis.lease import needs_latest_plan
from tamis.ops import (
    Attended,
    IndexInputs,
    gather_kv,
    index_topk,
    translate_positions,
    write_kv,
)
from tamis.ops.attend import attend_unchecked, check_rest, check_selections, translates_freely
from tamis.ops.index import QUERY_DTYPES, WORKSPACE_BYTES
from tamis.ops.index.prepare import agreed_recipe
from tamis.ops.write import join_parts
from tamis.plan import Plan
from tamis.spec import LayerSpec

DTYPES = (*checks.FLOATS, torch.float64, torch.float8_e4m3fn)
FIXED_COLUMNS = 512
"""Columns per split in batch-invariant mode: few enough to fill a GPU with a handful of requests at top-k 2048."""


@dataclass(frozen=True)
class Shard:
    """Which part of each request's rows this rank holds, for context-parallel decode."""

    ranks: int = 1
    rank: int = 0
    interleave: int = 1


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
        self.spec, self.backend, self.shard = spec, backend, shard or Shard()
        self._gathered = {d: plain_rows(d, latent=spec.latent_dim, rope=spec.rope_dim) for d in checks.FLOATS}
        self._passed: tuple[object, ...] | None = None
        self._columns = f"rows {spec.topk or 'K'}"
        self.batch_invariant = batch_invariant
        self.index_workspace_bytes = checks.integer("index_workspace_bytes", index_workspace_bytes, low=1)

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
        caches = caches if isinstance(caches, Caches) else Caches(caches)
        q = join_parts("q", q)
        # Everything is checked before anything is written: a refused call leaves the caches as they were.
        self._check(q, caches.latent, plan)
        self._check_selection(positions, index, caches, plan)
        self.write(kv, caches, plan, index)
        if index is not None:
            positions = self.select(index, caches, plan)
        assert positions is not None
        attended = self._attend(q, positions, caches.latent, plan, sink, q_scale, out)
        return LayerOutput(*attended, positions)

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
        return self._attend_directly(q, positions, cache, request_ids, block_table, sink, q_scale, out)

    @needs_latest_plan
    def write(
        self,
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches,
        plan: Plan,
        index: IndexInputs | None = None,
    ) -> None:
        """Insert the new tokens' rows, and their index keys if given."""
        if kv is not None:
            write_kv(kv, caches.latent, plan.slots, backend=self.backend)
        if index is not None and index.keys is not None:
            write_kv(index.keys, _index_cache(caches), plan.slots, backend=self.backend)

    def select(self, index: IndexInputs, caches: Caches, plan: Plan) -> Tensor:
        """Positions int32 [rows, topk] by this layer's indexer, in ascending order; later layers may share them.

        The keys of the step's tokens must be in the index cache: `write` puts them there.
        """
        self._check_index(index, caches, plan)
        assert self.spec.topk is not None
        return index_topk(
            index.q,
            index.weights,
            _index_cache(caches),
            plan.request_ids,
            plan.block_table,
            plan.positions + 1,
            self.spec.topk,
            workspace_bytes=self.index_workspace_bytes,
            backend=self.backend,
        )

    def _check(self, q: Tensor, cache: PagedCache, plan: Plan) -> None:
        self._check_query(q, cache, plan.rows)
        if cache.page_size != plan.page_size:
            raise checks.refuse("caches", f"of the plan's page size {plan.page_size}", cache.page_size, "plan with it")
        if plan.mode == "separate" and not cache.layout.quantised:
            raise checks.refuse("caches", "an FP8 cache for a separate plan", repr(cache), "plan with its layout")

    def _check_query(self, q: Tensor, cache: PagedCache, rows: int) -> None:
        spec = self.spec
        remedy = "the plan's rows, the spec's heads and widths"
        checks.tensor("q", q, "rows H D", DTYPES, rows=rows, H=spec.heads, D=spec.head_dim, remedy=remedy)
        if self.backend != "auto":
            choose(spec, q.device, layout=cache.layout, dtype=q.dtype, page_size=cache.page_size, prefer=self.backend)

    def _check_selection(self, positions: Tensor | None, index: IndexInputs | None, caches: Caches, plan: Plan) -> None:
        if (positions is None) == (index is None):
            received = "neither" if index is None else "both"
            raise checks.refuse("positions and index", "given one at a time", received, "pass exactly one")
        if index is not None:
            self._check_index(index, caches, plan)
        if positions is not None:
            self._check_positions(positions, plan)

    def _check_positions(self, positions: Tensor, plan: Plan) -> None:
        self._check_columns(positions, plan.rows)
        if not checks.visible(positions) or not checks.visible(plan.positions):
            return
        own = plan.positions.unsqueeze(1)
        # Rows of padded tokens may hold anything.
        ahead = ((positions > own) & (own >= 0)).any(1).nonzero().flatten()
        if len(ahead):
            token = int(ahead[0])
            received = f"{int(positions[token].max())} for token {token} at {int(plan.positions[token])}"
            raise checks.refuse("positions", "at most each token's own", received, "they belong to another step")

    def _check_columns(self, positions: Tensor, rows: int) -> None:
        # A selection of another width comes from another layer or another setting: it would attend to too little.
        remedy = "one row per token of the plan, the spec's topk wide, -1 padded"
        checks.tensor("positions", positions, self._columns, (torch.int32,), rows=rows, remedy=remedy)

    def _check_index(self, index: IndexInputs, caches: Caches, plan: Plan) -> None:
        spec = self.spec
        if spec.topk is None:
            raise checks.refuse("index", "None for a layer without top-k", "inputs", "pass positions instead")
        if spec.reuse_topk:
            remedy = "pass positions=, those of the last layer that has an indexer"
            raise checks.refuse("index", "None for a layer that shares an earlier layer's selection", "inputs", remedy)
        cache = _index_cache(caches)
        if cache.page_size != plan.page_size:
            raise checks.refuse(
                "caches.index", f"of the plan's page size {plan.page_size}", cache.page_size, "share one block table"
            )
        if cache.recipe is not None and index.recipe is None:
            raise checks.refuse(
                "index.recipe", f"that of the cache, {cache.recipe}", None, "say how q and keys were prepared"
            )
        if index.recipe is not None:
            agreed_recipe("index.recipe", index.recipe, cache)
        width = cache.layout.width
        remedy = "one row per token of the plan, the spec's index heads, as wide as the keys"
        shape = f"T {spec.index_heads or 'H'} D"
        checks.tensor("index.q", index.q, shape, QUERY_DTYPES, T=plan.rows, D=width, remedy=remedy)
        checks.tensor("index.weights", index.weights, "T H", checks.FLOATS, T=plan.rows, H=index.q.shape[1])
        if index.keys is not None:
            checks.tensor("index.keys", index.keys, "T D", checks.FLOATS, T=plan.rows, D=width, remedy=remedy)

    def _translate(
        self,
        positions: Tensor,
        cache: PagedCache,
        request_ids: Tensor,
        block_table: Tensor,
        workspace: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        return translate_positions(
            positions,
            request_ids,
            block_table,
            page_size=cache.page_size,
            workspace=workspace,
            ranks=self.shard.ranks,
            rank=self.shard.rank,
            interleave=self.shard.interleave,
            backend=self.backend,
        ).slots

    def _attend_directly(
        self,
        q: Tensor,
        positions: Tensor,
        cache: PagedCache,
        request_ids: Tensor,
        block_table: Tensor,
        sink: Tensor | None,
        q_scale: float | Tensor,
        out: Tensor | None,
    ) -> Attended:
        selection = Selection(cache, positions, None, request_ids, block_table)
        self._check_directly(q, selection, sink, out)
        if self.shard.ranks > 1 or not translates_freely(q, selection, self.spec.value_dim, backend=self.backend):
            selection = Selection(cache, self._translate(positions, cache, request_ids, block_table))
        return self._attend_rows(q, selection, sink, q_scale, out)

    def _check_directly(self, q: Tensor, selection: Selection, sink: Tensor | None, out: Tensor | None) -> None:
        if torch.compiler.is_compiling() or checks.visible(q):
            given = None
        else:
            # The same shapes come layer after layer and step after step, and checks take longer than launches: on a
            # device, where they see no values, what passed last time is not checked again.
            cache, ids, table = selection.cache, selection.request_ids, selection.block_table
            given = (cache.layout.key, *checks.signature(q, selection.slots, ids, table, cache.storage, sink, out))
            if given == self._passed:
                return
        self._check_query(q, selection.cache, q.shape[0])
        self._check_columns(selection.slots, q.shape[0])
        check_selections(q, [selection])
        check_rest(q, self.spec.value_dim, sink, None, out)
        if given is not None:
            self._passed = given

    def _attend(
        self,
        q: Tensor,
        positions: Tensor,
        cache: PagedCache,
        plan: Plan,
        sink: Tensor | None,
        q_scale: float | Tensor,
        out: Tensor | None,
    ) -> Attended:
        prefill = plan.prefill
        if prefill is None or not prefill.chunks:
            ids, table = plan.request_ids, plan.block_table
            return self._attend_directly(q, positions, cache, ids, table, sink, q_scale, out)
        check_rest(q, self.spec.value_dim, sink, None, out)
        workspace_rows = (prefill.ids, prefill.starts)
        slots = self._translate(positions, cache, plan.request_ids, plan.block_table, workspace_rows)
        if out is None:
            dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
            out = torch.zeros(plan.rows, self.spec.heads, self.spec.value_dim, dtype=dtype, device=q.device)
        lse = torch.full((plan.rows, self.spec.heads), -torch.inf, dtype=torch.float32, device=q.device)
        top = torch.full_like(lse, -torch.inf)

        def fill(rows: slice, source: PagedCache) -> None:
            part = self._attend_rows(q[rows], Selection(source, slots[rows]), sink, q_scale, out[rows])
            lse[rows] = part.lse
            top[rows] = part.max_logits if part.max_logits is not None else top[rows]

        if plan.decode is not None:
            fill(slice(0, plan.decode.tokens), cache)
        workspace = plan.workspace
        assert workspace is not None
        for chunk in prefill.chunks:
            room = workspace[: chunk.rows]
            gather_kv(cache, chunk.block_table, chunk.lengths, starts=chunk.starts, out=room, backend=self.backend)
            fill(chunk.tokens, PagedCache.rebuilt(room.unsqueeze(1), self._gathered[workspace.dtype], 1.0))
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
        splits = -(-selection.slots.shape[1] // FIXED_COLUMNS) if self.batch_invariant else None
        return attend_unchecked(q, [selection], spec.scale, spec.value_dim, sink, q_scale, splits, out, self.backend)


def _index_cache(caches: Caches) -> PagedCache:
    if caches.index is None:
        raise checks.refuse("caches.index", "a cache of index keys", None, "pass Caches(latent, index)")
    return caches.index
