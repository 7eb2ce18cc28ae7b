"""Portable sparse attention in Triton: chooses a kernel, its block sizes and its number of splits, and launches it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.fields import from_key
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.cuda.device import sm_count
from tamis.ops.attention.operations import Attend, AttendSlots
from tamis.ops.attention.triton_grouped import GROUPS, attend_groups_kernel
from tamis.ops.attention.triton_rowwise import attend_rows_kernel
from tamis.ops.combine.triton_kernels import combine_splits
from tamis.ops.rows.triton_rows import has_native_e4m3, interpreted, launching_on, strided_field

MAX_LATENT, MAX_ROPE = 512, 256
"""The widest rows. A wider accumulator would not fit the registers, nor wider rows the smallest shared memory."""
LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a CTA may have on every NVIDIA GPU from compute capability 8.0 on. AMD GPUs may have
less, but there operands stay in registers, and the small launches take half of the shared memory."""


@dataclass(frozen=True)
class LaunchConfig:
    """A kernel, its block sizes and its launch options."""

    block_h: int
    block_n: int
    warps: int
    stages: int
    grouped: bool = False
    """Whether warps split the columns of a row (`triton_grouped`); otherwise `triton_rowwise` runs."""
    per_sm: int = 1
    """Programs that share an SM."""


OVERHEAD_BLOCKS = 2
"""The cost of a program outside its loop (loading queries, storing the output, merging splits), in iterations."""
GROUPED = LaunchConfig(16, 32, 4, 1, grouped=True, per_sm=2)
SMALL, SMALLEST = LaunchConfig(16, 32, 4, 1, per_sm=2), LaunchConfig(16, 16, 4, 1)
LARGE = LaunchConfig(64, 64, 8, 2)
NOT_PIPELINED = LaunchConfig(64, 64, 8, 1)
"""For unquantised rows on GPUs whose matrix instruction reads both operands from shared memory (`both_in_shared`):
Triton 3.6 would keep pipelined rows three times there."""


@lru_cache(1024)
def choose_launch(
    key: str, query: torch.dtype, heads: int, value_dim: int, shared_memory: int, both_in_shared: bool = False
) -> LaunchConfig:
    """The kernel and its block sizes for rows of the layout of that key, so that they fit the device's shared memory.

    Up to 16 heads are one tile of the small matrix instruction. More heads run 64 at a time where shared memory allows
    it; at 32 heads half a tile is empty, which on an H200 is still faster than two tiles of 16. Where it does not fit,
    the small tile always does. Queries of two terms take twice the shared memory: blocks of 64 heads would leave room
    for 32 rows and spill kilobytes of registers. `both_in_shared` is true for Blackwell's data-centre GPUs.
    """
    layout = from_key(key)  # the key is the argument because strings cache their hash and layouts do not
    grouped = can_group(layout, value_dim)
    compute = compute_dtype(query, layout, grouped=grouped)
    if compute == torch.float32:
        return SMALLEST
    if layout.scale_mode == "exact":
        return GROUPED
    if heads > 16 and shared_memory >= 200 * 1024 and query_terms(query, compute) == 1:
        launch = NOT_PIPELINED if both_in_shared and not layout.quantised else LARGE
        if shared_bytes(launch, layout, query) <= shared_memory:
            return launch
    if grouped:
        return GROUPED
    return SMALL if shared_bytes(SMALL, layout, query) <= max(shared_memory, LEAST_SHARED) else SMALLEST


def shared_bytes(launch: LaunchConfig, layout: Layout, query: torch.dtype) -> int:
    """An upper bound of the shared memory of a launch of `triton_rowwise`, which offline compilation verifies.

    It holds queries and rows, rows in bf16 a second time where they are pipelined or change their layout between keys
    and values, and then weights and scales.
    """
    compute = compute_dtype(query, layout, grouped=False)
    terms = query_terms(query, compute)
    once = compute == torch.float32 or (layout.quantised and launch.stages == 1)
    rows = launch.block_h * terms + (1 if once else 2) * launch.block_n
    widths = row_widths(layout)
    columns: int = widths["BLOCK_L"] + (widths["BLOCK_T"] if widths["TAIL"] else 0)
    scales: int = launch.block_n * widths["BLOCK_L"] // widths["TILE"] * 4 if layout.tile else 0
    return rows * columns * compute.itemsize + 2 * launch.block_h * launch.block_n * (terms - 1) + scales + 2048


@lru_cache(1024)
def choose_splits(programs: int, columns: int, block_n: int, resident: int) -> int:
    """The number of splits that finishes soonest: waves of programs, times the blocks of columns of each program.

    Each split costs `OVERHEAD_BLOCKS` more for the work outside its loop. Among equal durations the fewest splits win.
    """
    blocks = max(1, ceil_div(columns, block_n))

    def duration(splits: int) -> int:
        return ceil_div(programs * splits, resident) * (ceil_div(blocks, splits) + OVERHEAD_BLOCKS)

    return min(range(1, blocks + 1), key=duration)


def attend_slots(call: AttendSlots) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`, except that each selection has its own splits and its own launch."""
    q = _plain_query(call.q)
    launches = _plan_launches(q, call)
    shape = (sum(splits for _, splits in launches), *q.shape[:2], call.value_dim)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    return out, *_launch_all(q, call, launches, None, out)


def attend(call: Attend) -> tuple[Tensor, Tensor]:
    """As `reference.attend`; the output of a single split is stored directly."""
    if call.translate_first:
        # A look-up before each load of rows costs more than a separate pass (benchmarks/NOTES.md).
        call = call.translated()
    q, out = _plain_query(call.q), call.out
    launches = _plan_launches(q, call)
    splits = sum(count for _, count in launches)
    if splits == 1 and out.stride(2) == 1:
        lse, max_logits = _launch_all(q, call, launches, call.sink, out.unsqueeze(0))
        return call.lse_form.arrange(lse[0], max_logits[0])
    parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=q.device)
    lses, max_logits = _launch_all(q, call, launches, None, parts)
    return call.lse_form.arrange(*combine_splits(parts, lses, max_logits, call.sink, out))


def _launch_all(
    q: Tensor,
    call: Attend | AttendSlots,
    launches: list[tuple[LaunchConfig, int]],
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fill `out` [S, T, H, V]; return lse and max_logits [S, T, H]."""
    tokens, heads, _ = q.shape
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    max_logits = torch.empty_like(lse)
    factor, first = call.factor, 0
    for selection, (config, splits) in zip(call.selections, launches, strict=True):
        span = slice(first, first + splits)
        results = (out[span], lse[span], max_logits[span])
        arguments, options = launch_arguments(q, selection, factor, sink, config, splits, *results)
        kernel = attend_groups_kernel if config.grouped else attend_rows_kernel
        if tokens:
            with launching_on(q.device):
                kernel[(tokens * triton.cdiv(heads, config.block_h), splits)](**arguments, **options)
        first += splits
    return lse, max_logits


def check_attend(call: Attend | AttendSlots) -> None:
    """Refuse what these kernels cannot do."""
    remedy = "pass backend='reference'"
    if call.q.dtype == torch.float64:
        raise checks.refuse_type("q", "at most float32 for the triton backend", "float64", remedy)
    for selection in call.selections:
        layout = selection.cache.layout
        if layout.latent > MAX_LATENT or layout.tile & (layout.tile - 1):
            expected = f"a latent part of at most {MAX_LATENT} in tiles of a power of two, for the triton backend"
            raise checks.refuse("cache", expected, f"{layout.latent} in tiles of {layout.tile}", remedy)
        if layout.rope > MAX_ROPE:
            raise checks.refuse("cache", f"at most {MAX_ROPE} rope columns for the triton backend", layout.rope, remedy)


check_attend_slots = check_attend


def _plain_query(q: Tensor) -> Tensor:
    """The query as kernels read it: e4m3 as bytes, and columns next to each other."""
    q = q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q
    return q if q.stride(2) == 1 else q.contiguous()


def _plan_launches(q: Tensor, call: Attend | AttendSlots) -> list[tuple[LaunchConfig, int]]:
    """The launch of each selection and its number of splits."""
    return [_plan_launch(q, selection, call.value_dim, call.splits) for selection in call.selections]


def _plan_launch(q: Tensor, selection: Selection, value_dim: int, splits: int | None) -> tuple[LaunchConfig, int]:
    tokens, heads, _ = q.shape
    columns, key = selection.slots.shape[1], selection.cache.layout.key
    if q.device.type == "cpu":
        config = choose_launch(key, q.dtype, heads, value_dim, 0)
    else:
        properties: Any = torch.cuda.get_device_properties(q.device)
        shared = properties.shared_memory_per_block_optin
        config = choose_launch(key, q.dtype, heads, value_dim, shared, properties.major in (10, 11))
    if splits is None:
        programs = tokens * triton.cdiv(heads, config.block_h)
        splits = choose_splits(programs, columns, config.block_n, config.per_sm * sm_count(q.device))
    return config, min(splits, max(1, columns))


def can_group(layout: Layout, value_dim: int) -> bool:
    """Whether rows consist of four tiles with float32 scales and a 16-bit tail that is not part of the value."""
    scaled = layout.scale_mode in ("pow2", "exact") and layout.latent == GROUPS.value * layout.tile
    return scaled and layout.tile >= 16 and value_dim <= layout.latent


def compute_dtype(query: torch.dtype, layout: Layout, *, grouped: bool) -> torch.dtype:
    """The dtype of products: bf16 unless it would lose bits.

    Products run in float32, which is slower, for float32 queries and rows, for fp16 rows, and for rows dequantised with
    scales that are not powers of two.
    """
    exact = query == torch.float32 or layout.element in (torch.float32, torch.float16)
    exact = exact or (layout.scale_mode == "exact" and not grouped)
    return torch.float32 if exact else torch.bfloat16


def query_terms(query: torch.dtype, compute: torch.dtype) -> int:
    """How many numbers of the compute dtype represent one of the query: two where bf16 has fewer bits than fp16."""
    return 2 if compute == torch.bfloat16 and query == torch.float16 else 1


def launch_arguments(
    q: Tensor,
    selection: Selection,
    scale: float | Tensor,
    sink: Tensor | None,
    launch: LaunchConfig,
    splits: int,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of one launch that fills `out` [S, T, H, V]."""
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
    # Kernels take strides for slots and for the table's rows, but not for lengths and request ids.
    lengths, ids = (
        None if value is None else value.contiguous() for value in (selection.lengths, selection.request_ids)
    )
    table = selection.block_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
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
        "lengths": lengths,
        "request_ids": ids,
        "block_table": table,
        "table_stride": 0 if table is None else table.stride(0),
        "table_width": 0 if table is None else table.shape[1],
        "requests": 0 if table is None else table.shape[0],
        "rows": cache.rows,
        "out": out,
        "lse": lse,
        "max_logits": max_logits,
        "out_split_stride": out.stride(0),
        "out_token_stride": out.stride(1),
        "out_head_stride": out.stride(2),
        "sink": sink,
        "tokens": q.shape[0],
        "scale": 1.0 if isinstance(scale, Tensor) else scale,
        "scale_factor": scale if isinstance(scale, Tensor) else None,
        "heads": heads,
        "columns": columns,
        "split_columns": triton.cdiv(columns, splits),
        "NATIVE": has_native_e4m3(q.device),
        "COMPUTE": tl.float32 if compute == torch.float32 else tl.bfloat16,
        "TERMS": query_terms(q.dtype, compute),
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
    # Each warp's share of the tail is at least 16 wide, as the matrix instruction needs.
    return {
        "TILE": layout.tile,
        "TAIL": layout.rope,
        "BLOCK_T": max(16 * GROUPS.value, triton.next_power_of_2(layout.rope)),
    }


def _row_arguments(cache: PagedCache, launch: LaunchConfig) -> dict[str, Any]:
    return {
        "cache_scale": 1.0 if isinstance(cache.scale, Tensor) else cache.scale,
        "cache_scale_factor": cache.scale if isinstance(cache.scale, Tensor) else None,
        **row_widths(cache.layout),
        "STAGES": launch.stages,
    }


def row_widths(layout: Layout) -> dict[str, Any]:
    """The widths of the two parts into which `triton_rowwise` divides a row: the latent part and the tail."""
    mode = {"none": "plain", "tensor": "tensor", "exponent": "exponent"}.get(layout.scale_mode, "tile")
    if layout.packed:
        mode = "packed_e4m3" if layout.scale_mode == "e4m3" else "packed"
    # Rows without tiles have a latent part that is the largest power of two that fits.
    latent = layout.latent if layout.tile else min(512, triton.next_power_of_2(layout.width + 1) // 2)
    rest = layout.width - latent
    return {
        "MODE": mode,
        "LATENT": latent,
        "BLOCK_L": max(16, triton.next_power_of_2(latent)),
        "TILE": layout.tile or latent,
        "TAIL": rest,
        "BLOCK_T": max(16, triton.next_power_of_2(rest)) if rest else 16,
    }
