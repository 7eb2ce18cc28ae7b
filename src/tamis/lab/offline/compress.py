"""Launches of the Triton kernels of stage `compress`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.cache.layout import Layout, compressor_state, index_fp8, index_mxfp4, named, plain_fp8
from tamis.cache.paged import PagedCache
from tamis.lab.offline.triton import OfflineCase
from tamis.ops.compress.operations import CompressKv, PoolKv
from tamis.ops.compress.triton_kernels import (
    compress_kv_kernel,
    launch_arguments,
    launch_options,
    pool_arguments,
    pool_kv_kernel,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Every layout of entries, both kinds of spans, with and without the Hadamard rotation; pooled keys."""
    pooled = [(index_fp8(), size, False, torch.bfloat16, True) for size in (4, 16)]
    kinds: list[tuple[Layout, int, bool, torch.dtype, bool]] = [
        (named("v4-fp8"), 4, True, torch.float32, False),
        (named("v4-fp8"), 128, False, torch.float32, False),
        (named("v4-bf16"), 4, True, torch.bfloat16, False),
        (plain_fp8(latent=448), 128, False, torch.bfloat16, False),
        (index_fp8(), 4, True, torch.float32, False),
        (index_fp8(), 4, True, torch.float32, True),
        (index_fp8(dim=100), 3, True, torch.float16, False),
        (index_mxfp4(), 4, True, torch.float32, False),
        (index_mxfp4(), 4, True, torch.float32, True),
    ]
    for layout, ratio, overlapping, dtype, hadamard in [*kinds, *pooled]:
        state = PagedCache(compressor_state(dim=layout.width, overlapping=overlapping), 2, 4)
        channels = state.layout.width // 2
        tokens = torch.empty(2, channels, dtype=dtype, device="cpu")
        ids = torch.zeros(2, dtype=torch.int32, device="cpu")
        pages = (ids, ids.long(), ids, torch.zeros(2, 32, dtype=torch.int32, device="cpu"), ids.long())
        norm: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if overlapping or not hadamard:
            angles = torch.empty(9, 64, dtype=torch.float32, device="cpu")
            norm = (torch.empty(layout.width, dtype=torch.float32, device="cpu"), angles)
        weights = (torch.empty(ratio, channels, dtype=torch.float32, device="cpu"), *norm)
        cache = PagedCache(layout, 2, 2)
        call = CompressKv(tokens, tokens, state, cache, *pages, *weights, 1e-6, hadamard, "triton")
        arguments = launch_arguments(call)
        how = f"{ratio}{' overlapping' * overlapping}{' by Hadamard' * hadamard}"
        label = f"compress {layout.name} {how} from {dtype}".replace("torch.", "")
        yield OfflineCase.of_launch(compress_kv_kernel, arguments, launch_options(arguments), label)
    yield from _latent_cases()


def _latent_cases() -> Iterator[OfflineCase]:
    """Latents as in V4.1."""
    for width, dtype in ((512, torch.float32), (96, torch.bfloat16)):
        state = PagedCache(compressor_state(dim=width, overlapping=False), 2, 8)
        tokens, latents = (torch.empty(2, width, dtype=d, device="cpu") for d in (dtype, torch.bfloat16))
        ids = torch.zeros(2, dtype=torch.int32, device="cpu")
        pages = (ids, ids.long(), ids, torch.zeros(2, 32, dtype=torch.int32, device="cpu"))
        call = PoolKv(tokens, tokens, state, *pages, tokens[0], 2, 1e-6, latents.dtype, "triton")
        arguments = pool_arguments(call, latents)
        label = f"compress: latents of {width} from {dtype}".replace("torch.", "")
        yield OfflineCase.of_launch(pool_kv_kernel, arguments, launch_options(arguments), label)
