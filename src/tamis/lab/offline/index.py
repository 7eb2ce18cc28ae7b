"""Launches of index scores for `tamis.lab.testing.offline --every`: what the checks admit, each once."""

from collections.abc import Iterator
from itertools import product

import torch

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.cache.paged import PagedCache
from tamis.lab.testing.offline import NATIVE_E4M3, TARGETS, OfflineCase
from tamis.ops.index.triton_kernels import (
    E4M3,
    MAX_DIM,
    _compute_dtype,
    _head_block,
    _held_dtype,
    _page_places,
    score_arguments,
)
from tamis.ops.index.triton_scores import choose_score_launch, score_keys

QUERIES = (torch.bfloat16, torch.float16, torch.float32, E4M3)
HEADS = (1, 16, 17, 32, 64, 128)
DIMS = (32, 128, MAX_DIM)


def layouts() -> Iterator[Layout]:
    """Every format that index keys may have."""
    for dim in DIMS:
        yield index_fp8(dim=dim)
        yield index_mxfp4(dim=dim)
        for dtype in checks.FLOATS:
            yield rows(dtype, latent=dim, rope=0)


def cases() -> Iterator[OfflineCase]:
    """Every program of a layout, a query dtype, a number of heads, and tokens that share keys or do not."""
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
        compute = _compute_dtype(query, _held_dtype(layout), native=native)
        block_h, exact = _head_block(heads, layout.width, compute), compute == torch.float32
        for target in targets:
            kind = {"shared": shared, "exact": exact, "native": compute == E4M3}
            key_bytes = layout.values.dtype.itemsize * layout.width
            launch = choose_score_launch(out.shape, 132, heads, block_h, **kind, key_bytes=key_bytes)
            places = _page_places(PagedCache(layout, 2, 64), four, table, four, out)
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
