"""Index scores in CUDA C++ on Hopper, for the heads and key formats of DeepSeek's and GLM's indexers.

`fp8_scores.cu` has e4m3 keys, `scores.cu` bf16 and e2m1 ones. Which calls they serve depends on formats and sizes of
numbers alone, never on the batch. So a score is computed by the same operations in every batch.
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
from tamis.cuda.params import params_bytes
from tamis.cuda.tile_map import TileMap, tile_map
from tamis.ops.index.hopper.score_params import (
    BLOCK,
    Memory,
    ScoreParams,
    cached,
    key_pages,
    key_params,
    listed,
    out_params,
    query_params,
)
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores

E4M3 = torch.float8_e4m3fn
HEADS = (16, 32, 64)
DIM = 128
MOST_GROUPS = 2048
"""Groups of tokens in a launch."""
SHARED_BYTES = 227 * 1024


class Tiles(NamedTuple):
    """A shape of a CTA's work: how many heads of tokens it scores at a time, and how many blocks of keys it holds."""

    columns: int
    """Heads of all tokens of a tile."""
    stages: int
    """Blocks of keys in shared memory."""


class KeyFormat(NamedTuple):
    """A format of keys, as its source is compiled for it."""

    source: str
    number: int
    """`KEYS` in `scores.cu`: 1 for bf16, 2 for e2m1."""
    key_bytes: int
    """Bytes of a key without scales."""
    prompts: Tiles
    decodes: Tiles
    """Tiles of few tokens, whose keys then have more stages."""
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

    @property
    def mapped(self) -> bool:
        """Whether keys are copied by a tile map."""
        return self.source == "fp8_scores.cu"

    def tiles(self, columns: int) -> Tiles:
        """The tiles for groups of tokens that have so many heads together."""
        return self.decodes if columns <= self.decodes.columns else self.prompts


FORMATS = {
    "e4m3": KeyFormat("fp8_scores.cu", 0, 128, Tiles(512, 10), Tiles(128, 22), 2, 216, 72),
    "bf16": KeyFormat("scores.cu", 1, 256, Tiles(512, 3), Tiles(128, 9), 3, 152, 56),
    "e2m1": KeyFormat("scores.cu", 2, 64, Tiles(512, 15), Tiles(128, 30), 3, 152, 56),
}


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
    return _fits(found, cached(cache), cache.page_size)


def serves_list(call: RaggedScores) -> bool:
    """Whether the source computes the scores of such a call, with keys in one list."""
    keys, scales = call.keys, call.key_scales
    if call.q.shape[1] not in HEADS or call.q.shape[2] != DIM or not len(keys):
        return False
    if keys.dtype != call.q.dtype or keys.dtype not in (E4M3, torch.bfloat16):
        return False
    if (scales is None) == (keys.dtype == E4M3):
        return False
    return _fits(_list_format(call), listed(call), BLOCK)


def _fits(found: KeyFormat, memory: Memory, page_size: int) -> bool:
    """Whether pages can be copied whole: aligned, with keys side by side."""
    aligned = memory.keys.data_ptr() % 16 == 0 and memory.page_stride % 16 == 0 and memory.row_stride == found.key_bytes
    if memory.scales is not None:
        aligned &= memory.scales.data_ptr() % 16 == 0 and memory.scale_page_stride % 16 == 0
        aligned &= memory.scale_row_stride == 4
    return aligned and (page_size in (16, 32) or page_size % BLOCK == 0)


def _list_format(call: RaggedScores) -> KeyFormat:
    return FORMATS["e4m3" if call.keys.dtype == E4M3 else "bf16"]


def key_offsets(cache: PagedCache) -> tuple[int, int | None]:
    """Bytes from the start of the cache's storage to its keys, and to their scales if they have any."""
    memory, start = cached(cache), cache.storage.data_ptr()
    return memory.keys.data_ptr() - start, None if memory.scales is None else memory.scales.data_ptr() - start


def group_size(found: KeyFormat, tokens: int, requests: int, heads: int) -> int:
    """Tokens that may be one tile: all new tokens of a request if every request has as many and they fit, so that
    neither a group nor a tile is divided; otherwise as many as fit."""
    most = found.prompts.columns // heads
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
    call = call._replace(q=q, request_ids=ids, block_table=table, lengths=ends)
    _launch_all(found, q, paged_params(found, call, out, fill=fill), out.device)


def ragged_scores(call: RaggedScores) -> None:
    """Fill `call.out` of a call that `serves_list`."""
    q, starts, ends, out = aligned_query(call.q), call.starts.contiguous(), call.ends.contiguous(), call.out
    found = _list_format(call)
    params = ScoreParams(
        **query_params(q, call.weights),
        **key_params(listed(call), 0),
        request_ids=0,
        block_table=0,
        table_stride=0,
        starts=starts.data_ptr(),
        ends=ends.data_ptr(),
        **out_params(out, fill=True),
        pages=len(call.keys),
        page_size=BLOCK,
        requests=0,
        table_width=0,
        listed_keys=len(call.keys),
        group=found.prompts.columns // q.shape[1],
    )
    _launch_all(found, q, params, out.device)


def aligned_query(q: Tensor) -> Tensor:
    """The queries, copied if rows of a head cannot be read 16 bytes at a time."""
    size = q.element_size()
    steps = (q.data_ptr(), q.stride(0) * size, q.stride(1) * size)
    return q if q.stride(2) == 1 and all(step % 16 == 0 for step in steps) else q.contiguous()


def paged_params(found: KeyFormat, call: IndexScores | IndexTopk, out: Tensor, *, fill: bool) -> ScoreParams:
    """The parameters of a launch for tensors that need no copy."""
    cache, table = call.cache, call.block_table
    (tokens, heads, _), (requests, table_width) = call.q.shape, table.shape
    return ScoreParams(
        **query_params(call.q, call.weights),
        **key_params(cached(cache), cache.page_size),
        request_ids=call.request_ids.data_ptr(),
        block_table=table.data_ptr(),
        table_stride=table.stride(0),
        starts=0,
        ends=call.lengths.data_ptr(),
        **out_params(out, fill=fill),
        pages=cache.pages,
        page_size=cache.page_size,
        requests=requests,
        table_width=table_width,
        listed_keys=min(out.shape[1], table_width * cache.page_size),
        group=group_size(found, tokens, requests, heads),
    )


def _launch_all(found: KeyFormat, q: Tensor, params: ScoreParams, device: torch.device) -> None:
    """Launch for all tokens, as many at a time as a launch takes."""
    tokens, most = params.tokens, MOST_GROUPS * params.group
    heads = q.shape[1]
    launch = _launch(device_index(device), found, heads, q.element_size(), found.tiles(params.group * heads))
    keys = tile_map(*key_pages(params)) if found.mapped else None
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
        launch((sm_count(device), 1, 1), some, keys)


CHANGING = ("q", "weights", "keys", "scales", "request_ids", "block_table", "ends", "out")
"""The parameters that every launch of `prepare_scores` is given."""


class PreparedScores(NamedTuple):
    """A launch for calls like one. Give it the addresses named in `CHANGING`, and the map of its keys."""

    launch: PreparedLaunch
    pages: tuple[int, int, int, int] | None
    """What `tile_map` takes beside the address of the keys; None if they are copied without a map."""

    def key_map(self, keys: int) -> TileMap | None:
        """The map of keys at an address, for all launches that read them."""
        return None if self.pages is None else tile_map(keys, *self.pages)


def prepare_scores(call: IndexTopk, out: Tensor) -> PreparedScores | None:
    """A launch for calls like this one as a whole; None if it needs copies or several launches."""
    found = format_of(call.cache.layout, call.q.dtype)
    copied = aligned_query(call.q) is not call.q or call.block_table.stride(1) != 1
    copied = copied or not call.request_ids.is_contiguous() or not call.lengths.is_contiguous()
    if found is None or copied:
        return None
    params = paged_params(found, call, out, fill=False)
    if ceil_div(params.tokens, params.group) > MOST_GROUPS:
        return None
    heads, size = call.q.shape[1], call.q.element_size()
    launch = _launch(device_index(out.device), found, heads, size, found.tiles(params.group * heads))
    pages = key_pages(params)[1:] if found.mapped else None
    return PreparedScores(launch.prepared((sm_count(out.device), 1, 1), params, CHANGING), pages)


@cache
def program(found: KeyFormat, heads: int, query_bytes: int, tiles: Tiles) -> Program:
    """The program of a format for a number of heads, the size of a query's numbers, and tiles."""
    own = {"KEYS": found.number, "QUERY_BYTES": query_bytes}
    if found.mapped:
        own = {"QUARTETS": int(tiles == found.prompts)}
    return Program.packaged(
        __package__,
        found.source,
        HEADS=heads,
        COLUMNS=tiles.columns,
        STAGES=tiles.stages,
        THREADS=found.threads,
        SHARED_BYTES=SHARED_BYTES,
        PARAMS_BYTES=params_bytes(ScoreParams),
        SCORE_REGISTERS=found.score_registers,
        PRODUCE_REGISTERS=found.produce_registers,
        **own,
    )


@cache
def _launch(device: int, found: KeyFormat, heads: int, query_bytes: int, tiles: Tiles) -> Launch:
    loaded = kernel(program(found, heads, query_bytes, tiles), "index_scores", device)
    return Launch(loaded, ScoreParams, threads=found.threads, shared=SHARED_BYTES, overlap=True, mapped=found.mapped)
