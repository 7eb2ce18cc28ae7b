"""Pooled index keys in a `SparseMLA` layer (GLM-5.3-Flash): one key per group of `LayerSpec.kpool` tokens.

The keys of single tokens and their gates go to `Caches.index_state`. The token that completes a group writes the
group's key, a mean of its tokens' keys weighted by a softmax over their gates per channel, to `Caches.index`. The
indexer selects groups, and `select_groups` turns them into positions.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs
from tamis.ops.compress import check_compress_kv, check_recipe, has_hadamard
from tamis.ops.compress.operations import CompressKv, compress_kv
from tamis.ops.index import check_layout
from tamis.ops.select.operations import SelectGroups, select_groups
from tamis.ops.write.operations import WriteKv, write_kv
from tamis.step.plan import GroupPlan, Plan

Write: TypeAlias = WriteKv | CompressKv
"""A write of a layer call: of rows, of index keys, or of pooled index keys."""

_NO_NORM = 1.0
"""An epsilon for an operation without a norm."""


def groups_of(plan: Plan, spec: LayerSpec) -> GroupPlan:
    """The groups of a plan, which must be those of the layer."""
    if plan.groups is None or plan.groups.size != spec.kpool:
        received = None if plan.groups is None else plan.groups.size
        raise checks.refuse("plan.groups", f"of {spec.kpool} tokens", received, "plan with the layer's spec")
    return plan.groups


def check_pooled(spec: LayerSpec, index: IndexInputs, caches: Caches, plan: Plan) -> None:
    """Refuse keys and gates that do not fit the layer and its caches, before an operation is built of them."""
    groups = groups_of(plan, spec)
    for name in ("gates", "gate_bias"):
        if (getattr(index, name) is None) != (index.keys is None):
            given = "None" if index.keys is None else "given"
            remedy = "a layer with pooled keys takes keys, gates and gate_bias, or none of them"
            raise checks.refuse(f"index.{name}", f"{given} like index.keys", type(getattr(index, name)), remedy)
    if index.keys is None:
        return
    keys, state = caches.index, caches.index_state
    if state is None:
        remedy = "pass Caches(latent, index, index_state)"
        raise checks.refuse("caches.index_state", "a cache of single tokens' keys and gates", None, remedy)
    checks.instance("caches.index_state", state, PagedCache)
    if state.page_size != groups.state_page_size:
        expected = f"of the plan's page size {groups.state_page_size}"
        raise checks.refuse("caches.index_state", expected, state.page_size, "use one page size for both")
    assert keys is not None
    check_layout(keys, "caches.index")
    sizes = {"T": plan.rows, "D": keys.layout.width}
    for name in ("keys", "gates"):
        checks.tensor(f"index.{name}", getattr(index, name), "T D", checks.FLOATS, device=keys.device, **sizes)  # type: ignore[arg-type]
    sizes = {"G": spec.kpool, "D": keys.layout.width}
    checks.tensor("index.gate_bias", index.gate_bias, "G D", checks.FLOATS, device=keys.device, **sizes)  # type: ignore[arg-type]


def pooling(index: IndexInputs, caches: Caches, plan: Plan, spec: LayerSpec, backend: str) -> CompressKv:
    """The operation that keeps the step's keys and gates, and writes the keys of the groups that are complete with
    them."""
    groups, keys, gates, bias = groups_of(plan, spec), index.keys, index.gates, index.gate_bias
    # The arguments have been checked by `check_pooled`.
    assert keys is not None
    assert gates is not None
    assert bias is not None
    assert caches.index is not None
    assert caches.index_state is not None
    where = (plan.positions, groups.state.slots, plan.request_ids, groups.state.block_table, groups.slots)
    options: tuple[None, None, float, bool, str] = (None, None, _NO_NORM, has_hadamard(caches.index), backend)
    return CompressKv(keys, gates, caches.index_state, caches.index, *where, bias, *options)


def check_pooling(call: CompressKv) -> None:
    """Refuse what the operation refuses."""
    check_compress_kv(call, ("caches.index_state", "caches.index"))
    check_recipe(call.cache, 0, "caches.index")


def run_write(call: Write) -> None:
    """Run a write."""
    if isinstance(call, CompressKv):
        compress_kv(call)
    else:
        write_kv(call)


def positions_of_groups(chosen: Tensor, plan: Plan, spec: LayerSpec, backend: str) -> Tensor:
    """int32 [rows, spec.columns]: the positions of the tokens of chosen groups and of the incomplete one."""
    positions = torch.empty((plan.rows, spec.columns or 0), dtype=torch.int32, device=chosen.device)
    select_groups(SelectGroups(chosen, plan.visible, spec.kpool, positions, backend))
    return positions
