"""Parameters of the scorers in CUDA C++, `fp8_scores.cu` and `scores.cu`: where queries, keys and results are."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.cuda.params import Int, Long, Pointer, pointer
from tamis.cuda.tile_map import ROW_BYTES
from tamis.ops.index.operations import RaggedScores

BLOCK = 64
"""Keys of a block."""
WEIGHT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class ScoreParams(NamedTuple):
    """The parameters of a launch: T tokens, B requests."""

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


def cached(cache: PagedCache) -> Memory:
    """The keys of a cache."""
    values = cache.field(cache.layout.values)
    size = values.element_size()
    places = values, values.stride(0) * size, values.stride(1) * size
    if cache.layout.scales is None:
        return Memory(*places, None, 0, 0)
    scales = cache.field(cache.layout.scales)
    size = scales.element_size()
    return Memory(*places, scales, scales.stride(0) * size, scales.stride(1) * size)


def listed(call: RaggedScores) -> Memory:
    """The keys of a list, of which 64 count as a page."""
    keys, scales = call.keys, call.key_scales
    row = keys.stride(0) * keys.element_size() if keys.stride(1) == 1 else 0
    if scales is None:
        return Memory(keys, BLOCK * row, row, None, 0, 0)
    return Memory(keys, BLOCK * row, row, scales, BLOCK * 4, scales.stride(0) * 4)


def query_params(q: Tensor, weights: Tensor) -> dict[str, int]:
    """The parameters that follow from queries and weights."""
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


def key_params(memory: Memory, page_size: int) -> dict[str, int]:
    """The parameters that follow from where keys are."""
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


def out_params(out: Tensor, *, fill: bool) -> dict[str, int]:
    """The parameters that follow from the result."""
    return {
        "out": out.data_ptr(),
        "out_stride": out.stride(0),
        "width": out.shape[1],
        "fill": int(fill),
        "pairs": int(out.data_ptr() % 8 == 0 and out.stride(0) % 2 == 0 and out.shape[1] % BLOCK == 0),
    }


class KeyPages(NamedTuple):
    """What `tamis.cuda.tile_map` needs to describe keys."""

    address: int
    rows: int
    """Keys of a page."""
    pages: int
    page_stride: int
    """In bytes."""
    box_rows: int
    """Keys that one copy takes."""


def key_pages(params: ScoreParams) -> KeyPages:
    """The keys of a launch as pages. A list is one page."""
    if not params.block_table:
        return KeyPages(params.keys, params.listed_keys, 1, params.listed_keys * ROW_BYTES, BLOCK)
    box = min(BLOCK, params.page_size)
    return KeyPages(params.keys, params.page_size, params.pages, params.key_page_stride, box)
