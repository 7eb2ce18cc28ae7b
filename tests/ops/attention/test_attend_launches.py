"""Which blocks portable attention is launched with: they fit the shared memory of every device they are chosen for."""

from itertools import product

import pytest
import torch
from attention_calls import attend_slots_call

from tamis import PagedCache, Selection
from tamis.cache.layout import named
from tamis.ops.attention import triton_kernels
from tamis.ops.attention.triton_kernels import (
    GROUPED,
    LARGE,
    LEAST_SHARED,
    NOT_PIPELINED,
    SMALL,
    SMALLEST,
    LaunchConfig,
    choose_launch,
    shared_bytes,
)

BF16, FP16, FP32, CODES = torch.bfloat16, torch.float16, torch.float32, torch.uint8
H200, A100, SMALL_GPU, HOST = 227 * 1024, 163 * 1024, 99 * 1024, 0


@pytest.mark.parametrize(
    ("layout", "query", "heads", "room", "launch"),
    [
        # As measured on an H200.
        ("v32-bf16", BF16, 64, H200, LARGE),
        ("v32-bf16", BF16, 17, H200, LARGE),
        ("v4-fp8", BF16, 64, H200, LARGE),
        ("v32-fp8", BF16, 64, H200, LARGE),
        ("plain-fp8", CODES, 128, H200, LARGE),
        ("v32-bf16", BF16, 16, H200, SMALL),
        ("v32-fp8", BF16, 16, H200, GROUPED),
        ("v32-fp32", BF16, 64, H200, SMALLEST),
        ("v32-fp8", FP32, 64, H200, SMALLEST),
        # Queries of two parts, which took 258 to 299 KB in large blocks.
        ("v32-bf16", FP16, 64, H200, SMALL),
        ("v4-fp8", FP16, 24, H200, SMALL),
        ("v32-fp8", FP16, 64, H200, GROUPED),
        ("plain-fp8", FP16, 128, H200, SMALL),
        # Elsewhere the small ones, and smaller ones where those took 100 KB.
        ("v32-bf16", BF16, 64, A100, SMALL),
        ("v32-bf16", FP16, 64, A100, SMALL),
        ("v32-bf16", BF16, 16, SMALL_GPU, SMALL),
        ("v32-bf16", FP16, 16, SMALL_GPU, SMALLEST),
        ("v4-fp8", FP16, 64, SMALL_GPU, SMALL),
        ("v32-fp8", BF16, 64, HOST, GROUPED),
        ("v32-bf16", BF16, 64, HOST, SMALL),
    ],
)
def test_blocks_by_device_heads_and_dtype(
    layout: str, query: torch.dtype, heads: int, room: int, launch: LaunchConfig
) -> None:
    assert choose_launch(named(layout).key, query, heads, 512, room) == launch


def test_rows_are_not_copied_ahead_where_they_would_be_kept_three_times() -> None:
    for layout, launch in (("v32-bf16", NOT_PIPELINED), ("v4-fp8", LARGE), ("plain-fp8", LARGE)):
        assert choose_launch(named(layout).key, BF16, 64, 512, H200, both_in_shared=True) == launch


def test_the_bound_of_shared_memory_is_kept_at_every_width() -> None:
    """The bound holds for these cases; offline compilation compares it with the compilers' own numbers."""
    for latent, rope, query, heads, room in product(
        (1, 64, 448, 512),
        (0, 1, 64, 128, 256),
        (BF16, FP16, FP32, CODES),
        (1, 16, 17, 128),
        (HOST, SMALL_GPU, A100, H200),
    ):
        for layout in (named("v32-bf16", latent=latent, rope=rope), named("plain-fp8", latent=latent, rope=rope)):
            launch = choose_launch(layout.key, query, heads, latent, room)
            assert not launch.grouped
            assert shared_bytes(launch, layout, query) <= max(room, LEAST_SHARED)


def test_wider_tails_are_refused_before_a_launch(device: torch.device) -> None:
    for rope in (256, 257):
        cache = PagedCache(named("v32-bf16", latent=16, rope=rope), 1, 4, device=device)
        cache.storage.zero_()
        selection = Selection(cache, torch.zeros(1, 1, dtype=torch.int32, device=device))
        q = torch.zeros(1, 1, 16 + rope, dtype=BF16, device=device)
        if rope == 256:
            out, lse, _ = triton_kernels.attend_slots(
                attend_slots_call(q, [selection], scale=1.0, value_dim=16, splits=1)
            )
            assert out.abs().max() == 0
            assert lse.tolist() == [[[0.0]]]
        else:
            with pytest.raises(ValueError, match=r"cache must be at most 256 rope columns for the triton backend, got"):
                triton_kernels.check_attend(attend_slots_call(q, [selection], scale=1.0, value_dim=16, splits=1))
