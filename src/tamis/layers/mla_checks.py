"""The checks of a `SparseMLA` call, all of which run before its first write, and the operations of a call (`Call`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import rows as plain_rows
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches, Selection
from tamis.choice import choose
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs
from tamis.ops.attention import check_attend, check_query, check_scales
from tamis.ops.attention.operations import Attend
from tamis.ops.combine import check_output, check_sink
from tamis.ops.compress.operations import CompressKv
from tamis.ops.gather import check_gather_kv
from tamis.ops.gather.operations import GatherKv
from tamis.ops.index import MAX_K, QUERY_DTYPES, check_index_topk, check_layout
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepare import resolve_recipe
from tamis.ops.library import implementation
from tamis.ops.pairs import join_pair
from tamis.ops.translate import check_translate_positions
from tamis.ops.translate.operations import TranslatePositions
from tamis.ops.write import check_rows, check_write_kv
from tamis.ops.write.operations import WriteKv
from tamis.step.plan import Plan

if TYPE_CHECKING:
    from tamis.layers.mla_pooled import PooledKeys

Write: TypeAlias = WriteKv | CompressKv
"""A write of a layer call: of rows, of index keys, or of pooled index keys."""
DTYPES = (*checks.FLOATS, torch.float64, torch.float8_e4m3fn)
_INDEX_NAMES = {"q": "index.q", "weights": "index.weights", "cache": "caches.index"}


class Arguments(NamedTuple):
    """The arguments of one layer call, as `SparseMLA.__call__` documents them, with the query as one tensor."""

    q: Tensor
    """[rows, H, width] in bf16, fp16, fp32, fp64 or e4m3."""
    kv: Tensor | tuple[Tensor, Tensor] | None
    """[rows, width] or the pair (latent part, rope part) in bf16, fp16 or fp32; None if already written."""
    caches: Caches
    plan: Plan | None
    """None for `attend_positions`."""
    table: tuple[Tensor, Tensor]
    """Request ids int32 [rows] and block table int32 [requests, pages], those of the plan if there is one."""
    positions: Tensor | None
    """int32 [rows, topk]; None if the layer selects them."""
    index_inputs: IndexInputs | None
    """The indexer's inputs; None if positions are given."""
    sink: Tensor | None
    """float32 [H]"""
    q_scale: float | Tensor
    out: Tensor | None
    """[rows, H, value_dim] in bf16, fp16, fp32 or fp64; None for a new tensor."""

    @classmethod
    def of(
        cls,
        q: Tensor | tuple[Tensor, Tensor],
        kv: Tensor | tuple[Tensor, Tensor] | None,
        caches: Caches | PagedCache,
        plan: Plan,
        *others: Any,
    ) -> Self:
        """The arguments of a call with a plan."""
        if not isinstance(plan, Plan):
            checks.instance("plan", plan, Plan)
        if isinstance(q, tuple):
            q = join_pair("q", q)
        if not isinstance(caches, Caches):
            caches = Caches(caches)
        return cls(q, kv, caches, plan, (plan.request_ids, plan.block_table), *others)

    @property
    def inputs(self) -> dict[str, Tensor | None]:
        """All tensors that are read besides caches and plan, by name."""
        kv, index = self.kv, self.index_inputs
        parts = kv if isinstance(kv, tuple) else (kv, None)
        found = {"q": self.q, "kv": parts[0], "kv (rope part)": parts[1], "positions": self.positions}
        found["sink"] = self.sink
        if index is not None:
            found |= {"index.q": index.q, "index.weights": index.weights, "index.keys": index.keys}
            found |= {"index.gates": index.gates, "index.gate_bias": index.gate_bias}
        return found

    @property
    def read(self) -> list[Tensor | None]:
        """All tensors with which `out` must not share memory."""
        plan, caches = self.plan, self.caches
        found = [*self.inputs.values(), *self.table, caches.latent.storage]
        found += [held.storage for held in (caches.index, caches.index_state) if held is not None]
        return found if plan is None else [*found, plan.positions, plan.slots, plan.workspace]


class Call(NamedTuple):
    """One layer call: its operations in the order in which they run."""

    plan: Plan | None
    """None for `attend_positions`."""
    cache: PagedCache
    """The cache of latent rows."""
    table: tuple[Tensor, Tensor]
    """Request ids int32 [rows] and block table int32 [requests, pages]."""
    writes: Sequence[Write]
    """The writes of the new tokens' rows and of their index keys."""
    index_topk: IndexTopk | None
    """The layer's own indexer; None if positions are given."""
    positions: Tensor | None
    """int32 [rows, topk]; None if the layer selects them."""
    translate: TranslatePositions | None
    """The translation of positions to slots for shards and gathered prefills; otherwise attention translates them."""
    gathers: list[GatherKv]
    """The gathers of prefills into the plan's workspace, one per chunk."""
    attend: Attend
    """The attention. Its selection is added once the positions are known."""
    known: Any = None
    """What was prepared for calls like it (`KnownCall`), which then make their output themselves; None if nothing."""
    slots: Tensor | None = None
    """int32 [rows, topk], the result of `translate` if it has run already: adapters share it between layers."""


class MlaChecks:
    """The checks of one layer.

    On the host they see values, so they run in every call. On a device they see only what is in a call's signature, so
    they run once for each; see `tamis.layers.mla_memory`.
    """

    def __init__(self, spec: LayerSpec, backend: str) -> None:
        """Remember the layer."""
        self.spec, self.backend = spec, backend
        self.pooled = _pooled_keys(spec, backend) if spec.kpool > 1 else None
        self._gathered = {d: plain_rows(d, latent=spec.latent_dim, rope=spec.rope_dim) for d in checks.FLOATS}
        self._columns = f"rows {spec.columns or 'K'}"

    def arguments(self, given: Arguments) -> None:
        """Refuse arguments that do not fit each other, before operations are built of them."""
        q, caches, plan, positions, index = given.q, given.caches, given.plan, given.positions, given.index_inputs
        if plan is None:
            checks.instance("cache", caches.latent, PagedCache)
        else:
            self.caches(caches, plan)
        self._check_query(q, caches.latent, plan)
        if (positions is None) == (index is None):
            received = "neither" if index is None else "both"
            raise checks.refuse("positions and index", "given one at a time", received, "pass exactly one")
        if positions is not None:
            self._check_positions(positions, q, plan)
        if plan is not None:
            if index is not None:
                self.index(index, caches, plan)
            self.rows(given.kv, index, caches, plan)
        check_scales(self.spec.scale, given.q_scale, q.device)
        check_sink(given.sink, self.spec.heads, q.device)
        if plan is not None and plan.prefill is not None and plan.prefill.chunks:
            width = caches.latent.layout.width
            checks.tensor("plan.workspace", plan.workspace, "N D", tuple(self._gathered), D=width, device=q.device)

    def operations(self, given: Arguments, call: Call) -> None:
        """Refuse what the operations of a call refuse."""
        self.writes(call.writes, given.caches)
        if call.index_topk is not None and call.plan is not None:
            self.index_topk(call.index_topk, call.plan)
        if call.plan is not None and call.plan.requests == 0:
            self._check_output(given)
            checks.no_gradient(**given.inputs)
        else:
            self._check_attention(given, call)

    def caches(self, caches: Caches, plan: Plan) -> None:
        """Refuse caches that do not fit the layer and the plan."""
        cache, spec = caches.latent, self.spec
        checks.instance("caches", cache, PagedCache)
        for name, held in (("index", caches.index), ("index_state", caches.index_state)):
            if held is not None:
                checks.instance(f"caches.{name}", held, PagedCache)
        if cache.page_size != plan.page_size:
            raise checks.refuse(
                "caches", f"of the plan's page size {plan.page_size}", cache.page_size, "use one page size for both"
            )
        if cache.layout.width != spec.head_dim:
            raise checks.refuse("caches", f"{spec.head_dim} wide like the layer's rows", repr(cache), "match the spec")
        if cache.device != plan.slots.device:
            raise checks.refuse("caches", f"on {plan.slots.device} like the plan", cache.device, "plan for that device")
        if plan.mode == "separate" and not cache.layout.quantised:
            raise checks.refuse("caches", "an FP8 cache for a separate plan", repr(cache), "plan with its layout")
        if plan.topk is not None and spec.topk is not None and plan.topk != spec.topk:
            raise checks.refuse("plan.topk", f"the layer's {spec.topk}", plan.topk, "plan with the layer's spec")

    def rows(
        self, kv: Tensor | tuple[Tensor, Tensor] | None, index: IndexInputs | None, caches: Caches, plan: Plan
    ) -> None:
        """Refuse rows and index keys that do not fit their caches."""
        if kv is not None:
            if self.spec.reuse_rows:
                remedy = "pass None, and the cache that the earlier layer wrote"
                raise checks.refuse("kv", "None for a layer that reads an earlier layer's rows", "rows", remedy)
            check_rows(kv, caches.latent)
        if index is not None:
            checks.instance("index", index, IndexInputs)
            if self.pooled is not None:
                self.pooled.check(index, self._index_cache(caches, plan), caches.index_state, plan)
            elif index.gates is not None or index.gate_bias is not None:
                remedy = "only layers with pooled keys have gates"
                raise checks.refuse("index.gates", "None for a layer with kpool=1", "gates", remedy)
            elif index.keys is not None:
                cache = self._index_cache(caches, plan)
                check_layout(cache, "caches.index")
                check_rows(index.keys, cache, name="index.keys")

    def writes(self, calls: Sequence[Write], caches: Caches) -> None:
        """Refuse what the writes of rows and index keys refuse."""
        for call in calls:
            if isinstance(call, CompressKv):
                assert self.pooled is not None
                self.pooled.check_write(call)
                continue
            keys = call.cache is caches.index
            name, where = ("index.keys", "caches.index") if keys else ("kv", "caches.latent")
            check_write_kv(call, name=name, where=where)

    def index(self, index: IndexInputs, caches: Caches, plan: Plan) -> None:
        """Refuse an indexer that does not fit the layer and its cache. Its keys are checked by `rows`."""
        spec = self.spec
        checks.instance("index", index, IndexInputs)
        if spec.topk is None:
            raise checks.refuse("index", "None for a layer without top-k", "inputs", "pass positions instead")
        if spec.reuse_topk:
            remedy = "pass positions=, those of the last layer that has an indexer"
            raise checks.refuse("index", "None for a layer that shares an earlier layer's selection", "inputs", remedy)
        if (spec.index_topk or 0) > MAX_K:
            expected = f"at most {MAX_K} keys for an indexer"
            raise checks.refuse("spec.topk", expected, spec.index_topk, "pass positions instead")
        cache = self._index_cache(caches, plan)
        if cache.recipe is not None and index.recipe is None:
            raise checks.refuse(
                "index.recipe", f"that of the cache, {cache.recipe}", None, "say how q and keys were prepared"
            )
        if index.recipe is not None:
            resolve_recipe("index.recipe", index.recipe, cache)
        if plan.requests == 0:
            # The indexer does not run, so its operation is not built and its inputs are checked here.
            check_layout(cache, "caches.index")
            width, sizes = cache.layout.width, self._index_sizes(plan)
            sizes = checks.tensor("index.q", index.q, "T H D", QUERY_DTYPES, D=width, device=cache.device, **sizes)  # type: ignore[arg-type]
            heads = {"T": plan.rows, "H": sizes["H"]}
            checks.tensor("index.weights", index.weights, "T H", checks.FLOATS, device=cache.device, **heads)  # type: ignore[arg-type]

    def index_topk(self, call: IndexTopk, plan: Plan) -> None:
        """Refuse what the indexer's operation refuses."""
        check_index_topk(call, self._index_sizes(plan), **_INDEX_NAMES)

    def workspace_cache(self, rows: Tensor) -> PagedCache:
        """Gathered rows [N, width] as a cache with pages of one row."""
        return PagedCache.rebuilt(rows.unsqueeze(1), self._gathered[rows.dtype], 1.0)

    def _index_sizes(self, plan: Plan) -> dict[str, int]:
        return {"T": plan.rows} | ({"H": self.spec.index_heads} if self.spec.index_heads else {})

    def _check_query(self, q: Tensor, cache: PagedCache, plan: Plan | None) -> None:
        spec, sizes = self.spec, {} if plan is None else {"rows": plan.rows}
        remedy = "it has the plan's rows and the spec's heads and width"
        sizes |= {"H": spec.heads, "D": spec.head_dim}
        checks.tensor("q", q, "rows H D", DTYPES, device=cache.device, remedy=remedy, **sizes)
        if self.backend != "auto":
            if not torch.compiler.is_compiling():
                implementation("attend", self.backend, q.device)
            choose(spec, q.device, layout=cache.layout, dtype=q.dtype, page_size=cache.page_size, prefer=self.backend)

    def _check_positions(self, positions: Tensor, q: Tensor, plan: Plan | None) -> None:
        # A selection of another width comes from another layer or setting, and would silently attend to fewer rows.
        remedy = "it has one row per token of the plan, as wide as the spec's columns (its topk) and padded with -1"
        sizes: dict[str, Any] = {"rows": q.shape[0], "device": q.device}
        checks.tensor("positions", positions, self._columns, (torch.int32,), remedy=remedy, **sizes)
        if plan is None or not checks.visible(positions) or not checks.visible(plan.positions):
            return
        own = plan.positions.unsqueeze(1)
        # Rows of padded tokens may hold anything.
        ahead = ((positions > own) & (own >= 0)).any(1).nonzero().flatten()
        if len(ahead):
            token = int(ahead[0])
            expected = f"at most {int(plan.positions[token])}, the position of token {token}"
            remedy = "future tokens are not allowed; are these positions from another step?"
            raise checks.refuse(f"positions[{token}]", expected, int(positions[token].max()), remedy)

    def _check_attention(self, given: Arguments, call: Call) -> None:
        """Refuse what attention over the call's positions refuses, and what translates and gathers for it."""
        attention, positions = call.attend, call.positions
        if positions is None:
            positions = self.placeholder(attention.q)
        selections = [Selection(call.cache, positions, None, *call.table)]
        if call.translate is not None:
            check_translate_positions(call.translate)
            selections = [Selection(call.cache, positions)]
        for gather in call.gathers:
            check_gather_kv(gather)
            selections = [selections[0], Selection(self.workspace_cache(gather.out), positions)]
        check_query(attention.q, selections, self.spec.value_dim)
        self._check_output(given)
        check_attend(attention._replace(selections=selections))

    def _check_output(self, given: Arguments) -> None:
        if given.out is not None:
            check_output(given.out, (*given.q.shape[:2], self.spec.value_dim), given.q.device, *given.read)

    def placeholder(self, q: Tensor) -> Tensor:
        """Empty positions int32 [rows, topk], which are checked in place of those that an indexer will select."""
        return torch.empty((q.shape[0], self.spec.columns or 0), dtype=torch.int32, device=q.device)

    def _index_cache(self, caches: Caches, plan: Plan) -> PagedCache:
        """The cache of index keys, which shares the plan's block table with the latent one."""
        cache, page_size = caches.index, plan.page_size // self.spec.kpool
        if cache is None:
            raise checks.refuse("caches.index", "a cache of index keys", None, "pass Caches(latent, index)")
        checks.instance("caches.index", cache, PagedCache)
        if cache.page_size != page_size:
            pooled = f" / kpool={self.spec.kpool}" if self.spec.kpool > 1 else ""
            expected = f"of the plan's page size {plan.page_size}{pooled}"
            raise checks.refuse("caches.index", expected, cache.page_size, "share one block table")
        return cache


def _pooled_keys(spec: LayerSpec, backend: str) -> "PooledKeys":
    from tamis.layers.mla_pooled import PooledKeys  # which programs without such a model need not load

    return PooledKeys(spec, backend)


def no_positions(spec: LayerSpec, plan: Plan) -> Tensor:
    """The positions of a step without requests."""
    return torch.full((plan.rows, spec.columns or 0), -1, dtype=torch.int32, device=plan.positions.device)
