"""How layers run the selections of their indexers."""

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from tamis.cache.shard import Shard
from tamis.ops.index.block_operations import IndexTopkAndBlocks
from tamis.ops.index.columns import seen_columns
from tamis.ops.index.operations import IndexTopk, index_topk
from tamis.ops.index.prepared import PreparedTopk
from tamis.step.plan import Plan

if TYPE_CHECKING:
    from tamis.ops.index.over_ranks import OverRanks

C = TypeVar("C", IndexTopk, IndexTopkAndBlocks)


def run_selection(
    call: IndexTopk, plan: Plan, known: PreparedTopk | None, over: "OverRanks | None", span: int = 1
) -> Tensor:
    """Run a layer's checked selection, and return its positions.

    Args:
        call: the selection.
        plan: the step.
        known: what was prepared for calls like this one.
        over: the ranks that select together.
        span: tokens per key.
    """
    short = for_prompts(call, plan, span, None if over is None else over.shard)
    if over is not None:
        over.run(short)
    elif known is None:
        index_topk(short)
    elif short is call:
        known.run(call)
    else:
        known.run_short(short)
    return call.out


def for_prompts(call: C, plan: Plan, span: int = 1, shard: Shard | None = None) -> C:
    """The selection of a step with prompts, with no more columns of the planner's block table than the longest request
    has keys. Steps of decodes keep all columns: they are captured in CUDA graphs, after calls that load their kernels.

    Args:
        call: the selection.
        plan: the step.
        span: tokens per key.
        shard: the part of the keys that this rank holds; None if it holds all.
    """
    # Compiled code would depend on the number, and would be compiled anew for each.
    if torch.compiler.is_compiling() or plan.prefill is None:
        return call
    keys = plan.max_length // span
    keys = keys if shard is None else shard.most(keys)
    table = call.block_table
    short = seen_columns(table, call.cache.page_size, call.q.shape[0], keys, call.workspace_bytes)
    return call if short is table else call._replace(block_table=short)
