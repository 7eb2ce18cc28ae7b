"""Launches of the Triton kernel of stage `combine`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.lab.offline.triton import OfflineCase
from tamis.ops.combine.triton_kernels import combine_kernel, launch_arguments


def triton_cases() -> Iterator[OfflineCase]:
    """Few splits of many tokens, and many splits of one token with a sink."""
    for count, tokens, sink in ((2, 128, None), (64, 1, torch.zeros(16, dtype=torch.float32, device="cpu"))):
        parts = torch.zeros(count, tokens, 16, 512, dtype=torch.float32, device="cpu")
        lses = torch.zeros(count, tokens, 16, dtype=torch.float32, device="cpu")
        out = torch.zeros(tokens, 16, 512, dtype=torch.bfloat16, device="cpu")
        arguments = launch_arguments(parts, lses, sink, out, lses[0], None if sink is None else lses, lses[0])
        label = f"combine {count} parts" + (", sink" if sink is not None else "")
        yield OfflineCase.of_launch(combine_kernel, arguments, {"num_warps": 4}, label)
