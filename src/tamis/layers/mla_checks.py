"""Everything that a call of `SparseMLA` can be refused for, looked at once and before its first write."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import rows as plain_rows
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches, Selection
from tamis.choice import choose
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs
from tamis.ops.attention import check_attend, check_query, check_scales, folded_scale, new_output, read_by
from tamis.ops.attention.operations import Attend
from tamis.ops.combine import check_output, check_sink
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.gather import check_gather_kv
from tamis.ops.index import MAX_K, QUERY_DTYPES, check_index_topk, check_layout
from tamis.ops.index.prepare import agreed_recipe
from tamis.ops.library import implementation
from tamis.ops.translate import check_translate_positions
from tamis.ops.translate.operations import TranslatePositions
from tamis.ops.write import check_write_kv
from tamis.step.plan import Plan, PrefillPart

DTYPES = (*checks.FLOATS, torch.float64, torch.float8_e4m3fn)


class Call(NamedTuple):
    """The arguments of one layer call, the query in one piece."""

    q: Tensor
    kv: Tensor | tuple[Tensor, Tensor] | None
    caches: Caches
    plan: Plan
    positions: Tensor | None
    index_inputs: IndexInputs | None
    sink: Tensor | None
    q_scale: float | Tensor
    out: Tensor | None

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """What is read besides caches and plan, by name."""
        kv, index = self.kv, self.index_inputs
        parts = kv if isinstance(kv, tuple) else (kv, None)
        found = {"q": self.q, "kv": parts[0], "kv (rope part)": parts[1], "positions": self.positions}
        found["sink"] = self.sink
        if index is not None:
            found |= {"index.q": index.q, "index.weights": index.weights, "index.keys": index.keys}
        return found

    @property
    def read(self) -> list[Tensor | None]:
        """All memory that `out` must not share."""
        plan, caches = self.plan, self.caches
        index = None if caches.index is None else caches.index.storage
        held = (plan.request_ids, plan.positions, plan.slots, plan.block_table, plan.workspace)
        return [*self.inputs.values(), caches.latent.storage, index, *held]


class PositionsCall(NamedTuple):
    """The arguments of attention to given positions, without a plan."""

    q: Tensor
    selection: Selection
    sink: Tensor | None
    q_scale: float | Tensor
    out: Tensor | None


class CallChecks:
    """The checks of one layer.

    On the host they see values and run every time. On a device they see none, so that what passed last passes again as
    long as shapes, dtypes and devices are the same: a step's call is then one comparison, and what shapes do not show.
    """

    def __init__(self, spec: LayerSpec, backend: str, shard: tuple[int, int, int], workspace_bytes: int) -> None:
        """Remember the layer."""
        self.spec, self.backend, self.shard, self.workspace_bytes = spec, backend, shard, workspace_bytes
        self.gathered = {d: plain_rows(d, latent=spec.latent_dim, rope=spec.rope_dim) for d in checks.FLOATS}
        self._columns = f"rows {spec.topk or 'K'}"
        self._passed: tuple[object, ...] | None = None

    def call(self, call: Call) -> None:
        """Refuse a layer call."""
        seen = self._signature(call)
        if seen is not None and seen == self._passed:
            if torch.is_grad_enabled():
                checks.no_gradient(**call.inputs, out=call.out)
            if call.out is not None:
                checks.apart("out", call.out, *call.read)
            return
        self._check_call(call)
        if seen is not None:
            self._passed = seen

    def given_positions(
        self, q: Tensor, selection: Selection, sink: Tensor | None, q_scale: float | Tensor, out: Tensor | None
    ) -> None:
        """Refuse attention to given positions of rows that are in the cache."""
        seen = None
        if _remembers(q) and isinstance(selection.cache, PagedCache):
            cache, ids, table = selection.cache, selection.request_ids, selection.block_table
            tensors = (q, selection.slots, ids, table, cache.storage, sink, out)
            seen = ("positions", cache.layout.key, *_scale_and_out(q_scale, out), *checks.signature(*tensors))
            if seen == self._passed:
                if torch.is_grad_enabled():
                    checks.no_gradient(q=q, sink=sink, out=out)
                if out is not None:
                    checks.apart("out", out, q, sink, *read_by([selection]))
                return
        checks.instance("cache", selection.cache, PagedCache)
        self._check_query(q, selection.cache, None)
        self._check_columns(selection.slots, q.shape[0], q.device)
        self._check_attend(q, [selection], sink, q_scale, out, read_by([selection]))
        if seen is not None:
            self._passed = seen

    def write(
        self, kv: Tensor | tuple[Tensor, Tensor] | None, caches: Caches, plan: Plan, index: IndexInputs | None
    ) -> None:
        """Refuse rows and index keys that do not fit caches and plan."""
        self._check_caches(caches, plan)
        if kv is not None:
            check_write_kv(kv, caches.latent, plan.slots, backend=self.backend, where="caches.latent")
        if index is not None:
            checks.instance("index", index, IndexInputs)
            if index.keys is not None:
                cache = index_cache(caches, plan)
                check_layout(cache, "caches.index")
                names = {"name": "index.keys", "where": "caches.index"}
                check_write_kv(index.keys, cache, plan.slots, backend=self.backend, **names)

    def index(self, index: IndexInputs, caches: Caches, plan: Plan) -> None:
        """Refuse inputs of the indexer; its keys are `write`'s."""
        spec = self.spec
        checks.instance("index", index, IndexInputs)
        if spec.topk is None:
            raise checks.refuse("index", "None for a layer without top-k", "inputs", "pass positions instead")
        if spec.reuse_topk:
            remedy = "pass positions=, those of the last layer that has an indexer"
            raise checks.refuse("index", "None for a layer that shares an earlier layer's selection", "inputs", remedy)
        if spec.topk > MAX_K:
            raise checks.refuse("spec.topk", f"at most {MAX_K} for an indexer", spec.topk, "pass positions instead")
        cache = index_cache(caches, plan)
        if cache.recipe is not None and index.recipe is None:
            raise checks.refuse(
                "index.recipe", f"that of the cache, {cache.recipe}", None, "say how q and keys were prepared"
            )
        if index.recipe is not None:
            agreed_recipe("index.recipe", index.recipe, cache)
        sizes = {"T": plan.rows} | ({"H": spec.index_heads} if spec.index_heads else {})
        if plan.requests == 0:
            # There is no table to look into, and nothing to look for.
            check_layout(cache, "caches.index")
            width = cache.layout.width
            sizes = checks.tensor("index.q", index.q, "T H D", QUERY_DTYPES, D=width, device=cache.device, **sizes)  # type: ignore[arg-type]
            heads = {"T": plan.rows, "H": sizes["H"]}
            checks.tensor("index.weights", index.weights, "T H", checks.FLOATS, device=cache.device, **heads)  # type: ignore[arg-type]
            return
        check_index_topk(
            index.q,
            index.weights,
            cache,
            plan.request_ids,
            plan.block_table,
            plan.positions + 1,
            spec.topk,
            self.workspace_bytes,
            self.backend,
            prefix="index.",
            name="caches.index",
            sizes=sizes,
        )

    def _signature(self, call: Call) -> tuple[object, ...] | None:
        """All that the checks of a call on a device depend on; None where they must run."""
        q, caches, plan, index = call.q, call.caches, call.plan, call.index_inputs
        kinds = isinstance(caches.latent, PagedCache) and (caches.index is None or isinstance(caches.index, PagedCache))
        if not (_remembers(q) and kinds and (index is None or isinstance(index, IndexInputs))):
            return None
        if plan.prefill is not None and plan.prefill.chunks:
            return None
        numbers: tuple[Any, ...] = ("call", plan.rows, plan.requests == 0, plan.page_size, plan.topk, plan.mode)
        keys: tuple[Any, ...] = (caches.latent.layout.key, checks.frozen(caches.latent.storage))
        keys += (isinstance(call.kv, tuple),)
        held: tuple[Tensor | None, ...] = (caches.latent.storage, plan.request_ids, plan.slots, plan.block_table)
        if index is not None:
            keys += (index.recipe,)
        if caches.index is not None:
            keys += (caches.index.layout.key, caches.index.recipe, checks.frozen(caches.index.storage))
            held += (caches.index.storage,)
        tensors = (*call.inputs.values(), *held, plan.positions, call.out)
        return (*numbers, *keys, *_scale_and_out(call.q_scale, call.out), *checks.signature(*tensors))

    def _check_call(self, call: Call) -> None:
        q, kv, caches, plan, positions, index, sink, q_scale, out = call
        self._check_caches(caches, plan)
        self._check_query(q, caches.latent, plan)
        if (positions is None) == (index is None):
            received = "neither" if index is None else "both"
            raise checks.refuse("positions and index", "given one at a time", received, "pass exactly one")
        if positions is not None:
            self._check_positions(positions, plan)
        if index is not None:
            self.index(index, caches, plan)
            # What the indexer will give.
            shape = (plan.rows, self.spec.topk)
            positions = torch.empty(shape, dtype=torch.int32, device=q.device)  # type: ignore[arg-type]
        assert positions is not None
        self.write(kv, caches, plan, index)
        prefill = plan.prefill
        if plan.requests == 0:
            checks.tensor("positions", positions, "rows K", (torch.int32,), device=q.device)
            check_scales(self.spec.scale, q_scale, q.device)
            check_sink(sink, self.spec.heads, q.device)
            self._check_output(q, out, call.read)
            checks.no_gradient(**call.inputs)
        elif prefill is not None and prefill.chunks:
            self._check_gathered(call, positions, prefill)
        else:
            selection = Selection(caches.latent, positions, None, plan.request_ids, plan.block_table)
            self._check_attend(q, [selection], sink, q_scale, out, call.read)

    def _check_caches(self, caches: Caches, plan: Plan) -> None:
        cache, spec = caches.latent, self.spec
        checks.instance("caches", cache, PagedCache)
        if caches.index is not None:
            checks.instance("caches.index", caches.index, PagedCache)
        if cache.page_size != plan.page_size:
            raise checks.refuse("caches", f"of the plan's page size {plan.page_size}", cache.page_size, "plan with it")
        if cache.layout.width != spec.head_dim:
            raise checks.refuse("caches", f"{spec.head_dim} wide like the layer's rows", repr(cache), "match the spec")
        if cache.device != plan.slots.device:
            raise checks.refuse("caches", f"on {plan.slots.device} like the plan", cache.device, "plan for that device")
        if plan.mode == "separate" and not cache.layout.quantised:
            raise checks.refuse("caches", "an FP8 cache for a separate plan", repr(cache), "plan with its layout")
        if plan.topk is not None and spec.topk is not None and plan.topk != spec.topk:
            raise checks.refuse("plan.topk", f"the layer's {spec.topk}", plan.topk, "plan with the layer's spec")

    def _check_query(self, q: Tensor, cache: PagedCache, plan: Plan | None) -> None:
        spec, sizes = self.spec, {} if plan is None else {"rows": plan.rows}
        remedy = "the plan's rows, the spec's heads and widths"
        sizes |= {"H": spec.heads, "D": spec.head_dim}
        checks.tensor("q", q, "rows H D", DTYPES, device=cache.device, remedy=remedy, **sizes)
        if self.backend != "auto":
            if not torch.compiler.is_compiling():
                implementation("attend", self.backend, q.device)
            choose(spec, q.device, layout=cache.layout, dtype=q.dtype, page_size=cache.page_size, prefer=self.backend)

    def _check_positions(self, positions: Tensor, plan: Plan) -> None:
        self._check_columns(positions, plan.rows, plan.positions.device)
        if not checks.visible(positions) or not checks.visible(plan.positions):
            return
        own = plan.positions.unsqueeze(1)
        # Rows of padded tokens may hold anything.
        ahead = ((positions > own) & (own >= 0)).any(1).nonzero().flatten()
        if len(ahead):
            token = int(ahead[0])
            received = f"{int(positions[token].max())} for token {token} at {int(plan.positions[token])}"
            raise checks.refuse("positions", "at most each token's own", received, "they belong to another step")

    def _check_columns(self, positions: Tensor, rows: int, device: torch.device) -> None:
        # A selection of another width comes from another layer or another setting: it would attend to too little.
        remedy = "one row per token of the plan, the spec's topk wide, -1 padded"
        checks.tensor("positions", positions, self._columns, (torch.int32,), device=device, rows=rows, remedy=remedy)

    def _check_attend(
        self,
        q: Tensor,
        selections: list[Selection],
        sink: Tensor | None,
        q_scale: float | Tensor,
        out: Tensor | None,
        read: list[Tensor | None],
    ) -> None:
        spec = self.spec
        check_query(q, selections, spec.value_dim)
        check_scales(spec.scale, q_scale, q.device)
        self._check_output(q, out, read)
        out = new_output(q, spec.value_dim) if out is None else out
        sink = contiguous_sink(sink)
        scales = folded_scale(spec.scale, q_scale)
        check_attend(Attend(q, selections, *scales, None, sink, out, True, self.backend))

    def _check_output(self, q: Tensor, out: Tensor | None, read: list[Tensor | None]) -> None:
        if out is not None:
            check_output(out, (*q.shape[:2], self.spec.value_dim), q.device, *read)

    def _check_gathered(self, call: Call, positions: Tensor, prefill: PrefillPart) -> None:
        q, cache, plan = call.q, call.caches.latent, call.plan
        ids, table, width = plan.request_ids, plan.block_table, cache.layout.width
        size, workspace = cache.page_size, (prefill.ids, prefill.starts)
        check_translate_positions(
            TranslatePositions(positions, ids, table, size, size, *workspace, self.shard, False, self.backend)
        )
        room = plan.workspace
        checks.tensor("plan.workspace", room, "N D", tuple(self.gathered), D=width, device=q.device)
        assert room is not None
        for chunk in prefill.chunks:
            where = {"starts": chunk.starts, "out": room[: chunk.rows]}
            check_gather_kv(cache, chunk.block_table, chunk.lengths, **where, backend=self.backend)
        rows = PagedCache.rebuilt(room.unsqueeze(1), self.gathered[room.dtype], 1.0)
        both = [Selection(cache, positions), Selection(rows, positions)]
        self._check_attend(q, both, call.sink, call.q_scale, call.out, call.read)


def index_cache(caches: Caches, plan: Plan) -> PagedCache:
    """The cache of index keys, which shares the plan's block table with the latent one."""
    cache = caches.index
    if cache is None:
        raise checks.refuse("caches.index", "a cache of index keys", None, "pass Caches(latent, index)")
    checks.instance("caches.index", cache, PagedCache)
    if cache.page_size != plan.page_size:
        raise checks.refuse(
            "caches.index", f"of the plan's page size {plan.page_size}", cache.page_size, "share one block table"
        )
    return cache


def _remembers(q: object) -> bool:
    """Whether checks may go by what passed last: a call on a device, where they see no values."""
    return isinstance(q, Tensor) and not torch.compiler.is_compiling() and not checks.visible(q)


def _scale_and_out(q_scale: float | Tensor, out: Tensor | None) -> tuple[object, ...]:
    """What checks of a query's scale and of an output depend on besides shapes: a number; strides and who made it."""
    scale = checks.signature(q_scale) if isinstance(q_scale, Tensor) else (type(q_scale), q_scale)
    if not isinstance(out, Tensor):
        return scale
    return (*scale, out.stride(), checks.frozen(out))
