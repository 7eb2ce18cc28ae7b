"""The checks of a `SparseV4` call, all of which run before its first write, and the operations of a call (`V4Call`).

The projections of a call write nothing, so they run before the checks, which then see the arguments of each operation.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.cache.v4_caches import V4Caches
from tamis.layers import v4_memory
from tamis.layers.v4_gathered import Gathered, prepare_gathered
from tamis.layers.v4_products import Queries
from tamis.layers.v4_weights import V4Weights
from tamis.model.spec import LayerSpec
from tamis.ops import memory
from tamis.ops.attention import Prepared, check_attend, check_query
from tamis.ops.attention.operations import Attend
from tamis.ops.compress import check_compress_kv
from tamis.ops.compress.operations import CompressKv
from tamis.ops.index import check_index_topk, check_layout
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import PreparedTopk
from tamis.ops.output import check_rotate_to_fp8
from tamis.ops.output.operations import RotateToFp8
from tamis.ops.rotate import check_recipe, check_rotate_and_write, check_rotate_heads
from tamis.ops.rotate.operations import RotateAndWrite, RotateHeads
from tamis.step.v4_plan import EntryPlan, V4Plan

_COMPRESSED = (("caches.state", "caches.entries"), ("caches.index_state", "caches.index"))
_INDEX_NAMES = {"q": "index_q", "weights": "index_weights", "cache": "caches.index"}


class Projected(NamedTuple):
    """The products of a layer's weights and hidden states."""

    queries: Queries
    """The queries and raw rows."""
    entry: tuple[Tensor, Tensor] | None
    """Values and scores [rows, C] of the compressor; None for layers with a window only."""
    index_q: Tensor | None
    """[rows, index heads, index dim]; None, like the next two, for layers without an indexer."""
    index_weights: Tensor | None
    """[rows, index heads]"""
    index_entry: tuple[Tensor, Tensor] | None
    """Values and scores of the compressor that makes index keys."""


class V4Writes(NamedTuple):
    """The operations of a call that write to caches."""

    rotation: RotateAndWrite
    """Rotates the queries and writes the raw rows."""
    compressions: list[CompressKv]
    """The compressions of entries and of index keys, if the layer has them."""


class KnownV4(NamedTuple):
    """The operations of calls like one that passed, as far as the backend could prepare them."""

    index_topk: PreparedTopk | None
    attend: Prepared | None
    held: list[tuple[PagedCache, Tensor]]
    """The caches of the call. They are kept so that no others get their identities, by which they are remembered."""


class V4Call(NamedTuple):
    """One layer call: its operations in the order in which they run."""

    plan: V4Plan
    caches: V4Caches
    writes: V4Writes
    index_topk: IndexTopk | None
    """The indexer's selection. Its queries are replaced by the rotated ones when the call runs."""
    attend: Attend | Gathered
    """The attention. Its query is replaced by the rotated one, and the entries that the indexer chooses are added."""
    output: RotateHeads | RotateToFp8
    """The rotation of the output. Its input is replaced by attention's output."""
    known: KnownV4 | None
    """What was prepared for a call on a device that is like one before. Its attention has no output yet."""


class V4Checks:
    """The checks of one layer. Few of them run again for a call on a device that is like one before."""

    def __init__(self, spec: LayerSpec, weights: V4Weights, cos_sin: Tensor, eps: float, backend: str) -> None:
        """Remember the layer, and refuse parts of it that do not fit each other."""
        checks.instance("spec", spec, LayerSpec)
        if spec.kind in ("tokens", "indexed"):
            other = "SparseMLA" if spec.kind == "tokens" else "SparseV41"
            raise checks.refuse("spec", "of a V4 kind", repr(spec.kind), f"use {other}, or LayerSpec.from_hf")
        checks.instance("weights", weights, V4Weights)
        weights.check(spec)
        checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=spec.rope_dim, device=weights.kv.device)
        checks.positive_number("eps", eps)
        self.spec, self.weights, self.cos_sin, self.eps, self.backend = spec, weights, cos_sin, eps, backend
        self._known: memory.Memory[KnownV4] = memory.Memory(v4_memory.MOST)

    def seen_before(self, hidden: Tensor, seen: memory.Signature | None) -> KnownV4 | None:
        """What was prepared, if a call of this signature has passed. Otherwise `arguments` and `operations` must look
        at it."""
        known = None if seen is None else self._known.find(seen)
        if known is not None and torch.is_grad_enabled():
            self._no_gradient(hidden)
        return known

    def arguments(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> None:
        """Refuse hidden states, caches and a plan that do not fit each other and the layer."""
        spec, device = self.spec, self.cos_sin.device
        check_kinds(caches)
        self._check_hidden(hidden, plan)
        if plan.window.size != spec.window:
            raise checks.refuse(
                "plan.window.size", f"the layer's {spec.window}", plan.window.size, "plan with the layer's spec"
            )
        check_cache("window", caches.window, plan.window.page_size, spec.head_dim, device)
        if spec.kind != "window":
            self._check_compressed(caches, entry_plan(spec, plan))
        if torch.is_grad_enabled():
            self._no_gradient(hidden)

    def selected(self, selected: Tensor, plan: V4Plan) -> None:
        """Refuse a tensor that the layer's selection cannot be written to."""
        topk = self.spec.topk if self.spec.kind == "overlapping" else None
        if topk is None:
            expected = "None for a layer without an indexer"
            raise checks.refuse("selected", expected, checks.describe(selected), "leave it out")
        remedy = "pass one row per row of the plan"
        device = self.cos_sin.device
        checks.tensor(
            "selected", selected, f"rows {topk}", (torch.int32,), rows=plan.step.rows, device=device, remedy=remedy
        )
        checks.writable("selected", selected, plan.step.positions, plan.step.request_ids)

    def operations(self, call: V4Call, seen: memory.Signature | None) -> V4Call:
        """Refuse what the operations of a call refuse, and remember the signature of a call that passed.

        Returns the call; if prefills are gathered, with the operations of their groups.
        """
        self.writes(call.writes)
        if call.index_topk is not None:
            self.index(call.index_topk)
        if isinstance(call.attend, Gathered):
            call = call._replace(attend=prepare_gathered(call.attend))
        else:
            self._check_attend(call, call.attend)
        self.output(call.output)
        if seen is not None and isinstance(call.attend, Attend):
            self._known.keep(seen, self._prepared(call, call.attend))
        return call

    def _prepared(self, call: V4Call, attention: Attend) -> KnownV4:
        index, attended = None, None
        if memory.remembered_on(attention.q):
            index = None if call.index_topk is None else PreparedTopk.of(call.index_topk)
            attended = Prepared.of(attention._replace(selections=self._selections(call, attention)), None)
        return KnownV4(index, attended, v4_memory.held_by(call.caches))

    def writes(self, writes: V4Writes) -> None:
        """Refuse what the writing operations refuse."""
        check_rotate_and_write(writes.rotation, "caches.window")
        for call, names in zip(writes.compressions, _COMPRESSED, strict=False):
            check_compress_kv(call, names)

    def index(self, call: IndexTopk) -> None:
        """Refuse what the indexer's operation refuses."""
        sizes = {"T": call.request_ids.shape[0], "H": self.spec.index_heads}
        check_index_topk(call, sizes, **_INDEX_NAMES)

    def attended(self, attended: Tensor, plan: V4Plan) -> None:
        """Refuse an input of the output projection that is not attention's output."""
        sizes = {"rows": plan.step.rows, "H": self.spec.heads, "D": self.spec.head_dim}
        checks.tensor("attended", attended, "rows H D", checks.FLOATS, device=self.cos_sin.device, **sizes)  # type: ignore[arg-type]
        checks.no_gradient(attended=attended)

    def output(self, call: RotateHeads | RotateToFp8) -> None:
        """Refuse what the rotation of attention's output refuses."""
        if isinstance(call, RotateHeads):
            check_rotate_heads(call)
        else:
            check_rotate_to_fp8(call)

    def placeholder(self, plan: V4Plan) -> Tensor:
        """Empty entries int32 [rows, topk], which are checked in place of those that the indexer will choose."""
        return torch.empty((plan.step.rows, self.spec.topk or 0), dtype=torch.int32, device=self.cos_sin.device)

    def _no_gradient(self, hidden: Tensor) -> None:
        checks.no_gradient(hidden=hidden, cos_sin=self.cos_sin, **self.weights.named())

    def _check_hidden(self, hidden: Tensor, plan: V4Plan) -> None:
        rows, width, device = plan.step.rows, self.weights.kv.shape[1], self.cos_sin.device
        checks.tensor("hidden", hidden, "rows X", checks.FLOATS, rows=rows, X=width, device=device)
        if plan.step.positions.device != device:
            raise checks.refuse(
                "plan", f"on {device} like the layer", plan.step.positions.device, "plan for that device"
            )

    def _check_compressed(self, caches: V4Caches, entries: EntryPlan) -> None:
        """Refuse caches of entries, index keys and compressor state that do not fit the layer and the plan."""
        spec, device, overlapping = self.spec, self.cos_sin.device, self.spec.kind == "overlapping"
        for name in ("entries", "state", *(("index", "index_state") if overlapping else ())):
            if getattr(caches, name) is None:
                raise checks.refuse(f"caches.{name}", f"given for a layer of kind {spec.kind!r}", None, "allocate it")
        assert caches.entries is not None
        check_cache("entries", caches.entries, entries.page_size, spec.head_dim, device)
        check_recipe(caches.entries, spec.rope_dim, "caches.entries")
        spans = 2 if overlapping else 1
        check_cache("state", caches.state, entries.state_page_size, 2 * spans * spec.head_dim, device)
        if overlapping:
            assert caches.index is not None
            check_cache("index", caches.index, entries.page_size, spec.index_dim, device)
            check_cache("index_state", caches.index_state, entries.state_page_size, 2 * spans * spec.index_dim, device)
            check_layout(caches.index, "caches.index")
            check_recipe(caches.index, spec.rope_dim, "caches.index")
            if entries.columns != spec.topk:
                raise checks.refuse("plan.entries", f"for top-k {spec.topk}", entries.columns, "plan with the layer")
        elif entries.every is None:
            raise checks.refuse("plan.entries", "with slots of all entries", None, "plan with the layer's spec")

    def _selections(self, call: V4Call, attention: Attend) -> list[Selection]:
        """What a call attends to, with a placeholder for the entries that the indexer will choose."""
        if call.index_topk is None or call.caches.entries is None:
            return attention.selections
        entries = entry_plan(self.spec, call.plan)
        return [*attention.selections, entries.selection(call.caches.entries, self.placeholder(call.plan))]

    def _check_attend(self, call: V4Call, attention: Attend) -> None:
        selections = self._selections(call, attention)
        check_query(attention.q, selections, self.spec.value_dim)
        check_attend(attention._replace(selections=selections))


def entry_plan(spec: LayerSpec, plan: V4Plan) -> EntryPlan:
    """The part of a plan about entries of the layer's ratio."""
    entries = plan.entries.get(spec.compress)
    if entries is None or entries.state is None:
        expected = f"with entries and a state pool for ratio {spec.compress}"
        raise checks.refuse("plan", expected, f"ratios {sorted(plan.entries)}", "plan for every layer of the model")
    return entries


def check_kinds(caches: V4Caches) -> None:
    """Refuse what are no caches of a layer."""
    checks.instance("caches", caches, V4Caches)
    for name in ("entries", "state", "index", "index_state"):
        if getattr(caches, name) is not None:
            checks.instance(f"caches.{name}", getattr(caches, name), PagedCache)


def check_cache(name: str, cache: PagedCache | None, page_size: int, width: int, device: torch.device) -> None:
    """Refuse a cache of other pages or rows than the plan and the layer have, or on another device."""
    checks.instance(f"caches.{name}", cache, PagedCache)
    assert cache is not None
    if cache.page_size != page_size:
        raise checks.refuse(
            f"caches.{name}", f"of the plan's page size {page_size}", cache.page_size, "use one page size for both"
        )
    if cache.layout.width != width:
        raise checks.refuse(f"caches.{name}", f"of rows {width} wide", repr(cache), "match the layer's spec")
    if cache.device != device:
        raise checks.refuse(f"caches.{name}", f"on {device} like the layer", cache.device, "keep both on one device")
