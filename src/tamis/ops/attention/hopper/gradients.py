"""Gradients of attention over rows on Hopper: launches of `gradients.cu`, the portable kernels for everything else."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.selection import Rows
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import Float, Int, Long, Pointer, aligned, params_bytes, pointer
from tamis.ops.attention import hopper, triton_gradients
from tamis.ops.attention.row_operations import AttendRows, AttendRowsBackward
from tamis.ops.attention.triton_gradients import Given, counted_slots, delta_of, join, row_gradients, sink_gradient
from tamis.ops.rows import ordered_sums
from tamis.ops.rows.ordered_sums import OrderedSums, PairForm, sum_in_order
from tamis.ops.rows.row_sums import natural_columns

VALUE_DIM = 512
WIDTHS = (512, 576)
"""Widths of rows: of V4 and of V3.2."""
HEADS = (16, 32, 64)
"""Heads of a CTA: one kernel each."""
THREADS = 384
SHARED_BYTES = 227 * 1024
REGISTERS = (("COMPUTE_REGISTERS", 232), ("GATHER_REGISTERS", 40))
"""Per thread of the roles. Two computing warpgroups and a gathering one may have 504 together."""

index_target = triton_gradients.index_target
check_attend_rows = triton_gradients.check_attend_rows
check_attend_rows_backward = check_index_target = check_attend_rows


class GradientParams(NamedTuple):
    """The parameters of `gradients.cu`."""

    q: Pointer
    dout: Pointer
    rows: Pointer
    slots: Pointer
    lengths: Pointer
    lse: Pointer
    delta: Pointer
    dlse: Pointer
    sink: Pointer
    dq: Pointer
    drows: Pointer
    pairs: Pointer
    pair_scales: Pointer
    q_token_stride: Long
    q_head_stride: Long
    dout_token_stride: Long
    dout_head_stride: Long
    row_stride: Long
    slots_token_stride: Long
    slots_column_stride: Long
    heads: Int
    parts: Int
    columns: Int
    row_count: Int
    first_token: Int
    scale: Float


def attend_rows(call: AttendRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `gradients.attend_rows`. The forward pass is that of inference."""
    return triton_gradients.attend_rows_with(call, hopper.attend, hopper.attend_with_rest)


def attend_rows_backward(call: AttendRowsBackward) -> tuple[Tensor, list[Tensor], Tensor]:
    """As `gradients.attend_rows_backward`."""
    if refusal(call) is not None:
        return triton_gradients.attend_rows_backward(call)
    rows = join(call.selections)
    rows = Rows(aligned(rows.rows), rows.slots, rows.lengths)
    dout = None if call.dout is None else aligned(call.dout)
    delta = delta_of(call, dout)
    dlse = None if call.dlse is None else call.dlse.contiguous()
    q, lse = aligned(call.q.detach()), call.lse.contiguous()
    given = Given(q, rows, dout, lse, delta, dlse, call.sink, call.scale, call.out.shape[2])
    dq = torch.empty(call.q.shape if call.q_wanted else 0, dtype=call.q.dtype, device=call.q.device)
    ordered = call.deterministic and call.rows_wanted
    device = device_index(q.device)
    launch = on_device(q.shape[2], heads_of(q.shape[1]), ordered, device)
    if ordered:
        sums = OrderedSums(rows.rows, ordered_sums.on_device(pair_form(q), device))
        summed = add_in_order(given, dq, launch, sums, sm_count(q.device))
    else:
        summed = add_at_once(given, dq, launch, wanted=call.rows_wanted)
        summed = natural_columns(summed, q.dtype) if call.rows_wanted else summed
    return dq, row_gradients(call, summed), sink_gradient(call, delta)


def refusal(call: AttendRowsBackward) -> str | None:
    """Why these kernels do not take a call, or None if they do."""
    width, value_dim = call.q.shape[2], call.out.shape[2]
    if call.q.dtype != torch.bfloat16:
        return f"queries are {checks.dtype_name(call.q.dtype)}, not bfloat16"
    if width not in WIDTHS or value_dim != VALUE_DIM:
        return f"rows are {width} wide with values of {value_dim}, not 512 or 576 with values of 512"
    return None


Launcher = Callable[[tuple[int, int, int], GradientParams], None]


def add_at_once(given: Given, dq: Tensor, launch: Launcher, *, wanted: bool) -> Tensor:
    """The queries' gradient, and the rows' as float32 sums whose columns `natural_columns` brings in order, if they are
    wanted."""
    drows = torch.zeros(given.rows.rows.shape if wanted else 0, dtype=torch.float32, device=given.q.device)
    params = gradient_params(given, dq, drows if wanted else None)
    if len(given.q):
        launch((len(given.q) * params.parts, 1, 1), params)
    return drows


def add_in_order(given: Given, dq: Tensor, launch: Launcher, sums: OrderedSums, sms: int) -> Tensor:
    """The same with sums in one order: contributions of some tokens at a time are stored, then added up."""
    form = pair_form(given.q)
    if given.rows.slots.shape[1] == 0:
        dq.zero_()

    def store(start: int, end: int, pairs: Tensor, scales: Tensor) -> None:
        launch(((end - start) * form.parts, 1, 1), gradient_params(given, dq, None, start, pairs, scales))

    return sum_in_order(sums, form, counted_slots(given.rows), store, sms)


def gradient_params(
    given: Given,
    dq: Tensor,
    drows: Tensor | None,
    first_token: int = 0,
    pairs: Tensor | None = None,
    scales: Tensor | None = None,
) -> GradientParams:
    """The parameters of a launch for the tokens from `first_token` on."""
    q, dout, rows, slots = given.q, given.dout, given.rows.rows, given.rows.slots
    dout_strides = (0, 0, 0) if dout is None else dout.stride()
    return GradientParams(
        q=pointer(q),
        dout=pointer(dout),
        rows=pointer(rows),
        slots=pointer(slots),
        lengths=pointer(given.rows.lengths),
        lse=pointer(given.lse),
        delta=pointer(given.delta),
        dlse=pointer(given.dlse),
        sink=pointer(given.sink),
        dq=pointer(dq) if dq.numel() else 0,
        drows=pointer(drows),
        pairs=pointer(pairs),
        pair_scales=pointer(scales),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        dout_token_stride=dout_strides[0],
        dout_head_stride=dout_strides[1],
        row_stride=rows.stride(0),
        slots_token_stride=slots.stride(0),
        slots_column_stride=slots.stride(1),
        heads=q.shape[1],
        parts=parts_of(q.shape[1]),
        columns=slots.shape[1],
        row_count=len(rows),
        first_token=first_token,
        scale=given.scale,
    )


def heads_of(heads: int) -> int:
    """Heads of a CTA for a number of heads."""
    return next((size for size in HEADS if heads <= size), HEADS[-1])


def parts_of(heads: int) -> int:
    """CTAs of a token."""
    return ceil_div(heads, heads_of(heads))


def pair_form(q: Tensor) -> PairForm:
    """How the contributions of pairs of token and row are stored for such queries."""
    return PairForm(q.shape[2], VALUE_DIM, parts_of(q.shape[1]))


def program(width: int, heads: int, *, ordered: bool) -> Program:
    """The source for rows of a width and CTAs of a number of heads."""
    return Program.packaged(
        __package__,
        "gradients.cu",
        WIDTH=width,
        HEADS=heads,
        ORDERED=int(ordered),
        THREADS=THREADS,
        SHARED_BYTES=SHARED_BYTES,
        PARAMS_BYTES=params_bytes(GradientParams),
        **dict(REGISTERS),
    )


@cache
def on_device(width: int, heads: int, ordered: bool, device: int) -> Launch:
    """The kernel, ready to launch."""
    loaded = kernel(program(width, heads, ordered=ordered), "attention_gradients", device)
    return Launch(loaded, GradientParams, threads=THREADS, shared=SHARED_BYTES)
