"""Portable sparse attention in Triton: how the kernel of `triton_device` is laid out and launched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.cache import PagedCache, Selection
from tamis.ops.attend.triton_device import attend_kernel
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


def choose_launch(heads: int, tokens: int, shared_memory: int, *, exact: bool) -> Launch:
    """Blocks that fit the device's shared memory.

    Up to 16 heads are one tile of the small matrix instruction, and two blocks share a multiprocessor. More heads go 64
    at a time where there is room for such tiles; at 32 heads half a tile is empty, which is still faster than two of
    16. Measured on an H200; elsewhere the small tile fits everywhere.
    """
    if exact:
        return Launch(16, 16, 4, 1)
    if shared_memory >= 200 * 1024:
        if heads > 16:
            return Launch(64, 64, 8, 2)
        if tokens <= 16:
            # Few tokens leave multiprocessors to spare: larger blocks shorten the longest chain of steps.
            return Launch(16, 64, 8, 2)
    return Launch(16, 32, 4, 1)


def choose_splits(programs: int, columns: int, block_n: int, slots_on_device: int) -> int:
    """Parts per row: enough that the programs fill the device once, of at least two blocks each."""
    most = max(1, columns // (2 * block_n))
    return min(most, max(1, -(-slots_on_device // max(1, programs))))


def attend_slots(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`; each selection is cut into parts of its own, one launch per selection."""
    for selection in selections:
        _refuse_unknown(q.dtype, selection.cache)
    if q.dtype == torch.float8_e4m3fn:
        q = q.view(torch.uint8)
    q = q if q.stride(2) == 1 else q.contiguous()
    tokens, heads, _ = q.shape
    launches = [_plan_launch(q, s, splits) for s in selections]
    parts = sum(count for _, count in launches)
    out = torch.empty(parts, tokens, heads, value_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(parts, tokens, heads, dtype=torch.float32, device=q.device)
    top = torch.empty_like(lse)
    first = 0
    for selection, (launch, count) in zip(selections, launches, strict=True):
        span = slice(first, first + count)
        arguments, options = launch_arguments(
            q, selection, scale, value_dim, launch, count, out[span], lse[span], top[span]
        )
        if tokens:
            with launching_on(q.device):
                attend_kernel[(tokens * arguments["HEAD_BLOCKS"], count)](**arguments, **options)
        first += count
    return out, lse, top


def _refuse_unknown(dtype: torch.dtype, cache: PagedCache) -> None:
    layout = cache.layout
    remedy = "pass backend='reference'"
    if dtype == torch.float64:
        raise checks.refuse_type("q", "at most float32 for the triton backend", "float64", remedy)
    if layout.latent > MAX_LATENT or layout.tile & (layout.tile - 1):
        expected = f"a latent part of at most {MAX_LATENT} in tiles of a power of two, for the triton backend"
        raise checks.refuse("cache", expected, f"{layout.latent} in tiles of {layout.tile}", remedy)


def _plan_launch(q: Tensor, selection: Selection, splits: int | None) -> tuple[Launch, int]:
    tokens, heads, _ = q.shape
    columns = selection.slots.shape[1]
    exact = _compute_dtype(q.dtype, selection.cache) == torch.float32
    if q.device.type == "cpu":
        shared, cores = 0, 1
    else:
        properties: Any = torch.cuda.get_device_properties(q.device)
        shared, cores = properties.shared_memory_per_block_optin, properties.multi_processor_count
    launch = choose_launch(heads, tokens, shared, exact=exact)
    per_core = 2 if launch.block_h == 16 and launch.warps == 4 else 1
    programs = tokens * triton.cdiv(heads, launch.block_h)
    if splits is None:
        splits = choose_splits(programs, columns, launch.block_n, per_core * cores)
    return launch, min(splits, max(1, columns))


def _compute_dtype(query: torch.dtype, cache: PagedCache) -> torch.dtype:
    """bf16, unless it would lose bits: float32 queries and rows, fp16 rows, and rows whose scales are no powers of two
    are multiplied in float32, which is slower."""
    layout = cache.layout
    exact = query == torch.float32 or layout.element in (torch.float32, torch.float16) or layout.scale_mode == "exact"
    return torch.float32 if exact else torch.bfloat16


def launch_arguments(
    q: Tensor,
    selection: Selection,
    scale: float | Tensor,
    value_dim: int,
    launch: Launch,
    parts: int,
    out: Tensor,
    lse: Tensor,
    top: Tensor,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of one launch."""
    cache, layout = selection.cache, selection.cache.layout
    values, values_page, values_row = strided_field(cache, layout.values)
    scales, scales_page, scales_row = strided_field(cache, layout.scales)
    tail, tail_page, tail_row = strided_field(cache, layout.tail)
    strides = ((values_page, values_row), (scales_page, scales_row), (tail_page, tail_row))
    mode = {"none": "plain", "tensor": "tensor", "exponent": "exponent"}.get(layout.scale_mode, "tile")
    # Unquantised rows have no tiles: they are cut where a power of two ends.
    latent = layout.latent if mode in ("tile", "exponent") else min(512, triton.next_power_of_2(layout.width + 1) // 2)
    rest = layout.width - latent
    on_host = interpreted(attend_kernel)
    compute = torch.float32 if on_host else _compute_dtype(q.dtype, cache)
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
        "part_stride": q.shape[0] * heads,
        "scale": 1.0 if isinstance(scale, Tensor) else scale,
        "scale_factor": scale if isinstance(scale, Tensor) else None,
        "cache_scale": 1.0 if isinstance(cache.scale, Tensor) else cache.scale,
        "cache_scale_factor": cache.scale if isinstance(cache.scale, Tensor) else None,
        "heads": heads,
        "columns": columns,
        "split_columns": triton.cdiv(columns, parts),
        "MODE": mode,
        "NATIVE": has_native_e4m3(q.device),
        "COMPUTE": tl.float32 if compute == torch.float32 else tl.bfloat16,
        "PARTS": 2 if compute == torch.bfloat16 and q.dtype == torch.float16 else 1,
        "LATENT": latent,
        "BLOCK_L": max(16, triton.next_power_of_2(latent)),
        "TILE": layout.tile or latent,
        "TAIL": rest,
        "BLOCK_T": max(16, triton.next_power_of_2(rest)) if rest else 16,
        "VALUE_DIM": out.shape[-1],
        "VALUES_ROW": values_row,
        "SCALES_ROW": scales_row,
        "TAIL_ROW": tail_row,
        "PAGE_SIZE": cache.page_size,
        "FLAT": all(page == row * cache.page_size for page, row in strides),
        "HEAD_BLOCKS": triton.cdiv(heads, launch.block_h),
        "BLOCK_H": launch.block_h,
        "BLOCK_N": launch.block_n,
        "STAGES": launch.stages,
        "INTERPRETED": on_host,
    }
    return arguments, {"num_warps": launch.warps, "num_stages": launch.stages}


def offline_cases() -> Iterator["OfflineCase"]:
    """Launches that `tamis.testing.offline` compiles."""
    from tamis.layout import named
    from tamis.testing.offline import NATIVE_E4M3, TARGETS, OfflineCase

    large = ("sm_90", "sm_100")
    small = {True: NATIVE_E4M3, False: tuple(t for t in TARGETS if t not in NATIVE_E4M3)}
    for layout, heads, translate in (
        (named("v32-fp8"), 16, True),
        (named("v32-fp8", scale_mode="exact"), 16, False),
        (named("v32-bf16"), 16, False),
        (named("v4-fp8"), 64, False),
    ):
        cache = PagedCache(layout, 2, 64)
        exact = _compute_dtype(torch.bfloat16, cache) == torch.float32
        q = torch.zeros(2, heads, cache.layout.width, dtype=torch.bfloat16)
        ids, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int32)
        lookup = (ids, table) if translate else (None, None)
        selection = Selection(cache, torch.zeros(2, 2048, dtype=torch.int32), ids, *lookup)
        out, lse = torch.zeros(1, 2, heads, 512), torch.zeros(1, 2, heads)
        for room, native, targets in (
            (0, True, small[True]),
            (0, False, small[False]),
            (227 * 1024, True, large),
        ):
            launch = choose_launch(heads, 128, room, exact=exact)
            arguments, options = launch_arguments(q, selection, 0.1, 512, launch, 1, out, lse, lse)
            arguments["NATIVE"] = native
            label = f"attend {layout.name} {layout.scale_mode}, {heads} heads, {launch.block_h}x{launch.block_n}"
            yield OfflineCase.of_launch(attend_kernel, arguments, options, label, targets)
