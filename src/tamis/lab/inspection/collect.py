"""Runs a prompt through an attached model and records the selections of its layers.

Layers select exactly as without inspection (`index_topk` equals `index_scores`, then `topk_positions`), but a few
queries at a time, so that not all scores are held at once. Dense attention is computed from the same cached rows.

If index keys are pooled, every token of a group has the group's score. The tokens of the incomplete last group, which
are always selected, have no score: they are recorded with the lowest one of those that are selected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import float32_products, without_autocast
from tamis.cache.paged import PagedCache
from tamis.integrations.hf.forward import language_model
from tamis.integrations.hf.layers import CacheKind
from tamis.integrations.transformers import attach, detach
from tamis.lab.inspection.notes import Extent, LayerNotes
from tamis.lab.inspection.statistics import dense_shares, selected_mask
from tamis.layers.mla import LayerOutput, SparseMLA
from tamis.layers.mla_checks import Call
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_checks import V4Call
from tamis.model.spec import LayerSpec
from tamis.ops import Rotated, gather_kv, index_scores, read_kv, select_groups, topk_positions
from tamis.ops.index.operations import IndexTopk
from tamis.step.plan import Plan

SCORE_ELEMENTS = 4 << 20
"""The most scores held at once."""
LOGIT_ELEMENTS = 8 << 20
"""The most logits of dense attention held at once, over all heads."""
COMPARED_QUERIES = 2048
Report = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Inspection:
    """The selections of a model for a prompt."""

    tokens: list[int]
    """The prompt."""
    specs: list[LayerSpec | None]
    """The specs of all layers; None for layers of linear attention."""
    layers: list[LayerNotes]
    """Records of the layers with a selection, in order; also of layers that share that of another."""
    extent: Extent
    cache: str
    needle: int | None = None
    """A position of the prompt whose selection is followed; see `describe_needle`."""

    def layer(self, number: int) -> LayerNotes:
        """The record of a layer by its number in the model."""
        return next(notes for notes in self.layers if notes.number == number)

    def source(self, notes: LayerNotes) -> LayerNotes:
        """The layer whose indexer selected: the layer itself, or the one whose selection it shares."""
        return notes if notes.source is None else self.layer(notes.source)


def inspect_model(
    model: Any,
    tokens: Sequence[int],
    *,
    cache: CacheKind = "fp8",
    backend: str = "auto",
    compared_queries: int = COMPARED_QUERIES,
    queries: Sequence[int] = (-1,),
    needle: int | None = None,
    report: Report = lambda done, total: None,
) -> Inspection:
    """Run a prompt through a model once and record the selections of its layers.

    Args:
        model: as for `tamis.integrations.transformers.attach`; it is attached during the call.
        tokens: the prompt.
        cache: cache format, as for `attach`. Dense attention reads the same cache.
        backend: a name from `tamis backends`, or "auto".
        compared_queries: number of evenly spaced queries for which dense attention is computed.
        queries: positions whose selections must be kept; for a short prompt all are kept. Negative positions count from
            the end.
        needle: a position of the prompt to follow, such as that of the word which the model should find; negative
            positions count from the end. See `describe_needle`.
        report: called with the number of queries done and of all queries, summed over layers.
    """
    prompt = list(tokens)
    if not prompt:
        raise checks.refuse("tokens", "at least one", "none", "pass a prompt")
    checks.integer("compared_queries", compared_queries, low=1)
    asked = [_resolved("queries", query, len(prompt)) for query in queries]
    marked = None if needle is None else _resolved("needle", needle, len(prompt))
    notes: dict[int, LayerNotes] = {}
    watch = _Watch(notes, report)
    attach(model, cache=cache, backend=backend, wrap_layer=watch.wrap)
    try:
        specs = _specs(model)
        extent = Extent.plan(specs, len(prompt), compared_queries, asked)
        source = None
        for number, spec in enumerate(specs):
            if spec is None or spec.topk is None:
                continue
            if not spec.reuse_topk:
                source = number
            factor = 1.0 if spec.kind == "tokens" else (spec.index_heads * spec.index_dim) ** -0.5
            notes[number] = LayerNotes(number, spec, extent, source if spec.reuse_topk else None, factor, marked)
        watch.total = len(prompt) * len(notes)
        with torch.no_grad():
            # The model without its head: the logits are not needed.
            language_model(model)(
                input_ids=torch.tensor([prompt], dtype=torch.int64, device=model.device), use_cache=False
            )
    finally:
        detach(model)
    return Inspection(prompt, specs, list(notes.values()), extent, cache, marked)


def _resolved(name: str, position: int, tokens: int) -> int:
    checks.integer(name, position, low=-tokens, high=tokens - 1)
    return position % tokens


def _specs(model: Any) -> list[LayerSpec | None]:
    specs: list[LayerSpec | None] = language_model(model)._tamis.family.specs
    return specs


class _Watch:
    """Wraps the layers with a selection so that they also record it."""

    def __init__(self, notes: dict[int, LayerNotes], report: Report) -> None:
        self.notes, self.report = notes, report
        self.done = self.total = 0

    def wrap(self, number: int, layer: Any) -> Any:
        if layer.spec.topk is None:
            return layer
        return _WatchedV4(layer, self, number) if isinstance(layer, SparseV4) else _WatchedMLA(layer, self, number)

    def advance(self, queries: int) -> None:
        self.done += queries
        self.report(self.done, self.total)


class _WatchedMLA(SparseMLA):
    def __init__(self, layer: SparseMLA, watch: _Watch, number: int) -> None:
        super().__init__(layer.spec, backend=layer.backend)
        self._watch, self._number = watch, number

    def run(self, call: Call) -> LayerOutput:
        result, plan = super().run(call), call.plan
        assert plan is not None
        notes, own = self._watch.notes[self._number], plan.positions
        if notes.source is not None:
            notes.add_selection(own, own + 1, result.positions, None)
            self._watch.advance(len(own))
        rows = _all_rows(call.cache, plan.block_table, int(own.max()) + 1, self.backend)
        _compare(notes, call.attend.q, rows, own, own + 1, result.positions)
        return result

    def _selected(self, call: IndexTopk, plan: Plan, known: object = None) -> Tensor:
        return _select(self._watch, self._number, call, plan.positions, self.spec.kpool)


class _WatchedV4(SparseV4):
    def __init__(self, layer: SparseV4, watch: _Watch, number: int) -> None:
        super().__init__(layer.spec, layer.weights, layer.cos_sin, eps=layer.eps, backend=layer.backend)
        self._watch, self._number = watch, number

    def _select(self, call: V4Call, queries: Rotated) -> Tensor:
        assert call.index_topk is not None
        assert queries.index_q is not None
        index = call.index_topk._replace(q=queries.index_q)
        chosen = _select(self._watch, self._number, index, call.plan.step.positions)
        self._compare(queries.q, chosen, call)
        return chosen

    def _compare(self, q: Tensor, chosen: Tensor, call: V4Call) -> None:
        caches, plan, entries = call.caches, call.plan, call.plan.entries[self.spec.compress]
        assert caches.entries is not None

        def parts(part: Tensor, queries: Tensor, entry_logits: Tensor, selected: Tensor) -> Tensor:
            """float32 [n, PARTS]: the shares of all attention weights, mean over heads."""
            slots, lengths = plan.window.slots[part], plan.window.lengths[part]
            rows = read_kv(caches.window, slots, backend=self.backend)
            wide = float32_products(q.device)
            with without_autocast(q.device):
                logits = torch.einsum("nhd,nwd->nhw", queries.to(wide), rows.to(wide)).float() * self.spec.scale
            beyond = torch.arange(slots.shape[1], dtype=torch.int64, device=slots.device) >= lengths.unsqueeze(1)
            near = logits.masked_fill(beyond.unsqueeze(1), -torch.inf).logsumexp(-1)
            inside = entry_logits.masked_fill(~selected.unsqueeze(1), -torch.inf).logsumexp(-1)
            outside = entry_logits.masked_fill(selected.unsqueeze(1), -torch.inf).logsumexp(-1)
            sink = torch.full_like(near, -torch.inf) if self.weights.sink is None else self.weights.sink.float()
            # In the order of PARTS.
            return torch.stack((near, inside, outside, sink.expand_as(near)), -1).softmax(-1).mean(1)

        notes, own = self._watch.notes[self._number], plan.step.positions
        count = int(entries.visible.max())
        if count:
            rows = _all_rows(caches.entries, entries.block_table, count, self.backend)
            _compare(notes, q, rows, own, entries.visible, chosen, parts)


def _select(watch: _Watch, number: int, call: IndexTopk, own: Tensor, kpool: int = 1) -> Tensor:
    """Select as `index_topk` does, and record the scores; `own` are the positions of the queries. If keys are pooled,
    groups are selected, and their tokens are returned."""
    notes = watch.notes[number]
    width = max(1, int(call.lengths.max()))
    found = []
    for part, some in call.chunks(SCORE_ELEMENTS // width):
        paged = (some.cache, some.request_ids, some.block_table, some.lengths)
        scores = index_scores(some.q, some.weights, *paged, width=width, backend=some.backend)
        positions, visible = topk_positions(scores, some.lengths, call.k, backend=some.backend), some.lengths
        if kpool > 1:
            visible = own[part] + 1
            scores = _token_scores(scores, positions, visible, kpool)
            positions = select_groups(positions, visible, size=kpool, backend=some.backend)
        notes.add_selection(own[part], visible, positions, scores)
        found.append(positions)
        watch.advance(len(positions))
    return torch.cat(found)


def _token_scores(scores: Tensor, groups: Tensor, visible: Tensor, size: int) -> Tensor:
    """The scores of tokens, from those of their groups; tokens of an incomplete group have the lowest selected one."""
    chosen = scores.gather(1, groups.clamp_min(0).long()).masked_fill(groups < 0, torch.inf).amin(1, keepdim=True)
    least = chosen.masked_fill(chosen == torch.inf, 0.0)
    found = torch.nn.functional.pad(scores.repeat_interleave(size, dim=1), (0, size), value=-torch.inf)
    token = torch.arange(found.shape[1], dtype=torch.int64, device=found.device)
    seen = visible.unsqueeze(1)
    return torch.where((token >= seen // size * size) & (token < seen), least, found)


def _all_rows(cache: PagedCache, block_table: Tensor, count: int, backend: str) -> Tensor:
    """float32 [count, width]: the rows of the only request."""
    out = torch.zeros(count, cache.layout.width, dtype=torch.float32, device=cache.device)
    lengths = torch.tensor([count], dtype=torch.int32, device=cache.device)
    return gather_kv(cache, block_table[:1], lengths, out=out, backend=backend)


def _compare(
    notes: LayerNotes,
    q: Tensor,
    rows: Tensor,
    own: Tensor,
    visible: Tensor,
    positions: Tensor,
    parts: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Compute dense attention of the compared queries, a few at a time: the logits of all would not fit."""
    column = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
    step = max(1, LOGIT_ELEMENTS // (q.shape[1] * len(rows)))
    for part in notes.compared_among(own).split(step):
        queries = q[part].float()
        wide = float32_products(q.device)
        with without_autocast(q.device):
            logits = (queries.to(wide) @ rows.T.to(wide)).float().mul_(notes.spec.scale)
        logits.masked_fill_((column >= visible[part].unsqueeze(1)).unsqueeze(1), -torch.inf)
        chosen = selected_mask(positions[part], len(rows))
        beside = None if parts is None else parts(part, queries, logits, chosen)
        notes.add_shares(own[part], dense_shares(logits, chosen), beside)
