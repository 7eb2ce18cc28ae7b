"""Merging partial attention outputs by their lse, in Triton: one program per token, head and block of columns."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.rows.triton_rows import interpreted, launching_on, load_wide, store_rounded

BLOCK_PARTS = 8
"""Parts that are read at once: latency, not bandwidth, is what few rows of many parts cost."""


@triton.jit
def combine_kernel(
    parts,
    parts_lse,
    sink,
    out,
    lse,
    parts_top,
    top,
    part_stride,
    count,
    heads,
    out_token_stride,
    out_head_stride,
    out_column_stride,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    NATIVE_BF16: tl.constexpr,
):
    """All lses of a row at once, then its outputs, some parts at a time."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    here = column < VALUE_DIM
    part = tl.arange(0, BLOCK_S)
    lses = tl.load(parts_lse + part * part_stride + row, mask=part < count, other=float("-inf"))
    peak = tl.max(lses, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(lses - base), 0)
    merged = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, count, BLOCK_PARTS):
        some = first + tl.arange(0, BLOCK_PARTS)
        known = some < count
        weight = tl.exp(tl.load(parts_lse + some * part_stride + row, mask=known, other=float("-inf")) - base)
        # An empty part may hold anything: left out, not multiplied away, since 0 * NaN is NaN.
        wanted = (weight > 0.0)[:, None] & here[None, :]
        at = (some.to(tl.int64) * part_stride + row) * VALUE_DIM
        merged += tl.sum(load_wide(parts + at[:, None] + column[None, :], wanted) * weight[:, None], 0)
    empty = total == 0.0
    whole = tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total)))
    merged = merged / tl.where(empty, 1.0, total)
    if sink is not None:
        logit = tl.load(sink + row % heads)
        share = 1.0 / (1.0 + tl.exp(logit - tl.where(empty, 0.0, whole)))
        merged = tl.where(empty, 0.0, merged * share)
    target = out + row // heads * out_token_stride + row % heads * out_head_stride
    store_rounded(target + column * out_column_stride, merged, here, NATIVE_BF16)
    if tl.program_id(1) == 0:
        tl.store(lse + row, whole)
        if parts_top is not None:
            tops = tl.load(parts_top + part * part_stride + row, mask=part < count, other=float("-inf"))
            tl.store(top + row, tl.max(tops, 0))


def combine_parts(parts: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor) -> Tensor:
    """As `reference.combine_parts`."""
    return _combine(parts, lses, sink, out, None)[0]


def combine_with_maxima(
    parts: Tensor,
    lses: Tensor,
    maxima: Tensor,
    sink: Tensor | None,
    out: Tensor,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the largest of the parts' maxima [S, T, H], in one launch; `into` holds both, contiguous."""
    return _combine(parts, lses, sink, out, maxima, into)


def _combine(
    parts: Tensor,
    lses: Tensor,
    sink: Tensor | None,
    out: Tensor,
    maxima: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    if into is None:
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        into = lse, torch.empty_like(lse)
    lse, top = into
    if out.numel():
        arguments = launch_arguments(parts.contiguous(), lses.contiguous(), sink, out, lse, maxima, top)
        blocks = triton.cdiv(arguments["VALUE_DIM"], arguments["BLOCK_V"])
        with launching_on(out.device):
            combine_kernel[(lse.numel(), blocks)](**arguments, num_warps=4)
    return lse, top


def launch_arguments(
    parts: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, maxima: Tensor | None, top: Tensor
) -> dict[str, Any]:
    """What `combine_kernel` is launched with."""
    count, tokens, heads, width = parts.shape
    return {
        "parts": parts,
        "parts_lse": lses,
        "sink": sink,
        "out": out,
        "lse": lse,
        "parts_top": maxima,
        "top": top,
        "part_stride": tokens * heads,
        "count": count,
        "heads": heads,
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "out_column_stride": out.stride(2),
        "VALUE_DIM": width,
        # Few rows leave multiprocessors to spare for narrower blocks.
        "BLOCK_V": triton.next_power_of_2(width) if tokens * heads > 512 else min(128, triton.next_power_of_2(width)),
        "BLOCK_S": triton.next_power_of_2(count),
        "BLOCK_PARTS": min(BLOCK_PARTS, triton.next_power_of_2(count)),
        "NATIVE_BF16": not interpreted(combine_kernel),
    }
