"""Launches of the Triton kernels of stage `gather`, to compile without a GPU."""

from collections.abc import Iterator

import torch

from tamis.cache.layout import named
from tamis.cache.paged import PagedCache
from tamis.lab.offline.triton import NATIVE_E4M3, OfflineCase
from tamis.ops.gather.operations import GatherIndex, GatherKv
from tamis.ops.gather.triton_kernels import (
    copy_index_rows,
    index_arguments,
    launch_options,
    no_request_arguments,
    read_arguments,
    read_rows,
    request_arguments,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Every layout read by request or by slot, and index keys copied as stored."""
    table, ones = torch.zeros(32, 128, dtype=torch.int32, device="cpu"), torch.ones(32, dtype=torch.int32, device="cpu")
    for name, dtype in (
        ("v32-fp8", torch.bfloat16),
        ("v4-fp8", torch.bfloat16),
        ("plain-fp8", torch.float16),
        ("v32-bf16", torch.bfloat16),
        ("index-mxfp4", torch.bfloat16),
        ("v41-fp4", torch.bfloat16),
    ):
        cache = PagedCache(name, 2, 64)
        out = torch.empty(16, cache.layout.width, dtype=dtype, device="cpu")
        call = GatherKv(table, ones, ones, ones, cache, out, "triton")
        arguments = read_arguments(cache, out, request_arguments(call) | {"slots": None})
        label = f"gather {name} to {dtype}".replace("torch.", "")
        yield OfflineCase.of_launch(read_rows, arguments, launch_options(arguments), label)
        if cache.layout.quantised and not cache.layout.packed:
            arguments |= {"NATIVE_E4M3": True}
            yield OfflineCase.of_launch(
                read_rows, arguments, launch_options(arguments), f"{label}, native", targets=NATIVE_E4M3
            )
    # Triton turns arguments that are 1 into constants, which gives another program.
    cache = PagedCache("plain-fp8", 1, 1, scale=torch.ones((), dtype=torch.float32, device="cpu"))
    out = torch.empty(1, 576, dtype=torch.float32, device="cpu")
    call = GatherKv(table[:1, :1], ones[:1], ones[:1], ones[:1], cache, out, "triton")
    arguments = read_arguments(cache, out, request_arguments(call) | {"slots": None})
    yield OfflineCase.of_launch(read_rows, arguments, launch_options(arguments), "gather plain-fp8, one of everything")
    cache = PagedCache(named("v32-fp8", latent=128, rope=32), 2, 64)
    arguments = read_arguments(
        cache,
        torch.empty(16, 160, dtype=torch.float32, device="cpu"),
        no_request_arguments(cache) | {"slots": torch.arange(16, dtype=torch.int64, device="cpu")},
    )
    yield OfflineCase.of_launch(read_rows, arguments, launch_options(arguments), f"read {cache.layout.name} to float32")
    for name in ("index-fp8", "index-mxfp4"):
        keys = GatherIndex(table, ones, ones, ones, PagedCache(name, 2, 64), 16, "triton")
        arguments = index_arguments(keys.cache, *keys.zeros(), request_arguments(keys))
        yield OfflineCase.of_launch(copy_index_rows, arguments, launch_options(arguments), f"gather {name} as stored")
