"""Launches of the Triton kernels of stage `output`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.lab.offline.triton import NATIVE_E4M3, TARGETS, OfflineCase
from tamis.ops.output.operations import LowerGroups, RotateToFp8
from tamis.ops.output.triton_kernels import (
    E4M3,
    LOWER_WARPS,
    ROTATE_WARPS,
    fp8_arguments,
    lower_arguments,
    lower_groups_kernel,
    rotate_to_fp8_kernel,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Heads rotated to FP8, and groups lowered for one token and for many."""
    x = torch.empty(2, 64, 512, dtype=torch.bfloat16, device="cpu")
    table = torch.empty(9, 64, dtype=torch.float32, device="cpu")
    values, scales = x.to(E4M3), torch.empty(2, 64, 4, dtype=torch.uint8, device="cpu")
    positions = torch.zeros(2, dtype=torch.int32, device="cpu")
    arguments = fp8_arguments(RotateToFp8(x, positions, table, 128, True, "triton"), values.view(torch.uint8), scales)
    yield OfflineCase.of_launch(
        rotate_to_fp8_kernel, arguments, {"num_warps": ROTATE_WARPS}, "output: rotate 64x512 to FP8"
    )
    weight = torch.empty(8, 1024, 4096, dtype=E4M3, device="meta")
    weight_scales = torch.empty(8, 8, 32, dtype=torch.float32, device="cpu")
    for tokens in (1, 200):
        lowered = (
            torch.empty(tokens, 8, 4096, dtype=E4M3, device="meta"),
            torch.empty(tokens, 8, 32, dtype=torch.float32, device="cpu").byte(),
        )
        out = torch.empty(tokens, 8, 1024, dtype=torch.bfloat16, device="meta")
        call = LowerGroups(*lowered, weight, weight_scales, torch.bfloat16, "triton")
        for native in (True, False):
            arguments = lower_arguments(call, out, native=native)
            targets = tuple(t for t in TARGETS if (t in NATIVE_E4M3) == native)
            label = f"output: lower groups of 4096, {tokens} tokens{', native' * native}"
            yield OfflineCase.of_launch(lower_groups_kernel, arguments, {"num_warps": LOWER_WARPS}, label, targets)
