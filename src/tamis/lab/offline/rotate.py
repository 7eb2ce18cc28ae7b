"""Launches of the Triton kernels of stage `rotate`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.cache.layout import named, plain_fp8
from tamis.cache.paged import PagedCache
from tamis.lab.offline.triton import NATIVE_E4M3, TARGETS, OfflineCase
from tamis.ops.rotate.triton_kernels import (
    NUM_WARPS,
    head_and_row_arguments,
    head_arguments,
    norm_arguments,
    norm_options,
    norm_rows_kernel,
    turn_and_insert,
    turn_heads,
)
from tamis.ops.rotate.triton_output import (
    E4M3,
    LOWER_WARPS,
    TURN_WARPS,
    fp8_arguments,
    lower_arguments,
    lower_tile,
    turn_to_fp8,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Heads, rows and norms as V4 has them, in the dtypes and layouts that differ."""
    options = {"num_warps": NUM_WARPS}
    positions = torch.zeros(2, dtype=torch.int32, device="cpu")
    table = torch.empty(9, 64, dtype=torch.float32, device="cpu")
    for heads, width, dtype in ((64, 512, torch.bfloat16), (64, 128, torch.bfloat16), (3, 512, torch.float32)):
        x = torch.empty(2, heads, width, dtype=dtype, device="cpu")
        for eps, inverse in ((1e-6, False), (None, True)):
            label = f"rotate {heads}x{width} {dtype}{' inverse' * inverse}{' normed' * (eps is not None)}"
            arguments = head_arguments(x, positions, table, eps, inverse, x)
            yield OfflineCase.of_launch(turn_heads, arguments, options, label.replace("torch.", ""))
    index = torch.empty(2, 64, 128, dtype=torch.bfloat16, device="cpu")
    for layout, other, hadamard in (
        (named("v4-fp8"), index, False),
        (named("v4-fp8"), index, True),
        (named("v4-fp8"), None, False),
        (named("v4-bf16"), index, False),
        (named("v4-fp32"), None, False),
        (plain_fp8(latent=448), None, False),
    ):
        q = torch.empty(2, 64, layout.width, dtype=torch.bfloat16, device="cpu")
        cache = PagedCache(layout, 2, 64)
        slots = torch.arange(2, dtype=torch.int64, device="cpu")
        weight = torch.empty(layout.width, dtype=torch.float32, device="cpu")
        rest = (positions, table, weight, 1e-6, q, other, other, hadamard)
        arguments = head_and_row_arguments(q, q[:, 0], cache, slots, *rest)
        queries = f"{' with index queries' * (other is not None)}{' by Hadamard' * hadamard}"
        label = f"rotate and write {layout.name}{queries}"
        yield OfflineCase.of_launch(turn_and_insert, arguments, options, label)
    for width, dtype in ((1536, torch.bfloat16), (100, torch.float32)):
        x = torch.empty(2, width, dtype=dtype, device="cpu")
        arguments = norm_arguments(x, torch.empty(width, dtype=torch.float32, device="cpu"), 1e-6, x)
        label = f"rotate: norm of {width} {dtype}".replace("torch.", "")
        yield OfflineCase.of_launch(norm_rows_kernel, arguments, norm_options(arguments), label)
    yield from _output_cases()


def _output_cases() -> Iterator[OfflineCase]:
    """Attention's output on its way back: rotated to FP8, then lowered by group."""
    x = torch.empty(2, 64, 512, dtype=torch.bfloat16, device="cpu")
    table = torch.empty(9, 64, dtype=torch.float32, device="cpu")
    values, scales = x.to(E4M3), torch.empty(2, 64, 4, dtype=torch.uint8, device="cpu")
    positions = torch.zeros(2, dtype=torch.int32, device="cpu")
    arguments = fp8_arguments(x, positions, table, 128, True, values.view(torch.uint8), scales)
    yield OfflineCase.of_launch(turn_to_fp8, arguments, {"num_warps": TURN_WARPS}, "rotate 64x512 to FP8")
    weight = torch.empty(8, 1024, 4096, dtype=E4M3, device="meta")
    weight_scales = torch.empty(8, 8, 32, dtype=torch.float32, device="cpu")
    for tokens in (1, 200):
        lowered = (
            torch.empty(tokens, 8, 4096, dtype=E4M3, device="meta"),
            torch.empty(tokens, 8, 32, dtype=torch.float32, device="cpu").byte(),
        )
        out = torch.empty(tokens, 8, 1024, dtype=torch.bfloat16, device="meta")
        for native in (True, False):
            arguments = lower_arguments(*lowered, weight, weight_scales, out, native=native)
            targets = tuple(t for t in TARGETS if (t in NATIVE_E4M3) == native)
            label = f"rotate: lower groups of 4096, {tokens} tokens{', native' * native}"
            yield OfflineCase.of_launch(lower_tile, arguments, {"num_warps": LOWER_WARPS}, label, targets)
