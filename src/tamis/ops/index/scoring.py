"""Launches of `triton_scores.score_keys`, over a whole batch or chunk by chunk. Both GPU backends score with them.

Grids and blocks depend on shapes alone, so every call can be captured in a CUDA graph and replayed with other lengths:
programs whose keys all lie past the lengths exit at once.
"""

from collections.abc import Callable, Iterator
from functools import cache as remember
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.cache.fields import from_key
from tamis.cuda.device import sm_count
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores
from tamis.ops.index.triton_scores import E4M3, choose_score_launch, score_keys
from tamis.ops.rows.triton_launch import TritonLaunch, can_prepare
from tamis.ops.rows.triton_rows import has_native_e4m3, interpreted, launching_on, strided_field

PACKED = torch.bfloat16
"""The type that holds e2m1 values times their scales: bf16 has the range of float32."""
MAX_HEADS = 128
MAX_DIM = 256
MAX_BLOCK = 16384
"""Positions of the largest block: one program holds their scores."""


def index_scores(call: IndexScores) -> None:
    """Fill `call.out`; see `tamis.ops.index_scores`."""
    _score_pages(call, call.out, batch=call.q.shape[0], fill=True)


def ragged_scores(call: RaggedScores) -> None:
    """Fill `call.out`; see `tamis.ops.ragged_scores`."""
    _launch(call, ragged_keys(call), call.out, shared=True, fill=True)


def check_index_scores(call: IndexScores | RaggedScores | IndexTopk | IndexTopkAndBlocks | IndexTopkWithin) -> None:
    """Refuse more heads, or wider ones, than `score_keys` holds."""
    _, heads, dim = call.q.shape
    if heads > MAX_HEADS or dim > MAX_DIM:
        expected = f"at most {MAX_HEADS} heads of {MAX_DIM} numbers for the triton backend"
        raise checks.refuse("q", expected, list(call.q.shape), "pass backend='reference'")


check_ragged_scores = check_index_topk = check_index_topk_within = check_index_scores


def check_index_topk_and_blocks(call: IndexTopkAndBlocks) -> None:
    """Refuse what `check_index_scores` refuses, and blocks of more positions than a program holds."""
    check_index_scores(call)
    if call.block_size > MAX_BLOCK:
        expected = f"at most {MAX_BLOCK} for the triton backend"
        raise checks.refuse("block_size", expected, call.block_size, "pass backend='reference'")


class Chunk(NamedTuple):
    """Some tokens of a call with their scores."""

    scores: Tensor
    """float32 [t, width], undefined past each token's length. The next chunk overwrites it."""
    call: IndexTopk
    """The part of the call that selects for them."""


def scored_chunks(
    call: IndexTopk, width: int, tokens: int, score: Callable[[IndexTopk, Tensor], None] | None = None
) -> Iterator[Chunk]:
    """Scores in `width` columns, of at most `tokens` tokens (at least one) at a time, by `score` or by default here."""
    total = call.q.shape[0]
    rows = max(1, min(tokens, total))
    scores = torch.empty(rows, width, dtype=torch.float32, device=call.q.device)
    for some, chunk in call.chunks(rows):
        found = scores[: some.stop - some.start]
        if score is None:
            _score_pages(chunk, found, batch=call.batch, fill=False)
        else:
            score(chunk, found)
        yield Chunk(found, chunk)


def score_width(call: IndexTopk) -> int:
    """Columns of scores for a call: a multiple of 16, so that rows are aligned for vector loads."""
    return round_up(call.block_table.shape[1] * call.cache.page_size, 16)


def _score_pages(call: IndexScores | IndexTopk, out: Tensor, *, batch: int, fill: bool) -> None:
    if call.block_table.numel() == 0:
        out.fill_(-torch.inf)
        return
    # More tokens than requests mean a prefill, where neighbours mostly belong to one request. This determines the order
    # of summation, so it must depend on the whole batch and not on the chunk.
    shared = batch > call.block_table.shape[0]
    _launch(call, paged_keys(call, out.shape[1]), out, shared=shared, fill=fill)


class Keys(NamedTuple):
    """The keys of a launch of `score_keys`."""

    dtype: torch.dtype
    """The dtype that holds a key without its scale, or with its scales if it is packed."""
    arguments: dict[str, Any]
    """The kernel's arguments that describe the keys."""


def paged_keys(call: IndexScores | IndexTopk, width: int) -> Keys:
    """The keys of a cache, for scores in `width` columns."""
    cache, layout, block_table = call.cache, call.cache.layout, call.block_table
    requests, table_width = block_table.shape
    keys, keys_page, keys_row = strided_field(cache, layout.values)
    scales, scales_page, scales_row = strided_field(cache, layout.scales)
    dtype, tile = _key_format(layout.key)
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
        "listed_keys": min(width, table_width * cache.page_size),
        "KEYS_ROW": keys_row,
        "SCALES_ROW": scales_row,
        "TILE": tile,
        "PAGE_SIZE": cache.page_size,
    }
    return Keys(dtype, arguments)


@remember
def _key_format(key: str) -> tuple[torch.dtype, int]:
    """`Keys.dtype` of a layout, and how many values share a scale if it is packed, otherwise 0."""
    layout = from_key(key)
    if layout.packed:
        return PACKED, layout.tile
    return E4M3 if layout.quantised else layout.element, 0


def ragged_keys(call: RaggedScores) -> Keys:
    """The keys of a contiguous list."""
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
        "listed_keys": keys.shape[0],
        "KEYS_ROW": keys.stride(0),
        "SCALES_ROW": 1 if scales is None else scales.stride(0),
        "TILE": 2 * keys.shape[1] // scales.shape[1] if packed and scales is not None else 0,
        "PAGE_SIZE": 1,
    }
    return Keys(PACKED if packed else keys.dtype, arguments)


def _launch(call: IndexScores | RaggedScores | IndexTopk, keys: Keys, out: Tensor, *, shared: bool, fill: bool) -> None:
    device = out.device
    native, sms = has_native_e4m3(device), sm_count(device)
    grid, arguments, options = score_launch(call, keys, out, shared=shared, fill=fill, native=native, sms=sms)
    if grid[0]:
        with launching_on(device):
            score_keys[grid](**arguments, **options)


def prepare_scores(call: IndexTopk, out: Tensor) -> Callable[[int, IndexTopk, int], None] | None:
    """A launch that scores calls like this one as a whole, into memory like `out`: a function of the stream, the call
    and the address of its scores. None if tensors would have to be copied."""
    q, lengths, ids, table = call.q, call.lengths, call.request_ids, call.block_table
    copied = q.stride(2) != 1 or not lengths.is_contiguous() or not ids.is_contiguous()
    if copied or not q.shape[0] or not table.numel() or not can_prepare(score_keys):
        return None
    device, keys = out.device, paged_keys(call, out.shape[1])
    grid, arguments, options = score_launch(
        call,
        keys,
        out,
        shared=call.batch > table.shape[0],
        fill=False,
        native=has_native_e4m3(device),
        sms=sm_count(device),
    )
    scaled = arguments["scales"] is not None
    changing = ["q", "weights", "request_ids", "block_table", "ends", "out", "keys", *["scales"] * scaled]
    launch = TritonLaunch(score_keys, grid, arguments, changing, **options)
    storage = call.cache.storage.data_ptr()
    starts = [arguments[name].data_ptr() - storage for name in changing[6:]]

    def run(stream: int, call: IndexTopk, out: int) -> None:
        pages = call.cache.storage.data_ptr()
        addresses = [call.q.data_ptr(), call.weights.data_ptr(), call.request_ids.data_ptr()]
        addresses += (call.block_table.data_ptr(), call.lengths.data_ptr(), out)
        addresses += [pages + start for start in starts]
        launch(stream, addresses)

    return run


def score_launch(
    call: IndexScores | RaggedScores | IndexTopk,
    keys: Keys,
    out: Tensor,
    *,
    shared: bool,
    fill: bool,
    native: bool,
    sms: int,
) -> tuple[tuple[int, int], dict[str, Any], dict[str, int]]:
    """Grid, arguments and options of a launch of `score_keys`.

    Args:
        call: queries and weights.
        keys: the keys, from `paged_keys` or `ragged_keys`.
        out: float32 [T, width], rows contiguous.
        shared: whether neighbouring tokens mostly see the same keys.
        fill: whether elements past a token's keys are written.
        native: whether the device converts and multiplies e4m3 in hardware.
        sms: SMs of the device.
    """
    weights, width = call.weights, out.shape[1]
    q = call.q if call.q.stride(2) == 1 else call.q.contiguous()
    tokens, heads, dim = q.shape
    stored: Tensor = keys.arguments["keys"]
    itemsize = stored.element_size()
    launch = choose_score_launch(
        *(tokens, width, heads, dim, q.dtype, keys.dtype),
        key_bytes=itemsize * dim,
        shared=shared,
        native=native,
        on_host=interpreted(score_keys),
        sms=sms,
    )
    # The kernel decodes e4m3 from bytes, unless the product takes it as it is.
    byte = E4M3 if launch.compute == E4M3 else torch.uint8
    arguments = keys.arguments | launch.constants
    arguments |= {
        "q": q.view(byte) if q.dtype == E4M3 else q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "weights": weights,
        "weights_token_stride": weights.stride(0),
        "weights_head_stride": weights.stride(1),
        "keys": stored.view(byte) if itemsize == 1 else stored,
        "out": out,
        "out_stride": out.stride(0),
        "tokens": tokens,
        "width": width,
        "span": launch.span,
        "FILL": fill,
    }
    programs = ceil_div(tokens, launch.block_q) * ceil_div(width, launch.span)
    return (programs, launch.block_q if arguments["block_table"] is not None else 1), arguments, launch.options
