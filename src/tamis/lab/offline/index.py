"""Launches of the Triton and CUDA kernels of stage `index`, to compile without a GPU."""

from collections.abc import Iterator
from itertools import product

import torch

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, named, rows
from tamis.cache.paged import PagedCache
from tamis.lab.offline.cuda import CudaCase
from tamis.lab.offline.triton import NATIVE_E4M3, TARGETS, OfflineCase
from tamis.model.recipe import IndexRecipe
from tamis.ops.index.hopper.topk import Variant, program
from tamis.ops.index.triton_kernels import (
    E4M3,
    MAX_DIM,
    compute_dtype,
    head_block,
    held_dtype,
    list_places,
    page_places,
    score_arguments,
)
from tamis.ops.index.triton_prepare import OPTIONS, insert_keys, key_arguments, quantise_queries, query_arguments
from tamis.ops.index.triton_scores import choose_score_launch, score_keys
from tamis.ops.index.triton_topk import choose_topk_launch, topk_launches

QUERIES = (torch.bfloat16, torch.float16, torch.float32, E4M3)
HEADS = (1, 16, 17, 32, 64, 128)
DIMS = (32, 128, MAX_DIM)


def triton_cases() -> Iterator[OfflineCase]:
    """Preparation, scores in every dtype and format at usual sizes, and top-k."""
    yield from _prepare_cases()
    plain = tuple(t for t in TARGETS if t not in NATIVE_E4M3)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    four = torch.zeros(4, dtype=torch.int32, device="cpu")
    table = torch.zeros(4, 32, dtype=torch.int32, device="cpu")
    out = torch.empty(4, 2048, dtype=torch.float32, device="cpu")
    for layout, query, heads, shared, targets in (
        (named("index-fp8"), E4M3, 64, False, NATIVE_E4M3),
        (named("index-fp8"), E4M3, 64, True, NATIVE_E4M3),
        (named("index-fp8"), E4M3, 64, False, plain),
        (named("index-fp8"), E4M3, 64, True, plain),
        (named("index-fp8"), bf16, 64, True, NATIVE_E4M3),
        (named("index-fp8"), bf16, 64, True, plain),
        (named("index-fp8"), E4M3, 128, True, NATIVE_E4M3),
        (named("index-mxfp4"), bf16, 64, False, tuple(TARGETS)),
        (named("index-mxfp4"), bf16, 64, True, tuple(TARGETS)),
        (named("index-mxfp4"), E4M3, 64, True, NATIVE_E4M3),
        (rows(bf16, latent=256, rope=0), bf16, 128, True, tuple(TARGETS)),
        (rows(bf16, latent=256, rope=0), bf16, 32, False, tuple(TARGETS)),
        (rows(fp16, latent=96, rope=0), fp32, 5, True, tuple(TARGETS)),
    ):
        cache = PagedCache(layout, 2, 64)
        native = targets == NATIVE_E4M3
        q, keys = torch.empty(4, heads, layout.width, dtype=query, device="cpu"), held_dtype(layout)
        compute = compute_dtype(query, keys, native=native)
        block_h = head_block(heads, layout.width, compute)
        kind = {"shared": shared, "exact": compute == fp32, "native": compute == E4M3}
        key_bytes = layout.values.dtype.itemsize * layout.width
        launch = choose_score_launch(out.shape, 132, heads, block_h, **kind, key_bytes=key_bytes)
        places = page_places(cache, four, table, four, out)
        arguments, options = score_arguments(
            q,
            torch.empty(4, heads, dtype=torch.float32, device="cpu"),
            places,
            compute,
            launch,
            out,
            native=native,
            fill=shared,
        )
        label = f"index {layout.name} {checks.dtype_name(query)}, {heads} heads, {launch.block_q} tokens"
        yield OfflineCase.of_launch(score_keys, arguments, options, label, targets)
        if not layout.quantised:
            places = list_places(q[:, 0].contiguous(), None, four, four, out)
            arguments, options = score_arguments(
                q,
                torch.empty(4, heads, dtype=torch.float32, device="cpu"),
                places,
                compute,
                launch,
                out,
                native=native,
                fill=True,
            )
            yield OfflineCase.of_launch(score_keys, arguments, options, f"{label}, gathered", targets)
    page_table = torch.zeros(4, 1024, dtype=torch.int32, device="cpu")
    for tokens, width, k, translate in ((512, 65536, 2048, False), (1, 65536, 2048, True), (512, 1000, 4096, True)):
        scores = torch.empty(tokens, width, dtype=torch.float32, device="meta")
        lengths = torch.zeros(tokens, dtype=torch.int32, device="cpu")
        cut = choose_topk_launch(tokens, width, k, 132)
        ids, pages = (lengths, page_table) if translate else (None, None)
        result = torch.empty(tokens, k, dtype=torch.int32, device="cpu")
        for kernel, _, arguments, options in topk_launches(cut, scores, lengths, k, ids, pages, 64, result):
            label = f"index {kernel.fn.__name__}, {k} of {width}, {cut.parts} parts"
            yield OfflineCase.of_launch(kernel, arguments, options, label)


def _prepare_cases() -> Iterator[OfflineCase]:
    """Queries and keys of every format on their way into the indexer."""
    positions = torch.zeros(2, dtype=torch.int32, device="cpu")
    table = torch.empty(9, 64, dtype=torch.float32, device="cpu")
    v32, v4 = IndexRecipe(), IndexRecipe(interleaved=True, rope_first=False, hadamard=True)
    for layout, recipe, dtype in (
        (index_fp8(), v32, torch.bfloat16),
        (index_fp8(), v4, torch.bfloat16),
        (index_fp8(dim=96, rounding="none"), v32, torch.float32),
        (index_mxfp4(), v4, torch.bfloat16),
        (rows(torch.bfloat16, latent=128, rope=0), v4, torch.float16),
    ):
        cache, x = PagedCache(layout, 2, 64), torch.empty(2, 64, layout.width, dtype=dtype, device="cpu")
        label = f"{layout.name} from {checks.dtype_name(dtype)}{' by Hadamard' * recipe.hadamard}"
        keys = x[:, 0]
        slots = torch.arange(2, dtype=torch.int64, device="cpu")
        norm = torch.empty(layout.width, dtype=torch.float32, device="cpu")
        arguments = key_arguments(keys, cache, slots, norm, norm, 1e-6, positions, table, recipe)
        yield OfflineCase.of_launch(insert_keys, arguments, OPTIONS, f"index keys {label}, normed")
        arguments = key_arguments(keys, cache, slots, None, None, 1e-6, None, None, recipe)
        yield OfflineCase.of_launch(insert_keys, arguments, OPTIONS, f"index keys {label}, rotated before")
        if layout.quantised and not layout.packed:
            out = (
                x.view(torch.uint8)[..., : layout.width].contiguous(),
                torch.empty(2, 64, dtype=torch.float32, device="cpu"),
            )
            arguments = query_arguments(
                x, torch.empty(2, 64, dtype=torch.float32, device="cpu"), positions, table, recipe, layout, 1.0, *out
            )
            yield OfflineCase.of_launch(quantise_queries, arguments, OPTIONS, f"index queries {label}")


def cuda_cases() -> Iterator[CudaCase]:
    """Top-k with each number of threads per CTA."""
    for threads in (512, 1024):
        yield CudaCase(f"index, top-k, {threads} threads", program(threads), Variant(1, threads, 1).shared)


def layouts() -> Iterator[Layout]:
    """Every format that index keys may have."""
    for dim in DIMS:
        yield index_fp8(dim=dim)
        yield index_mxfp4(dim=dim)
        for dtype in checks.FLOATS:
            yield rows(dtype, latent=dim, rope=0)


def every_triton_case() -> Iterator[OfflineCase]:
    """Those, and every program of a layout, a query dtype, a number of heads, and tokens that share keys or do not."""
    yield from triton_cases()
    host = torch.device("cpu")
    four = torch.zeros(4, dtype=torch.int32, device=host)
    table = torch.zeros(4, 32, dtype=torch.int32, device=host)
    out = torch.empty(4, 2048, dtype=torch.float32, device=host)
    plain = tuple(t for t in TARGETS if t not in NATIVE_E4M3)
    seen = set()
    for layout, query, heads, shared, targets in product(
        layouts(), QUERIES, HEADS, (False, True), (NATIVE_E4M3, plain)
    ):
        native = targets == NATIVE_E4M3
        q = torch.empty(4, heads, layout.width, dtype=query, device=host)
        compute = compute_dtype(query, held_dtype(layout), native=native)
        block_h, exact = head_block(heads, layout.width, compute), compute == torch.float32
        for target in targets:
            kind = {"shared": shared, "exact": exact, "native": compute == E4M3}
            key_bytes = layout.values.dtype.itemsize * layout.width
            launch = choose_score_launch(out.shape, 132, heads, block_h, **kind, key_bytes=key_bytes)
            places = page_places(PagedCache(layout, 2, 64), four, table, four, out)
            weights = torch.empty(4, heads, dtype=torch.float32, device=host)
            arguments, options = score_arguments(q, weights, places, compute, launch, out, native=native, fill=shared)
            label = f"index {layout.name} {checks.dtype_name(query)}, {heads} heads, {launch.block_q} tokens"
            case = OfflineCase.of_launch(score_keys, arguments, options, label, (target,))
            # The number of heads is a constant; those of one block differ in a mask alone.
            constants = {n: v for n, v in case.constexprs.items() if n not in ("HEADS", "FILL")} | {
                "blocks": ceil_div(heads, block_h)
            }
            program = (target, tuple(case.signature.items()), str(constants), str(options))
            if program not in seen:
                seen.add(program)
                yield case
