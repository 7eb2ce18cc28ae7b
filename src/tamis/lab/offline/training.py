"""Launches of the Triton kernels that train, to compile without a GPU."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.selection import Rows
from tamis.lab.offline.triton import TARGETS, OfflineCase
from tamis.ops.attention import triton_gradients as attention
from tamis.ops.attention.triton_backward import (
    delta_kernel,
    query_gradient_kernel,
    row_gradient_kernel,
    split_kernel,
    target_kernel,
)
from tamis.ops.attention.triton_gradients import MAX_WIDTH
from tamis.ops.index import triton_gradients as index
from tamis.ops.index.loss_operations import IndexLoss
from tamis.ops.rows.triton_sums import RowSums, sum_options, sum_rows_kernel

HALF, SINGLE = torch.bfloat16, torch.float32
SIZES = ((HALF, 64, 576, 512), (HALF, 16, 512, 512))
"""Dtype, heads, width and value width that the tests compile: of V3.2 and V4."""
OTHERS = ((HALF, 128, MAX_WIDTH, MAX_WIDTH), (HALF, 8, 40, 24), (torch.float16, 16, 64, 64), (SINGLE, 16, 80, 80))
"""The widest rows, rows with padding, and products in float32."""
TESTED = ("sm_86", "sm_90", "sm_100", "gfx942")
"""The targets that the tests compile for: the least shared memory, each matrix instruction, each compiler."""


def zeros(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    """A host tensor that stands for one on a device."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def attend_cases(*, every: bool = False) -> Iterator[OfflineCase]:
    """Gradients of attention and the indexer's target; with `every`, over sizes and dtypes and for all targets."""
    for name in TARGETS if every else TESTED:
        for number, (dtype, heads, width, value_dim) in enumerate(SIZES + OTHERS if every else SIZES):
            yield from _gradient_cases(name, dtype, heads, width, value_dim, pairs=number % 2 == 1)
    out, lse = zeros(4, 64, 512, dtype=HALF), zeros(4, 64)
    arguments = attention.delta_arguments(out, out, out, lse)
    targets = tuple(TARGETS) if every else TESTED
    split = attention.split_arguments(zeros(4, 64, 512), out, out)
    yield OfflineCase.of_launch(split_kernel, split, {"num_warps": 4}, "attend: wide output in two parts", targets)
    yield OfflineCase.of_launch(delta_kernel, arguments, {"num_warps": 1}, "attend: delta of gradients", targets)


def _gradient_cases(
    name: str, dtype: torch.dtype, heads: int, width: int, value_dim: int, *, pairs: bool
) -> Iterator[OfflineCase]:
    q, rows, drows = zeros(4, heads, width, dtype=dtype), zeros(64, width, dtype=dtype), zeros(64, width)
    slots, lse, sink = zeros(4, 2048, dtype=torch.int32), zeros(4, heads), zeros(heads) if pairs else None
    dout = zeros(4, heads, value_dim, dtype=dtype)
    given = attention.Given(q, Rows(rows, slots), dout, lse, lse, None, sink, 0.1, value_dim)
    limits = (TARGETS[name].shared_limit, TARGETS[name].backend == "hip")
    launches: list[tuple[Any, str, tuple[dict[str, Any], dict[str, int]]]] = [
        (query_gradient_kernel, "gradient of queries", attention.query_arguments(given, q, limits)),
        (row_gradient_kernel, "gradient of rows", attention.row_arguments(given, drows, 0, pairs=pairs, limits=limits)),
        (target_kernel, "target of the indexer", attention.target_arguments(given, zeros(4, 2048), limits)),
    ]
    for kernel, what, (arguments, options) in launches:
        label = f"attend: {what}, {checks.dtype_name(dtype)} {heads} heads {width}/{value_dim}"
        yield OfflineCase.of_launch(kernel, arguments, options, label, (name,))


def index_cases(*, every: bool = False) -> Iterator[OfflineCase]:
    """The indexer's loss at V3.2's size and, with `every`, at others, and ordered sums."""
    targets, slots = tuple(TARGETS) if every else TESTED, zeros(4, 2048, dtype=torch.int32)
    sizes = ((HALF, 64, 128), (HALF, 128, 128), (HALF, 64, 256), (HALF, 4, 32), (SINGLE, 8, 32), (SINGLE, 64, 128))
    for dtype, heads, dim in sizes if every else sizes[:1]:
        inputs = (zeros(4, heads, dim, dtype=dtype), zeros(64, dim, dtype=dtype), zeros(4, heads, dtype=dtype))
        call = IndexLoss(*inputs, slots, zeros(4, 2048), zeros(4), True, False, "triton")
        results = (zeros(4), inputs[0], inputs[2], zeros(64, dim))
        arguments, options = index.loss_arguments(call, *results, 0, pairs=heads == 128)
        label = f"index: loss, {checks.dtype_name(dtype)} {heads} heads of {dim}"
        yield OfflineCase.of_launch(index.index_loss_kernel, arguments, options, label, targets)
    order = zeros(8192, dtype=torch.int64)
    arguments = RowSums(zeros(64, 576)).arguments(zeros(8192, 576), order, order)
    yield OfflineCase.of_launch(sum_rows_kernel, arguments, sum_options(arguments), "index: ordered sums", targets)
