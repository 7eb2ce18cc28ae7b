"""Portable lightning indexer in Triton: how the kernels of `triton_scores` and `triton_topk` are launched, and those
of `triton_prepare`.

Grids and blocks depend on shapes alone, so every call can be captured in a graph and replayed with other lengths:
programs whose keys lie behind them stop at once.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cuda.device import sm_count
from tamis.ops.index.triton_prepare import check_recipe, quantise_index_query, write_index_keys
from tamis.ops.index.triton_scores import ScoreLaunch, choose_score_launch, score_keys
from tamis.ops.index.triton_topk import choose_topk_launch, topk_launches
from tamis.ops.rows.triton_rows import has_native_e4m3, interpreted, launching_on, strided_field

__all__ = [
    "check_recipe",
    "check_scores",
    "index_scores",
    "index_topk",
    "quantise_index_query",
    "ragged_scores",
    "topk_positions",
    "write_index_keys",
]

E4M3 = torch.float8_e4m3fn
PACKED = torch.bfloat16
"""What holds e2m1 values times their scales: bf16 has float32's range."""
MAX_HEADS = 128
MAX_DIM = 256
QUERY_BYTES = 16 * 1024
"""Largest block of heads of one token; more heads go block by block."""
SCRATCH_BYTES = 64 << 20
"""What a selection may take beside scores and result, unless one row needs more."""


def index_scores(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    out: Tensor,
) -> None:
    """Fill `out`, float32 [T, width]; see `tamis.ops.index_scores`."""
    _score_pages(q, weights, cache, request_ids, block_table, lengths, out, batch=q.shape[0], fill=True)


def ragged_scores(
    q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None, starts: Tensor, ends: Tensor, out: Tensor
) -> None:
    """Fill `out`, float32 [T, N]; see `tamis.ops.ragged_scores`."""
    keys = keys if keys.stride(1) == 1 else keys.contiguous()
    held = PACKED if keys.dtype == torch.uint8 else keys.dtype
    _score(q, weights, list_places(keys, key_scales, starts, ends, out), held, out, shared=True, fill=True)


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None,
    block_table: Tensor | None,
    page_size: int,
) -> Tensor:
    """Positions, or slots where there is a block table, int32 [T, k]; see `tamis.ops.topk_positions`."""
    result = torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    table = None if request_ids is None else block_table
    _select(scores, lengths, k, None if request_ids is None else request_ids.contiguous(), table, page_size, result)
    return result


def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    workspace_bytes: int,
) -> Tensor:
    """Positions int32 [T, k], as many tokens at a time as the workspace holds scores of."""
    tokens, width = q.shape[0], score_width(cache, block_table)
    scratch = max(choose_topk_launch(n, width, k, sm_count(q.device)).scratch for n in (1, max(1, tokens)))

    def select(scores: Tensor, visible: Tensor, result: Tensor) -> None:
        _select(scores, visible, k, None, None, 0, result)

    rows = workspace_bytes // (4 * (width + scratch))
    return score_and_select(q, weights, cache, request_ids, block_table, lengths, k, rows, select)


def score_width(cache: PagedCache, block_table: Tensor) -> int:
    """Numbers in a row of scores: a multiple of 16, so that rows are read in wide loads."""
    return ceil_div(block_table.shape[1] * cache.page_size, 16) * 16


def score_and_select(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    rows: int,
    select: Callable[[Tensor, Tensor, Tensor], None],
) -> Tensor:
    """Positions int32 [T, k]: scores of `rows` tokens at a time (at least one), each followed by
    `select(scores, lengths, result)`."""
    tokens = q.shape[0]
    step = max(1, min(tokens, rows))
    scores = torch.empty(step, score_width(cache, block_table), dtype=torch.float32, device=q.device)
    result = torch.empty(tokens, k, dtype=torch.int32, device=q.device)
    for start in range(0, tokens, step):
        some = slice(start, min(start + step, tokens))
        part, ids, visible = scores[: some.stop - start], request_ids[some], lengths[some]
        # Launched like the whole batch.
        _score_pages(q[some], weights[some], cache, ids, block_table, visible, part, batch=tokens, fill=False)
        select(part, visible, result[some])
    return result


def _score_pages(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    batch: int,
    fill: bool,
) -> None:
    if block_table.numel() == 0:
        out.fill_(-torch.inf)
        return
    places = page_places(cache, request_ids, block_table, lengths, out)
    keys = held_dtype(cache.layout)
    _score(q, weights, places, keys, out, shared=batch > block_table.shape[0], fill=fill)


def held_dtype(layout: Layout) -> torch.dtype:
    """What holds a key of this layout without its scale, or with it if packed."""
    return PACKED if layout.packed else E4M3 if layout.quantised else layout.element


def list_places(keys: Tensor, key_scales: Tensor | None, starts: Tensor, ends: Tensor, out: Tensor) -> dict[str, Any]:
    """Arguments of `score_keys` for keys in one list."""
    paged = ("keys_page_stride", "scales_page_stride", "pages", "request_ids", "block_table", "table_stride")
    return dict.fromkeys((*paged, "page_id_stride", "requests", "table_width")) | {
        "keys": keys,
        "scales": None if key_scales is None else key_scales.contiguous(),
        "starts": starts.contiguous(),
        "ends": ends.contiguous(),
        "held": out.shape[1],
        "KEYS_ROW": keys.stride(0),
        "SCALES_ROW": 1 if key_scales is None else key_scales.contiguous().stride(0),
        "TILE": 0 if keys.dtype != torch.uint8 or key_scales is None else 2 * keys.shape[1] // key_scales.shape[1],
        "PAGE_SIZE": 1,
    }


def page_places(
    cache: PagedCache, request_ids: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor
) -> dict[str, Any]:
    """Arguments of `score_keys` for keys in pages."""
    layout = cache.layout
    requests, table_width = block_table.shape
    keys, keys_page, keys_row = strided_field(cache, layout.values)
    scales, scales_page, scales_row = strided_field(cache, layout.scales)
    return {
        "keys": keys,
        "keys_page_stride": keys_page,
        "scales": scales,
        "scales_page_stride": scales_page,
        "pages": cache.pages,
        "request_ids": request_ids.contiguous(),
        "block_table": block_table,
        "table_stride": block_table.stride(0),
        "page_id_stride": block_table.stride(1),
        "requests": requests,
        "table_width": table_width,
        "starts": None,
        "ends": lengths.contiguous(),
        "held": min(out.shape[1], table_width * cache.page_size),
        "KEYS_ROW": keys_row,
        "SCALES_ROW": scales_row,
        "TILE": layout.tile if layout.packed else 0,
        "PAGE_SIZE": cache.page_size,
    }


def check_scores(q: Tensor) -> None:
    """Refuse more heads, or wider ones, than `score_keys` holds."""
    _, heads, dim = q.shape
    if heads > MAX_HEADS or dim > MAX_DIM:
        expected = f"at most {MAX_HEADS} heads of {MAX_DIM} numbers for the triton backend"
        raise checks.refuse("q", expected, list(q.shape), "pass backend='reference'")


def _score(
    q: Tensor, weights: Tensor, places: dict[str, Any], keys: torch.dtype, out: Tensor, *, shared: bool, fill: bool
) -> None:
    """Launch `score_keys`; `shared` says that neighbouring tokens mostly see the same keys."""
    _, heads, dim = q.shape
    native = has_native_e4m3(q.device)
    compute = compute_dtype(q.dtype, keys, native=native)
    block_h, exact = head_block(heads, dim, compute), compute == torch.float32
    kind = {"shared": shared, "exact": exact, "native": compute == E4M3}
    key_bytes = places["keys"].element_size() * dim
    launch = choose_score_launch(out.shape, sm_count(q.device), heads, block_h, **kind, key_bytes=key_bytes)
    arguments, options = score_arguments(q, weights, places, compute, launch, out, native=native, fill=fill)
    programs = triton.cdiv(q.shape[0], launch.block_q) * triton.cdiv(out.shape[1], launch.span)
    if programs:
        with launching_on(q.device):
            score_keys[(programs, launch.block_q if places["block_table"] is not None else 1)](**arguments, **options)


def compute_dtype(query: torch.dtype, keys: torch.dtype, *, native: bool) -> torch.dtype:
    """What the products run in: the narrowest type that holds both, e4m3 itself only where the device multiplies it."""
    if interpreted(score_keys):
        return torch.float32
    if query == keys:
        return torch.float16 if query == E4M3 and not native else query
    if E4M3 in (query, keys):
        return keys if query == E4M3 else query
    return torch.float32


def head_block(heads: int, dim: int, compute: torch.dtype) -> int:
    width, power = (int(triton.next_power_of_2(n)) for n in (max(32, dim), heads))
    return max(16, min(QUERY_BYTES // (width * compute.itemsize), power))


def score_arguments(
    q: Tensor,
    weights: Tensor,
    places: dict[str, Any],
    compute: torch.dtype,
    launch: ScoreLaunch,
    out: Tensor,
    *,
    native: bool,
    fill: bool,
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of a launch of `score_keys`, given where the keys are."""
    tokens, heads, dim = q.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    stored = E4M3 if compute == E4M3 else torch.uint8
    keys = places["keys"]
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, E4M3: tl.float8e4nv}
    arguments = places | {
        "q": q.view(stored) if q.dtype == E4M3 else q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "weights": weights,
        "weights_token_stride": weights.stride(0),
        "weights_head_stride": weights.stride(1),
        "keys": keys.view(stored) if keys.element_size() == 1 else keys,
        "out": out,
        "out_stride": out.stride(0),
        "tokens": tokens,
        "width": out.shape[1],
        "span": launch.span,
        "HEADS": heads,
        "BLOCK_H": head_block(heads, dim, compute),
        "DIM": dim,
        "BLOCK_D": triton.next_power_of_2(max(32, dim)),
        "BLOCK_Q": launch.block_q,
        "BLOCK_N": launch.block_n,
        "FILL": fill,
        "COMPUTE": types[compute],
        "NATIVE": native,
        "STAGES": launch.stages,
        "INTERPRETED": interpreted(score_keys),
    }
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return arguments, options if launch.registers is None else options | {"maxnreg": launch.registers}


def _select(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None,
    block_table: Tensor | None,
    page_size: int,
    result: Tensor,
) -> None:
    """Select from rows, as many at a time as the scratch memory allows."""
    tokens, width = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    lengths = lengths.contiguous()
    launch = choose_topk_launch(tokens, width, k, sm_count(scores.device))
    step = max(1, SCRATCH_BYTES // (4 * launch.scratch))
    for start in range(0, tokens, step):
        some = slice(start, start + step)
        ids = None if request_ids is None else request_ids[some]
        with launching_on(scores.device):
            for kernel, grid, arguments, options in topk_launches(
                launch, scores[some], lengths[some], k, ids, block_table, page_size, result[some]
            ):
                kernel[(grid,)](**arguments, **options)
