"""Sparse attention of 64 heads at a time over FP8 rows in CUDA C++, for Hopper: `many_heads.cu` and its launches."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache import Selection
from tamis.cuda.compiler import Program
from tamis.cuda.launch import Launch, kernel
from tamis.layout import Layout, v4_fp8, v32_fp8
from tamis.ops.attend.triton_kernels import choose_splits
from tamis.ops.combine.triton_kernels import combine_with_maxima

if TYPE_CHECKING:
    from tamis.testing.offline_cuda import CudaCase

HEADS = 64
"""Of a block."""
ROWS = 64
"""Selected rows that a block works on at a time."""
VALUE_DIM = 512
SELECTIONS = 2
"""How many one launch takes."""
THREADS = 384
SHARED_BYTES = 227 * 1024
SIGNATURE = "PqqiifPPPqqqiPPi" + SELECTIONS * "PqiiPqqiPPPqii"


class Variant(NamedTuple):
    """How a block is laid out."""

    halves: int = 3
    """Buffers for half the columns of 64 widened rows: with a third, the next rows are widened meanwhile."""
    ring: int = 1
    """Blocks of 64 raw rows in shared memory."""
    lag: bool = False
    """Whether half of the product with values runs under the next block's softmax instead of beside the other half."""
    registers: tuple[int, int, int] = (232, 160, 112)
    """Per thread of the groups that score, weigh and fetch; 504 in all."""


USUAL = Variant()


def reason_against(q: Tensor, selections: Sequence[Selection], value_dim: int) -> str | None:
    """Why these kernels cannot do a call, or None if they can."""
    if q.dtype != torch.bfloat16:
        return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16"
    if value_dim != VALUE_DIM:
        return f"values are {value_dim} wide, not {VALUE_DIM}"
    if len(selections) > SELECTIONS:
        return f"there are {len(selections)} selections, more than {SELECTIONS}"
    planar = {_is_planar(s.cache.layout) for s in selections}
    if None in planar or len(planar) > 1:
        return "caches are not all v32-fp8, or all v4-fp8"
    for held in (s.cache for s in selections):
        if held.page_stride % 16 or held.storage.data_ptr() % 16:
            return "rows do not start at multiples of 16 bytes"
        if True in planar and held.page_size % 2:
            return f"pages have {held.page_size} rows, an odd number"
    return None


def _is_planar(layout: Layout) -> bool | None:
    """Whether a layout is v4-fp8's bytes (True), v32-fp8's (False), or neither."""
    described = layout.values, layout.scales, layout.tail, layout.tile
    for planar, known in ((False, _V32), (True, _V4)):
        if described == known:
            return planar
    return None


def _described(layout: Layout) -> tuple[Any, ...]:
    return layout.values, layout.scales, layout.tail, layout.tile


_V32, _V4 = _described(v32_fp8()), _described(v4_fp8())


def attend_slots(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    value_dim: int,
    splits: int | None,
    variant: Variant = USUAL,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`, in one launch; parts are cut between blocks of 64 rows."""
    _refuse(q, selections, value_dim)
    parts = splits or usual_splits(q, selections)
    out = torch.empty(parts, *q.shape[:2], value_dim, dtype=torch.float32, device=q.device)
    return out, *_attend(q, selections, scale, None, out, variant)


def attend_into(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    splits: int | None,
    sink: Tensor | None,
    out: Tensor,
    variant: Variant = USUAL,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_into`; a single part goes straight into `out`."""
    _refuse(q, selections, out.shape[2])
    parts = splits or usual_splits(q, selections)
    if parts == 1 and _takes_pairs(out):
        lse, top = _attend(q, selections, scale, sink, out.unsqueeze(0), variant)
        return lse[0], top[0]
    room = torch.empty(parts, *out.shape, dtype=torch.float32, device=q.device)
    lse, top = _attend(q, selections, scale, None, room, variant)
    return combine_with_maxima(room, lse, top, sink, out)


def _refuse(q: Tensor, selections: Sequence[Selection], value_dim: int) -> None:
    if reason := reason_against(q, selections, value_dim):
        raise checks.refuse("q and selections", "what the kernel for many heads reads", reason, "use another backend")


def _takes_pairs(out: Tensor) -> bool:
    """Whether a tensor can be written two bf16 at a time."""
    even = out.stride(0) % 2 == 0 and out.stride(1) % 2 == 0 and out.data_ptr() % 4 == 0
    return out.dtype == torch.bfloat16 and out.stride(2) == 1 and even


def usual_splits(q: Tensor, selections: Sequence[Selection]) -> int:
    """Parts that finish soonest if every column is used: lengths are on the device."""
    tokens, heads, _ = q.shape
    columns = sum(-(-s.slots.shape[1] // ROWS) * ROWS for s in selections)
    return choose_splits(max(1, tokens) * -(-heads // HEADS), columns, ROWS, _multiprocessors(q.device.index))


def _attend(
    q: Tensor,
    selections: Sequence[Selection],
    scale: float | Tensor,
    sink: Tensor | None,
    out: Tensor,
    variant: Variant,
) -> tuple[Tensor, Tensor]:
    """Fill `out` [parts, T, H, V]; lse and maxima [parts, T, H]."""
    parts, tokens, heads, _ = out.shape
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    top = torch.empty_like(lse)
    if tokens:
        # Copies of arguments stay alive until the launch by being in the list.
        values, copies = launch_values(q, selections, scale, sink, out, lse, top)
        launch = _launch(q.device.index, _is_planar(selections[0].cache.layout) is True, variant)
        launch((tokens * -(-heads // HEADS), parts, 1), *values)
        del copies
    return lse, top


def launch_values(
    q: Tensor,
    selections: Sequence[Selection],
    scale: float | Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
) -> tuple[list[Any], list[Tensor]]:
    """Arguments of a launch as `SIGNATURE` lists them, and tensors made on the way, to be held until it is done."""
    parts, tokens, heads, _ = out.shape
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    made = [q]
    factor = scale if isinstance(scale, Tensor) else None
    values = [q.data_ptr(), q.stride(0), q.stride(1), tokens, heads, 1.0 if isinstance(scale, Tensor) else scale]
    values += [_address(factor), _address(sink), out.data_ptr(), *out.stride()[:3], int(out.dtype == torch.bfloat16)]
    values += [lse.data_ptr(), top.data_ptr(), parts]
    for selection in selections:
        tensors = [selection.lengths, selection.request_ids, selection.block_table]
        lengths, ids, table = (None if t is None else t.contiguous() for t in tensors)
        made += [t for t in (lengths, ids, table) if t is not None]
        cache, slots = selection.cache, selection.slots
        values += [cache.storage.data_ptr(), cache.page_stride, cache.page_size, cache.rows, slots.data_ptr()]
        values += [*slots.stride(), slots.shape[1], _address(lengths), _address(ids), _address(table)]
        values += [0, 0, 0] if table is None else [table.stride(0), table.shape[1], table.shape[0]]
    nothing = [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    return values + nothing * (SELECTIONS - len(selections)), made


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def program(planar: bool, variant: Variant = USUAL) -> Program:
    """The source for v4-fp8 rows (planar) or v32-fp8 rows."""
    score, weigh, fetch = variant.registers
    return Program.packaged(
        __package__,
        "many_heads.cu",
        V4=int(planar),
        HALVES=variant.halves,
        RING=variant.ring,
        LAG=int(variant.lag),
        THREADS=THREADS,
        SHARED_BYTES=SHARED_BYTES,
        SCORE_REGISTERS=score,
        WEIGH_REGISTERS=weigh,
        FETCH_REGISTERS=fetch,
    )


@cache
def _launch(device: int, planar: bool, variant: Variant) -> Launch:
    loaded = kernel(program(planar, variant), "attend_many_heads", device)
    return Launch(loaded, SIGNATURE, threads=THREADS, shared=SHARED_BYTES)


VARIANTS = (USUAL, Variant(lag=True), Variant(halves=2, ring=2))
"""Layouts worth measuring."""


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.testing.offline_cuda` compiles."""
    from tamis.testing.offline_cuda import CudaCase

    for planar, name in ((False, "v32-fp8"), (True, "v4-fp8")):
        for variant in VARIANTS:
            label = f"attend, {name}, 64 heads, {variant.halves} halves, ring of {variant.ring}, lag {variant.lag}"
            yield CudaCase(label, program(planar, variant), SHARED_BYTES)
