"""Merges partial attention outputs by their lse, in Triton: one program per token, head and block of columns."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.combine.operations import CombineParts
from tamis.ops.rows.triton_rows import interpreted, launching_on, load_wide, store_rounded

BLOCK_SPLITS = 8
"""Splits that are read at once. With few rows and many splits, latency and not bandwidth limits the merge."""
MANY_ROWS = 512
"""Tokens times heads from which one program per row fills a GPU; below, columns are spread over several programs."""


@triton.jit
def combine_kernel(
    parts,
    split_lses,
    sink,
    out,
    lse,
    split_max_logits,
    max_logits,
    split_stride,
    count,
    heads,
    out_token_stride,
    out_head_stride,
    out_column_stride,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    NATIVE_BF16: tl.constexpr,
):
    """Merge one row: first all of its lses at once, then its outputs, BLOCK_SPLITS splits at a time."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    here = column < VALUE_DIM
    split = tl.arange(0, BLOCK_S)
    lses = tl.load(split_lses + split * split_stride + row, mask=split < count, other=float("-inf"))
    largest = tl.max(lses, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(lses - base), 0)
    merged = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, count, BLOCK_SPLITS):
        some = first + tl.arange(0, BLOCK_SPLITS)
        known = some < count
        weight = tl.exp(tl.load(split_lses + some * split_stride + row, mask=known, other=float("-inf")) - base)
        # An empty split may hold NaN, which multiplying by zero would keep, so it is not loaded.
        wanted = (weight > 0.0)[:, None] & here[None, :]
        at = (some.to(tl.int64) * split_stride + row) * VALUE_DIM
        merged += tl.sum(load_wide(parts + at[:, None] + column[None, :], wanted) * weight[:, None], 0)
    empty = total == 0.0
    whole = tl.where(empty, float("-inf"), largest + tl.log(tl.where(empty, 1.0, total)))
    merged = merged / tl.where(empty, 1.0, total)
    if sink is not None:
        logit = tl.load(sink + row % heads)
        share = 1.0 / (1.0 + tl.exp(logit - tl.where(empty, 0.0, whole)))
        merged = tl.where(empty, 0.0, merged * share)
    target = out + row // heads * out_token_stride + row % heads * out_head_stride
    store_rounded(target + column * out_column_stride, merged, here, NATIVE_BF16)
    if tl.program_id(1) == 0:
        tl.store(lse + row, whole)
        if split_max_logits is not None:
            logits = tl.load(split_max_logits + split * split_stride + row, mask=split < count, other=float("-inf"))
            tl.store(max_logits + row, tl.max(logits, 0))


def combine_parts(call: CombineParts) -> Tensor:
    """As `reference.combine_parts`."""
    lse, _ = _combine(call.parts, call.lses, None, call.sink, call.out)
    return lse.to(call.lses.dtype)


def combine_splits(
    parts: Tensor, lses: Tensor, max_logits: Tensor, sink: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the splits of `attend_slots` into `out` in one launch; return lse and max_logits [T, H]."""
    return _combine(parts, lses, max_logits, sink, out)


def _combine(
    parts: Tensor, lses: Tensor, split_max_logits: Tensor | None, sink: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor]:
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
    max_logits = torch.empty_like(lse)
    if out.numel():
        arguments = launch_arguments(
            parts.contiguous(), lses.contiguous(), sink, out, lse, split_max_logits, max_logits
        )
        blocks = triton.cdiv(arguments["VALUE_DIM"], arguments["BLOCK_V"])
        with launching_on(out.device):
            combine_kernel[(lse.numel(), blocks)](**arguments, num_warps=4)
    return lse, max_logits


def launch_arguments(
    parts: Tensor,
    lses: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    split_max_logits: Tensor | None,
    max_logits: Tensor,
) -> dict[str, Any]:
    """The arguments of `combine_kernel`."""
    count, tokens, heads, width = parts.shape
    block = triton.next_power_of_2(width)
    return {
        "parts": parts,
        "split_lses": lses,
        "sink": sink,
        "out": out,
        "lse": lse,
        "split_max_logits": split_max_logits,
        "max_logits": max_logits,
        "split_stride": tokens * heads,
        "count": count,
        "heads": heads,
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "out_column_stride": out.stride(2),
        "VALUE_DIM": width,
        "BLOCK_V": block if tokens * heads > MANY_ROWS else min(128, block),
        "BLOCK_S": triton.next_power_of_2(count),
        "BLOCK_SPLITS": min(BLOCK_SPLITS, triton.next_power_of_2(count)),
        "NATIVE_BF16": not interpreted(combine_kernel),
    }
