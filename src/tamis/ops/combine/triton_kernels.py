"""Merging partial attention outputs by their lse, in Triton: one program per token and head."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis.ops.triton_rows import interpreted, launching_on, load_wide, store_rounded

if TYPE_CHECKING:
    from tamis.testing.offline import OfflineCase


@triton.jit
def combine_kernel(
    parts,
    parts_lse,
    sink,
    out,
    lse,
    part_stride,
    count,
    heads,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NATIVE_BF16: tl.constexpr,
):
    """Two passes over the lses of a row (they are few), one over its outputs."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_V)
    here = column < VALUE_DIM
    peak = float("-inf")
    for part in range(count):
        peak = tl.maximum(peak, tl.load(parts_lse + part * part_stride + row))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = 0.0
    merged = tl.zeros([BLOCK_V], tl.float32)
    for part in range(count):
        weight = tl.exp(tl.load(parts_lse + part * part_stride + row) - base)
        total += weight
        value = load_wide(parts + (part * part_stride + row) * VALUE_DIM + column, here)
        # An empty part may hold anything: selected, not multiplied away, since 0 * NaN is NaN.
        merged += tl.where(weight > 0.0, value * weight, 0.0)
    empty = total == 0.0
    whole = tl.where(empty, float("-inf"), peak + tl.log(tl.where(empty, 1.0, total)))
    merged = merged / tl.where(empty, 1.0, total)
    if sink is not None:
        logit = tl.load(sink + row % heads)
        share = 1.0 / (1.0 + tl.exp(logit - tl.where(empty, 0.0, whole)))
        merged = tl.where(empty, 0.0, merged * share)
    store_rounded(out + row * VALUE_DIM + column, merged, here, NATIVE_BF16)
    tl.store(lse + row, whole)


def combine_parts(
    out: Tensor, lse: Tensor, sink: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """As `reference.combine_parts`; the merged output in `dtype`."""
    _, tokens, heads, width = out.shape
    merged = torch.empty(tokens, heads, width, dtype=dtype, device=out.device)
    merged_lse = torch.empty(tokens, heads, dtype=torch.float32, device=out.device)
    if merged.numel():
        arguments = _arguments(out.contiguous(), lse.contiguous(), sink, merged, merged_lse)
        with launching_on(out.device):
            combine_kernel[(tokens * heads,)](**arguments, num_warps=4)
    return merged, merged_lse


def _arguments(parts: Tensor, parts_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor) -> dict[str, Any]:
    count, tokens, heads, width = parts.shape
    return {
        "parts": parts,
        "parts_lse": parts_lse,
        "sink": sink,
        "out": out,
        "lse": lse,
        "part_stride": tokens * heads,
        "count": count,
        "heads": heads,
        "VALUE_DIM": width,
        "BLOCK_V": triton.next_power_of_2(width),
        "NATIVE_BF16": not interpreted(combine_kernel),
    }


def offline_cases() -> Iterator["OfflineCase"]:
    """Launches that `tamis.testing.offline` compiles."""
    from tamis.testing.offline import OfflineCase

    parts, lse = torch.zeros(4, 2, 16, 512), torch.zeros(4, 2, 16)
    merged = torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    for sink in (None, torch.zeros(16)):
        arguments = _arguments(parts, lse, sink, merged, lse[0])
        label = "combine" if sink is None else "combine, sink"
        yield OfflineCase.of_launch(combine_kernel, arguments, {"num_warps": 4}, label)
