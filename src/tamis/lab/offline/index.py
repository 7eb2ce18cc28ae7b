"""Launches of the Triton and CUDA kernels of stage `index`, to compile without a GPU."""

from collections.abc import Iterator
from itertools import product

import torch

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, named, rows
from tamis.cache.paged import PagedCache
from tamis.lab.offline.cuda import CudaCase
from tamis.lab.offline.training import index_cases
from tamis.lab.offline.triton import NATIVE_E4M3, TARGETS, OfflineCase
from tamis.model.recipe import IndexRecipe
from tamis.ops.index.block_operations import IndexTopkWithin
from tamis.ops.index.hopper import gradients, scores, topk_rows
from tamis.ops.index.hopper.topk import Variant, program
from tamis.ops.index.operations import (
    IndexScores,
    QuantiseIndexQuery,
    RaggedScores,
    TopkPositions,
    WriteIndexKeys,
)
from tamis.ops.index.scoring import MAX_DIM, paged_keys, ragged_keys, score_launch
from tamis.ops.index.triton_blocks import (
    block_maxima,
    candidate_arguments,
    candidate_positions,
    maxima_arguments,
    position_arguments,
    score_candidates,
)
from tamis.ops.index.triton_prepare import OPTIONS, insert_keys, key_arguments, quantise_queries, query_arguments
from tamis.ops.index.triton_scores import E4M3, score_keys
from tamis.ops.index.triton_topk import choose_topk_launch, topk_launches
from tamis.ops.rows import ordered_sums

QUERIES = (torch.bfloat16, torch.float16, torch.float32, E4M3)
HEADS = (1, 16, 17, 32, 64, 128)
DIMS = (32, 128, MAX_DIM)
SMS = 132
"""SMs of an H200, for which launches are chosen."""
HOST = torch.device("cpu")


def triton_cases() -> Iterator[OfflineCase]:
    """Preparation, scores in every dtype and format at usual sizes, top-k, and the loss that trains an indexer."""
    yield from index_cases()
    yield from _prepare_cases()
    yield from _block_cases()
    plain = tuple(t for t in TARGETS if t not in NATIVE_E4M3)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
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
        yield _score_case(layout, query, heads, shared, targets)
        if not layout.quantised:
            yield _ragged_case(layout, query, heads, shared, targets)
    page_table = torch.zeros(4, 1024, dtype=torch.int32, device=HOST)
    for tokens, width, k, translate in ((512, 65536, 2048, False), (1, 65536, 2048, True), (512, 1000, 4096, True)):
        scores = torch.empty(tokens, width, dtype=torch.float32, device="meta")
        lengths = torch.zeros(tokens, dtype=torch.int32, device=HOST)
        launch = choose_topk_launch(tokens, width, k, SMS)
        ids, pages = (lengths, page_table) if translate else (None, None)
        call = TopkPositions(scores, lengths, k, ids, pages, 64, "triton")
        result = torch.empty(tokens, k, dtype=torch.int32, device=HOST)
        for kernel, _, arguments, options in topk_launches(launch, call, result):
            label = f"index {kernel.fn.__name__}, {k} of {width}, {launch.splits} splits"
            yield OfflineCase.of_launch(kernel, arguments, options, label)


def _score_case(layout: Layout, query: torch.dtype, heads: int, shared: bool, targets: tuple[str, ...]) -> OfflineCase:
    """Scores of cached keys; without `shared`, columns past a length are not filled, as in `index_topk`."""
    four = torch.zeros(4, dtype=torch.int32, device=HOST)
    table = torch.zeros(4, 32, dtype=torch.int32, device=HOST)
    q, weights, out = _scored(heads, layout.width, query)
    call = IndexScores(q, weights, PagedCache(layout, 2, 64), four, table, four, out, "triton")
    native = targets[0] in NATIVE_E4M3
    _, arguments, options = score_launch(
        call, paged_keys(call, out.shape[1]), out, shared=shared, fill=shared, native=native, sms=SMS
    )
    label = f"index {layout.name} {checks.dtype_name(query)}, {heads} heads, {arguments['BLOCK_Q']} tokens"
    return OfflineCase.of_launch(score_keys, arguments, options, label, targets)


def _ragged_case(layout: Layout, query: torch.dtype, heads: int, shared: bool, targets: tuple[str, ...]) -> OfflineCase:
    """Scores of gathered keys in the layout's dtype."""
    four = torch.zeros(4, dtype=torch.int32, device=HOST)
    q, weights, out = _scored(heads, layout.width, query)
    keys = torch.empty(4, layout.width, dtype=query, device=HOST)
    call = RaggedScores(q, weights, keys, None, four, four, out, "triton")
    native = targets[0] in NATIVE_E4M3
    _, arguments, options = score_launch(call, ragged_keys(call), out, shared=shared, fill=True, native=native, sms=SMS)
    label = f"index {layout.name} {checks.dtype_name(query)}, {heads} heads, {arguments['BLOCK_Q']} tokens, gathered"
    return OfflineCase.of_launch(score_keys, arguments, options, label, targets)


def _scored(heads: int, width: int, query: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, weights and an output buffer for the scores of four tokens."""
    q = torch.empty(4, heads, width, dtype=query, device=HOST)
    weights = torch.empty(4, heads, dtype=torch.float32, device=HOST)
    return q, weights, torch.empty(4, 2048, dtype=torch.float32, device=HOST)


def _prepare_cases() -> Iterator[OfflineCase]:
    """Preparation of queries and keys in every format."""
    positions = torch.zeros(2, dtype=torch.int32, device=HOST)
    table = torch.empty(9, 64, dtype=torch.float32, device=HOST)
    slots = torch.arange(2, dtype=torch.int64, device=HOST)
    weights = torch.empty(2, 64, dtype=torch.float32, device=HOST)
    v32, v4 = IndexRecipe(), IndexRecipe(interleaved=True, rope_first=False, hadamard=True)
    for layout, recipe, dtype in (
        (index_fp8(), v32, torch.bfloat16),
        (index_fp8(), v4, torch.bfloat16),
        (index_fp8(dim=96, rounding="none"), v32, torch.float32),
        (index_mxfp4(), v4, torch.bfloat16),
        (rows(torch.bfloat16, latent=128, rope=0), v4, torch.float16),
    ):
        cache, q = PagedCache(layout, 2, 64), torch.empty(2, 64, layout.width, dtype=dtype, device=HOST)
        label = f"{layout.name} from {checks.dtype_name(dtype)}{' by Hadamard' * recipe.hadamard}"
        norm = torch.empty(layout.width, dtype=torch.float32, device=HOST)
        normed = WriteIndexKeys(q[:, 0], cache, slots, norm, norm, 1e-6, positions, table, recipe, "triton")
        yield OfflineCase.of_launch(insert_keys, key_arguments(normed), OPTIONS, f"index keys {label}, normed")
        rotated = normed._replace(norm_weight=None, norm_bias=None, positions=None, cos_sin=None)
        arguments = key_arguments(rotated)
        yield OfflineCase.of_launch(insert_keys, arguments, OPTIONS, f"index keys {label}, rotated before")
        if layout.quantised and not layout.packed:
            call = QuantiseIndexQuery(q, weights, positions, table, recipe, layout, 1.0, "triton")
            values = torch.empty(q.shape, dtype=torch.uint8, device=HOST)
            arguments = query_arguments(call, values, torch.empty_like(weights))
            yield OfflineCase.of_launch(quantise_queries, arguments, OPTIONS, f"index queries {label}")


def _block_cases() -> Iterator[OfflineCase]:
    """Selection in two levels: block maxima, scores of candidates, and their positions."""
    ids = torch.zeros(4, dtype=torch.int32, device=HOST)
    plain = tuple(t for t in TARGETS if t not in NATIVE_E4M3)
    for layout, query, heads, targets in (
        (named("index-fp8"), E4M3, 32, NATIVE_E4M3),
        (named("index-fp8"), E4M3, 32, plain),
        (named("index-fp8"), torch.bfloat16, 32, NATIVE_E4M3),
        (named("index-mxfp4"), torch.bfloat16, 128, tuple(TARGETS)),
        (rows(torch.bfloat16, latent=96, rope=0), torch.float32, 5, tuple(TARGETS)),
    ):
        q, weights, out = _scored(heads, layout.width, query)
        cache, table = PagedCache(layout, 2, 64), torch.zeros(4, 32, dtype=torch.int32, device=HOST)
        candidates = torch.zeros(4, 256, dtype=torch.int32, device=HOST)
        chosen = torch.empty(4, 512, dtype=torch.int32, device=HOST)
        call = IndexTopkWithin(q, weights, cache, ids, table, ids, candidates, 512, 8, 1 << 28, chosen, "triton")
        native = targets == NATIVE_E4M3
        arguments, options, _ = candidate_arguments(call, out, native=native, sms=SMS)
        label = f"index: {heads} heads of {checks.dtype_name(query)} over candidates in {layout.name}"
        yield OfflineCase.of_launch(score_candidates, arguments, options, label, targets)
    yield OfflineCase.of_launch(candidate_positions, position_arguments(call), {}, "index: positions of candidates")
    arguments = maxima_arguments(out, ids, torch.empty(4, 256, dtype=torch.float32, device=HOST), 8, 2048)
    yield OfflineCase.of_launch(block_maxima, arguments, {}, "index: block maxima")


def cuda_cases() -> Iterator[CudaCase]:
    """Scores of every format, number of heads and size of tiles, top-k with each number of threads per CTA, and the
    loss with each order of sums."""
    sizes = {"e4m3": (1,), "bf16": (2,), "e2m1": (1, 2)}  # bytes of a query's number
    for (name, found), heads in product(scores.FORMATS.items(), scores.HEADS):
        for size, tiles in product(sizes[name], (found.prompts, found.decodes)):
            label = f"index, {name} keys, {8 * size}-bit queries, {heads} heads, {tiles.columns} columns"
            yield CudaCase(label, scores.program(found, heads, size, tiles), scores.SHARED_BYTES)
    for threads in (512, 1024):
        yield CudaCase(f"index, top-k, {threads} threads", program(threads), Variant(1, threads, 1).shared)
    for form in (*topk_rows.WHOLE, *topk_rows.STREAMED, topk_rows.ALONE):
        how = "streamed" if form.stages else "whole"
        label = f"index, top-k of {how} rows, {form.threads} threads, {form.ctas} CTAs, k up to {form.most_k}"
        yield CudaCase(label, topk_rows.program(form), form.shared)
    for ordered in (False, True):
        label = f"index, loss{', in order' if ordered else ''}"
        yield CudaCase(label, gradients.program(ordered=ordered), gradients.MOST_BYTES)
    pairs = gradients.FORM
    yield CudaCase("index, sums in order", ordered_sums.program(pairs), ordered_sums.shared_bytes(pairs))


def layouts() -> Iterator[Layout]:
    """Every format of index keys."""
    for dim in DIMS:
        yield index_fp8(dim=dim)
        yield index_mxfp4(dim=dim)
        for dtype in checks.FLOATS:
            yield rows(dtype, latent=dim, rope=0)


def every_triton_case() -> Iterator[OfflineCase]:
    """The cases of `triton_cases`, and every program over layouts, query dtypes, heads, and shared keys or not."""
    yield from index_cases(every=True)
    yield from triton_cases()
    seen = set()
    for layout, query, heads, shared, target in product(layouts(), QUERIES, HEADS, (False, True), TARGETS):
        case = _score_case(layout, query, heads, shared, (target,))
        # The number of heads is a constant of the program; within one block it only changes a mask.
        constants = {n: v for n, v in case.constexprs.items() if n not in ("HEADS", "FILL")} | {
            "blocks": ceil_div(heads, case.constexprs["BLOCK_H"])
        }
        program = (target, tuple(case.signature.items()), str(constants), str(case.options))
        if program not in seen:
            seen.add(program)
            yield case
