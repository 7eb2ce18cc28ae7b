"""Checks of stage `compress`, against sums in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.cache.layout import Layout, compressor_state, index_fp8, rows
from tamis.cache.paged import PagedCache
from tamis.cache.pool import PagePool
from tamis.lab.testing.cases import Draw
from tamis.lab.testing.oracle import index_rows
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.latents import latent_cases, latent_checks, latents_again, latents_made
from tamis.lab.verify.repeat import Replays, graph_check, repeat_check
from tamis.lab.verify.v4_inputs import BOUNDS, FP8_BOUND, LENGTH, PIECES, ROTARY, layouts, norm_error, normed
from tamis.model.recipe import IndexRecipe
from tamis.ops import (
    StatePages,
    compress_kv,
)


def compress_checks(target: Target) -> Iterator[Check]:
    """Entries against sums in float64, over prompts, chunks, decodes and rejected drafts."""
    found = [case for case in _compress_cases() if target.takes("compress", case.layout)]
    for quantised, bound in ((False, BOUNDS[torch.bfloat16]), (True, FP8_BOUND)):
        some = [case for case in found if case.layout.quantised == quantised]
        name = "entries in FP8" if quantised else "entries"
        yield Check("compress", name, bound, named_calls(_compress, target, some))
    yield from latent_checks(target)
    latents = latent_cases(target)
    repeated = [*named_calls(_compressed, target, found[::2]), *named_calls(latents_made, target, latents[:1])]
    yield repeat_check("compress", repeated)
    again = named_calls(_compress_again, target, found)
    replays: Replays = [*again, *named_calls(latents_again, target, latents)]
    yield graph_check(target, "compress", ["compress"], replays)


@dataclass(frozen=True)
class CompressCase:
    """A kind of compressor and the format of its entries."""

    layout: Layout
    ratio: int
    overlapping: bool
    recipe: IndexRecipe | None = None
    pooled: bool = False
    """Whether entries are only pooled, without norm and rope, as GLM-5.3-Flash's index keys are."""

    @property
    def name(self) -> str:
        """The name in reports."""
        turned = ", by Hadamard" * (self.recipe is not None)
        only = ", only pooled" * self.pooled
        return f"{self.layout.name}, {self.ratio} tokens{', overlapping' * self.overlapping}{turned}{only}"

    @property
    def channels(self) -> int:
        """Channels of a token's values."""
        return self.layout.width * (2 if self.overlapping else 1)


def _compress_cases() -> list[CompressCase]:
    small = rows(torch.float32, latent=24, rope=64)
    kinds = [(4, True), (128, False), (16, False), (3, True)]
    found = [CompressCase(layout, *kind) for layout in layouts() for kind in kinds[:2]]
    turned = CompressCase(index_fp8(), 4, True, IndexRecipe.of_v4(ROTARY.dim, hadamard=True))
    pooled = [CompressCase(index_fp8(), size, False, IndexRecipe(0, hadamard=True), True) for size in (4, 16)]
    return [*found, turned, *(CompressCase(small, *kind) for kind in kinds[2:]), *pooled]


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

    def metadata(self, start: int, end: int) -> tuple[Tensor, StatePages, Tensor]:
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
            norm_weight=None if self.case.pooled else self.weight,
            cos_sin=None if self.case.pooled else self.table,
            backend=self.target.backend,
        )


def _compressed(target: Target, case: CompressCase) -> list[Tensor]:
    """All entries of a request that ran as a prompt, decodes, rejected drafts, and a chunk."""
    made = _Compressor(target, case)
    for start, end, drafts in PIECES:
        wrong = target.here(
            (torch.arange(start, end, dtype=torch.int64, device="cpu") >= end - drafts).float().unsqueeze(1)
        )
        made.run(made.values[start:end] + wrong, made.scores[start:end] - wrong, *made.metadata(start, end))
    return [made.cache.read(made.entries.slots("a", 0, LENGTH // case.ratio).to(target.device))]


def _compress_again(
    target: Target, case: CompressCase
) -> tuple[list[Tensor], list[Tensor], Callable[..., list[Tensor]]]:
    made = _Compressor(target, case)
    metadata = made.metadata(0, 2 * case.ratio)
    first = [made.values[: 2 * case.ratio], made.scores[: 2 * case.ratio]]

    def call(values: Tensor, scores: Tensor) -> list[Tensor]:
        made.run(values, scores, *metadata)
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
    entries = torch.stack(made)
    if case.pooled:
        entries = index_rows(entries, angles[:, :0], recipe)
    else:
        entries = index_rows(normed(entries) * weight, angles, recipe)
    return norm_error(_compressed(target, case)[0], entries)
