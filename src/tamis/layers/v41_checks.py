"""The checks of a `SparseV41` call, all of which run before its first write, and the operations of a call."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.v4_caches import V4Caches
from tamis.layers import v4_memory
from tamis.layers.v4_checks import check_cache, check_kinds
from tamis.layers.v4_products import Queries
from tamis.layers.v41_weights import V41Weights
from tamis.model.spec import LayerSpec
from tamis.ops import memory
from tamis.ops.attention import Prepared, check_attend, check_query
from tamis.ops.attention.operations import Attend
from tamis.ops.compress import check_pool_kv
from tamis.ops.compress.operations import PoolKv
from tamis.ops.index import check_index_topk, check_layout
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.blocks import check_index_topk_and_blocks, check_index_topk_within
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import PreparedTopk
from tamis.ops.output import check_rotate_to_fp8
from tamis.ops.output.operations import RotateToFp8
from tamis.ops.rotate import (
    check_norm_rows,
    check_recipe,
    check_rotate_and_write,
    check_rotate_heads,
    check_write_rotated,
)
from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads, WriteRotated
from tamis.step.v4_plan import EntryPlan, V4Plan

_INDEX_NAMES = {"q": "index_q", "weights": "index_weights", "cache": "caches.index"}


class V41Selection(NamedTuple):
    """What layers select for the layers after them."""

    entries: Tensor
    """int32 [rows, topk], numbers of entries in their request, ascending, then -1."""
    candidates: Tensor | None
    """int32 [rows, blocks], the blocks of entries within which later layers select; None if no layer selected them."""


class Made(NamedTuple):
    """The products of a layer's weights and hidden states."""

    queries: Queries
    """The queries and raw rows."""
    index_q: Tensor | None
    """[rows, index heads, index dim]; None, like the next, for layers without an indexer."""
    index_weights: Tensor | None
    """float32 [rows, index heads]"""
    values: Tensor | None
    """float32 [rows, D], of which latents are made; None for layers that make no entries."""
    scores: Tensor | None
    """float32 [rows, D]; None for entries of one token."""


class V41Latents(NamedTuple):
    """The operations that make and write entries and index keys."""

    pool: PoolKv | NormRows
    """Makes the latents."""
    dtype: torch.dtype
    """The dtype of the latents."""
    entries: WriteRotated
    """Writes the entries. Its rows are replaced by the latents."""
    keys: WriteRotated
    """Writes the index keys. Its rows are replaced by the latents' projections."""


class KnownV41(NamedTuple):
    """The operations of calls like one that passed, as far as the backend could prepare them."""

    topk: PreparedTopk | None
    """Selects entries for a layer that neither selects blocks nor selects within some."""
    attend: Prepared | None
    held: list[tuple[PagedCache, Tensor]]
    """The caches of the call, which keep their identities as long as they are here."""


class V41Call(NamedTuple):
    """One layer call: its operations in the order in which they run."""

    plan: V4Plan
    caches: V4Caches
    rotation: RotateAndWrite
    latents: V41Latents | None
    """None for layers that make no entries."""
    select: IndexTopk | IndexTopkAndBlocks | IndexTopkWithin | None
    """The indexer's selection. Its queries are replaced by the rotated ones when the call runs."""
    attend: Attend
    """The attention over the window. Its query is replaced by the rotated one, and the selected entries are added."""
    output: RotateHeads | RotateToFp8
    """The rotation of the output. Its input is replaced by attention's output."""
    known: KnownV41 | None
    """What was prepared for a call on a device that is like one before. Its attention has no output yet."""


class V41Checks:
    """The checks of one layer. Few of them run again for a call on a device that is like one before."""

    def __init__(self, spec: LayerSpec, weights: V41Weights, cos_sin: Tensor, eps: float) -> None:
        """Remember the layer, and refuse parts of it that do not fit each other."""
        checks.instance("spec", spec, LayerSpec)
        if spec.kind not in ("window", "indexed"):
            raise checks.refuse("spec", "of a V4.1 kind", repr(spec.kind), "use SparseMLA or SparseV4")
        checks.instance("weights", weights, V41Weights)
        weights.check(spec)
        checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=spec.rope_dim, device=weights.attention.kv.device)
        checks.positive_number("eps", eps)
        self.spec, self.weights, self.cos_sin = spec, weights, cos_sin
        self._known: memory.Memory[KnownV41] = memory.Memory(v4_memory.MOST)

    def signature(
        self, hidden: Tensor, caches: V4Caches, plan: V4Plan, selection: V41Selection | None
    ) -> memory.Signature | None:
        """All that the checks of a call on a device depend on; None if they must run in every call."""
        seen = v4_memory.sign_call(hidden, caches, plan, self.spec.compress)
        if seen is None or selection is None:
            return seen
        try:
            return (*seen, type(selection), memory.sign(selection.entries), memory.sign(selection.candidates))
        except memory.NOT_ARGUMENTS:
            return None

    def seen_before(self, hidden: Tensor, seen: memory.Signature | None) -> KnownV41 | None:
        """What was prepared, if a call of this signature has passed. Otherwise `arguments` and `operations` must look
        at it."""
        known = None if seen is None else self._known.find(seen)
        if known is not None and torch.is_grad_enabled():
            self._no_gradient(hidden)
        return known

    def _no_gradient(self, hidden: Tensor) -> None:
        checks.no_gradient(hidden=hidden, cos_sin=self.cos_sin, **self.weights.named())

    def arguments(self, hidden: Tensor, caches: V4Caches, plan: V4Plan, selection: V41Selection | None) -> None:
        """Refuse hidden states, caches, a plan and a selection that do not fit each other and the layer."""
        spec, device = self.spec, self.cos_sin.device
        check_kinds(caches)
        width = self.weights.attention.kv.shape[1]
        checks.tensor("hidden", hidden, "rows X", checks.FLOATS, rows=plan.step.rows, X=width, device=device)
        if plan.step.positions.device != device:
            expected, found = f"on {device} like the layer", plan.step.positions.device
            raise checks.refuse("plan", expected, found, "plan for that device")
        if plan.window.size != spec.window:
            expected = f"the layer's {spec.window}"
            raise checks.refuse("plan.window.size", expected, plan.window.size, "plan with the layer's spec")
        check_cache("window", caches.window, plan.window.page_size, spec.head_dim, device)
        if spec.kind == "indexed":
            self._check_entries(caches, plan)
        self._check_selection(selection, plan)
        if torch.is_grad_enabled():
            self._no_gradient(hidden)

    def _check_entries(self, caches: V4Caches, plan: V4Plan) -> None:
        spec, device, entries = self.spec, self.cos_sin.device, self._entry_plan(plan)
        check_cache("entries", caches.entries, entries.page_size, spec.head_dim, device)
        assert caches.entries is not None
        check_recipe(caches.entries, spec.rope_dim, "caches.entries")
        if not spec.reuse_topk:
            check_cache("index", caches.index, entries.page_size, spec.index_dim, device)
            assert caches.index is not None
            check_layout(caches.index, "caches.index")
            check_recipe(caches.index, spec.rope_dim, "caches.index")
        if spec.compress > 1 and not spec.reuse_entries:
            if entries.state is None:
                expected = f"with a state pool for ratio {spec.compress}"
                raise checks.refuse("plan", expected, None, "pass the pool's pages in Batch.other_pages")
            check_cache("state", caches.state, entries.state_page_size, 2 * spec.head_dim, device)

    def _entry_plan(self, plan: V4Plan) -> EntryPlan:
        entries = plan.entries.get(self.spec.compress)
        if entries is None or entries.every is not None:
            expected = f"with entries of ratio {self.spec.compress} that an indexer selects"
            raise checks.refuse("plan", expected, f"ratios {sorted(plan.entries)}", "plan for every layer of the model")
        if entries.columns != self.spec.topk:
            raise checks.refuse("plan.entries", f"for top-k {self.spec.topk}", entries.columns, "plan with the layer")
        return entries

    def _check_selection(self, selection: V41Selection | None, plan: V4Plan) -> None:
        spec, rows, device = self.spec, plan.step.rows, self.cos_sin.device
        candidates = spec.candidates if spec.candidates is not None and not spec.candidates.source else None
        takes_entries = spec.kind == "indexed" and spec.reuse_topk
        if selection is None:
            if takes_entries or candidates is not None:
                what = "the selection" if takes_entries else "the candidate blocks"
                expected = f"given for a layer that takes {what} of an earlier one"
                raise checks.refuse("selection", expected, None, "pass what that one returned")
            return
        checks.instance("selection", selection, V41Selection)
        if takes_entries:
            sizes = {"T": rows, "K": spec.topk}
            checks.tensor("selection.entries", selection.entries, "T K", (torch.int32,), device=device, **sizes)  # type: ignore[arg-type]
            self._check_seen(selection.entries, plan)
        if candidates is not None:
            sizes = {"T": rows, "N": candidates.blocks}
            name = "selection.candidates"
            checks.tensor(name, selection.candidates, "T N", (torch.int32,), device=device, **sizes)  # type: ignore[arg-type]

    def _check_seen(self, entries: Tensor, plan: V4Plan) -> None:
        """Refuse entries that a token cannot see. Rows of padded tokens may hold anything."""
        if not checks.visible(entries):
            return
        seen = self._entry_plan(plan).visible
        ahead = ((entries.amax(1) >= seen) & (plan.step.positions >= 0)).nonzero().flatten()
        if len(ahead):
            token = int(ahead[0])
            expected = f"below {int(seen[token])}, the number of entries that token {token} sees"
            remedy = "pass what the layer before returned for this step"
            raise checks.refuse("selection.entries", expected, int(entries[token].amax()), remedy)

    def nothing(self, hidden: Tensor, selection: V41Selection | None) -> V41Selection | None:
        """The selection of a step without requests."""
        spec = self.spec
        if spec.kind != "indexed" or spec.reuse_topk:
            return selection

        def empty(columns: int) -> Tensor:
            return torch.full((len(hidden), columns), -1, dtype=torch.int32, device=hidden.device)

        held = None if selection is None else selection.candidates
        if spec.candidates is not None and spec.candidates.source:
            held = empty(spec.candidates.blocks)
        return V41Selection(empty(spec.topk or 0), held)

    def operations(self, call: V41Call, seen: memory.Signature | None) -> None:
        """Refuse what the operations of a call refuse, and remember the signature of a call that passed."""
        check_rotate_and_write(call.rotation, "caches.window")
        if call.latents is not None:
            pool = call.latents.pool
            if isinstance(pool, PoolKv):
                check_pool_kv(pool, "caches.state")
            else:
                check_norm_rows(pool)
            check_write_rotated(call.latents.entries, "caches.entries")
            check_write_rotated(call.latents.keys, "caches.index")
        if call.select is not None:
            self._check_index(call.select)
        selections = call.attend.selections
        if self.spec.kind == "indexed":
            assert call.caches.entries is not None
            rows, device = call.plan.step.rows, self.cos_sin.device
            chosen = torch.empty((rows, self.spec.topk or 0), dtype=torch.int32, device=device)
            selections = [*selections, self._entry_plan(call.plan).selection(call.caches.entries, chosen)]
        attention = call.attend._replace(selections=selections)
        check_query(attention.q, selections, self.spec.value_dim)
        check_attend(attention)
        if isinstance(call.output, RotateHeads):
            check_rotate_heads(call.output)
        else:
            check_rotate_to_fp8(call.output)
        if seen is not None:
            self._known.keep(seen, self._prepared(call, attention))

    def _prepared(self, call: V41Call, attention: Attend) -> KnownV41:
        topk, attended = None, None
        if memory.remembered_on(attention.q):
            topk = PreparedTopk.of(call.select) if isinstance(call.select, IndexTopk) else None
            attended = Prepared.of(attention, None)
        return KnownV41(topk, attended, v4_memory.held_by(call.caches))

    def _check_index(self, call: IndexTopk | IndexTopkAndBlocks | IndexTopkWithin) -> None:
        sizes = {"T": call.request_ids.shape[0], "H": self.spec.index_heads}
        if isinstance(call, IndexTopkAndBlocks):
            check_index_topk_and_blocks(call, call.blocks.shape[1], sizes, **_INDEX_NAMES)
        elif isinstance(call, IndexTopkWithin):
            check_index_topk_within(call, sizes, candidates="selection.candidates", **_INDEX_NAMES)
        else:
            check_index_topk(call, sizes, **_INDEX_NAMES)
