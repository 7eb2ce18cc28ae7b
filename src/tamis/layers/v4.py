"""`SparseV4`: one DeepSeek-V4 attention layer, from hidden states to hidden states."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from tamis import checks
from tamis.arithmetic import ceil_div, float32_products, without_autocast
from tamis.cache.v4_caches import V4Caches
from tamis.layers.mla import FIXED_COLUMNS
from tamis.layers.v4_checks import Projected, V4Checks, attended_rows, entry_plan
from tamis.layers.v4_gathered import gathered_unchecked
from tamis.layers.v4_weights import CompressorWeights, V4Weights
from tamis.model.spec import LayerSpec
from tamis.ops import Rotated
from tamis.ops.attention import new_output
from tamis.ops.attention.operations import Attend, attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.compress import operations as compress_ops
from tamis.ops.index import WORKSPACE_BYTES
from tamis.ops.index import registered as index_ops
from tamis.ops.output import operations as output_ops
from tamis.ops.output.operations import LowerGroups, RotateToFp8
from tamis.ops.rotate import operations as rotate_ops
from tamis.ops.rotate import run_rotate_and_write
from tamis.ops.rotate.operations import NormRows, RotateHeads
from tamis.step.lease import needs_latest_plan
from tamis.step.v4_plan import V4Plan

__all__ = ["SparseV4", "V4Caches", "project"]


class SparseV4:
    """The attention of one V4 layer of any kind: projections, norms and rotations, the writes to all of its caches,
    compression, selection, attention over window and entries with sinks, and the grouped output projection.

    The object holds weights and no state of a step; caches, plan and hidden states are arguments.
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
    ) -> None:
        """Remember what to compute.

        Args:
            spec: the layer; its kind decides what there is besides the window.
            weights: of this layer, for the spec's heads.
            cos_sin: float32 [max_positions, rope_dim] of this kind of layer, from `Rope.from_hf_v4`; layers with a
                window only have another theta than the rest, and no YaRN.
            eps: of all norms.
            backend: a name from `tamis backends`, or "auto". A named backend runs or the call fails.
            batch_invariant: as in `SparseMLA`; without effect on prefills that a plan gathers.
        """
        self._checks = V4Checks(spec, weights, cos_sin, eps, backend)
        self.spec, self.weights, self.cos_sin, self.eps = spec, weights, cos_sin, float(eps)
        self.backend, self.batch_invariant = backend, checks.flag("batch_invariant", batch_invariant)

    @needs_latest_plan
    def __call__(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor:
        """Attend the step's tokens: hidden states [rows, hidden] to hidden states of the same shape and dtype.

        The tokens' rows, state and entries are written first, since a token attends to itself and to the entry that it
        completes. Padded rows come out as zeros.
        """
        checks.instance("plan", plan, V4Plan)
        # Everything is checked before anything is written: a refused call leaves the caches as they were.
        known = self._checks.passed(hidden, caches, plan)
        if not known:
            self._checks.arguments(hidden, caches, plan)
        self._checks.no_gradient(hidden)
        if plan.step.requests == 0:
            return torch.zeros_like(hidden)
        made = self._project(hidden)
        if not known:
            self._checks.stages(made, caches, plan)
            self._checks.remember(hidden, caches, plan)
        q, index_q = self.write_unchecked(made, caches, plan)
        chosen = None
        if index_q is not None and made.index_weights is not None:
            chosen = self.select_unchecked(index_q, made.index_weights, caches, plan)
        return self._output(self._attend(q, chosen, caches, plan), plan)

    @needs_latest_plan
    def write(self, hidden: Tensor, caches: V4Caches, plan: V4Plan) -> Rotated:
        """Insert the new tokens' raw rows, remember them for compression, and insert what they complete; the queries
        [rows, H, D] and the indexer's, which are rotated in the same pass as the rows."""
        checks.instance("plan", plan, V4Plan)
        self._checks.arguments(hidden, caches, plan)
        self._checks.no_gradient(hidden)
        made = self._project(hidden)
        if plan.step.requests == 0:
            return Rotated(made.q, made.index_q)
        self._checks.writes(made, caches, plan)
        return self.write_unchecked(made, caches, plan)

    def write_unchecked(self, made: Projected, caches: V4Caches, plan: V4Plan) -> Rotated:
        """As `write`, of what was projected and checked: what a layer call runs."""
        queries = run_rotate_and_write(self._checks.rotation(made, caches, plan))
        for _, call in self._checks.compressions(made, caches, plan):
            compress_ops.compress_kv(call)
        return queries

    def select(self, hidden: Tensor, index_q: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor:
        """Entries int32 [rows, topk] by this layer's indexer, -1 where there are no more. `index_q` is what `write`
        returned."""
        checks.instance("plan", plan, V4Plan)
        indexer = self.weights.indexer
        if indexer is None:
            raise checks.refuse("select", "called on a layer with an indexer", self.spec.kind, "it attends to all")
        self._checks.arguments(hidden, caches, plan)
        self._checks.no_gradient(hidden)
        if plan.step.requests == 0:
            return torch.full((len(hidden), self.spec.topk or 0), -1, dtype=torch.int32, device=hidden.device)
        weights = project(hidden, indexer.weights, torch.float32)
        self._checks.selects(index_q, weights, caches, plan)
        return self.select_unchecked(index_q, weights, caches, plan)

    def select_unchecked(self, index_q: Tensor, index_weights: Tensor, caches: V4Caches, plan: V4Plan) -> Tensor:
        """As `select`, of inputs that were checked: what a layer call runs."""
        spec, entries = self.spec, entry_plan(self.spec, plan)
        assert caches.index is not None
        assert spec.topk is not None
        where = (plan.step.request_ids, entries.block_table, entries.visible)
        return index_ops.index_topk(
            index_q, index_weights, caches.index, *where, spec.topk, WORKSPACE_BYTES, self.backend
        )

    def output(self, attended: Tensor, plan: V4Plan) -> Tensor:
        """Hidden states [rows, hidden] from attention's [rows, H, D], whose values were rotated as keys are."""
        checks.instance("plan", plan, V4Plan)
        self._checks.outputs(attended, plan)
        return self._output(attended, plan)

    def _project(self, hidden: Tensor) -> Projected:
        """The layer's products with hidden states. They write nothing, so checks of what becomes of them come after."""
        weights, spec = self.weights, self.spec
        compressed_q = rotate_ops.norm_rows(
            NormRows(project(hidden, weights.q_a), weights.q_norm, self.eps, self.backend)
        )
        index_q, index_weights, index_entry = None, None, None
        if weights.indexer is not None:
            index_q = project(compressed_q, weights.indexer.q).unflatten(1, (spec.index_heads, spec.index_dim))
            # The model's constant factor, positive, would change no order.
            index_weights = project(hidden, weights.indexer.weights, torch.float32)
            index_entry = _entry(hidden, weights.indexer.compressor)
        return Projected(
            project(compressed_q, weights.q_b).unflatten(1, (spec.heads, -1)),
            project(hidden, weights.kv),
            None if weights.compressor is None else _entry(hidden, weights.compressor),
            index_q,
            index_weights,
            index_entry,
        )

    def _output(self, attended: Tensor, plan: V4Plan) -> Tensor:
        weights, positions = self.weights, plan.step.positions
        if weights.o_a_scales is not None:
            return project(self._lower_in_fp8(attended, positions, weights.o_a_scales), weights.o_b)
        turned = rotate_ops.rotate_heads(RotateHeads(attended, positions, self.cos_sin, None, True, self.backend))
        grouped = turned.flatten(1).unflatten(1, (weights.o_a.shape[0], -1)).transpose(0, 1)
        wide = _product_dtype(turned)
        with without_autocast(turned.device):
            lowered = torch.bmm(grouped.to(wide), weights.o_a.to(wide).transpose(1, 2)).transpose(0, 1).to(turned.dtype)
        return project(lowered.flatten(1), weights.o_b)

    def _lower_in_fp8(self, attended: Tensor, positions: Tensor, weight_scales: Tensor) -> Tensor:
        """[rows, groups * o rank]"""
        groups, tile = self.weights.o_a.shape[0], self.weights.output_tile
        assert tile is not None
        call = RotateToFp8(attended, positions, self.cos_sin, tile, True, self.backend)
        values, scales = output_ops.rotate_to_fp8(call)
        grouped, exponents = (part.flatten(1).unflatten(1, (groups, -1)) for part in (values, scales))
        weight, dtype = self.weights.o_a, attended.dtype
        lower = LowerGroups(grouped, exponents, weight, weight_scales, dtype, self.backend)
        return output_ops.lower_groups(lower).flatten(1)

    def _attend(self, q: Tensor, chosen: Tensor | None, caches: V4Caches, plan: V4Plan) -> Tensor:
        spec, sink = self.spec, self.weights.sink
        if plan.workspace is not None:
            numbers = (spec.compress, spec.scale, spec.value_dim, sink, self.backend)
            return gathered_unchecked(q, plan, caches.window, caches.entries, chosen, *numbers)
        selections = attended_rows(spec, chosen, caches, plan)
        columns = sum(s.slots.shape[1] for s in selections)
        splits = ceil_div(columns, FIXED_COLUMNS) if self.batch_invariant else None
        out = new_output(q, spec.value_dim)
        attend(Attend(q, selections, spec.scale, None, splits, contiguous_sink(sink), out, False, self.backend))
        return out


def _entry(hidden: Tensor, weights: CompressorWeights) -> tuple[Tensor, Tensor]:
    """Values and scores of each token for a compressor."""
    return project(hidden, weights.values, torch.float32), project(hidden, weights.scores, torch.float32)


def project(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight.T in x's dtype, or another; on a CPU the product runs in float32."""
    wide = _product_dtype(x)
    with without_autocast(x.device):
        if dtype == torch.float32 and wide in (torch.bfloat16, torch.float16):
            # What the product sums in float32 anyway is not rounded in between.
            return torch.mm(x, weight.to(wide).T, out_dtype=dtype)
        return linear(x.to(wide), weight.to(wide)).to(x.dtype if dtype is None else dtype)


def _product_dtype(x: Tensor) -> torch.dtype:
    # 16-bit matrix products are not usable on every CPU, and a reference should not round twice. On a device, float32
    # products follow what the program allows, as those of every other linear layer of the model do.
    return float32_products(x.device) if x.device.type == "cpu" else x.dtype
