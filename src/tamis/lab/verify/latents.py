"""Checks of DeepSeek-V4.1's latents and rotated rows, parts of the stages `compress` and `rotate`, against float64."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.cache.layout import Layout, compressor_state, index_fp8, named, rows
from tamis.cache.paged import PagedCache
from tamis.cache.pool import PagePool
from tamis.lab.testing.cases import Draw
from tamis.lab.testing.oracle import index_rows
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import Replay
from tamis.lab.verify.v4_inputs import BOUNDS, FP8_BOUND, LENGTH, PIECES, ROTARY, norm_error, normed
from tamis.model.recipe import IndexRecipe
from tamis.ops import StatePages, pool_kv, write_rotated


@dataclass(frozen=True)
class LatentCase:
    """A span, the width of its latents, and their dtype."""

    ratio: int
    width: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"latents of {self.ratio} tokens, {self.width} wide, in {self.dtype}".replace("torch.", "")


LATENTS = (
    LatentCase(2, 512, torch.bfloat16),
    LatentCase(2, 512, torch.float32),
    LatentCase(1, 512, torch.bfloat16),
    LatentCase(5, 24, torch.float16),
)


def latent_checks(target: Target) -> Iterator[Check]:
    """Latents over prompts, chunks, decodes and rejected drafts."""
    for dtype, bound in BOUNDS.items():
        some = [case for case in latent_cases(target) if case.dtype == dtype]
        yield Check("compress", f"latents in {dtype}".replace("torch.", ""), bound, named_calls(_latents, target, some))


def latent_cases(target: Target) -> list[LatentCase]:
    """All cases, but none where only other formats will run, or the stage is missing."""
    return list(LATENTS) if target.scope is None and target.runs("compress") is not None else []


def _tokens(case: LatentCase) -> list[Tensor]:
    """Values, scores and gain."""
    draw = Draw(case.name)
    return [draw.normal(LENGTH, case.width), draw.normal(LENGTH, case.width) * 2, draw.normal(case.width)]


class _Pooling:
    """A request's tokens and their state on the target."""

    def __init__(self, target: Target, case: LatentCase) -> None:
        self.target, self.case = target, case
        self.values, self.scores, self.norm = target.here(_tokens(case))
        self.pool = PagePool(90, 8, seed=1)
        self.pool.extend("a", LENGTH)
        self.state = PagedCache(compressor_state(dim=case.width, overlapping=False), 90, 8, target.device)
        self.state.storage.fill_(torch.nan)

    def where(self, start: int, end: int) -> tuple[Tensor, StatePages]:
        """Positions and state pages of tokens start..end."""
        positions = torch.arange(start, end, dtype=torch.int64, device="cpu")
        ids = torch.zeros(end - start, dtype=torch.int32, device="cpu")
        pages = StatePages(self.pool.slots("a", start, end), ids, self.pool.block_table(["a"]))
        return self.target.here((positions, pages))

    def run(self, values: Tensor, scores: Tensor, positions: Tensor, pages: StatePages) -> Tensor:
        return pool_kv(
            values,
            scores,
            self.state,
            positions=positions,
            pages=pages,
            norm_weight=self.norm,
            ratio=self.case.ratio,
            dtype=self.case.dtype,
            backend=self.target.backend,
        )


def latents_made(target: Target, case: LatentCase) -> list[Tensor]:
    """The latents of all tokens of a request that ran as a prompt, decodes, rejected drafts, and a chunk."""
    made = _Pooling(target, case)
    found = torch.empty(LENGTH, case.width, dtype=case.dtype, device=target.device)
    for start, end, drafts in PIECES:
        some, at = slice(start, end), torch.arange(start, end, dtype=torch.int64, device="cpu")
        wrong = target.here((at >= end - drafts).float().unsqueeze(1))
        found[some] = made.run(made.values[some] + wrong, made.scores[some] - wrong, *made.where(start, end))
    return [found]


def _latents(target: Target, case: LatentCase) -> Trial:
    values, scores, gain = (tensor.double() for tensor in _tokens(case))
    spans = LENGTH // case.ratio
    values, scores = (x[: spans * case.ratio].view(spans, case.ratio, -1) for x in (values, scores))
    expected = torch.zeros(LENGTH, case.width, dtype=torch.float64, device="cpu")
    expected[case.ratio - 1 :: case.ratio] = normed((scores.softmax(1) * values).sum(1)) * gain
    return norm_error(latents_made(target, case)[0], expected)


def latents_again(target: Target, case: LatentCase) -> Replay:
    """A step captured with some values and replayed with others."""
    made, tokens = _Pooling(target, case), 2 * case.ratio
    where, first = made.where(0, tokens), [made.values[:tokens], made.scores[:tokens]]

    def call(values: Tensor, scores: Tensor) -> list[Tensor]:
        return [made.run(values, scores, *where), made.state.storage.clone()]

    return first, [part.flip(0) for part in first], call


@dataclass(frozen=True)
class RotatedCase:
    """The cache that rows are written to, and how many tokens each of them stands for."""

    layout: Layout
    span: int
    hadamard: bool = False

    @property
    def keys(self) -> bool:
        """Whether these are index keys, which are normalised first."""
        return self.layout.width == index_fp8().width

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.layout.name}, spans of {self.span}{', by Hadamard' * self.hadamard}"


def rotated_cases(target: Target) -> list[RotatedCase]:
    """Entries and index keys, by tokens and by spans."""
    entries = [named("v4-fp8"), named("v4-bf16"), named("v41-fp8"), rows(torch.float32, latent=24, rope=64)]
    found = [RotatedCase(layout, span) for layout in (*entries, index_fp8()) for span in (1, 2)]
    found.append(RotatedCase(index_fp8(), 2, hadamard=True))
    return [case for case in found if target.takes("rotate", case.layout)]


def rotated_checks(target: Target) -> Iterator[Check]:
    """Rows at the rotation of the first position of their span."""
    for quantised, bound in ((False, BOUNDS[torch.bfloat16]), (True, FP8_BOUND)):
        some = [case for case in rotated_cases(target) if case.layout.quantised == quantised]
        name = "rows of spans in FP8" if quantised else "rows of spans"
        yield Check("rotate", name, bound, named_calls(_rotated, target, some))


def _rows(case: RotatedCase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, gain, positions and slots; some rows are not written."""
    draw = Draw(f"rotated {case.name}")
    given, gain = draw.normal(9, case.layout.width, dtype=torch.bfloat16), draw.normal(case.layout.width)
    positions = torch.tensor([3, 5, 300, 0, 77, 1, LENGTH - 1, 6, -1], dtype=torch.int64, device="cpu")
    slots = torch.tensor([4, -1, 14, 0, 7, 9, 2, 11, -1], dtype=torch.int64, device="cpu")
    return given, gain, positions, slots


def _recipe(case: RotatedCase) -> IndexRecipe:
    return IndexRecipe.of_v4(ROTARY.dim, hadamard=case.hadamard)


def rotated_made(target: Target, case: RotatedCase) -> list[Tensor]:
    """All rows of a cache after some were written."""
    recipe = _recipe(case) if case.keys else None
    cache = PagedCache(case.layout, 3, 5, target.device, recipe=recipe)
    given, gain, positions, slots, table = target.here([*_rows(case), ROTARY.cos_sin_table(LENGTH)])
    write_rotated(
        given,
        cache,
        slots,
        positions=positions,
        cos_sin=table,
        norm_weight=gain if case.keys else None,
        span=case.span,
        backend=target.backend,
    )
    return [cache.read(torch.arange(cache.rows, dtype=torch.int64, device=target.device))]


def _rotated(target: Target, case: RotatedCase) -> Trial:
    given, gain, positions, slots = _rows(case)
    kept = slots >= 0
    first = positions[kept] - positions[kept] % case.span
    wide = normed(given[kept]) * gain.double() if case.keys else given[kept].double()
    expected = torch.zeros(15, case.layout.width, dtype=torch.float64, device="cpu")
    expected[slots[kept]] = index_rows(wide, ROTARY.cos_sin_table(LENGTH)[first], _recipe(case))
    return norm_error(rotated_made(target, case)[0], expected)
