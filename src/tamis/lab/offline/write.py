"""Launches of the Triton kernel of stage `write`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.cache.layout import named
from tamis.cache.paged import PagedCache
from tamis.lab.offline.triton import OfflineCase
from tamis.ops.write.operations import WriteKv
from tamis.ops.write.triton_kernels import NUM_WARPS, launch_arguments, write_rows


def triton_cases() -> Iterator[OfflineCase]:
    """Every layout and scale mode, from one tensor or two."""
    options = {"num_warps": NUM_WARPS}
    for layout, dtype in (
        (named("v32-fp8"), torch.bfloat16),
        (named("v32-fp8", scale_mode="exact"), torch.bfloat16),
        (named("v32-fp8", latent=128, rope=32), torch.float16),
        (named("v4-fp8"), torch.float32),
        (named("v41-fp8"), torch.bfloat16),
        (named("v41-fp4"), torch.bfloat16),
        (named("plain-fp8"), torch.bfloat16),
        (named("index-fp8"), torch.bfloat16),
        (named("index-mxfp4"), torch.bfloat16),
        (named("index-mxfp4", dim=96), torch.float32),
        (named("v32-bf16"), torch.bfloat16),
        (named("v4-fp16"), torch.float32),
    ):
        kv = torch.empty(2, layout.width, dtype=dtype, device="cpu")
        slots = torch.arange(2, dtype=torch.int64, device="cpu")
        arguments = launch_arguments(WriteKv(kv, None, slots, PagedCache(layout, 2, 64), "triton"))
        label = f"write {layout.name} {layout.scale_mode} from {dtype}".replace("torch.", "")
        yield OfflineCase.of_launch(write_rows, arguments, options, label)
    for layout in (named("v32-fp8"), named("v32-bf16"), named("plain-fp8")):
        latent, rope = torch.empty(2, layout.width, dtype=torch.bfloat16, device="cpu").split(
            [layout.latent, layout.rope], 1
        )
        slots = torch.arange(2, dtype=torch.int64, device="cpu")
        arguments = launch_arguments(WriteKv(latent, rope, slots, PagedCache(layout, 2, 64), "triton"))
        yield OfflineCase.of_launch(write_rows, arguments, options, f"write {layout.name} from two tensors")
    # Triton turns arguments that are 1 into constants, which gives another program.
    single = PagedCache("plain-fp8", 1, 1, scale=torch.ones((), dtype=torch.float32, device="cpu"))
    kv, slot = torch.empty(1, 576, dtype=torch.float32, device="cpu"), torch.zeros(1, dtype=torch.int32, device="cpu")
    arguments = launch_arguments(WriteKv(kv, None, slot, single, "triton"))
    yield OfflineCase.of_launch(write_rows, arguments, options, "write plain-fp8, one of everything")
