"""Sparse attention of few heads over FP8 or bf16 rows in CUDA C++, for Hopper: two kernels and their launches.

`few_heads.cu` has 16 heads in a CTA, the M dimension of mma.sync. `heads_as_columns.cu` has 16 or 32, the N dimension
of wgmma. Both take the same parameters. With more heads there are more CTAs, which read the same rows.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.selection import Selection
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import params_bytes
from tamis.ops.attention.hopper.few_heads_shapes import (
    BF16_ROWS,
    FP8_ROWS,
    MMA_HEADS,
    CtaShape,
    RowKind,
    row_kind,
)
from tamis.ops.attention.hopper.params import (
    AttendParams,
    OutputParams,
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

NAME = "few heads"
COPY_ALIGNMENT = 16
"""Alignment in bytes that bulk copies require of a row's address."""
LOAD_BYTES = 8
"""Bytes of a query that a thread loads at a time."""
QUERY_DTYPES = (torch.bfloat16, torch.float16)
MERGE_US = 2.5
"""The duration of the merge of splits in microseconds."""


def refusal(q: Tensor, selections: Sequence[Selection], value_dim: int) -> str | None:
    """The reason why these kernels do not take a call, or None if they do."""
    if q.dtype not in QUERY_DTYPES:
        return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16 or float16"
    if value_dim != VALUE_DIM:
        return f"values are {value_dim} wide, not {VALUE_DIM}"
    for selection in selections:
        held = selection.cache
        kind = row_kind(held.layout.key)
        if kind is None:
            return f"rows are {held.layout.name}, not v32-fp8 or v32-bf16"
        if kind.bf16 and q.dtype != torch.bfloat16:
            return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16, over {held.layout.name} rows"
        if held.page_stride % COPY_ALIGNMENT or held.storage.data_ptr() % COPY_ALIGNMENT:
            return f"rows do not start at multiples of {COPY_ALIGNMENT} bytes"
    return None


def source(q: Tensor, selections: Sequence[Selection], sms: int) -> str:
    """The names of the source files that run a call which these kernels take."""
    tokens, heads, _ = q.shape
    names = []
    for selection in selections:
        kind, columns = _kind_of(selection), selection.slots.shape[1]
        names.append(choose_shape(tokens, heads, sms, kind.bf16, columns, kind.rope).source)
    return " and ".join(f"{name}.cu" for name in dict.fromkeys(names))


def _kind_of(selection: Selection) -> RowKind:
    found = row_kind(selection.cache.layout.key)
    assert found is not None  # `refusal` has refused other layouts
    return found


def suits(tokens: int | None, heads: int, bf16_rows: bool) -> bool:
    """Whether these kernels are faster than those for many heads, if both take a call (see benchmarks/NOTES.md).

    Without a number of tokens, the answer holds for any number. FP8 rows with one are decided by estimates instead.
    """
    return heads <= (MMA_HEADS if bf16_rows else 2 * MMA_HEADS) or _few_pairs(tokens, heads, bf16_rows)


def _few_pairs(tokens: int | None, heads: int, bf16_rows: bool) -> bool:
    most = (BF16_ROWS if bf16_rows else FP8_ROWS).few_pairs
    return tokens is not None and most is not None and tokens * ceil_div(heads, MMA_HEADS) <= most


def choose_shape(tokens: int | None, heads: int, sms: int, bf16_rows: bool, columns: int, rope: int = 64) -> CtaShape:
    """The fastest shape; without a number of tokens, one shape for any number of tokens.

    CTAs with two streams need fewer splits of a token, so they are fastest if there are few tokens.
    """
    shapes = RowKind(bf16_rows, rope).shapes
    if heads > MMA_HEADS and tokens is not None and shapes.few_pairs is None:
        both = (shapes.few_tokens, shapes.more_heads)
        return min(both, key=lambda shape: _duration(shape, tokens, heads, columns, sms))
    if heads > MMA_HEADS and not _few_pairs(tokens, heads, bf16_rows):
        return shapes.more_heads
    return shapes.few_tokens if tokens is not None and tokens <= 2 * sms else shapes.many_tokens


def estimate(q: Tensor, selections: Sequence[Selection], sms: int) -> float:
    """The estimated duration of a call over FP8 rows in microseconds, one launch per selection."""
    tokens, heads, _ = q.shape
    total = 0.0
    for selection in selections:
        columns, rope = selection.slots.shape[1], _kind_of(selection).rope
        total += _duration(choose_shape(tokens, heads, sms, False, columns, rope), tokens, heads, columns, sms)
    return total


def _duration(shape: CtaShape, tokens: int, heads: int, columns: int, sms: int) -> float:
    """The estimated duration of a shape in microseconds; the constants are fitted to benchmarks/NOTES.md."""
    launch, item, step = shape.microseconds
    capacity, steps = _capacity(shape, heads, sms), max(1, ceil_div(columns, shape.columns))
    whole, splits = _shape_splits(shape, tokens, heads, columns, sms, direct=True)
    total = launch + ceil_div(whole, capacity) * (steps * step + item)
    if whole < tokens:
        total += ceil_div((tokens - whole) * splits, capacity) * (ceil_div(steps, splits) * step + item) + MERGE_US
    return total


def _capacity(shape: CtaShape, heads: int, sms: int) -> int:
    """Work items that the device runs at a time."""
    return max(1, shape.per_sm * sms // ceil_div(heads, shape.heads))


def _shape_splits(shape: CtaShape, tokens: int, heads: int, columns: int, sms: int, *, direct: bool) -> SplitPlan:
    return choose_splits(
        tokens,
        max(heads, MMA_HEADS),
        max(1, ceil_div(columns, shape.columns)),
        _capacity(shape, heads, sms),
        direct=direct,
        rows_per_step=shape.rows_per_step,
        steps_per_split=shape.steps_per_split,
    )


class Plan(NamedTuple):
    """How one selection of a call is launched."""

    shape: CtaShape
    whole: int
    """Tokens that are not split."""
    splits: int
    """Splits of each of the other tokens."""
    capacity: int
    """Work items that the device runs at a time."""
    sharing: int
    """CTAs that share the heads of a work item."""


@lru_cache(1024)
def plan_launch(
    tokens: int, heads: int, columns: int, splits: int | None, sms: int, kind: RowKind, direct: bool
) -> Plan:
    """Choose shape and splits. `direct`: whether whole tokens can be written to the output.

    Both decide how a row is rounded, so with given splits they do not depend on the number of tokens.
    """
    shape = choose_shape(tokens if splits is None else None, heads, sms, kind.bf16, columns, kind.rope)
    if splits is None:
        whole, splits = _shape_splits(shape, tokens, heads, columns, sms, direct=direct)
    else:
        splits = min(splits, max(1, columns))
        whole = tokens if splits == 1 and direct else 0
    capacity, sharing = _capacity(shape, heads, sms), ceil_div(heads, shape.heads)
    return Plan(shape, whole, splits, capacity, sharing)


def _plan(q: Tensor, selection: Selection, splits: int | None, direct: bool) -> Plan:
    tokens, heads, _ = q.shape
    columns, sms = selection.slots.shape[1], sm_count(q.device)
    return plan_launch(tokens, heads, columns, splits, sms, _kind_of(selection), direct)


def attend_slots(call: AttendSlots) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`, one launch per selection; each selection has splits of its own."""
    q, scale = call.q, call.factor
    plans = [_plan(q, selection, call.splits, False) for selection in call.selections]
    found = Outputs.empty(sum(plan.splits for plan in plans), *q.shape[:2], device=q.device)
    first = 0
    for selection, plan in zip(call.selections, plans, strict=True):
        own = Outputs(*(tensor[first : first + plan.splits] for tensor in found))
        _launch_plan(plan, q, selection, scale, output_params(own, own, None, LseForm()))
        first += plan.splits
    return found


def attend(call: Attend, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `reference.attend`; tokens that are not split go straight into `out`.

    `rest`, for a call that `can_keep_rest`, receives what rounding cuts off the output.
    """
    if len(call.selections) > 1 or not can_store(call.out):
        return call.lse_form.arrange(*combine_splits(*attend_slots(call.in_splits()), call.sink, call.out))
    plan, whole, splits = _allocated(call)
    output = output_params(whole, splits, call.sink, call.lse_form)._replace(rest=rest_distance(call.out, rest))
    _launch_plan(plan, call.q, call.selections[0], call.factor, output)
    if splits is not None:
        merge_splits(splits, call.sink, whole, call.lse_form, rest)
    return whole.lse, whole.max_logits


def prepare_attend(call: Attend) -> PreparedAttend | None:
    """Launches for calls like this one, if it has one selection and nothing is copied."""
    q, selections = call.q, call.selections
    direct = len(selections) == 1 and can_store(call.out) and call.q_scale is None
    if not direct or not q.shape[0] or not _loads(q) or not copies_nothing(selections):
        return None
    plan, whole, splits = _allocated(call)
    output = output_params(whole, splits, call.sink, call.lse_form)
    made = _launch_of(plan, q, selections[0], call.scale, output, [])
    return PreparedAttend(call, [made], whole, splits, query_alignment=LOAD_BYTES)


def can_keep_rest(call: Attend) -> bool:
    """Whether the kernels write what rounding cuts off the output of a call that they take."""
    return len(call.selections) == 1 and _kind_of(call.selections[0]).bf16 and can_store(call.out)


def _allocated(call: Attend) -> tuple[Plan, Outputs, Outputs | None]:
    """The plan of a call with one selection, with memory for its outputs and for splits, if there are any."""
    tokens, heads, _ = call.q.shape
    plan = _plan(call.q, call.selections[0], call.splits, True)
    whole, left = Outputs.into(call.out, call.lse_form), tokens - plan.whole
    return plan, whole, Outputs.empty(plan.splits, left, heads, device=call.q.device) if left else None


def _loads(q: Tensor) -> bool:
    """Whether the kernels can load from a query; they load four neighbouring elements at a time."""
    return q.stride(2) == 1 and not (q.stride(0) % 4 or q.stride(1) % 4 or q.data_ptr() % LOAD_BYTES)


def _launch_plan(plan: Plan, q: Tensor, selection: Selection, scale: float | Tensor, output: OutputParams) -> None:
    """Write the outputs of whole tokens and the splits of the others. Each split is normalised by its own sum.

    The sink is applied to whole tokens only.
    """
    if q.shape[0] == 0:
        return
    if not _loads(q):
        # A contiguous query may still begin at an odd address, and `contiguous` would return it as it is.
        q = q.clone(memory_format=torch.contiguous_format)
    held = [q]  # copies must live until the launch, or their memory may be allocated again
    _launch_of(plan, q, selection, scale, output, held)()


def _launch_of(
    plan: Plan, q: Tensor, selection: Selection, scale: float | Tensor, output: OutputParams, held: list[Tensor]
) -> AttendLaunch:
    items = output.whole + output.split_tokens * output.splits
    params = AttendParams(
        items,
        ceil_div(selection.slots.shape[1], output.splits),
        query_params(q, scale, held),
        output,
        selection_params(selection, held),
    )
    grid = (min(items, plan.capacity), plan.sharing, 1)
    launch = _launch(q.device, plan.shape, q.dtype, output.rest != 0)
    return AttendLaunch(launch, grid, params, ("selection",))


@cache
def program(shape: CtaShape, dtype: torch.dtype, keep_rest: bool = False) -> Program:
    """The program for a shape and a dtype of queries; `keep_rest`: it also writes what rounding cuts off the output."""
    defines = dict(shape.defines) | {
        "QUERY_FP16": int(dtype == torch.float16),
        "KEEP_REST": int(keep_rest),
        "THREADS": shape.threads,
        "SHARED_BYTES": shape.shared,
        "PARAMS_BYTES": params_bytes(AttendParams),
    }
    return Program.packaged(__package__, f"{shape.source}.cu", **defines)


@cache
def _launch(device: torch.device, shape: CtaShape, dtype: torch.dtype, keep_rest: bool) -> Launch:
    loaded = kernel(program(shape, dtype, keep_rest), f"attend_{shape.source}", device_index(device))
    return Launch(loaded, AttendParams, threads=shape.threads, shared=shape.shared, overlap=True)
