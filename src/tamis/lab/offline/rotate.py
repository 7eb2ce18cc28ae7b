"""Launches of the Triton kernels of stage `rotate`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.cache.layout import index_fp8, index_mxfp4, named, plain_fp8
from tamis.cache.paged import PagedCache
from tamis.lab.offline.triton import OfflineCase
from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads, WriteRotated
from tamis.ops.rotate.triton_kernels import (
    NUM_WARPS,
    head_and_row_arguments,
    head_arguments,
    norm_arguments,
    norm_options,
    norm_rows_kernel,
    rotate_and_write_kernel,
    rotate_heads_kernel,
    row_write_arguments,
    write_rotated_kernel,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Heads, rows and norms as in V4, in the dtypes and layouts that give different programs."""
    options = {"num_warps": NUM_WARPS}
    positions = torch.zeros(2, dtype=torch.int32, device="cpu")
    table = torch.empty(9, 64, dtype=torch.float32, device="cpu")
    for heads, width, dtype in ((64, 512, torch.bfloat16), (64, 128, torch.bfloat16), (3, 512, torch.float32)):
        x = torch.empty(2, heads, width, dtype=dtype, device="cpu")
        for eps, inverse in ((1e-6, False), (None, True)):
            label = f"rotate {heads}x{width} {dtype}{' inverse' * inverse}{' normed' * (eps is not None)}"
            arguments = head_arguments(RotateHeads(x, positions, table, eps, inverse, "triton"), x)
            yield OfflineCase.of_launch(rotate_heads_kernel, arguments, options, label.replace("torch.", ""))
    index = torch.empty(2, 64, 128, dtype=torch.bfloat16, device="cpu")
    for layout, other, hadamard, norm_q in (
        (named("v4-fp8"), index, False, True),
        (named("v4-fp8"), index, True, True),
        (named("v4-fp8"), None, False, True),
        (named("v4-fp8"), index[:, :32], False, False),
        (named("v4-bf16"), index, False, True),
        (named("v4-fp32"), None, False, True),
        (plain_fp8(latent=448), None, False, True),
    ):
        q = torch.empty(2, 64, layout.width, dtype=torch.bfloat16, device="cpu")
        cache = PagedCache(layout, 2, 64)
        slots = torch.arange(2, dtype=torch.int64, device="cpu")
        weight = torch.empty(layout.width, dtype=torch.float32, device="cpu")
        rest = (positions, table, weight, 1e-6, other, hadamard, norm_q, "triton")
        call = RotateAndWrite(q, q[:, 0], cache, slots, *rest)
        arguments = head_and_row_arguments(call, q, index)
        queries = (
            f"{' with index queries' * (other is not None)}{' by Hadamard' * hadamard}{' unnormed' * (not norm_q)}"
        )
        label = f"rotate and write {layout.name}{queries}"
        yield OfflineCase.of_launch(rotate_and_write_kernel, arguments, options, label)
    for width, dtype in ((1536, torch.bfloat16), (100, torch.float32)):
        x = torch.empty(2, width, dtype=dtype, device="cpu")
        weight = torch.empty(width, dtype=torch.float32, device="cpu")
        arguments = norm_arguments(NormRows(x, weight, 1e-6, "triton"), x)
        label = f"rotate: norm of {width} {dtype}".replace("torch.", "")
        yield OfflineCase.of_launch(norm_rows_kernel, arguments, norm_options(arguments), label)
    yield from _written_cases()


def _written_cases() -> Iterator[OfflineCase]:
    """Entries and index keys as in V4.1."""
    positions = torch.zeros(2, dtype=torch.int32, device="cpu")
    table = torch.empty(9, 64, dtype=torch.float32, device="cpu")
    slots = torch.arange(2, dtype=torch.int64, device="cpu")
    for layout, normed, span, hadamard in (
        (named("v4-fp8"), False, 1, False),
        (named("v4-fp8"), False, 2, False),
        (named("v4-bf16"), False, 2, False),
        (index_fp8(), True, 2, False),
        (index_fp8(), True, 2, True),
        (index_mxfp4(), True, 1, False),
    ):
        rows = torch.empty(2, layout.width, dtype=torch.bfloat16, device="cpu")
        cache, norm = PagedCache(layout, 2, 64), rows[0] if normed else None
        call = WriteRotated(rows, cache, slots, positions, table, norm, 1e-6, span, hadamard, "triton")
        label = f"rotate: write {layout.name}, spans of {span}{', normed' * normed}{', by Hadamard' * hadamard}"
        options = {"num_warps": NUM_WARPS}
        yield OfflineCase.of_launch(write_rotated_kernel, row_write_arguments(call), options, label)
