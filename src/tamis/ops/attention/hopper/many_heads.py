"""Sparse attention of 64 heads at a time, for Hopper: launches of `many_heads.cu` and `many_heads_bf16.cu`."""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.fields import from_key
from tamis.cache.layout import Layout, rows, v4_fp8, v32_fp8
from tamis.cache.selection import Selection
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import MAX_CLUSTER, PORTABLE_CLUSTER, Launch, kernel
from tamis.cuda.params import params_bytes
from tamis.ops.attention.hopper.clusters import H200_CLUSTERS, STEP_US, ClusterPlan, choose_plan
from tamis.ops.attention.hopper.params import (
    OutputParams,
    QueryParams,
    SelectionParams,
    output_params,
    query_params,
    selection_params,
)
from tamis.ops.attention.hopper.prepared import AttendLaunch, PreparedAttend, copies_nothing
from tamis.ops.attention.hopper.splits import (
    VALUE_DIM,
    Outputs,
    SplitPlan,
    can_store,
    choose_splits,
    merge_splits,
    rest_distance,
)
from tamis.ops.attention.operations import Attend, AttendSlots
from tamis.ops.combine.triton_kernels import combine_splits
from tamis.ops.lse import LseForm

NAME = "many heads"
HEADS = 64
"""Heads of a work item."""
FEW_HEADS = 16
"""Up to so many heads, the kernel for v4-bf16 rows would compute mostly padding, and is not measured."""
SELECTIONS = 2
"""The most selections that one launch takes."""
MAX_PAGE_SIZE = 2**22
"""Rows of the largest page whose bytes 32 bits count."""
LOAD_BYTES = 16
"""Bytes of a query that a thread loads at a time."""
SHARED_BYTES = 227 * 1024
"""The most shared memory that a CTA may have; the sources lay it out."""


class ManyHeadsParams(NamedTuple):
    """The parameters of both sources; the C++ twin is in `items.cuh`."""

    query: QueryParams
    output: OutputParams
    first: SelectionParams
    second: SelectionParams
    """A copy of `first` where there is one selection."""


class RowKernel(NamedTuple):
    """The kernel for rows of one layout."""

    layout: str
    source: str
    constants: tuple[tuple[str, int], ...]
    """Preprocessor constants of the source: the kind of rows, and the registers per thread of each role."""
    threads: int
    step: int
    """Rows that a CTA processes at a time; a split consists of whole steps."""
    persistent: bool
    """Whether CTAs take one work item after the other; there is then at most one CTA per SM."""

    @property
    def merges(self) -> bool:
        """Whether the kernel can merge the splits of a token in a cluster."""
        return not self.persistent


# The registers of all warpgroups must add up to at most 4 x 128 or 3 x 168, which a launch of 512 or 384 threads gets;
# otherwise a warpgroup waits for registers for ever. Two warpgroups dequantise, and two attend.
_FP8 = (("SCORE_REGISTERS", 160), ("WEIGH_REGISTERS", 224), ("DEQUANTISE_REGISTERS", 64))
_BF16 = (("ATTEND_REGISTERS", 224), ("GATHER_REGISTERS", 56))
_ROPE, _NO_ROPE = ("ROPE_COLUMNS", 64), ("ROPE_COLUMNS", 0)
V32_FP8 = RowKernel("v32-fp8", "many_heads.cu", (("V4", 0), _ROPE, *_FP8), 512, 64, False)
V4_FP8 = RowKernel("v4-fp8", "many_heads.cu", (("V4", 1), _ROPE, *_FP8), 512, 64, False)
V32_BF16 = RowKernel("v32-bf16", "many_heads_bf16.cu", (("WIDTH", 576), *_BF16), 384, 128, True)
V4_BF16 = RowKernel("v4-bf16", "many_heads_bf16.cu", (("WIDTH", 512), *_BF16), 384, 128, True)
# GLM-5.3-Flash's rows, which have no rope.
NOPE_BF16 = RowKernel(rows(rope=0).name, "many_heads_bf16.cu", (("WIDTH", 512), *_BF16), 384, 128, True)
NOPE_FP8 = RowKernel(v32_fp8(rope=0).name, "many_heads.cu", (("V4", 0), _NO_ROPE, *_FP8), 512, 64, False)


def refusal(q: Tensor, selections: Sequence[Selection], value_dim: int) -> str | None:
    """The reason why these kernels do not take a call, or None if they do."""
    if q.dtype != torch.bfloat16:
        return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16"
    if value_dim != VALUE_DIM:
        return f"values are {value_dim} wide, not {VALUE_DIM}"
    if len(selections) > SELECTIONS:
        return f"there are {len(selections)} selections, more than {SELECTIONS}"
    kernels = {kernel_of(s.cache.layout) for s in selections}
    if None in kernels or len(kernels) > 1:
        found = ", ".join(dict.fromkeys(s.cache.layout.name for s in selections))
        return f"caches are {found}, not all v32-fp8, all v4-fp8, all v32-bf16, or all v4-bf16"
    if kernels == {V4_BF16} and q.shape[1] <= FEW_HEADS:
        return f"queries have {q.shape[1]} heads, not more than {FEW_HEADS} as this kernel takes with v4-bf16 rows"
    for held in (s.cache for s in selections):
        if held.page_stride % 16 or held.storage.data_ptr() % 16:
            return "rows do not start at multiples of 16 bytes"
        if held.page_size > MAX_PAGE_SIZE:
            return f"pages have {held.page_size} rows, more than {MAX_PAGE_SIZE}"
    return None


def source(q: Tensor, selections: Sequence[Selection], sms: int) -> str:
    """The name of the source file that runs a call which these kernels take."""
    return _kernel(selections).source


def kernel_of(layout: Layout) -> RowKernel | None:
    """The kernel that reads the bytes of a layout; None if there is none."""
    return _kernel_of_key(layout.key)


@lru_cache(maxsize=256)
def _kernel_of_key(key: str) -> RowKernel | None:
    # A call asks for its kernel several times, and hashing the fields of a layout takes longer than comparing its key.
    return _KERNELS.get(_bytes_of(from_key(key)))


def _bytes_of(layout: Layout) -> tuple[Any, ...]:
    """The fields of a layout that decide the bytes of a row."""
    return layout.latent, layout.rope, layout.values, layout.scales, layout.tail, layout.tile


_KERNELS = {
    _bytes_of(v32_fp8()): V32_FP8,
    _bytes_of(v4_fp8()): V4_FP8,
    _bytes_of(rows()): V32_BF16,
    _bytes_of(v32_fp8(rope=0)): NOPE_FP8,
    _bytes_of(rows(latent=448)): V4_BF16,
    _bytes_of(rows(rope=0)): NOPE_BF16,
}


def attend_slots(call: AttendSlots) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`, in one launch; a split consists of whole steps of the kernel."""
    q = call.q
    plan = _plan(q, call.selections, call.splits, None)
    assert isinstance(plan, SplitPlan)
    split = Outputs.empty(plan.splits, *q.shape[:2], device=q.device)
    _run(q, call.selections, call.factor, output_params(split, split, None, LseForm()))
    return split


def attend(call: Attend, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `reference.attend`; the kernel writes tokens that are whole or merged in clusters straight to `out`.

    `rest`, for a call that `can_keep_rest`, receives what rounding cuts off the output.
    """
    if not can_store(call.out):
        return call.lse_form.arrange(*combine_splits(*attend_slots(call.in_splits()), call.sink, call.out))
    held: list[Tensor] = []  # copies of arguments, which must live until the launch
    launches, whole, split = _launches(call, call.factor, held, rest)
    for launch in launches:
        launch()
    if split is not None:
        merge_splits(split, call.sink, whole, call.lse_form, rest)
    return whole.lse, whole.max_logits


def prepare_attend(call: Attend) -> PreparedAttend | None:
    """Launches for calls like this one, if nothing is copied."""
    q = call.q
    direct = can_store(call.out) and call.q_scale is None
    if not direct or not q.shape[0] or not _loads(q) or not copies_nothing(call.selections):
        return None
    launches, whole, split = _launches(call, call.scale, [])
    return PreparedAttend(call, launches, whole, split, query_alignment=LOAD_BYTES)


def can_keep_rest(call: Attend) -> bool:
    """Whether the kernels write what rounding cuts off the output of a call that they take."""
    return not _kernel(call.selections).merges and can_store(call.out)


def _launches(
    call: Attend, scale: float | Tensor, held: list[Tensor], rest: Tensor | None = None
) -> tuple[list[AttendLaunch], Outputs, Outputs | None]:
    """The launches of a call, its outputs, and the splits that a second kernel merges, if there are any."""
    q, selections = call.q, call.selections
    tokens, heads, _ = q.shape
    plan, whole = _plan(q, selections, call.splits, call.out), Outputs.into(call.out, call.lse_form)
    if not tokens:
        return [], whole, None
    if isinstance(plan, SplitPlan):
        left = tokens - plan.whole
        split = Outputs.empty(plan.splits, left, heads, device=q.device) if left else None
        output = output_params(whole, split, call.sink, call.lse_form)._replace(rest=rest_distance(call.out, rest))
        return [_launch_of(q, selections, scale, output, held)], whole, split
    output, found, first = output_params(whole, None, call.sink, call.lse_form), [], 0
    for count, cluster in plan.parts:
        part = (first, count, cluster) if cluster > 1 else (count, 0, 1)
        numbers = output._replace(whole=part[0], split_tokens=part[1], splits=part[2])
        found.append(_launch_of(q, selections, scale, numbers, held, cluster))
        first += count
    return found, whole, None


def _kernel(selections: Sequence[Selection]) -> RowKernel:
    found = kernel_of(selections[0].cache.layout)
    assert found is not None  # `refusal` has refused other layouts
    return found


def _plan(
    q: Tensor, selections: Sequence[Selection], splits: int | None, out: Tensor | None
) -> SplitPlan | ClusterPlan:
    """Choose how to split the batch. Without an output, all tokens are split alike for `attend_slots`.

    Given splits are merged in a cluster if every GPU can run one of that size, so that the choice, and with it the bits
    of a row, does not depend on the rest of the batch.
    """
    tokens, heads, _ = q.shape
    # The lengths are on the device, so the choice assumes that every column is selected.
    steps = _steps(selections)
    merges = out is not None and out.dtype != torch.float32 and _kernel(selections).merges
    if splits is None and (out is None or not _kernel(selections).merges):
        capacity = max(1, sm_count(q.device) // ceil_div(heads, HEADS))
        return choose_splits(tokens, heads, steps, capacity, direct=out is not None)
    clusters = active_clusters(q.device, _kernel(selections), len(selections)) if merges else (sm_count(q.device),)
    if splits is None:
        return choose_plan(tokens, heads, steps, clusters, merges=merges).plan
    if splits == 1 and out is not None:
        return SplitPlan(tokens, 1)
    # A slice of a GPU may have too few SMs for a cluster of this size.
    if splits <= min(PORTABLE_CLUSTER, len(clusters)) and clusters[splits - 1]:
        return ClusterPlan(((tokens, splits),))
    return SplitPlan(0, splits)


def _steps(selections: Sequence[Selection]) -> int:
    step = _kernel(selections).step
    return max(1, sum(ceil_div(s.slots.shape[1], step) for s in selections))


@cache
def active_clusters(device: torch.device, row_kernel: RowKernel, selections: int) -> tuple[int, ...]:
    """How many clusters of 1, 2, ... CTAs the device runs at a time; those of an H200 where there is no GPU."""
    if device.type != "cuda":
        return H200_CLUSTERS if device.type == "meta" else (sm_count(device),)
    found = [sm_count(device)]
    if row_kernel.merges:
        sizes = range(2, MAX_CLUSTER + 1)
        found += [_launch(device, row_kernel, selections, size).active_clusters() for size in sizes]
    return tuple(found)


def estimate(q: Tensor, selections: Sequence[Selection], device: torch.device) -> float:
    """The estimated duration of a call on a device in microseconds, if these kernels take it and splits are free."""
    clusters = active_clusters(device, _kernel(selections), len(selections))
    plan = choose_plan(q.shape[0], q.shape[1], _steps(selections), clusters, merges=len(clusters) > 1)
    return plan.steps * STEP_US


def _run(q: Tensor, selections: Sequence[Selection], scale: float | Tensor, output: OutputParams) -> None:
    """Write the splits of all tokens, each normalised by its own sum."""
    if q.shape[0]:
        held: list[Tensor] = []  # copies of arguments, which must live until the launch
        _launch_of(q, selections, scale, output, held)()


def _launch_of(
    q: Tensor,
    selections: Sequence[Selection],
    scale: float | Tensor,
    output: OutputParams,
    held: list[Tensor],
    cluster: int = 1,
) -> AttendLaunch:
    row_kernel = _kernel(selections)
    params = many_heads_params(q, selections, scale, output, held)
    whole = output.whole if cluster == 1 else 0  # with clusters, those before the first token of this launch
    ctas = (whole + output.split_tokens * output.splits) * ceil_div(q.shape[1], HEADS)
    if row_kernel.persistent:
        ctas = min(ctas, sm_count(q.device))
    launch = _launch(q.device, row_kernel, len(selections), cluster, output.rest != 0)
    return AttendLaunch(launch, (ctas, 1, 1), params, ("first", "second"))


def many_heads_params(
    q: Tensor, selections: Sequence[Selection], scale: float | Tensor, output: OutputParams, held: list[Tensor]
) -> ManyHeadsParams:
    """The parameters of a launch; tensors that had to be copied go to `held`."""
    if not _loads(q):
        q = q.clone(memory_format=torch.contiguous_format)
        held.append(q)
    described = [selection_params(selection, held) for selection in selections]
    return ManyHeadsParams(query_params(q, scale, held), output, described[0], described[-1])


def _loads(q: Tensor) -> bool:
    """Whether the kernels can load from a query; they load eight neighbouring elements at a time."""
    return q.stride(2) == 1 and not (q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % LOAD_BYTES)


@cache
def program(row_kernel: RowKernel, selections: int, merges: bool, keep_rest: bool = False) -> Program:
    """The program of a kernel for one or two selections.

    Args:
        row_kernel: the kernel.
        selections: how many.
        merges: whether the splits of a token are merged in a cluster.
        keep_rest: whether it writes what rounding cuts off a bf16 output as well.
    """
    return Program.packaged(
        __package__,
        row_kernel.source,
        **dict(row_kernel.constants),
        SELECTIONS=selections,
        MERGE_IN_CLUSTER=int(merges),
        KEEP_REST=int(keep_rest),
        THREADS=row_kernel.threads,
        SHARED_BYTES=SHARED_BYTES,
        PARAMS_BYTES=params_bytes(ManyHeadsParams),
    )


@cache
def _launch(
    device: torch.device, row_kernel: RowKernel, selections: int, cluster: int, keep_rest: bool = False
) -> Launch:
    loaded = kernel(program(row_kernel, selections, cluster > 1, keep_rest), "attend_many_heads", device_index(device))
    return Launch(
        loaded, ManyHeadsParams, threads=row_kernel.threads, shared=SHARED_BYTES, cluster=cluster, overlap=True
    )
