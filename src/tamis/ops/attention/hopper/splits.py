"""Split-KV: how the Hopper kernels split a batch over the device, their outputs, and the kernel that merges splits.

A work item is a query token, or a split of its columns. The first tokens of a launch are whole and are written straight
to the output. The others are split; their splits are written in float32 and merged by a second kernel.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import Float, Int, Long, Pointer, params_bytes, pointer
from tamis.ops.lse import LseForm

VALUE_DIM = 512
OUT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of output dtypes in the kernels."""
MERGE_BATCHES = (4, 16)
"""Splits that the merge loads before it adds any: many hide latency, few leave registers for more CTAs per SM."""
OVERHEAD_STEPS, MERGE_STEPS = 2, 2
"""The fixed cost of a work item, and that of the merge, in steps."""


class SplitPlan(NamedTuple):
    """How a batch is split into work items."""

    whole: int
    """The number of first tokens that are not split: one work item each."""
    splits: int
    """The number of splits, and of work items, of each other token."""


@lru_cache(1024)
def choose_splits(
    tokens: int,
    heads: int,
    steps: int,
    capacity: int,
    *,
    direct: bool = True,
    rows_per_step: int = 2200,
    steps_per_split: int = 1,
) -> SplitPlan:
    """Choose the plan with the shortest estimated duration, in steps of a CTA.

    Work items run in waves of `capacity`. A wave takes as long as a work item has steps, plus a fixed cost. Splits also
    cost the time to write and read them: one step for `rows_per_step` outputs of a head. A split has at least
    `steps_per_split` steps if the token has so many.

    Whole tokens fill whole waves. The other tokens, fewer than `capacity`, are split, so that one more token never
    costs one more wave. Among plans of equal duration the one with the fewest splits is chosen. Unless `direct`, whole
    tokens cannot be written to the output, and all tokens are split alike.
    """

    def duration(plan: SplitPlan) -> float:
        left = tokens - plan.whole
        waves = ceil_div(plan.whole, capacity) * (steps + OVERHEAD_STEPS)
        waves += ceil_div(left * plan.splits, capacity) * (ceil_div(steps, plan.splits) + OVERHEAD_STEPS)
        return waves + (MERGE_STEPS + left * plan.splits * heads / rows_per_step if left else 0)

    plans = [SplitPlan(tokens, 1)] if direct else []
    for whole in sorted({0, tokens // capacity * capacity if direct else 0}):
        plans += [SplitPlan(whole, splits) for splits in range(1, max(1, steps // steps_per_split) + 1)]
    return min(plans, key=duration)


class Outputs(NamedTuple):
    """The tensors that a kernel writes."""

    out: Tensor
    """[..., T, H, V]"""
    lse: Tensor
    """float32 [..., T, H]"""
    max_logits: Tensor
    """float32 [..., T, H]"""

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> "Outputs":
        """Memory for outputs in float32 of a shape [..., T, H]."""
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        return cls(torch.empty(*shape, VALUE_DIM, dtype=torch.float32, device=device), lse, torch.empty_like(lse))

    @classmethod
    def into(cls, out: Tensor, form: LseForm) -> "Outputs":
        """An output [T, H, V] with new memory for lse and max_logits in the given form."""
        lse = torch.empty(form.shape(*out.shape[:2]), dtype=torch.float32, device=out.device)
        return cls(out, lse, torch.empty_like(lse))


def rest_distance(out: Tensor, rest: Tensor | None) -> int:
    """How many elements after those of a bf16 output lies what rounding cuts off them; 0 if it is not kept."""
    return 0 if rest is None else (rest.data_ptr() - out.data_ptr()) // out.element_size()


def can_store(out: Tensor) -> bool:
    """Whether the kernels can write to an output. They write four neighbouring values at a time."""
    token_stride, head_stride, column_stride = out.stride()
    aligned = token_stride % 4 == head_stride % 4 == out.data_ptr() % (4 * out.element_size()) == 0
    return out.dtype in OUT_KINDS and column_stride == 1 and aligned


class MergeParams(NamedTuple):
    """The parameters of `merge_splits.cu`."""

    split_out: Pointer
    """float32 [S, T, H, 512], contiguous."""
    split_lse: Pointer
    """float32 [S, T, H], contiguous."""
    split_max_logits: Pointer
    """float32 [S, T, H], contiguous."""
    splits: Int
    tokens: Int
    heads: Int
    sink: Pointer
    """float32 [H]; 0 for none."""
    out: Pointer
    """float32, bfloat16 or float16 [whole + T, H, 512]."""
    out_kind: Int
    """0 for float32, 1 for bfloat16, 2 for float16."""
    token_stride: Long
    head_stride: Long
    rest: Long
    """How far from an element of bf16 out what rounding cuts off it is written; 0 for nowhere."""
    whole: Int
    """Tokens of out, lse and max_logits before the first split token."""
    lse: Pointer
    """float32 [(whole + T) / group, H, group], contiguous."""
    max_logits: Pointer
    """float32 [(whole + T) / group, H, group], contiguous."""
    group: Int
    """Query tokens that are neighbours in lse and max_logits."""
    lse_factor: Float
    """1 for natural logarithms, log2(e) for base 2."""
    empty_lse: Float
    """The lse of a row that attends to nothing."""


def merge_splits(
    splits: Outputs, sink: Tensor | None, whole: Outputs, form: LseForm, rest: Tensor | None = None
) -> None:
    """Merge splits [S, t, H, ...] into the last t tokens of outputs [T, H, ...]; the output passes `can_store`.

    `rest`, with the strides of a bf16 output, receives what rounding cuts off it.
    """
    launch, grid, params = merge_launch(splits, sink, whole, form)
    launch(grid, params._replace(rest=rest_distance(whole.out, rest)))


def merge_launch(
    splits: Outputs, sink: Tensor | None, whole: Outputs, form: LseForm
) -> tuple[Launch, tuple[int, int, int], MergeParams]:
    """The launch of a merge, its grid and its parameters."""
    count, tokens, heads = splits.lse.shape
    out = whole.out
    token_stride, head_stride, _ = out.stride()
    batch = MERGE_BATCHES[0 if count <= MERGE_BATCHES[0] else 1]
    params = MergeParams(
        splits.out.data_ptr(),
        splits.lse.data_ptr(),
        splits.max_logits.data_ptr(),
        count,
        tokens,
        heads,
        pointer(sink),
        out.data_ptr(),
        OUT_KINDS[out.dtype],
        token_stride,
        head_stride,
        0,
        out.shape[0] - tokens,
        whole.lse.data_ptr(),
        whole.max_logits.data_ptr(),
        max(1, form.group),
        form.factor,
        form.empty,
    )
    return _merge_launch(out.device, batch), (tokens * heads, 1, 1), params


@cache
def merge_program(batch: int) -> Program:
    """The program of the merge, for a number of splits that are loaded at once."""
    return Program.packaged(__package__, "merge_splits.cu", BATCH=batch, PARAMS_BYTES=params_bytes(MergeParams))


@cache
def _merge_launch(device: torch.device, batch: int) -> Launch:
    loaded = kernel(merge_program(batch), "merge_splits", device_index(device))
    return Launch(loaded, MergeParams, threads=VALUE_DIM // 4, overlap=True)
