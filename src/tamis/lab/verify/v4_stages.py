"""Checks of the stages that only V4 layers run: rotate, compress and output."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tamis.cache.layout import Layout, compressor_state, index_fp8, named, plain_fp8, rows
from tamis.cache.paged import PagedCache
from tamis.cache.pool import PagePool
from tamis.lab.testing.cases import Draw
from tamis.lab.testing.oracle import index_rows
from tamis.lab.verify.check import Check, Target, Trial
from tamis.lab.verify.repeat import graph_check, repeat_check
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import Rope
from tamis.ops import (
    StatePages,
    compress_kv,
    lower_groups,
    quantise_blocks,
    rotate_and_write,
    rotate_heads,
    rotate_to_fp8,
)

ROTARY = Rope(64, theta=160000.0, factor=16.0, original_length=65536)
LENGTH = 320
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Relative errors of single roundings."""
FP8_BOUND = 4e-2
OUTPUT_BOUND = 5e-2


def rotate_checks(target: Target) -> Iterator[Check]:
    """Heads and inserted rows against complex multiplication in float64."""
    if target.runs("rotate") is None:
        yield Check("rotate", "heads", 0.0, reason=f"{target.backend} does not have this stage")
        return
    for dtype, bound in BOUNDS.items():
        sizes = [(7, 64, 512), (3, 5, 128)] if target.quick else [(1, 1, 64), (7, 64, 512), (65, 5, 128), (9, 128, 512)]
        trials = [(f"{t} x {h} x {d}", partial(_rotate, target, t, h, d, dtype)) for t, h, d in sizes]
        yield Check("rotate", f"heads in {dtype}".replace("torch.", ""), bound, trials)
    found = [layout for layout in _layouts() if target.takes("rotate", layout)]
    inserted = [layout for layout in found if layout.width == 512]
    yield Check("rotate", "rows inserted", FP8_BOUND, [(f.name, partial(_insert, target, f)) for f in inserted])
    yield repeat_check("rotate", [(f.name, partial(_inserted, target, f)) for f in inserted])
    yield graph_check(target, "rotate", ["rotate"], [("heads", partial(_rotate_again, target))])


def output_checks(target: Target) -> Iterator[Check]:
    """Heads rotated back, quantised and lowered in FP8 against the exact projection in float64."""
    if target.runs("output") is None:
        yield Check("output", "lowered in FP8", 0.0, reason=f"{target.backend} does not have this stage")
        return
    trials = [(f"{tokens} tokens", partial(_lower, target, tokens)) for tokens in (1, 7, 70)]
    yield Check("output", "lowered in FP8", OUTPUT_BOUND, trials)


def compress_checks(target: Target) -> Iterator[Check]:
    """Entries against sums in float64, over prompts, chunks, decodes and rejected drafts."""
    found = [case for case in _compress_cases() if target.takes("compress", case.layout)]
    for quantised, bound in ((False, BOUNDS[torch.bfloat16]), (True, FP8_BOUND)):
        some = [case for case in found if case.layout.quantised == quantised]
        name = "entries in FP8" if quantised else "entries"
        yield Check("compress", name, bound, [(case.name, partial(_compress, target, case)) for case in some])
    yield repeat_check("compress", [(case.name, partial(_compressed, target, case)) for case in found[::2]])
    yield graph_check(target, "compress", ["compress"], [(c.name, partial(_compress_again, target, c)) for c in found])


def _turned(x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    angles = positions.double().unsqueeze(1) * ROTARY.frequencies().double()
    factor = torch.polar(torch.ones_like(angles), -angles if inverse else angles)
    factor = torch.where((positions >= 0).unsqueeze(1), factor, 1.0)
    while factor.dim() < x.dim():
        factor = factor.unsqueeze(1)
    tail = torch.view_as_complex(x[..., -ROTARY.dim :].double().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., : -ROTARY.dim].double(), torch.view_as_real(tail * factor).flatten(-2)), dim=-1)


def _normed(x: Tensor) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _error(found: Tensor, expected: Tensor) -> Trial:
    return Trial(float((found.cpu().double() - expected).norm() / expected.norm()))


def _rotate(target: Target, tokens: int, heads: int, width: int, dtype: torch.dtype) -> Trial:
    draw = Draw(f"rotate {tokens} {heads} {width}")
    x, positions = draw.normal(tokens, heads, width, dtype=dtype), draw.integers(-1, LENGTH, tokens)
    here, at, table = target.here([x, positions, ROTARY.cos_sin_table(LENGTH)])
    worst = Trial(0.0)
    for eps, inverse in ((None, False), (1e-6, False), (None, True)):
        found = rotate_heads(here, at, table, eps=eps, inverse=inverse, backend=target.backend)
        error = _error(found, _turned(x if eps is None else _normed(x), positions, inverse=inverse))
        worst = max(worst, error)
    return worst


def _lower(target: Target, tokens: int) -> Trial:
    """Eight heads in two groups, rotated back, quantised and lowered, against the exact projection."""
    draw = Draw(f"lower {tokens}")
    x, positions, weight = draw.normal(tokens, 8, 512), draw.integers(-1, LENGTH, tokens), draw.normal(2, 100, 2048)
    here, at, table, held = target.here([x, positions, ROTARY.cos_sin_table(LENGTH), weight])
    values, scales = rotate_to_fp8(here, at, table, backend=target.backend)
    grouped, exponents = (part.flatten(1).unflatten(1, (2, -1)) for part in (values, scales))
    found = lower_groups(grouped, exponents, *quantise_blocks(held), dtype=torch.float32, backend=target.backend)
    exact = _turned(x, positions, inverse=True).flatten(1).unflatten(1, (2, -1))
    return _error(found, torch.einsum("tgk,gok->tgo", exact, weight.double()))


def _rotate_again(target: Target) -> tuple[list[Tensor], list[Tensor], Callable[..., list[Tensor]]]:
    draw = Draw("rotate again")
    table = target.here(ROTARY.cos_sin_table(LENGTH))
    first, second = ([draw.normal(5, 8, 512), draw.integers(-1, LENGTH, 5)] for _ in range(2))

    def call(x: Tensor, positions: Tensor) -> list[Tensor]:
        return [rotate_heads(x, positions, table, eps=1e-6, backend=target.backend)]

    return target.here(first), target.here(second), call


def _layouts() -> list[Layout]:
    return [named("v4-fp8"), named("v4-bf16"), named("v4-fp32"), plain_fp8(latent=448), index_fp8()]


def _inserted(target: Target, layout: Layout) -> list[Tensor]:
    """Queries, and the rows of a cache that some of seven tokens are written to."""
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
    expected[[4, 14, 0, 7]] = _turned(_normed(kv) * weight.double(), positions)[[0, 2, 3, 4]]
    return max(_error(found, _turned(_normed(q), positions)), _error(rows_found, expected))


@dataclass(frozen=True)
class CompressCase:
    """A kind of compressor and the format of its entries."""

    layout: Layout
    ratio: int
    overlapping: bool
    recipe: IndexRecipe | None = None

    @property
    def name(self) -> str:
        """For reports."""
        turned = ", by Hadamard" * (self.recipe is not None)
        return f"{self.layout.name}, {self.ratio} tokens{', overlapping' * self.overlapping}{turned}"

    @property
    def channels(self) -> int:
        """Of a token's values."""
        return self.layout.width * (2 if self.overlapping else 1)


def _compress_cases() -> list[CompressCase]:
    small = rows(torch.float32, latent=24, rope=64)
    kinds = [(4, True), (128, False), (16, False), (3, True)]
    found = [CompressCase(layout, *kind) for layout in _layouts() for kind in kinds[:2]]
    turned = CompressCase(index_fp8(), 4, True, IndexRecipe.of_v4(ROTARY.dim, hadamard=True))
    return [*found, turned, *(CompressCase(small, *kind) for kind in kinds[2:])]


def _tokens(case: CompressCase) -> list[Tensor]:
    """Values, scores, bias and gain."""
    draw = Draw(f"compress {case.name}")
    values, scores = draw.normal(LENGTH, case.channels), draw.normal(LENGTH, case.channels) * 2
    return [values, scores, draw.normal(case.ratio, case.channels), draw.normal(case.layout.width)]


class _Compressor:
    """A request's tokens, its caches on the target, and the steps they go through."""

    def __init__(self, target: Target, case: CompressCase) -> None:
        self.target, self.case, layout = target, case, case.layout
        self.values, self.scores, self.bias, self.weight = target.here(_tokens(case))
        self.table = target.here(ROTARY.cos_sin_table(LENGTH))
        self.pool, self.entries = PagePool(90, 8, seed=1), PagePool(140, 3, seed=2)
        self.pool.extend("a", LENGTH)
        self.entries.extend("a", LENGTH // case.ratio)
        kept = compressor_state(dim=layout.width, overlapping=case.overlapping)
        self.state = PagedCache(kept, 90, 8, target.device)
        self.state.storage.fill_(torch.nan)
        scale = 0.05 if layout.scale_mode == "tensor" else 1.0
        self.cache = PagedCache(layout, 140, 3, target.device, scale=scale, recipe=case.recipe)

    def places(self, start: int, end: int) -> tuple[Tensor, StatePages, Tensor]:
        """Positions, state pages and entry slots of tokens start..end."""
        positions = torch.arange(start, end, dtype=torch.int64, device="cpu")
        slots = torch.full((end - start,), -1, dtype=torch.int64, device="cpu")
        ends = (positions + 1) % self.case.ratio == 0
        slots[ends] = self.entries.slots("a", start // self.case.ratio, end // self.case.ratio)
        ids = torch.zeros(end - start, dtype=torch.int32, device="cpu")
        pages = StatePages(self.pool.slots("a", start, end), ids, self.pool.block_table(["a"]))
        return self.target.here((positions, pages, slots))

    def run(self, values: Tensor, scores: Tensor, positions: Tensor, pages: StatePages, slots: Tensor) -> None:
        compress_kv(
            values,
            scores,
            self.state,
            self.cache,
            positions=positions,
            pages=pages,
            slots=slots,
            bias=self.bias,
            norm_weight=self.weight,
            cos_sin=self.table,
            backend=self.target.backend,
        )


def _compressed(target: Target, case: CompressCase) -> list[Tensor]:
    """All entries of a request that ran as a prompt, decodes, rejected drafts, and a chunk."""
    made = _Compressor(target, case)
    for start, end, drafts in ((0, 125, 0), (125, 126, 0), (126, 131, 3), (128, 131, 0), (131, LENGTH, 0)):
        wrong = target.here(
            (torch.arange(start, end, dtype=torch.int64, device="cpu") >= end - drafts).float().unsqueeze(1)
        )
        made.run(made.values[start:end] + wrong, made.scores[start:end] - wrong, *made.places(start, end))
    return [made.cache.read(made.entries.slots("a", 0, LENGTH // case.ratio).to(target.device))]


def _compress_again(
    target: Target, case: CompressCase
) -> tuple[list[Tensor], list[Tensor], Callable[..., list[Tensor]]]:
    made = _Compressor(target, case)
    places = made.places(0, 2 * case.ratio)
    first = [made.values[: 2 * case.ratio], made.scores[: 2 * case.ratio]]

    def call(values: Tensor, scores: Tensor) -> list[Tensor]:
        made.run(values, scores, *places)
        return [made.state.storage.clone(), made.cache.storage.clone()]

    return first, [part.flip(0) for part in first], call


def _compress(target: Target, case: CompressCase) -> Trial:
    values, scores, bias, weight = (t.double() for t in _tokens(case))
    width, ratio = case.layout.width, case.ratio
    biased = scores + bias.repeat(LENGTH // ratio + 1, 1)[:LENGTH]
    made = []
    for start in range(0, LENGTH - ratio + 1, ratio):
        own = slice(start, start + ratio)
        parts = [(values[own, -width:], biased[own, -width:])]
        if case.overlapping and start:
            before = slice(start - ratio, start)
            parts.append((values[before, :width], biased[before, :width]))
        pooled, shares = (torch.cat(part) for part in zip(*parts, strict=True))
        made.append((shares.softmax(0) * pooled).sum(0))
    angles = ROTARY.cos_sin_table(LENGTH)[: len(made) * ratio : ratio]
    recipe = case.recipe or IndexRecipe.of_v4(ROTARY.dim)
    entries = index_rows(_normed(torch.stack(made)) * weight, angles, recipe)
    return _error(_compressed(target, case)[0], entries)
