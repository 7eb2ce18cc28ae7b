"""Checks of stage `rotate`, against complex multiplication in float64."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.lab.testing.cases import Draw
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.latents import rotated_cases, rotated_checks, rotated_made
from tamis.lab.verify.repeat import graph_check, repeat_check
from tamis.lab.verify.v4_inputs import BOUNDS, FP8_BOUND, LENGTH, ROTARY, layouts, norm_error, normed, rotated
from tamis.ops import rotate_and_write, rotate_heads


def rotate_checks(target: Target) -> Iterator[Check]:
    """Rotated heads and written rows against complex multiplication in float64."""
    if target.runs("rotate") is None:
        yield Check("rotate", "heads", 0.0, reason=f"{target.backend} does not have this stage")
        return
    for dtype, bound in BOUNDS.items():
        sizes = [(7, 64, 512), (3, 5, 128)] if target.quick else [(1, 1, 64), (7, 64, 512), (65, 5, 128), (9, 128, 512)]
        trials = [(f"{t} x {h} x {d}", partial(_rotate, target, t, h, d, dtype)) for t, h, d in sizes]
        yield Check("rotate", f"heads in {dtype}".replace("torch.", ""), bound, trials)
    found = [layout for layout in layouts() if target.takes("rotate", layout)]
    inserted = [layout for layout in found if layout.width == 512]
    yield Check("rotate", "rows inserted", FP8_BOUND, named_calls(_insert, target, inserted))
    yield from rotated_checks(target)
    written = [*named_calls(_inserted, target, inserted), *named_calls(rotated_made, target, rotated_cases(target))]
    yield repeat_check("rotate", written)
    yield graph_check(target, "rotate", ["rotate"], [("heads", partial(_rotate_again, target))])


def _rotate(target: Target, tokens: int, heads: int, width: int, dtype: torch.dtype) -> Trial:
    draw = Draw(f"rotate {tokens} {heads} {width}")
    x, positions = draw.normal(tokens, heads, width, dtype=dtype), draw.integers(-1, LENGTH, tokens)
    here, at, table = target.here([x, positions, ROTARY.cos_sin_table(LENGTH)])
    worst = Trial(0.0)
    for eps, inverse in ((None, False), (1e-6, False), (None, True)):
        found = rotate_heads(here, at, table, eps=eps, inverse=inverse, backend=target.backend)
        error = norm_error(found, rotated(x if eps is None else normed(x), positions, inverse=inverse))
        worst = max(worst, error)
    return worst


def _rotate_again(target: Target) -> tuple[list[Tensor], list[Tensor], Callable[..., list[Tensor]]]:
    draw = Draw("rotate again")
    table = target.here(ROTARY.cos_sin_table(LENGTH))
    first, second = ([draw.normal(5, 8, 512), draw.integers(-1, LENGTH, 5)] for _ in range(2))

    def call(x: Tensor, positions: Tensor) -> list[Tensor]:
        return [rotate_heads(x, positions, table, eps=1e-6, backend=target.backend)]

    return target.here(first), target.here(second), call


def _inserted(target: Target, layout: Layout) -> list[Tensor]:
    """Queries, and all rows of a cache after some of seven tokens were written."""
    draw = Draw(f"insert {layout.name}")
    cache = PagedCache(layout, 3, 5, target.device, scale=0.05 if layout.scale_mode == "tensor" else 1.0)
    inputs = [draw.normal(7, 3, 512, dtype=torch.bfloat16), draw.normal(7, 512, dtype=torch.bfloat16)]
    slots = torch.tensor([4, -1, 14, 0, 7, -1], dtype=torch.int64, device="cpu")
    positions = torch.tensor([3, 5, 300, 0, 77, -1, -1], dtype=torch.int64, device="cpu")
    q, kv, slots, positions, table, weight = target.here(
        [*inputs, slots, positions, ROTARY.cos_sin_table(LENGTH), draw.normal(512)]
    )
    found = rotate_and_write(
        q, kv, cache, slots, positions=positions, cos_sin=table, norm_weight=weight, backend=target.backend
    )
    return [found.q, cache.read(torch.arange(cache.rows, dtype=torch.int64, device=target.device))]


def _insert(target: Target, layout: Layout) -> Trial:
    draw = Draw(f"insert {layout.name}")
    q, kv = draw.normal(7, 3, 512, dtype=torch.bfloat16), draw.normal(7, 512, dtype=torch.bfloat16)
    weight, positions = draw.normal(512), torch.tensor([3, 5, 300, 0, 77, -1, -1], dtype=torch.int64, device="cpu")
    found, rows_found = _inserted(target, layout)
    expected = torch.zeros(15, 512, dtype=torch.float64, device="cpu")
    expected[[4, 14, 0, 7]] = rotated(normed(kv) * weight.double(), positions)[[0, 2, 3, 4]]
    return max(norm_error(found, rotated(normed(q), positions)), norm_error(rows_found, expected))
