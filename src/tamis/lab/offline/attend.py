"""Launches of the Triton and CUDA kernels of stage `attend`, to compile without a GPU."""

from collections.abc import Iterator
from itertools import product

import torch

from tamis import checks
from tamis.cache.layout import Layout, named
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.lab.offline.cuda import CudaCase
from tamis.lab.offline.training import attend_cases
from tamis.lab.offline.triton import NATIVE_E4M3, TARGETS, OfflineCase, Target
from tamis.ops.attention.hopper import few_heads, few_heads_shapes, gradients, many_heads, splits
from tamis.ops.attention.triton_grouped import attend_groups_kernel
from tamis.ops.attention.triton_kernels import (
    MAX_LATENT,
    MAX_ROPE,
    choose_launch,
    compute_dtype,
    launch_arguments,
    query_terms,
    shared_bytes,
)
from tamis.ops.attention.triton_rowwise import attend_rows_kernel
from tamis.ops.rows import ordered_sums
from tamis.ops.rows.ordered_sums import PairForm

QUERIES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
HEADS = (16, 64)
"""One number of heads for each size of head blocks; other numbers only change the grid."""
WIDEST, TINY = (MAX_LATENT, MAX_ROPE), (1, 1)


def layouts() -> Iterator[Layout]:
    """Every byte format at its usual widths, at the widest, and at widths that its kernels divide differently."""
    for latent, rope in ((512, 64), WIDEST, (512, 128), (448, 64), (256, 64), (128, 32), (64, 0), TINY):
        yield named("v32-bf16", latent=latent, rope=rope)
    for latent, rope in ((512, 64), WIDEST, TINY):
        yield named("v32-fp16", latent=latent, rope=rope)
        yield named("v32-fp32", latent=latent, rope=rope)
        yield named("plain-fp8", latent=latent, rope=rope)
    for latent, rope, tile in ((512, 64, 128), (*WIDEST, 128), (512, 0, 16), (128, 32, 128), (64, 32, 16)):
        yield named("v32-fp8", latent=latent, rope=rope, tile=tile)
        yield named("v32-fp8", latent=latent, rope=rope, tile=tile, scale_mode="exact")
    for latent, rope, tile in ((448, 64, 64), (*WIDEST, 64), (448, 0, 16), (1, 1, 1)):
        yield named("v4-fp8", latent=latent, rope=rope, tile=tile)
    for name in ("v41-fp8", "v41-fp4"):
        yield named(name)
        yield named(name, latent=24, rope=8)


def every_case(target: Target) -> Iterator[tuple[OfflineCase, tuple[object, ...]]]:
    """The cases for a target, each with the values that determine its blocks; equal programs come once."""
    seen = set()
    for layout, query, heads in product(layouts(), QUERIES, HEADS):
        # A V4 row is a value as a whole, which needs a second accumulator for its tail.
        for value_dim in dict.fromkeys((min(layout.latent, 512), layout.width)):
            case, branch = _case(target, layout, query, heads, value_dim, translate=False)
            # HEAD_BLOCKS is a constant of the program, but only changes where a block begins.
            constants = {name: value for name, value in case.constexprs.items() if name != "HEAD_BLOCKS"}
            program = (case.kernel, tuple(case.signature.items()), str(constants), str(case.options))
            if program not in seen:
                seen.add(program)
                yield case, branch


def triton_cases() -> Iterator[OfflineCase]:
    """Launches of portable attention that cover the branches of `choose_launch`, and of its gradients."""
    yield from _cases()
    yield from attend_cases()


def every_triton_case() -> Iterator[OfflineCase]:
    """Launches of every program of portable attention, over dtypes, formats and widths, and of its gradients."""
    yield from _cases(every=True)
    yield from attend_cases(every=True)


def _cases(*, every: bool = False) -> Iterator[OfflineCase]:
    """For each target the case with the most shared memory of each branch; with `every`, all cases."""
    for target in TARGETS.values():
        if every:
            yield from (case for case, _ in every_case(target))
        else:
            largest: dict[tuple[object, ...], OfflineCase] = {}
            for layout, query, heads in product(_usual_layouts(), QUERIES, HEADS):
                case, branch = _case(target, layout, query, heads, 512, translate=False)
                if branch not in largest or case.most_shared > largest[branch].most_shared:
                    largest[branch] = case
            yield from largest.values()
        # A kernel that translates positions itself is another program, which needs more registers.
        yield _case(target, named("v32-fp8"), torch.bfloat16, 16, 512, translate=True)[0]


def _usual_layouts() -> Iterator[Layout]:
    for name in ("v32-bf16", "v32-fp32", "v32-fp8", "v4-fp8", "v41-fp4", "plain-fp8"):
        yield named(name)


def _case(
    target: Target, layout: Layout, query: torch.dtype, heads: int, value_dim: int, *, translate: bool
) -> tuple[OfflineCase, tuple[object, ...]]:
    cache, host = PagedCache(layout, 2, 64), torch.device("cpu")
    stored = torch.uint8 if query == torch.float8_e4m3fn else query
    q = torch.empty(2, heads, layout.width, dtype=stored, device=host)
    ids = torch.zeros(2, dtype=torch.int32, device=host)
    lookup = (ids, torch.zeros(2, 8, dtype=torch.int32, device=host)) if translate else (None, None)
    selection = Selection(cache, torch.zeros(2, 2048, dtype=torch.int32, device=host), ids, *lookup)
    out = torch.empty(1, 2, heads, value_dim, dtype=torch.float32, device=host)
    lse = torch.empty(1, 2, heads, dtype=torch.float32, device=host)
    launch = choose_launch(layout.key, q.dtype, heads, value_dim, target.shared_limit, target.name == "sm_100")
    arguments, options = launch_arguments(q, selection, 0.1, lse[0, 0], launch, 1, out, lse, lse)
    arguments["NATIVE"] = target.name in NATIVE_E4M3
    compute = compute_dtype(q.dtype, layout, grouped=launch.grouped)
    label = f"attend {layout.name} {layout.scale_mode} in tiles of {layout.tile}, {checks.dtype_name(query)} queries, "
    label += f"{heads} heads, {value_dim} values, {launch.block_h}x{launch.block_n}x{launch.stages}"
    label += ", grouped" * launch.grouped + ", translating" * translate
    kernel = attend_groups_kernel if launch.grouped else attend_rows_kernel
    # The bound holds for NVIDIA's compiler; AMD's uses little shared memory.
    bound = 0 if launch.grouped or target.backend != "cuda" else shared_bytes(launch, layout, q.dtype)
    case = OfflineCase.of_launch(kernel, arguments, options, label, (target.name,), most_shared=bound)
    mode = layout.scale_mode if launch.block_h > 16 else ""
    return case, (kernel, launch, compute, query_terms(q.dtype, compute), mode)


def cuda_cases() -> Iterator[CudaCase]:
    """The merge of splits, both attention kernels and gradients, in every variant that is launched."""
    for batch in splits.MERGE_BATCHES:
        yield CudaCase(f"attend, merging splits, {batch} at once", splits.merge_program(batch), 0)
    yield from few_heads_cases()
    yield from many_heads_cases()
    yield from gradient_cases()


def gradient_cases() -> Iterator[CudaCase]:
    """Gradients for each width, number of heads and order of sums, and the sums in order."""
    for width, heads, ordered in product(gradients.WIDTHS, gradients.HEADS, (False, True)):
        label = f"attend, gradients of rows of {width}, {heads} heads{', in order' if ordered else ''}"
        yield CudaCase(label, gradients.program(width, heads, ordered=ordered), gradients.SHARED_BYTES)
    for width, parts in product(gradients.WIDTHS, (1, 2)):
        form = PairForm(width, gradients.VALUE_DIM, parts)
        label = f"attend, sums in order, rows of {width}, parts: {parts}"
        yield CudaCase(label, ordered_sums.program(form), ordered_sums.shared_bytes(form))


def few_heads_cases() -> Iterator[CudaCase]:
    """Every CTA shape for each kind of rows and dtype of queries."""
    for kind, shapes, dtypes in (
        ("fp8", few_heads_shapes.FP8_ROWS, few_heads.QUERY_DTYPES),
        ("bf16", few_heads_shapes.BF16_ROWS, (torch.bfloat16,)),
        ("528-byte fp8", few_heads_shapes.FP8_NO_ROPE, few_heads.QUERY_DTYPES),
        ("512-wide bf16", few_heads_shapes.BF16_NO_ROPE, (torch.bfloat16,)),
    ):
        distinct = dict.fromkeys((shapes.few_tokens, shapes.many_tokens, shapes.more_heads))
        for shape, dtype in product(distinct, dtypes):
            name, per_sm = shape.source.replace("_", " "), f"{shape.per_sm} per SM"
            label = f"attend, {name} ({shape.heads}), {kind} rows, {per_sm}, {checks.dtype_name(dtype)} queries"
            yield CudaCase(label, few_heads.program(shape, dtype), shape.shared)
            if kind.endswith("bf16"):
                yield CudaCase(f"{label}, for training", few_heads.program(shape, dtype, True), shape.shared)


def many_heads_cases() -> Iterator[CudaCase]:
    """Each kind of rows, with one selection and with two."""
    kinds = (many_heads.V32_FP8, many_heads.V4_FP8, many_heads.V32_BF16, many_heads.V4_BF16, many_heads.NOPE_FP8)
    for kind in kinds:
        for count in range(1, many_heads.SELECTIONS + 1):
            label = f"attend, many heads, {kind.layout}, selections: {count}"
            yield CudaCase(label, many_heads.program(kind, count, False), many_heads.SHARED_BYTES)
            if not kind.merges:
                training = many_heads.program(kind, count, False, True)
                yield CudaCase(f"{label}, for training", training, many_heads.SHARED_BYTES)
            if kind.merges:
                merging = many_heads.program(kind, count, True)
                yield CudaCase(f"{label}, merging in clusters", merging, many_heads.SHARED_BYTES)
