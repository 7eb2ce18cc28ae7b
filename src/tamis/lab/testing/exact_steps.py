"""Steps of the indexer whose scores are known exactly, in patterns that are hard for a selection.

A key holds the digits of a whole number in a few channels, and a query the powers of the base in the same channels, so
that their product is the number. Weights are small whole numbers. All sums are exact in any order, also in the few bits
that FP8 tensor cores keep, so that every backend must compute the very same scores and select the very same positions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.cache.paged import PagedCache
from tamis.lab.testing import oracle
from tamis.lab.testing.cases import Draw, garbage_cache
from tamis.lab.testing.index_cases import E4M3, best_positions

KEY_SCALE = 0.5
"""The scale of all FP8 keys, unless scales are the scores."""
SPECIAL = (1.0, -1.0, 1 + 2**-23, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38)


@dataclass(frozen=True, eq=False)
class ExactStep:
    """Index queries over cached keys, and their scores."""

    name: str
    q: Tensor
    weights: Tensor
    cache: PagedCache
    request_ids: Tensor
    block_table: Tensor
    lengths: Tensor
    k: int
    scores: Tensor
    """float32 [T, all positions of the block table], -inf where a token sees nothing."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, PagedCache, Tensor, Tensor, Tensor]:
        """The first arguments of `index_scores` and `index_topk`."""
        return self.q, self.weights, self.cache, self.request_ids, self.block_table, self.lengths

    def expected(self) -> Tensor:
        """The positions that every backend must select, int32 [T, k]."""
        best = [best_positions(row, len(row), self.k) for row in self.scores]
        return torch.tensor(best, dtype=torch.int32, device="cpu").view(-1, self.k)


Pattern = Callable[[Draw, Tensor, int], Tensor]
"""Whole numbers for positions 0 .. n - 1 of a request, from 0 to below a limit."""

PATTERNS: dict[str, Pattern] = {
    "ascending": lambda draw, at, limit: at * min(limit, len(at)) // max(1, len(at)),
    "descending": lambda draw, at, limit: limit - 1 - at * min(limit, len(at)) // max(1, len(at)),
    "all equal": lambda draw, at, limit: torch.full_like(at, 5),
    "two values": lambda draw, at, limit: torch.where(_some(draw, at, 4) == 0, 7, 3),
    "an outlier in each 64": lambda draw, at, limit: torch.where(at % 64 == at // 64 * 5 % 64, 9 + at // 64 % 8, 1),
    "an outlier in each 8": lambda draw, at, limit: torch.where(at % 8 == at // 8 * 3 % 8, 2 + at // 8 % 8, 1),
    "mostly zeros": lambda draw, at, limit: torch.where(_some(draw, at, 40) == 0, 1 + _some(draw, at, 15), 0),
    "a high stretch": lambda draw, at, limit: (
        2 + at % 2 + 9 * ((at >= len(at) // 3) & (at < len(at) // 2 + 1)).to(at.dtype)
    ),
    "any": lambda draw, at, limit: _some(draw, at, limit),
}


def _some(draw: Draw, at: Tensor, limit: int) -> Tensor:
    return draw.integers(0, limit, len(at), dtype=at.dtype)


Tokens = Sequence[tuple[int, int]]
"""The request of each token of a step, and how many positions it sees."""


def step_shapes(k: int, longest: int) -> dict[str, tuple[list[int], Tokens]]:
    """By name, the lengths of the requests of a step and its tokens. No request is longer than `longest`."""
    near = [1, 17, k, max(1, k - 1), k + 1, longest, longest - 1, longest // 2 + 1, 2 * k + 3, 64, 65]
    near = [min(length, longest) for length in near]
    shapes: dict[str, tuple[list[int], Tokens]] = {"decodes": (near, list(enumerate(near)))}
    for drafts in (1, 2, 3, 5, 9):
        lengths = [drafts, min(longest, drafts + k), longest]
        shapes[f"{drafts} tokens each"] = (lengths, _last(lengths, [drafts] * 3))
    mixed = [5, min(longest, k + 1), longest, 90, longest, 13, longest]
    shapes["decodes and prompts"] = (mixed, _last(mixed, [1, 1, 1, 3, 21, 13, 10]))
    lengths = [longest, min(longest, 33), longest // 2 + 1]
    draw = Draw(f"shuffled {k} {longest}")
    seen = [0, 1, k, k - 1, k + 1, -1, longest, longest - 1, 8, 7, 9, 64, 63, longest // 3]
    mine = []
    for length in (min(length, longest) for length in seen + seen[::2]):
        able = [request for request, most in enumerate(lengths) if most >= length]
        mine.append((able[int(draw.integers(0, len(able), 1))], length))
    shapes["tokens in no order"] = (lengths, mine)
    return shapes


def _last(lengths: Sequence[int], new: Sequence[int]) -> Tokens:
    """The last tokens of each request, each of which sees the positions up to its own."""
    counts = [min(length, count) for length, count in zip(lengths, new, strict=True)]
    return [(r, n) for r, count in enumerate(counts) for n in range(lengths[r] - count + 1, lengths[r] + 1)]


@dataclass(frozen=True)
class Format:
    """The keys and queries of a step."""

    layout: Layout
    dtype: torch.dtype
    """The queries'."""
    heads: int
    page_size: int
    gap: int = 0
    """Bytes between pages."""
    weights: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """The format in words."""
        return f"{self.layout.name} by {self.heads} heads in {self.dtype}, pages of {self.page_size}"


FORMATS = (
    Format(index_fp8(), E4M3, 64, 64),
    Format(index_fp8(), E4M3, 32, 64, gap=132),
    Format(index_fp8(), E4M3, 16, 32),
    Format(index_fp8(), E4M3, 32, 128, gap=160, weights=torch.bfloat16),
    Format(index_fp8(), E4M3, 64, 16, weights=torch.float16),
    Format(index_fp8(), E4M3, 8, 16),
    Format(index_fp8(), E4M3, 1, 128),
    Format(index_fp8(), E4M3, 128, 64),
    Format(index_fp8(dim=64), E4M3, 64, 64),
    Format(index_fp8(dim=64), E4M3, 16, 128),
    Format(index_fp8(), torch.bfloat16, 64, 64),
    Format(index_mxfp4(), E4M3, 64, 64),
    Format(index_mxfp4(), torch.bfloat16, 16, 16),
    Format(index_mxfp4(dim=64), torch.bfloat16, 32, 32),
    Format(rows(torch.bfloat16, latent=128, rope=0), torch.bfloat16, 64, 64),
    Format(rows(torch.bfloat16, latent=128, rope=0), torch.bfloat16, 32, 32),
    Format(rows(torch.bfloat16, latent=64, rope=0), torch.bfloat16, 16, 16),
)


def exact_steps(k: int, longest: int, *, quick: bool = False) -> Iterator[ExactStep]:
    """Every format with one shape of step after the other, the first format with all; scales as scores in some."""
    shapes = list(step_shapes(k, longest).items())
    usual = FORMATS[0]
    for name, (lengths, tokens) in shapes if not quick else shapes[-2:]:
        yield exact_step(f"{name}, {usual.name}, top {k}", usual, lengths, tokens, k)
    for number, form in enumerate(FORMATS[1:] if not quick else FORMATS[2:3]):
        name, (lengths, tokens) = shapes[-1 - number % 2]
        yield exact_step(f"{name}, {form.name}, top {k}", form, lengths, tokens, k)
    name, (lengths, tokens) = shapes[-1]
    for form in (FORMATS[0], FORMATS[2]) if not quick else FORMATS[:1]:
        yield scaled_step(f"special scores, {form.name}, top {k}", form, lengths, tokens, k)


def exact_step(name: str, form: Format, lengths: Sequence[int], tokens: Tokens, k: int) -> ExactStep:
    """A step whose scores are whole numbers times the keys' scale. The tokens take turns at the patterns; every fourth
    has negative weights, so that its order is reversed. Some page inside every longer request is absent."""
    draw, layout = Draw(f"exact {name}"), form.layout
    base, digits = (4, 4) if layout.packed else (16, 3)
    cache, table = _cache(draw, form, lengths)
    powers = torch.tensor([base**n for n in reversed(range(digits))], dtype=torch.int64, device="cpu")
    made = list(PATTERNS.values())
    numbers = []
    for request, length in enumerate(lengths):
        at = torch.arange(length, dtype=torch.int64, device="cpu")
        numbers.append(torch.stack([make(draw, at, base**digits) for make in made]))
        held = (numbers[-1].unsqueeze(2) // powers % base).transpose(0, 1).flatten(1)
        keys = draw.integers(0, base, length, layout.width).float()
        keys[:, : held.shape[1]] = held.float()
        _store(cache, keys, table[request], torch.full((length,), KEY_SCALE, dtype=torch.float32, device="cpu"))
    count, first = len(tokens), int(draw.integers(0, len(made), 1))
    which = [(first + t) % len(made) for t in range(count)]
    q = torch.zeros(count, form.heads, layout.width, dtype=torch.float32, device="cpu")
    for token, pattern in enumerate(which):
        q[token, :, pattern * digits : (pattern + 1) * digits] = powers.float()
    weights = draw.integers(1, 4, count, form.heads).float()
    weights[3::4] *= -1
    # The product of every fourth head is negative, so that the head adds nothing whatever its weight.
    q[:, 3::4] *= -1
    total = weights.sum(1) - weights[:, 3::4].sum(1)
    scale = KEY_SCALE if layout.scale_mode == "pow2" and not layout.packed else 1.0
    scores = [numbers[r][which[t]].float() * total[t] * scale for t, (r, _) in enumerate(tokens)]
    return _step(name, form, q, weights, (cache, table), tokens, scores, k)


def scaled_step(name: str, form: Format, lengths: Sequence[int], tokens: Tokens, k: int) -> ExactStep:
    """A step whose scores are the scales of its FP8 keys, or their opposites: NaN, infinities, zeros of both signs, and
    numbers too small to be normal. All products are 1, and so are the sums of the weights, up to the sign. Some keys,
    one query and one weight hold NaN themselves, where the others hold zeros."""
    draw = Draw(f"scaled {name}")
    cache, table = _cache(draw, form, lengths)
    special = torch.tensor(SPECIAL, dtype=torch.float32, device="cpu")
    scales = [special[draw.integers(0, len(special), length).long()] for length in lengths]
    for request, length in enumerate(lengths):
        keys = torch.zeros(length, form.layout.width, dtype=torch.float32, device="cpu")
        keys[:, 0] = 1.0
        keys[::17, 7] = torch.nan
        _store(cache, keys, table[request], scales[request])
        scales[request][::17] = torch.nan
    q = torch.zeros(len(tokens), form.heads, form.layout.width, dtype=torch.float32, device="cpu")
    q[:, :, 0] = 1.0
    weights = torch.zeros(len(tokens), form.heads, dtype=torch.float32, device="cpu")
    weights[:, 0] = 1.0
    weights[:, 2::2], weights[:, 1:-1:2] = -2.0, 2.0
    weights[3::4] *= -1
    q[4, form.heads // 2, 3] = weights[6, -1] = torch.nan
    factors = weights.sum(1) + q.sum((1, 2)) * 0
    scores = [scales[r] * factors[t] for t, (r, _) in enumerate(tokens)]
    return _step(name, form, q, weights, (cache, table), tokens, scores, k)


def _cache(draw: Draw, form: Format, lengths: Sequence[int]) -> tuple[PagedCache, Tensor]:
    """Random bytes in all pages, and a block table of shuffled pages, -1 padded, with absent pages inside."""
    counts = [ceil_div(length, form.page_size) for length in lengths]
    cache = garbage_cache(draw, form.layout, sum(counts) + 2, form.page_size, gap=form.gap)
    order = draw.permutation(cache.pages).int()
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device="cpu")
    for row, count in zip(table, counts, strict=True):
        row[:count], order = order[:count], order[count:]
        if count > 3:
            row[count // 2] = -1
    return cache, table


def _store(cache: PagedCache, keys: Tensor, pages: Tensor, scales: Tensor) -> None:
    """Write the keys of one request, with these scales if they are FP8; those of absent pages are nowhere."""
    at = torch.arange(len(keys), dtype=torch.int64, device="cpu")
    page, row = pages[at // cache.page_size].long(), at % cache.page_size
    there, layout = page >= 0, cache.layout
    page, row, keys = page[there], row[there], keys[there]
    if layout.scale_mode == "none":
        cache.field(layout.values)[page, row] = keys.to(layout.element)
    elif layout.packed:
        oracle.write(keys, cache, page * cache.page_size + row)
    else:
        assert layout.scales is not None
        cache.field(layout.values)[page, row] = keys.to(E4M3).view(torch.uint8)
        cache.field(layout.scales)[page, row] = scales[there].unsqueeze(1)


def _step(
    name: str,
    form: Format,
    q: Tensor,
    weights: Tensor,
    stored: tuple[PagedCache, Tensor],
    tokens: Tokens,
    scores: Sequence[Tensor],
    k: int,
) -> ExactStep:
    cache, table = stored
    seen = torch.full((len(tokens), table.shape[1] * cache.page_size), -torch.inf, dtype=torch.float32, device="cpu")
    for row, (request, length), one in zip(seen, tokens, scores, strict=True):
        row[: max(0, length)] = one[: max(0, length)]
        row[(table[request] < 0).repeat_interleave(cache.page_size)] = -torch.inf
    ids, lengths = (torch.tensor(column, dtype=torch.int32, device="cpu") for column in zip(*tokens, strict=True))
    return ExactStep(name, q.to(form.dtype), weights.to(form.weights), cache, ids, table, lengths, k, seen)
