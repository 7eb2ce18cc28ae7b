"""Checks of whole `SparseMLA` calls over several steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tamis.cache.layout import index_fp8, named
from tamis.cache.paged import PagedCache
from tamis.cache.pool import PagePool
from tamis.cache.selection import Caches, Selection
from tamis.lab.testing import oracle
from tamis.lab.testing.cases import Draw
from tamis.lab.verify.attend import SIXTEEN_BITS, attention_error
from tamis.lab.verify.check import NOT_BATCH_INVARIANT, Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differing_bits, graph_check, repeat_check
from tamis.layers.mla import SparseMLA
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs
from tamis.step.batch import Batch, PageMap
from tamis.step.plan import Limits, Mode, Plan
from tamis.step.planner import Planner

PAGE, PAGES = 16, 60
LIMITS = Limits(max_tokens=128, max_requests=6, max_length=160, page_size=PAGE, workspace_rows=170)
STEPS = ([40, 23, 1], [1, 1, 1], [1, 1, 30, 17])
"""New tokens per request in each step: prompts, a decode step, a mixed step with a new request."""
LAYER_STAGES = ("write", "translate", "attend", "combine")


@dataclass(frozen=True)
class LayerCase:
    """A layer and how its steps are planned."""

    name: str
    spec: LayerSpec
    layout: str
    mode: Mode = "mixed"
    indexed: bool = False
    """Whether the layer selects positions with its own indexer."""

    @property
    def stages(self) -> list[str]:
        """The stages that its calls run."""
        more = ["gather"] * (self.mode == "separate") + ["index"] * self.indexed
        return [*LAYER_STAGES, *more]


def _layer_cases(target: Target) -> list[LayerCase]:
    v32 = LayerSpec(16, scale=0.05, topk=32)
    found = [
        LayerCase("V3.2, 16 heads, mixed", v32, "v32-fp8"),
        LayerCase("V3.2, 64 heads, separate", replace(v32, heads=64), "v32-fp8", "separate"),
        LayerCase("V3.2, 16 heads, indexed", replace(v32, index_heads=4, index_dim=128), "v32-fp8", indexed=True),
        LayerCase("bf16 rows, 5 heads", replace(v32, heads=5), "v32-bf16"),
        LayerCase("V4, 8 heads, sink", LayerSpec(8, 448, 64, 512, 0.05, topk=32, sink=True), "v4-fp8"),
    ]
    return [case for case in found if _takes(target, case)]


def _takes(target: Target, case: LayerCase) -> bool:
    heads, sink = case.spec.heads, case.spec.sink
    claimed = target.takes("attend", named(case.layout), page_size=PAGE, heads=heads, dtype=torch.bfloat16, sink=sink)
    return claimed and all(target.runs(stage) is not None for stage in case.stages)


class Served:
    """Requests served step by step on the target, and a cache on the host that the oracle fills."""

    def __init__(self, target: Target, case: LayerCase, *, batch_invariant: bool = False) -> None:
        """Start with an empty cache."""
        self.target, self.case, self.draw = target, case, Draw(f"layer {case.name}")
        self.pool = PagePool(PAGES, PAGE, seed=3)
        self.host = PagedCache(case.layout, PAGES, PAGE)
        latent = PagedCache(case.layout, PAGES, PAGE, target.device)
        index = PagedCache(index_fp8(), PAGES, PAGE, target.device) if case.indexed else None
        self.caches = Caches(latent, index)
        self.planner = Planner(case.spec, LIMITS, target.device, layout=case.layout, mode=case.mode)
        self.layer = SparseMLA(case.spec, backend=target.backend, batch_invariant=batch_invariant)
        self.sink = self.draw.normal(case.spec.heads) if case.spec.sink else None
        # Weights are moved once, since a captured graph cannot copy from the host.
        self.sink_here = target.here(self.sink)
        self.lengths: list[int] = []

    def plan(self, new_tokens: Sequence[int], *, padded: int | None = None) -> tuple[Batch, Plan]:
        """Plan the next step with these numbers of new tokens per request; additional numbers start new requests."""
        self.lengths += [0] * (len(new_tokens) - len(self.lengths))
        self.lengths = [length + new for length, new in zip(self.lengths, new_tokens, strict=True)]
        batch = replace(Batch.build(new_tokens, self.lengths, self.pool), padded_tokens=padded)
        pages = PageMap(*self.target.here([batch.pages.block_table, batch.pages.slots]))
        return batch, self.planner.plan(replace(batch, pages=pages))

    def inputs(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, rows and positions for the step, on the host; each token sees itself and earlier tokens."""
        spec = self.case.spec
        q = self.draw.normal(plan.rows, spec.heads, spec.head_dim, dtype=torch.bfloat16)
        kv = self.draw.normal(plan.rows, spec.head_dim, dtype=torch.bfloat16)
        assert spec.topk is not None
        seen = plan.positions.cpu().unsqueeze(1)
        picks = self.draw.integers(0, LIMITS.max_length, plan.rows, spec.topk) % (seen + 1).clamp_min(1)
        dropped = self.draw.integers(0, 6, plan.rows, spec.topk) == 0
        return q, kv, torch.where(dropped | (seen < 0), -1, picks).int()

    def expected(self, batch: Batch, q: Tensor, kv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Output and lse of the step, padded rows included."""
        tokens = len(batch.pages.slots)
        oracle.write(kv[:tokens], self.host, batch.pages.slots)
        ids = torch.zeros(len(q), dtype=torch.int32, device="cpu")
        ids[:tokens] = torch.repeat_interleave(
            torch.arange(len(batch.lengths), dtype=torch.int64, device="cpu"), batch.query_starts.diff()
        ).int()
        selection = Selection(self.host, positions, None, ids, batch.pages.block_table)
        spec = self.case.spec
        return oracle.attend(q, [selection], scale=spec.scale, value_dim=spec.value_dim, sink=self.sink)

    def run(self, plan: Plan, q: Tensor, kv: Tensor | None, positions: Tensor) -> list[Tensor]:
        """One call of the layer with given positions."""
        found = self.layer(q, kv, self.caches, plan, positions=positions, sink=self.sink_here)
        return [found.out, found.lse]

    def index_inputs(self, plan: Plan) -> IndexInputs:
        """The inputs of the layer's own indexer."""
        q, weights = self.draw.normal(plan.rows, 4, 128, dtype=torch.bfloat16), self.draw.normal(plan.rows, 4)
        keys = self.draw.normal(plan.rows, 128, dtype=torch.bfloat16)
        return self.target.here(IndexInputs(q, weights, keys))


def layer_checks(target: Target) -> Iterator[Check]:
    """Calls over prompts, decodes and mixed steps; repeated, alone, and from a captured graph."""
    found = _layer_cases(target)
    trials = named_calls(_serve, target, found)
    yield Check("layer", "prompts, decodes, mixed steps", SIXTEEN_BITS, trials)
    given = [case for case in found if not case.indexed]
    yield repeat_check("layer", named_calls(_decoded, target, given))
    reason = target.not_batch_invariant("attend")
    name = "same bits alone and in a batch"
    alone = [] if reason else named_calls(_alone, target, [case for case in given if case.mode == "mixed"])
    yield Check("layer", name, 0.0, alone, reason, remedy=NOT_BATCH_INVARIANT)
    replays = named_calls(_again, target, [case for case in given if case.mode == "mixed"])
    yield graph_check(target, "layer", LAYER_STAGES, replays)


def _serve(target: Target, case: LayerCase) -> Trial:
    served = Served(target, case)
    worst = Trial(0.0)
    for number, new_tokens in enumerate(STEPS):
        batch, plan = served.plan(new_tokens, padded=sum(new_tokens) + 5 * (number == 1))
        q, kv, positions = served.inputs(plan)
        here = target.here([q, kv, positions])
        if case.indexed:
            index = served.index_inputs(plan)
            result = served.layer(here[0], here[1], served.caches, plan, index=index, sink=served.sink_here)
            # Stage `index` checks the selection; here attention must use the selected positions.
            out, lse, positions = result.out, result.lse, served.layer.select(index, served.caches, plan).cpu()
        else:
            out, lse = served.run(plan, *here)
        found = attention_error(out, lse, *served.expected(batch, q, kv, positions))
        if not found.error <= worst.error:
            worst = Trial(found.error, f"step {number}: {found.note}")
    return worst


def _prefilled(target: Target, case: LayerCase, *, batch_invariant: bool = False) -> Served:
    served = Served(target, case, batch_invariant=batch_invariant)
    _, plan = served.plan(STEPS[0])
    served.run(plan, *target.here(served.inputs(plan)))
    return served


def _decoded(target: Target, case: LayerCase) -> list[Tensor]:
    served = _prefilled(target, case)
    _, plan = served.plan(STEPS[1])
    out = served.run(plan, *target.here(served.inputs(plan)))
    return [*out, served.caches.latent.storage]


def _alone(target: Target, case: LayerCase) -> Trial:
    """Each request's decode alone must give the bits of the decode in a batch, from the same cached rows."""
    served = _prefilled(target, case, batch_invariant=True)
    batch, plan = served.plan(STEPS[1])
    q, kv, positions = target.here(served.inputs(plan))
    whole = served.run(plan, q, kv, positions)
    worst = Trial(0.0)
    for request, length in enumerate(batch.lengths.tolist()):
        one = Batch.build([1], [length], served.pool, requests=[request])
        pages = PageMap(*target.here([one.pages.block_table, one.pages.slots]))
        row = slice(request, request + 1)
        found = served.run(served.planner.plan(replace(one, pages=pages)), q[row], None, positions[row])
        differences = count_differing_bits(found, [output[row] for output in whole])
        if differences.error > worst.error:
            worst = Trial(differences.error, f"request {request}: {differences.note}")
    return worst


def _again(target: Target, case: LayerCase) -> tuple[list[Tensor], list[Tensor], "_LayerCall"]:
    """A decode step with padded rows, then a step without one of the requests."""
    served = _prefilled(target, case)
    _, plan = served.plan([1, 1, 1], padded=6)
    first = target.here([*served.inputs(plan), *_changing(plan)])
    _, plan = served.plan([1, 0, 1], padded=6)
    second = target.here([*served.inputs(plan), *_changing(plan)])
    return first, second, _LayerCall(served, plan)


def _changing(plan: Plan) -> list[Tensor]:
    """Copies of the plan's buffers that a decode call reads."""
    return [t.clone() for t in (plan.request_ids, plan.positions, plan.slots, plan.block_table, plan.lengths)]


class _LayerCall:
    """Calls the layer on a cache that is restored before every call."""

    def __init__(self, served: Served, plan: Plan) -> None:
        self._served, self._plan = served, plan
        self._before = served.caches.latent.storage.clone()

    def __call__(self, q: Tensor, kv: Tensor, positions: Tensor, *buffers: Tensor) -> list[Tensor]:
        ids, own, slots, table, lengths = buffers
        plan = replace(self._plan, request_ids=ids, positions=own, slots=slots, block_table=table, lengths=lengths)
        storage = self._served.caches.latent.storage
        storage.copy_(self._before)
        return [*self._served.run(plan, q, kv, positions), storage.clone()]
