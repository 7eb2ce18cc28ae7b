"""Sparse attention of 64 heads at a time in CUDA C++, for Hopper: `many_heads.cu`, `many_heads_bf16.cu`, launches."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, rows, v4_fp8, v32_fp8
from tamis.cache.selection import Selection
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import ListLaunch, kernel
from tamis.cuda.params import pointer as address
from tamis.ops.attention.hopper.splits import (
    OUT_KINDS,
    VALUE_DIM,
    Outputs,
    SplitPlan,
    can_store,
    choose_splits,
    merge_splits,
)
from tamis.ops.attention.operations import Attend, AttendSlots
from tamis.ops.combine.triton_kernels import combine_splits

NAME = "many heads"
HEADS = 64
"""Of a block."""
SELECTIONS = 2
"""How many one launch takes."""
SHARED_BYTES = 227 * 1024
SIGNATURE = "PqqiifPPPiqqPPPPPii" + SELECTIONS * "PqiiPqqiPPPqii"


class Rows(NamedTuple):
    """Rows of one layout, and the program that reads them."""

    layout: str
    source: str
    constants: tuple[tuple[str, int], ...]
    """Which rows of those that the source knows, and registers per thread of the groups of warps."""
    threads: int
    step: int
    """Selected rows that a block works on at a time: parts are cut between steps."""
    stay: bool
    """Whether a block takes one item after the other, so that there are no more of them than multiprocessors."""


# A launch has 4 x 128 or 3 x 168 registers for its groups of 128 threads; one that asks for more waits for ever. Groups
# score, weigh and twice widen; or two attend and one gathers.
_FP8 = (("SCORE_REGISTERS", 160), ("WEIGH_REGISTERS", 224), ("WIDEN_REGISTERS", 64))
_BF16 = (("ATTEND_REGISTERS", 216), ("GATHER_REGISTERS", 72))
V32_FP8 = Rows("v32-fp8", "many_heads.cu", (("V4", 0), *_FP8), 512, 64, False)
V4_FP8 = Rows("v4-fp8", "many_heads.cu", (("V4", 1), *_FP8), 512, 64, False)
V32_BF16 = Rows("v32-bf16", "many_heads_bf16.cu", _BF16, 384, 128, True)


def refusal(q: Tensor, selections: Sequence[Selection], value_dim: int) -> str | None:
    """Why these kernels cannot do a call, or None if they can."""
    if q.dtype != torch.bfloat16:
        return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16"
    if value_dim != VALUE_DIM:
        return f"values are {value_dim} wide, not {VALUE_DIM}"
    if len(selections) > SELECTIONS:
        return f"there are {len(selections)} selections, more than {SELECTIONS}"
    kinds = {rows_of(s.cache.layout) for s in selections}
    if None in kinds or len(kinds) > 1:
        found = ", ".join(dict.fromkeys(s.cache.layout.name for s in selections))
        return f"caches are {found}, not all v32-fp8, all v4-fp8, or all v32-bf16"
    for held in (s.cache for s in selections):
        if held.page_stride % 16 or held.storage.data_ptr() % 16:
            return "rows do not start at multiples of 16 bytes"
    return None


def source(q: Tensor, selections: Sequence[Selection], sms: int) -> str:
    """The file that runs a call which these kernels take."""
    return _rows(selections).source


def rows_of(layout: Layout) -> Rows | None:
    """What a layout's bytes are; None if these kernels do not know them."""
    return _KNOWN.get(_described(layout))


def _described(layout: Layout) -> tuple[Any, ...]:
    return layout.latent, layout.rope, layout.values, layout.scales, layout.tail, layout.tile


_KNOWN = {_described(v32_fp8()): V32_FP8, _described(v4_fp8()): V4_FP8, _described(rows()): V32_BF16}


def attend_slots(call: AttendSlots) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`, in one launch; parts are cut between the kernel's steps."""
    q, selections, scale, splits = call.q, call.selections, call.factor, call.splits
    cut = _cut(q, selections, splits, direct=False)
    found = Outputs.empty(cut.splits, *q.shape[:2], device=q.device)
    attend_items(q, selections, scale=scale, sink=None, whole=found, parts=found)
    return found


def attend(call: Attend) -> tuple[Tensor, Tensor]:
    """As `reference.attend`; tokens that are not cut go straight into `out`."""
    q, selections, scale, splits, sink, out = (call.q, call.selections, call.factor, call.splits, call.sink, call.out)
    if not can_store(out):
        return combine_splits(*attend_slots(call.in_splits()), sink, out)
    plan = _cut(q, selections, splits, direct=True)
    tokens, heads, _ = q.shape
    whole = Outputs.into(out)
    split = Outputs.empty(plan.splits, tokens - plan.whole, heads, device=q.device)
    attend_items(q, selections, scale=scale, sink=sink, whole=whole, parts=split)
    if plan.whole < tokens:
        merge_splits(split, sink, whole)
    return whole.lse, whole.max_logits


def _rows(selections: Sequence[Selection]) -> Rows:
    found = rows_of(selections[0].cache.layout)
    assert found is not None  # or the call would have been refused
    return found


def _cut(q: Tensor, selections: Sequence[Selection], splits: int | None, *, direct: bool) -> SplitPlan:
    tokens, heads, _ = q.shape
    if splits is None:
        step = _rows(selections).step
        steps = max(1, sum(ceil_div(s.slots.shape[1], step) for s in selections))  # if every column is used
        return choose_splits(tokens, heads, steps, max(1, sm_count(q.device) // ceil_div(heads, HEADS)), direct=direct)
    return SplitPlan(tokens, 1) if splits == 1 and direct else SplitPlan(0, splits)


def attend_items(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    sink: Tensor | None,
    whole: Outputs,
    parts: Outputs,
) -> None:
    """Fill the first tokens' rows of `whole` [T, ...], and `parts` [P, t, ...] for the other t, contiguous in float32.

    Each part is normalised by its own sum; the sink counts only in whole tokens.
    """
    tokens, heads, _ = q.shape
    count, left = parts.lse.shape[:2]
    if tokens:
        # Copies of arguments stay alive until the launch by being in the list.
        values, copies = launch_values(q, selections, scale, sink, whole, parts)
        kind, items = _rows(selections), (tokens - left + left * count) * ceil_div(heads, HEADS)
        blocks = min(items, sm_count(q.device)) if kind.stay else items
        _launch(q.device, kind, len(selections))((blocks, 1, 1), *values)
        del copies


def launch_values(
    q: Tensor,
    selections: Sequence[Selection],
    scale: float | Tensor,
    sink: Tensor | None,
    whole: Outputs,
    parts: Outputs,
) -> tuple[list[Any], list[Tensor]]:
    """Arguments of a launch as `SIGNATURE` lists them, and tensors made on the way, to be held until it is done."""
    tokens, heads, _ = q.shape
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    made = [q]
    factor = scale.float() if isinstance(scale, Tensor) else None
    made += [] if factor is None else [factor]
    out, lse, maxima = whole.out.data_ptr(), whole.lse.data_ptr(), whole.max_logits.data_ptr()
    values = [q.data_ptr(), q.stride(0), q.stride(1), tokens, heads, 1.0 if isinstance(scale, Tensor) else scale]
    values += [address(factor), address(sink), out, OUT_KINDS[whole.out.dtype]]
    values += [whole.out.stride(-3), whole.out.stride(-2), lse, maxima]
    values += [
        parts.out.data_ptr(),
        parts.lse.data_ptr(),
        parts.max_logits.data_ptr(),
        tokens - parts.lse.shape[1],
        parts.lse.shape[0],
    ]
    for selection in selections:
        tensors = [selection.lengths, selection.request_ids, selection.block_table]
        lengths, ids, table = (None if t is None else t.contiguous() for t in tensors)
        made += [t for t in (lengths, ids, table) if t is not None]
        cache, slots = selection.cache, selection.slots
        values += [cache.storage.data_ptr(), cache.page_stride, cache.page_size, cache.pages, slots.data_ptr()]
        values += [*slots.stride(), slots.shape[1], address(lengths), address(ids), address(table)]
        values += [0, 0, 0] if table is None else [table.stride(0), table.shape[1], table.shape[0]]
    nothing = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    return values + nothing * (SELECTIONS - len(selections)), made


@cache
def program(kind: Rows, selections: int) -> Program:
    """The source for a kind of rows, and one selection or two."""
    constants = {
        **dict(kind.constants),
        "SELECTIONS": selections,
        "THREADS": kind.threads,
        "SHARED_BYTES": SHARED_BYTES,
    }
    return Program.packaged(__package__, kind.source, **constants)


@cache
def _launch(device: torch.device, kind: Rows, selections: int) -> ListLaunch:
    loaded = kernel(program(kind, selections), "attend_many_heads", device_index(device))
    return ListLaunch(loaded, SIGNATURE, threads=kind.threads, shared=SHARED_BYTES, overlap=True)
