"""Launches of `triton_scores.score_keys`, over a whole batch or chunk by chunk. Both GPU backends score with them.

Grids and blocks depend on shapes alone, so every call can be captured in a CUDA graph and replayed with other lengths:
programs whose keys all lie past the lengths exit at once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.arithmetic import round_up
from tamis.cuda.device import sm_count
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores
from tamis.ops.index.triton_scores import choose_score_launch, score_keys
from tamis.ops.rows.triton_rows import has_native_e4m3, interpreted, launching_on, strided_field

E4M3 = torch.float8_e4m3fn
PACKED = torch.bfloat16
"""The type that holds e2m1 values times their scales: bf16 has the range of float32."""
MAX_HEADS = 128
MAX_DIM = 256
QUERY_BYTES = 16 * 1024
"""Limit for the heads of one token that a program holds at once; more heads go block by block."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, E4M3: tl.float8e4nv}


def index_scores(call: IndexScores) -> None:
    """Fill `call.out`; see `tamis.ops.index_scores`."""
    _score_pages(call, shared=_tokens_share_keys(call), fill=True)


def ragged_scores(call: RaggedScores) -> None:
    """Fill `call.out`; see `tamis.ops.ragged_scores`."""
    _launch(call, ragged_keys(call), shared=True, fill=True)


def check_index_scores(call: IndexScores | RaggedScores | IndexTopk) -> None:
    """Refuse more heads, or wider ones, than `score_keys` holds."""
    _, heads, dim = call.q.shape
    if heads > MAX_HEADS or dim > MAX_DIM:
        expected = f"at most {MAX_HEADS} heads of {MAX_DIM} numbers for the triton backend"
        raise checks.refuse("q", expected, list(call.q.shape), "pass backend='reference'")


check_ragged_scores = check_index_topk = check_index_scores


class Keys(NamedTuple):
    """Where `score_keys` finds its keys."""

    dtype: torch.dtype
    """What holds a key without its scale, or with its scales if it is packed."""
    arguments: dict[str, Any]


class Chunk(NamedTuple):
    """Some tokens of a call with their scores."""

    tokens: slice
    scores: Tensor
    """float32 [t, score_width], undefined past each token's length. The next chunk overwrites it."""
    lengths: Tensor
    """int32 [t]"""


def scored_chunks(call: IndexTopk, tokens: int) -> Iterator[Chunk]:
    """Scores of `tokens` tokens at a time, or of one if that is less."""
    total = call.q.shape[0]
    rows = max(1, min(tokens, total))
    scores = torch.empty(rows, score_width(call), dtype=torch.float32, device=call.q.device)
    # This decides a score's order of summation, so it must follow from the whole batch and not from the chunk.
    shared = _tokens_share_keys(call)
    for some, chunk in call.chunks(rows):
        out = scores[: some.stop - some.start]
        _score_pages(chunk.scoring(out), shared=shared, fill=False)
        yield Chunk(some, out, chunk.lengths)


def score_width(call: IndexTopk) -> int:
    """Columns of scores for a call: a multiple of 16, so that rows are aligned for vector loads."""
    return round_up(call.block_table.shape[1] * call.cache.page_size, 16)


def _tokens_share_keys(call: IndexScores | IndexTopk) -> bool:
    """Whether neighbouring tokens mostly belong to one request, as they do in a prefill."""
    return call.q.shape[0] > call.block_table.shape[0]


def _score_pages(call: IndexScores, *, shared: bool, fill: bool) -> None:
    if call.block_table.numel() == 0:
        call.out.fill_(-torch.inf)
        return
    _launch(call, paged_keys(call), shared=shared, fill=fill)


def _launch(call: IndexScores | RaggedScores, keys: Keys, *, shared: bool, fill: bool) -> None:
    device = call.q.device
    native, sms = has_native_e4m3(device), sm_count(device)
    grid, arguments, options = score_launch(call, keys, shared=shared, fill=fill, native=native, sms=sms)
    if grid[0]:
        with launching_on(device):
            score_keys[grid](**arguments, **options)


def paged_keys(call: IndexScores) -> Keys:
    """The keys of a cache."""
    cache, layout, block_table = call.cache, call.cache.layout, call.block_table
    requests, table_width = block_table.shape
    keys, keys_page, keys_row = strided_field(cache, layout.values)
    scales, scales_page, scales_row = strided_field(cache, layout.scales)
    arguments = {
        "keys": keys,
        "keys_page_stride": keys_page,
        "scales": scales,
        "scales_page_stride": scales_page,
        "pages": cache.pages,
        "request_ids": call.request_ids.contiguous(),
        "block_table": block_table,
        "table_stride": block_table.stride(0),
        "page_id_stride": block_table.stride(1),
        "requests": requests,
        "table_width": table_width,
        "starts": None,
        "ends": call.lengths.contiguous(),
        "listed_keys": min(call.out.shape[1], table_width * cache.page_size),
        "KEYS_ROW": keys_row,
        "SCALES_ROW": scales_row,
        "TILE": layout.tile if layout.packed else 0,
        "PAGE_SIZE": cache.page_size,
    }
    return Keys(PACKED if layout.packed else E4M3 if layout.quantised else layout.element, arguments)


def ragged_keys(call: RaggedScores) -> Keys:
    """The keys of a list."""
    keys = call.keys if call.keys.stride(1) == 1 else call.keys.contiguous()
    scales = None if call.key_scales is None else call.key_scales.contiguous()
    packed = keys.dtype == torch.uint8
    arguments: dict[str, Any] = {
        "keys": keys,
        "keys_page_stride": None,
        "scales": scales,
        "scales_page_stride": None,
        "pages": None,
        "request_ids": None,
        "block_table": None,
        "table_stride": None,
        "page_id_stride": None,
        "requests": None,
        "table_width": None,
        "starts": call.starts.contiguous(),
        "ends": call.ends.contiguous(),
        "listed_keys": call.out.shape[1],
        "KEYS_ROW": keys.stride(0),
        "SCALES_ROW": 1 if scales is None else scales.stride(0),
        "TILE": 2 * keys.shape[1] // scales.shape[1] if packed and scales is not None else 0,
        "PAGE_SIZE": 1,
    }
    return Keys(PACKED if packed else keys.dtype, arguments)


def score_launch(
    call: IndexScores | RaggedScores, keys: Keys, *, shared: bool, fill: bool, native: bool, sms: int
) -> tuple[tuple[int, int], dict[str, Any], dict[str, int]]:
    """Grid, arguments and options of a launch of `score_keys`.

    Args:
        call: queries, weights and result.
        keys: where the keys are.
        shared: whether neighbouring tokens mostly see the same keys.
        fill: whether elements past a token's keys are written.
        native: whether the device converts and multiplies e4m3 in hardware.
        sms: SMs of the device.
    """
    weights, out = call.weights, call.out
    tokens, heads, dim = call.q.shape
    q = call.q if call.q.stride(2) == 1 else call.q.contiguous()
    compute = _compute_dtype(q.dtype, keys.dtype, native=native)
    block_d = triton.next_power_of_2(max(32, dim))
    block_h = max(16, min(QUERY_BYTES // (block_d * compute.itemsize), triton.next_power_of_2(heads)))
    stored: Tensor = keys.arguments["keys"]
    launch = choose_score_launch(
        out.shape,
        sms,
        heads,
        block_h,
        shared=shared,
        exact=compute == torch.float32,
        native=compute == E4M3,
        key_bytes=stored.element_size() * dim,
    )
    # The kernel decodes e4m3 from bytes, unless the product takes it as it is.
    byte = E4M3 if compute == E4M3 else torch.uint8
    arguments = keys.arguments | {
        "q": q.view(byte) if q.dtype == E4M3 else q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "weights": weights,
        "weights_token_stride": weights.stride(0),
        "weights_head_stride": weights.stride(1),
        "keys": stored.view(byte) if stored.element_size() == 1 else stored,
        "out": out,
        "out_stride": out.stride(0),
        "tokens": tokens,
        "width": out.shape[1],
        "span": launch.span,
        "HEADS": heads,
        "BLOCK_H": block_h,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_Q": launch.block_q,
        "BLOCK_N": launch.block_n,
        "FILL": fill,
        "COMPUTE": _TYPES[compute],
        "NATIVE": native,
        "STAGES": launch.stages,
        "INTERPRETED": interpreted(score_keys),
    }
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers is not None:
        options["maxnreg"] = launch.registers
    programs = triton.cdiv(tokens, launch.block_q) * triton.cdiv(out.shape[1], launch.span)
    return (programs, launch.block_q if arguments["block_table"] is not None else 1), arguments, options


def _compute_dtype(query: torch.dtype, keys: torch.dtype, *, native: bool) -> torch.dtype:
    """The type of the products' inputs: the narrowest that holds both, and e4m3 only where the device multiplies it."""
    if interpreted(score_keys):
        return torch.float32
    if query == keys:
        return torch.float16 if query == E4M3 and not native else query
    if E4M3 in (query, keys):
        return keys if query == E4M3 else query
    return torch.float32
