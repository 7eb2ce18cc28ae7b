"""A compressor with random weights over paged caches, and its entries computed in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import bounds
import torch
from bounds import relative_error
from seeds import seed_of
from torch import Tensor

from tamis import IndexRecipe, Layout, PagedCache, PagePool
from tamis.cache.layout import compressor_state, rows
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.model.rope import Rope
from tamis.ops import StatePages, compress_kv
from tamis.ops.compress.operations import CompressKv

DIM, ROPE = 24, 8
EXACT = rows(torch.float32, latent=DIM - ROPE, rope=ROPE)
PADDING = object()


@dataclass
class Compressor:
    """One compressor with random weights, its caches, and every token it was ever given."""

    ratio: int
    overlapping: bool
    layout: Layout = EXACT
    rope: int = ROPE
    state_page: int = 4
    entry_page: int = 2
    scale: float = 1.0
    length: int = 1100
    hadamard: bool = False
    pooled_only: bool = False
    """Whether entries are neither normalised nor rotated, as GLM-5.3-Flash's index keys are."""
    stage: Callable[[CompressKv], None] | None = None
    """A backend's implementation to run instead of the public `compress_kv`."""
    device: torch.device | str = "cpu"
    given: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dim = self.layout.width
        self.channels = self.dim * (2 if self.overlapping else 1)
        state = compressor_state(dim=self.dim, overlapping=self.overlapping)
        self.state = PagedCache(state, 700, self.state_page, self.device)
        self.state.storage.fill_(torch.nan)
        recipe = IndexRecipe.of_v4(0 if self.pooled_only else self.rope, hadamard=True) if self.hadamard else None
        self.cache = PagedCache(self.layout, 600, self.entry_page, self.device, scale=self.scale, recipe=recipe)
        self.state_pool = PagePool(700, self.state_page, seed=seed_of(1))
        self.entry_pool = PagePool(600, self.entry_page, seed=seed_of(2))
        self.bias = torch.randn(self.ratio, self.channels)
        self.norm = torch.rand(self.dim) + 0.5
        self.rotary = Rope(self.rope, theta=160000.0)
        self.cos_sin = self.rotary.cos_sin_table(self.length)
        self.after = (None, None) if self.pooled_only else (self.norm, self.cos_sin)

    def tokens(self, request: object, count: int) -> tuple[Tensor, Tensor]:
        """The request's values and scores, the same in every call."""
        if request not in self.given:
            self.given[request] = torch.randn(self.length, self.channels), 2 * torch.randn(self.length, self.channels)
        return tuple(part[:count] for part in self.given[request])

    def step(self, *chunks: tuple[object, int, int]) -> None:
        """Run tokens start..end of some requests; a request named PADDING has no position and no slots."""
        real = [request for request, _, _ in chunks if request is not PADDING]
        for request, _, end in chunks:
            if request is not PADDING:
                self.state_pool.extend(request, end)
                self.entry_pool.extend(request, end // self.ratio)
        parts = [self._chunk(request, real, start, end) for request, start, end in chunks]
        values, scores, positions, ids, slots, entries = (torch.cat(column) for column in zip(*parts, strict=True))
        pages = StatePages(slots, ids.int(), self.state_pool.block_table(real))
        self.call(values, scores, positions, pages, entries)

    def _chunk(self, request: object, real: list[object], start: int, end: int) -> tuple[Tensor, ...]:
        values, scores = (part[start:end] for part in self.tokens(request, end))
        count = end - start
        none = torch.full((count,), -1)
        if request is PADDING:
            return values, scores, none, torch.zeros(count), none, none
        positions = torch.arange(start, end)
        entries = none.clone()
        last = (positions + 1) % self.ratio == 0
        entries[last] = self.entry_pool.slots(request, start // self.ratio, end // self.ratio)
        ids = torch.full((count,), real.index(request))
        return values, scores, positions, ids, self.state_pool.slots(request, start, end), entries

    def call(self, values: Tensor, scores: Tensor, positions: Tensor, pages: StatePages, slots: Tensor) -> None:
        if self.stage is not None:
            tokens = (positions, pages.slots, pages.request_ids, pages.block_table, slots)
            inputs = (values, scores, *tokens, self.bias, *self.after)
            values, scores, *rest = (None if t is None else t.to(self.device) for t in inputs)
            self.stage(CompressKv(values, scores, self.state, self.cache, *rest, 1e-6, self.hadamard, "auto"))
            return
        compress_kv(
            values,
            scores,
            self.state,
            self.cache,
            positions=positions,
            pages=pages,
            slots=slots,
            bias=self.bias,
            norm_weight=self.after[0],
            cos_sin=self.after[1],
        )

    def run(self, request: object, count: int, chunk: int, start: int = 0) -> None:
        for begin in range(start, count, chunk):
            self.step((request, begin, min(begin + chunk, count)))

    def entries(self, request: object, count: int, first: int = 0) -> Tensor:
        return self.cache.read(self.entry_pool.slots(request, first, count).to(self.device)).cpu()

    def expected(self, request: object, count: int) -> Tensor:
        return self.exact(request, count)[0]

    def exact(self, request: object, count: int) -> tuple[Tensor, Tensor]:
        """Entries [count, dim] in fp64, one channel sum at a time, and how far float32 may be from each value."""
        values, scores = (part.double() for part in self.given[request])
        biased = scores + self.bias.double().repeat(self.length // self.ratio + 1, 1)[: self.length]
        made, errors = [], []
        for entry in range(count):
            own = slice(entry * self.ratio, entry * self.ratio + self.ratio)
            pooled, weights = values[own, -self.dim :], biased[own, -self.dim :]
            if self.overlapping and entry:
                before = slice(own.start - self.ratio, own.start)
                pooled = torch.cat((values[before, : self.dim], pooled))
                weights = torch.cat((biased[before, : self.dim], weights))
            mean, error = bounds.softmax_mean(weights, pooled)
            if self.pooled_only:
                made.append(mean)
                errors.append(error)
                continue
            size = (mean.square().mean() + 1e-6).sqrt()
            normed = mean / size * self.norm
            # The norm passes on the error of the mean, and divides by a size that has an error as well.
            error = error / size * self.norm + normed.abs() * error.square().mean().sqrt() / size
            error += bounds.rms_norm(normed)
            angle = own.start * self.rotary.frequencies().double()
            pairs = (part[-self.rope :].unflatten(0, (-1, 2)).norm(dim=1) for part in (normed, error))
            turning = bounds.rotation(next(pairs), angle) + next(pairs)
            error[-self.rope :] = turning.repeat_interleave(2)
            even, odd = normed[-self.rope :: 2].clone(), normed[1 - self.rope :: 2].clone()
            normed[-self.rope :: 2] = even * angle.cos() - odd * angle.sin()
            normed[1 - self.rope :: 2] = odd * angle.cos() + even * angle.sin()
            made.append(normed)
            errors.append(error)
        entries, allowed = torch.stack(made), torch.stack(errors)
        if not self.hadamard:
            return entries, allowed
        size, before = (part.square().mean(1, keepdim=True).sqrt() for part in (entries, allowed))
        return entries @ hadamard_matrix(self.dim), (before + bounds.hadamard(size, self.dim)).expand_as(entries)

    def check(self, request: object, count: int, bound: float | None = None, first: int = 0) -> None:
        """Assert that each value is within its arithmetic's error, or all within the relative error of a format."""
        found, (expected, error) = self.entries(request, count, first), self.exact(request, count)
        if bound is None:
            bounds.agree(found, expected[first:], error[first:])
        else:
            assert relative_error(found, expected[first:]) < bound


C4, C128 = {"ratio": 4, "overlapping": True}, {"ratio": 128, "overlapping": False, "state_page": 8}
C16 = {"ratio": 16, "overlapping": False}
KPOOL = {"ratio": 4, "overlapping": False, "pooled_only": True}
"""GLM-5.3-Flash's index keys."""
