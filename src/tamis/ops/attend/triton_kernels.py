"""Portable sparse attention in Triton: which kernel runs, how it is laid out, and its launch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.cache import PagedCache, Selection
from tamis.layout import Layout
from tamis.ops.attend.triton_grouped import GROUPS, attend_groups_kernel
from tamis.ops.attend.triton_rowwise import attend_rows_kernel
from tamis.ops.combine.triton_kernels import combine_with_maxima
from tamis.ops.triton_rows import has_native_e4m3, interpreted, launching_on, strided_field

if TYPE_CHECKING:
    from tamis.testing.offline import OfflineCase


MAX_LATENT = 512
"""A wider accumulator does not fit the registers."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is laid out on a device."""

    block_h: int
    block_n: int
    warps: int
    stages: int
    grouped: bool = False
    """Whether warps share the columns of a row (`triton_grouped`) instead of its tokens (`triton_rowwise`)."""
    per_core: int = 1
    """Programs that share a multiprocessor."""


OVERHEAD_BLOCKS = 2
"""What a program costs beside its loop, in steps of it: queries, output, and its share of the merge."""
GROUPED = Launch(16, 32, 4, 1, grouped=True, per_core=2)


def choose_launch(heads: int, shared_memory: int, *, compute: torch.dtype, grouped: bool) -> Launch:
    """The kernel and its blocks, which fit the device's shared memory; `grouped` tells whether rows can be grouped.

    Up to 16 heads are one tile of the small matrix instruction. More heads go 64 at a time where there is room for such
    tiles; at 32 heads half a tile is empty, which is still faster than two of 16. Measured on an H200; elsewhere the
    small tile fits everywhere.
    """
    if compute == torch.float32:
        return Launch(16, 16, 4, 1)
    if heads > 16 and shared_memory >= 200 * 1024:
        return Launch(64, 64, 8, 2)
    return GROUPED if grouped else Launch(16, 32, 4, 1, per_core=2)


@lru_cache(1024)
def choose_splits(programs: int, columns: int, block_n: int, slots_on_device: int) -> int:
    """Parts per row that finish soonest: rounds of programs on the device, times the blocks that each works through.

    A part costs some blocks more for what comes before and after its loop; among equals the fewest parts win.
    """
    blocks = max(1, -(-columns // block_n))

    def steps(parts: int) -> int:
        return -(-programs * parts // slots_on_device) * (-(-blocks // parts) + OVERHEAD_BLOCKS)

    return min(range(1, blocks + 1), key=steps)


def attend_slots(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`; each selection is cut into parts of its own, one launch per selection."""
    q = _plain_query(q)
    launches = [_plan_launch(q, s, value_dim, splits) for s in selections]
    out = torch.empty(
        sum(count for _, count in launches), *q.shape[:2], value_dim, dtype=torch.float32, device=q.device
    )
    return out, *_launch_all(q, selections, launches, scale, None, out)


def translates_freely(q: Tensor, selections: Sequence[Selection], *, value_dim: int) -> bool:
    """No: a look-up before each load of rows costs more than a pass of its own (see benchmarks/NOTES.md)."""
    return False


def attend_into(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    splits: int | None,
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_into`; a single part goes straight into `out`."""
    q = _plain_query(q)
    value_dim = out.shape[2]
    launches = [_plan_launch(q, s, value_dim, splits) for s in selections]
    parts = sum(count for _, count in launches)
    if parts == 1 and out.stride(2) == 1:
        lse, top = _launch_all(q, selections, launches, scale, sink, out.unsqueeze(0))
        return lse[0], top[0]
    room = torch.empty(parts, *q.shape[:2], value_dim, dtype=torch.float32, device=q.device)
    lse, top = _launch_all(q, selections, launches, scale, None, room)
    return combine_with_maxima(room, lse, top, sink, out)


def _launch_all(
    q: Tensor,
    selections: Sequence[Selection],
    launches: list[tuple[Launch, int]],
    scale: float | Tensor,
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `out` [parts, T, H, V]; lse and maxima [parts, T, H]."""
    tokens, heads, _ = q.shape
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    top = torch.empty_like(lse)
    first = 0
    for selection, (launch, count) in zip(selections, launches, strict=True):
        span = slice(first, first + count)
        arguments, options = launch_arguments(q, selection, scale, sink, launch, count, out[span], lse[span], top[span])
        kernel = attend_groups_kernel if launch.grouped else attend_rows_kernel
        if tokens:
            with launching_on(q.device):
                kernel[(tokens * triton.cdiv(heads, launch.block_h), count)](**arguments, **options)
        first += count
    return lse, top


def check_attend(q: Tensor, selections: Sequence[Selection], value_dim: int) -> None:
    """Refuse what these kernels cannot do."""
    remedy = "pass backend='reference'"
    if q.dtype == torch.float64:
        raise checks.refuse_type("q", "at most float32 for the triton backend", "float64", remedy)
    for selection in selections:
        layout = selection.cache.layout
        if layout.latent > MAX_LATENT or layout.tile & (layout.tile - 1):
            expected = f"a latent part of at most {MAX_LATENT} in tiles of a power of two, for the triton backend"
            raise checks.refuse("cache", expected, f"{layout.latent} in tiles of {layout.tile}", remedy)
        if layout.packed:
            raise checks.refuse("cache", "in e4m3 or 16 and more bits for the triton backend", layout.name, remedy)


def _plain_query(q: Tensor) -> Tensor:
    """The query as kernels read it."""
    q = q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q
    return q if q.stride(2) == 1 else q.contiguous()


def _plan_launch(q: Tensor, selection: Selection, value_dim: int, splits: int | None) -> tuple[Launch, int]:
    tokens, heads, _ = q.shape
    columns, layout = selection.slots.shape[1], selection.cache.layout
    grouped = can_group(layout, value_dim)
    if q.device.type == "cpu":
        shared, cores = 0, 1
    else:
        properties: Any = torch.cuda.get_device_properties(q.device)
        shared, cores = properties.shared_memory_per_block_optin, properties.multi_processor_count
    launch = choose_launch(heads, shared, compute=compute_dtype(q.dtype, layout, grouped=grouped), grouped=grouped)
    if layout.scale_mode == "exact" and grouped and q.dtype != torch.float32:
        launch = GROUPED
    if splits is None:
        programs = tokens * triton.cdiv(heads, launch.block_h)
        splits = choose_splits(programs, columns, launch.block_n, launch.per_core * cores)
    return launch, min(splits, max(1, columns))


def can_group(layout: Layout, value_dim: int) -> bool:
    """Whether rows are four tiles with float32 scales and a 16-bit tail that is no value."""
    scaled = layout.scale_mode in ("pow2", "exact") and layout.latent == GROUPS.value * layout.tile
    return scaled and layout.tile >= 16 and value_dim <= layout.latent


def compute_dtype(query: torch.dtype, layout: Layout, *, grouped: bool) -> torch.dtype:
    """bf16, unless it would lose bits: float32 queries and rows, fp16 rows, and rows whose scales are no powers of two
    and are multiplied in, are multiplied in float32, which is slower."""
    exact = query == torch.float32 or layout.element in (torch.float32, torch.float16)
    exact = exact or (layout.scale_mode == "exact" and not grouped)
    return torch.float32 if exact else torch.bfloat16


def launch_arguments(
    q: Tensor,
    selection: Selection,
    scale: float | Tensor,
    sink: Tensor | None,
    launch: Launch,
    parts: int,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of one launch, into parts `out` [parts, T, H, V]."""
    cache, layout = selection.cache, selection.cache.layout
    values, values_page, values_row = strided_field(cache, layout.values)
    if launch.grouped and values is not None:
        values = values.view(torch.int32)
        values_page, values_row = values.stride(0), values.stride(1)
    scales, scales_page, scales_row = strided_field(cache, layout.scales)
    tail, tail_page, tail_row = strided_field(cache, layout.tail)
    strides = ((values_page, values_row), (scales_page, scales_row), (tail_page, tail_row))
    on_host = interpreted(attend_rows_kernel)
    compute = torch.float32 if on_host else compute_dtype(q.dtype, layout, grouped=launch.grouped)
    heads, columns = q.shape[1], selection.slots.shape[1]
    table = selection.block_table
    arguments = {
        "q": q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "values": values,
        "values_page_stride": values_page,
        "scales": scales,
        "scales_page_stride": scales_page,
        "tail": tail,
        "tail_page_stride": tail_page,
        "slots": selection.slots,
        "slots_token_stride": selection.slots.stride(0),
        "slots_column_stride": selection.slots.stride(1),
        "lengths": selection.lengths,
        "request_ids": selection.request_ids,
        "block_table": table,
        "table_stride": 0 if table is None else table.stride(0),
        "table_width": 0 if table is None else table.shape[1],
        "requests": 0 if table is None else table.shape[0],
        "rows": cache.rows,
        "out": out,
        "lse": lse,
        "max_logits": top,
        "out_part_stride": out.stride(0),
        "out_token_stride": out.stride(1),
        "out_head_stride": out.stride(2),
        "sink": sink,
        "tokens": q.shape[0],
        "scale": 1.0 if isinstance(scale, Tensor) else scale,
        "scale_factor": scale if isinstance(scale, Tensor) else None,
        "heads": heads,
        "columns": columns,
        "split_columns": triton.cdiv(columns, parts),
        "NATIVE": has_native_e4m3(q.device),
        "COMPUTE": tl.float32 if compute == torch.float32 else tl.bfloat16,
        "PARTS": 2 if compute == torch.bfloat16 and q.dtype == torch.float16 else 1,
        "VALUE_DIM": out.shape[-1],
        "VALUES_ROW": values_row,
        "SCALES_ROW": scales_row,
        "TAIL_ROW": tail_row,
        "PAGE_SIZE": cache.page_size,
        "FLAT": all(page == row * cache.page_size for page, row in strides),
        "HEAD_BLOCKS": triton.cdiv(heads, launch.block_h),
        "BLOCK_H": launch.block_h,
        "BLOCK_N": launch.block_n,
        "INTERPRETED": on_host,
        **(_grouped_widths(layout) if launch.grouped else _row_arguments(cache, launch)),
    }
    return arguments, {"num_warps": launch.warps, "num_stages": launch.stages}


def _grouped_widths(layout: Layout) -> dict[str, Any]:
    # Each group's share of the tail is at least one step of the matrix instruction.
    return {
        "TILE": layout.tile,
        "TAIL": layout.rope,
        "BLOCK_T": max(16 * GROUPS.value, triton.next_power_of_2(layout.rope)),
    }


def _row_arguments(cache: PagedCache, launch: Launch) -> dict[str, Any]:
    layout = cache.layout
    mode = {"none": "plain", "tensor": "tensor", "exponent": "exponent"}.get(layout.scale_mode, "tile")
    # Unquantised rows have no tiles: they are cut where a power of two ends.
    latent = layout.latent if mode in ("tile", "exponent") else min(512, triton.next_power_of_2(layout.width + 1) // 2)
    rest = layout.width - latent
    return {
        "cache_scale": 1.0 if isinstance(cache.scale, Tensor) else cache.scale,
        "cache_scale_factor": cache.scale if isinstance(cache.scale, Tensor) else None,
        "MODE": mode,
        "LATENT": latent,
        "BLOCK_L": max(16, triton.next_power_of_2(latent)),
        "TILE": layout.tile or latent,
        "TAIL": rest,
        "BLOCK_T": max(16, triton.next_power_of_2(rest)) if rest else 16,
        "STAGES": launch.stages,
    }


def offline_cases() -> Iterator["OfflineCase"]:
    """Launches that `tamis.testing.offline` compiles."""
    from tamis.layout import named
    from tamis.testing.offline import NATIVE_E4M3, TARGETS, OfflineCase

    large = ("sm_90", "sm_100")
    small = {True: NATIVE_E4M3, False: tuple(t for t in TARGETS if t not in NATIVE_E4M3)}
    for layout, heads, translate in (
        (named("v32-fp8"), 16, True),
        (named("v32-fp8"), 64, False),
        (named("v32-bf16"), 16, False),
        (named("v32-fp32"), 16, False),
        (named("v4-fp8"), 64, False),
    ):
        cache = PagedCache(layout, 2, 64)
        q = torch.zeros(2, heads, cache.layout.width, dtype=torch.bfloat16, device="cpu")
        ids, table = torch.zeros(2, dtype=torch.int32, device="cpu"), torch.zeros(2, 8, dtype=torch.int32, device="cpu")
        lookup = (ids, table) if translate else (None, None)
        selection = Selection(cache, torch.zeros(2, 2048, dtype=torch.int32, device="cpu"), ids, *lookup)
        out = torch.zeros(1, 2, heads, 512, dtype=torch.float32, device="cpu")
        lse = torch.zeros(1, 2, heads, dtype=torch.float32, device="cpu")
        sink = torch.zeros(heads, dtype=torch.float32, device="cpu")
        grouped = can_group(layout, 512)
        compute = compute_dtype(q.dtype, layout, grouped=grouped)
        for room, native, targets in (
            (0, True, small[True]),
            (0, False, small[False]),
            (227 * 1024, True, large),
        ):
            launch = choose_launch(heads, room, compute=compute, grouped=grouped)
            arguments, options = launch_arguments(q, selection, 0.1, sink, launch, 1, out, lse, lse)
            arguments["NATIVE"] = native
            label = f"attend {layout.name}, {heads} heads, {launch.block_h}x{launch.block_n}"
            label += ", grouped" if launch.grouped else ""
            kernel = attend_groups_kernel if launch.grouped else attend_rows_kernel
            yield OfflineCase.of_launch(kernel, arguments, options, label, targets)
