"""`PooledKeys`: index keys of groups of `LayerSpec.kpool` tokens in a `SparseMLA` layer (GLM-5.3-Flash).

The keys of single tokens and their gates go to `Caches.index_state`. The token that completes a group writes the
group's key, a mean of its tokens' keys weighted by a softmax over their gates per channel, to `Caches.index`. The
indexer selects groups, and `select_groups` turns them into positions.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs
from tamis.ops.compress import check_compress_kv, has_hadamard
from tamis.ops.compress.operations import CompressKv
from tamis.ops.index import check_layout
from tamis.ops.rotate import check_recipe
from tamis.ops.select.operations import SelectGroups, select_groups
from tamis.step.plan import GroupPlan, Plan

_NO_NORM = 1.0
"""An epsilon for an operation without a norm."""


class PooledKeys:
    """The part of a layer's work that pooled index keys add."""

    def __init__(self, spec: LayerSpec, backend: str) -> None:
        """Remember the layer."""
        self.spec, self.backend = spec, backend

    def groups(self, plan: Plan) -> GroupPlan:
        """The groups of a plan, which must be those of the layer."""
        size = self.spec.kpool
        if plan.groups is None or plan.groups.size != size:
            received = None if plan.groups is None else plan.groups.size
            raise checks.refuse("plan.groups", f"of {size} tokens", received, "plan with the layer's spec")
        return plan.groups

    def check(self, index: IndexInputs, keys: PagedCache, state: PagedCache | None, plan: Plan) -> None:
        """Refuse keys and gates that do not fit the layer and its caches, before an operation is built of them."""
        groups = self.groups(plan)
        for name in ("gates", "gate_bias"):
            found = getattr(index, name)
            if (found is None) != (index.keys is None):
                expected = f"{'None' if index.keys is None else 'given'} like index.keys"
                remedy = "a layer with pooled keys takes keys, gates and gate_bias, or none of them"
                raise checks.refuse(f"index.{name}", expected, checks.describe(found), remedy)
        if index.keys is None:
            return
        if state is None:
            remedy = "pass Caches(latent, index, index_state)"
            raise checks.refuse("caches.index_state", "a cache of single tokens' keys and gates", None, remedy)
        checks.instance("caches.index_state", state, PagedCache)
        if state.page_size != groups.state_page_size:
            expected = f"of the plan's page size {groups.state_page_size}"
            raise checks.refuse("caches.index_state", expected, state.page_size, "use one page size for both")
        check_layout(keys, "caches.index")
        dim, device = keys.layout.width, keys.device
        for name in ("keys", "gates"):
            given = getattr(index, name)
            checks.tensor(f"index.{name}", given, "T D", checks.FLOATS, T=plan.rows, D=dim, device=device)
        size = self.spec.kpool
        checks.tensor("index.gate_bias", index.gate_bias, "G D", checks.FLOATS, G=size, D=dim, device=device)

    def write(self, index: IndexInputs, caches: Caches, plan: Plan) -> CompressKv:
        """The operation that keeps the step's keys and gates, and writes the keys of the groups that are complete with
        them."""
        groups, keys, gates, bias = self.groups(plan), index.keys, index.gates, index.gate_bias
        # The arguments have passed `check`.
        assert keys is not None
        assert gates is not None
        assert bias is not None
        assert caches.index is not None
        assert caches.index_state is not None
        where = (plan.positions, groups.state.slots, plan.request_ids, groups.state.block_table, groups.slots)
        options: tuple[None, None, float, bool, str] = (None, None, _NO_NORM, has_hadamard(caches.index), self.backend)
        return CompressKv(keys, gates, caches.index_state, caches.index, *where, bias, *options)

    def check_write(self, call: CompressKv) -> None:
        """Refuse what the operation refuses."""
        check_compress_kv(call, ("caches.index_state", "caches.index"))
        check_recipe(call.cache, 0, "caches.index")

    def positions(self, chosen: Tensor, plan: Plan) -> Tensor:
        """int32 [rows, spec.columns]: the positions of the tokens of chosen groups and of the incomplete one."""
        positions = torch.empty((plan.rows, self.spec.columns or 0), dtype=torch.int32, device=chosen.device)
        select_groups(SelectGroups(chosen, plan.visible, self.spec.kpool, positions, self.backend))
        return positions
