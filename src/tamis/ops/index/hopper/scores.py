"""Index scores in CUDA C++ on Hopper (`scores.cu`), for the heads and row formats of DeepSeek's and GLM's indexers.

Which calls it serves depends on formats and sizes of numbers alone, never on the batch. So a score is computed by the
same operations in every batch.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import Launch, PreparedLaunch, kernel
from tamis.cuda.params import Int, Long, Pointer, params_bytes, pointer
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores

E4M3 = torch.float8_e4m3fn
HEADS = (16, 32, 64)
DIM = 128
BLOCK = 64
"""Keys of a block."""
COLUMNS, FEW_COLUMNS = TILES = 512, 128
"""Heads of all tokens of a tile: many for prompts, and few for decodes, whose keys then have more stages."""
MOST_GROUPS = 2048
"""Groups of tokens in a launch."""
WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SHARED_BYTES = 227 * 1024


class KeyFormat(NamedTuple):
    """A format of keys, as the source is compiled for it."""

    number: int
    """`KEYS` in the source: 0 for e4m3, 1 for bf16, 2 for e2m1."""
    key_bytes: int
    """Bytes of a key without scales."""
    stages: int
    """Blocks of keys in shared memory, beside tiles of COLUMNS."""
    few_stages: int
    """The same beside tiles of FEW_COLUMNS."""
    consumers: int
    """Warpgroups that score, beside one that produces. As many as registers allow hide the latency of shared memory."""
    score_registers: int
    """Registers per thread of a consumer."""
    produce_registers: int
    """Registers per thread of a producer."""

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 128 * (1 + self.consumers)


FORMATS = {
    "e4m3": KeyFormat(0, 128, 8, 20, 4, 104, 64),
    "bf16": KeyFormat(1, 256, 3, 9, 3, 152, 56),
    "e2m1": KeyFormat(2, 64, 15, 30, 3, 152, 56),
}


class ScoreParams(NamedTuple):
    """The parameters of `scores.cu`: T tokens, B requests."""

    q: Pointer
    """[T, H, 128]"""
    q_token_stride: Long
    """In bytes, as the next one."""
    q_head_stride: Long
    weights: Pointer
    """[T, H]"""
    weight_token_stride: Long
    """In elements, as the next one."""
    weight_head_stride: Long
    keys: Pointer
    key_page_stride: Long
    """In bytes."""
    scales: Pointer
    """0 if keys have none."""
    scale_page_stride: Long
    """In bytes."""
    request_ids: Pointer
    """int32 [T]; 0, as the block table, if keys are one list."""
    block_table: Pointer
    """int32 [B, table_width]"""
    table_stride: Long
    starts: Pointer
    """int32 [T]; 0 if every token sees its request from the start."""
    ends: Pointer
    """int32 [T]"""
    out: Pointer
    """float32 [T, width]"""
    out_stride: Long
    weight_type: Int
    """A value of WEIGHT_TYPES."""
    pages: Int
    page_size: Int
    requests: Int
    table_width: Int
    listed_keys: Int
    """Keys of a request that have a column and an entry in the table, or of the list."""
    tokens: Int
    group: Int
    """Tokens that may be one tile."""
    width: Int
    fill: Int
    """Whether -inf is written past the keys that tiles see."""
    pairs: Int
    """Whether two neighbouring scores may be stored at once."""
    joined: Int
    """Whether a page has 64 keys, and their scales follow them."""


class Memory(NamedTuple):
    """Where keys are."""

    keys: Tensor
    page_stride: int
    """In bytes, as the next one."""
    row_stride: int
    scales: Tensor | None
    scale_page_stride: int
    """In bytes, as the next one."""
    scale_row_stride: int


def format_of(layout: Layout, query: torch.dtype) -> KeyFormat | None:
    """The format of a layout's keys for such queries; None if the source has none."""
    if layout.width != DIM:
        return None
    if layout.packed:
        served = layout.tile == 32 and query in (E4M3, torch.bfloat16)
        return FORMATS["e2m1"] if served else None
    if layout.quantised:
        return FORMATS["e4m3"] if query == E4M3 else None
    return FORMATS["bf16"] if layout.element == query == torch.bfloat16 else None


def serves(call: IndexScores | IndexTopk) -> bool:
    """Whether the source computes the scores of such a call."""
    cache = call.cache
    found = format_of(cache.layout, call.q.dtype)
    if found is None or call.q.shape[1] not in HEADS or call.block_table.numel() == 0:
        return False
    return _fits(found, _cached(cache), cache.page_size)


def serves_list(call: RaggedScores) -> bool:
    """Whether the source computes the scores of such a call, with keys in one list."""
    keys, scales = call.keys, call.key_scales
    if call.q.shape[1] not in HEADS or call.q.shape[2] != DIM or not len(keys):
        return False
    if keys.dtype != call.q.dtype or keys.dtype not in (E4M3, torch.bfloat16):
        return False
    if (scales is None) == (keys.dtype == E4M3):
        return False
    return _fits(_list_format(call), _listed(call), BLOCK)


def _fits(found: KeyFormat, memory: Memory, page_size: int) -> bool:
    """Whether pages can be copied whole: aligned, with keys side by side."""
    aligned = memory.keys.data_ptr() % 16 == 0 and memory.page_stride % 16 == 0 and memory.row_stride == found.key_bytes
    if memory.scales is not None:
        aligned &= memory.scales.data_ptr() % 16 == 0 and memory.scale_page_stride % 16 == 0
        aligned &= memory.scale_row_stride == 4
    return aligned and (page_size in (16, 32) or page_size % BLOCK == 0)


def _list_format(call: RaggedScores) -> KeyFormat:
    return FORMATS["e4m3" if call.keys.dtype == E4M3 else "bf16"]


def _cached(cache: PagedCache) -> Memory:
    values = cache.field(cache.layout.values)
    size = values.element_size()
    places = values, values.stride(0) * size, values.stride(1) * size
    if cache.layout.scales is None:
        return Memory(*places, None, 0, 0)
    scales = cache.field(cache.layout.scales)
    size = scales.element_size()
    return Memory(*places, scales, scales.stride(0) * size, scales.stride(1) * size)


def _listed(call: RaggedScores) -> Memory:
    keys, scales = call.keys, call.key_scales
    row = keys.stride(0) * keys.element_size() if keys.stride(1) == 1 else 0
    if scales is None:
        return Memory(keys, BLOCK * row, row, None, 0, 0)
    return Memory(keys, BLOCK * row, row, scales, BLOCK * 4, scales.stride(0) * 4)


def key_offsets(cache: PagedCache) -> tuple[int, int | None]:
    """Bytes from the start of the cache's storage to its keys, and to their scales if they have any."""
    memory, start = _cached(cache), cache.storage.data_ptr()
    return memory.keys.data_ptr() - start, None if memory.scales is None else memory.scales.data_ptr() - start


def group_size(tokens: int, requests: int, heads: int) -> int:
    """Tokens that may be one tile: all new tokens of a request if every request has as many and they fit, so that
    neither a group nor a tile is divided; otherwise as many as fit."""
    most = COLUMNS // heads
    each, rest = divmod(tokens, max(1, requests))
    return each if rest == 0 and 0 < each <= most else most


def index_scores(call: IndexScores | IndexTopk, out: Tensor, *, fill: bool) -> None:
    """Write the scores of a call that `serves` to `out`, float32 [T, width].

    Args:
        call: queries, weights and keys.
        out: float32 [T, width], rows contiguous.
        fill: whether elements past the keys that a token sees are written; otherwise they are undefined.
    """
    found = format_of(call.cache.layout, call.q.dtype)
    assert found is not None
    q = aligned_query(call.q)
    ids, table, ends = call.request_ids.contiguous(), call.block_table, call.lengths.contiguous()
    table = table if table.stride(1) == 1 else table.contiguous()
    params = paged_params(call._replace(q=q, request_ids=ids, block_table=table, lengths=ends), out, fill=fill)
    _launch_all(found, q, params, out.device)


def ragged_scores(call: RaggedScores) -> None:
    """Fill `call.out` of a call that `serves_list`."""
    q, starts, ends, out = aligned_query(call.q), call.starts.contiguous(), call.ends.contiguous(), call.out
    params = ScoreParams(
        **_query_params(q, call.weights),
        **_key_params(_listed(call), 0),
        request_ids=0,
        block_table=0,
        table_stride=0,
        starts=starts.data_ptr(),
        ends=ends.data_ptr(),
        **_out_params(out, fill=True),
        pages=len(call.keys),
        page_size=BLOCK,
        requests=0,
        table_width=0,
        listed_keys=len(call.keys),
        group=COLUMNS // q.shape[1],
    )
    _launch_all(_list_format(call), q, params, out.device)


def aligned_query(q: Tensor) -> Tensor:
    """The queries, copied if rows of a head cannot be read 16 bytes at a time."""
    size = q.element_size()
    steps = (q.data_ptr(), q.stride(0) * size, q.stride(1) * size)
    return q if q.stride(2) == 1 and all(step % 16 == 0 for step in steps) else q.contiguous()


def paged_params(call: IndexScores | IndexTopk, out: Tensor, *, fill: bool) -> ScoreParams:
    """The parameters of a launch for tensors that need no copy."""
    cache, table = call.cache, call.block_table
    (tokens, heads, _), (requests, table_width) = call.q.shape, table.shape
    return ScoreParams(
        **_query_params(call.q, call.weights),
        **_key_params(_cached(cache), cache.page_size),
        request_ids=call.request_ids.data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
        starts=0,
        ends=call.lengths.data_ptr(),
        **_out_params(out, fill=fill),
        pages=cache.pages,
        page_size=cache.page_size,
        requests=requests,
        table_width=table_width,
        listed_keys=min(out.shape[1], table_width * cache.page_size),
        group=group_size(tokens, requests, heads),
    )


def _query_params(q: Tensor, weights: Tensor) -> dict[str, int]:
    size = q.element_size()
    return {
        "q": q.data_ptr(),
        "q_token_stride": q.stride(0) * size,
        "q_head_stride": q.stride(1) * size,
        "weights": weights.data_ptr(),
        "weight_token_stride": weights.stride(0),
        "weight_head_stride": weights.stride(1),
        "weight_type": WEIGHT_TYPES[weights.dtype],
        "tokens": q.shape[0],
    }


def _key_params(memory: Memory, page_size: int) -> dict[str, int]:
    joined = False
    if memory.scales is not None and page_size == BLOCK:
        follow = memory.scales.data_ptr() - memory.keys.data_ptr() == BLOCK * memory.row_stride
        joined = follow and memory.scale_page_stride == memory.page_stride
    return {
        "joined": int(joined),
        "keys": memory.keys.data_ptr(),
        "key_page_stride": memory.page_stride,
        "scales": pointer(memory.scales),
        "scale_page_stride": memory.scale_page_stride,
    }


def _out_params(out: Tensor, *, fill: bool) -> dict[str, int]:
    return {
        "out": out.data_ptr(),
        "out_stride": out.stride(0),
        "width": out.shape[1],
        "fill": int(fill),
        "pairs": int(out.data_ptr() % 8 == 0 and out.stride(0) % 2 == 0 and out.shape[1] % BLOCK == 0),
    }


def _launch_all(found: KeyFormat, q: Tensor, params: ScoreParams, device: torch.device) -> None:
    """Launch for all tokens, as many at a time as a launch takes."""
    tokens, most = params.tokens, MOST_GROUPS * params.group
    launch = _launch(device_index(device), found, q.shape[1], q.element_size(), _columns(params.group, q.shape[1]))
    weight_bytes = 4 if params.weight_type == 0 else 2
    for first in range(0, tokens, most):
        some = params._replace(
            q=params.q + first * params.q_token_stride,
            weights=params.weights + first * params.weight_token_stride * weight_bytes,
            request_ids=params.request_ids and params.request_ids + 4 * first,
            starts=params.starts and params.starts + 4 * first,
            ends=params.ends + 4 * first,
            out=params.out + 4 * first * params.out_stride,
            tokens=min(most, tokens - first),
        )
        launch((sm_count(device), 1, 1), some)


CHANGING = ("q", "weights", "keys", "scales", "request_ids", "block_table", "ends", "out")
"""The parameters that every launch of `prepare_scores` is given."""


def prepare_scores(call: IndexTopk, out: Tensor) -> PreparedLaunch | None:
    """A launch for calls like this one as a whole; None if it needs copies or several launches.

    Call it with the stream and the addresses named in `CHANGING`.
    """
    found = format_of(call.cache.layout, call.q.dtype)
    copied = aligned_query(call.q) is not call.q or call.block_table.stride(1) != 1
    copied = copied or not call.request_ids.is_contiguous() or not call.lengths.is_contiguous()
    params = paged_params(call, out, fill=False)
    if found is None or copied or ceil_div(params.tokens, params.group) > MOST_GROUPS:
        return None
    heads, size = call.q.shape[1], call.q.element_size()
    launch = _launch(device_index(out.device), found, heads, size, _columns(params.group, heads))
    return launch.prepared((sm_count(out.device), 1, 1), params, CHANGING)


@cache
def program(found: KeyFormat, heads: int, query_bytes: int, columns: int) -> Program:
    """The program `scores.cu` for a format, a number of heads, the size of a query's numbers, and tiles."""
    return Program.packaged(
        __package__,
        "scores.cu",
        KEYS=found.number,
        HEADS=heads,
        QUERY_BYTES=query_bytes,
        COLUMNS=columns,
        STAGES=found.stages if columns == COLUMNS else found.few_stages,
        THREADS=found.threads,
        SHARED_BYTES=SHARED_BYTES,
        PARAMS_BYTES=params_bytes(ScoreParams),
        SCORE_REGISTERS=found.score_registers,
        PRODUCE_REGISTERS=found.produce_registers,
    )


@cache
def _launch(device: int, found: KeyFormat, heads: int, query_bytes: int, columns: int) -> Launch:
    loaded = kernel(program(found, heads, query_bytes, columns), "index_scores", device)
    return Launch(loaded, ScoreParams, threads=found.threads, shared=SHARED_BYTES, overlap=True)


def _columns(group: int, heads: int) -> int:
    """Columns of the tiles for groups of a size."""
    return FEW_COLUMNS if group * heads <= FEW_COLUMNS else COLUMNS
