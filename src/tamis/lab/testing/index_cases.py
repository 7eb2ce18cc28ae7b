"""Seeded adversarial inputs for the indexer: keys to prepare, keys to score, and scores for top-k."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, rows
from tamis.cache.paged import PagedCache
from tamis.lab.testing import oracle
from tamis.lab.testing.cases import INT_MIN, Draw, filled_cache
from tamis.model.recipe import IndexRecipe

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class IndexCase:
    """Index queries over cached keys."""

    name: str
    q: Tensor
    weights: Tensor
    cache: PagedCache
    request_ids: Tensor
    block_table: Tensor
    lengths: Tensor
    k: int
    exact: bool = False
    """Whether scores are small integers with many ties, exact in every precision, so that the selection is known."""


def index_cases(*, quick: bool = False) -> Iterator[IndexCase]:
    """FP8 and unquantised keys and queries, page sizes, lengths from below 0, top-k beyond the context, absent pages,
    ties, and contexts longer than any block of keys."""
    kinds: list[tuple[str, Layout, torch.dtype]] = [
        ("index-fp8", index_fp8(), torch.bfloat16),
        ("index-fp8, fp8 queries", index_fp8(), E4M3),
        ("index-mxfp4", index_mxfp4(), torch.bfloat16),
        ("bf16", rows(torch.bfloat16, latent=128, rope=0), torch.bfloat16),
    ]
    for label, layout, dtype in kinds:
        for page_size in (1, 61, 64) if not quick else (61,):
            for k in (1, 33, 2048) if not quick else (33,):
                for exact in (False, True):
                    name = f"{label}, pages of {page_size}, top {k}{', ties' if exact else ''}"
                    yield _index_case(name, layout, dtype, page_size, k, 130, exact=exact)
    for k in (64, 2048) if not quick else (64,):
        for exact in (False, True):
            name = f"long contexts, top {k}{', ties' if exact else ''}"
            yield _index_case(name, index_fp8(), E4M3, 64, k, 4500 if not quick else 1100, exact=exact)


def _index_case(
    name: str, layout: Layout, dtype: torch.dtype, page_size: int, k: int, longest: int, *, exact: bool
) -> IndexCase:
    draw = Draw(f"index {name}")
    cache = filled_cache(draw, layout, 3 * longest + 10, page_size, gap=layout.row_bytes)
    q, weights = draw.normal(7, 4, 128).to(dtype), draw.normal(7, 4)
    if exact:
        oracle.write(
            draw.integers(-1, 2, cache.rows, 128).float(),
            cache,
            torch.arange(cache.rows, dtype=torch.int64, device="cpu"),
        )
        q, weights = draw.integers(-1, 2, 7, 4, 128).to(dtype), draw.integers(-2, 3, 7, 4).float()
    width = ceil_div(longest, page_size)
    table = draw.permutation(cache.pages)[: 3 * width]
    table = table.view(3, width).int() if len(table) == 3 * width else draw.integers(0, cache.pages, 3, width)
    table[2, -1] = -1
    seen = torch.tensor([0, 1, longest // 3, longest, longest - 30, longest, -1], dtype=torch.int32, device="cpu")
    ids = torch.tensor([0, 0, 1, 1, 2, 2, 1], dtype=torch.int32, device="cpu")
    return IndexCase(name, q, weights, cache, ids, table, seen, k, exact)


def best_positions(scores: Tensor, length: int, k: int) -> list[int]:
    """The definition of a selection, by a stable sort: highest scores, lowest positions among equals, ascending, -1
    padded."""
    row = scores[: max(0, length)].double().numpy()
    row = np.where(np.isnan(row), -np.inf, row)
    order = np.argsort(-row, kind="stable")[:k]
    chosen = sorted(int(p) for p in order if row[p] > -np.inf)
    return chosen + [-1] * (k - len(chosen))


@dataclass(frozen=True, eq=False)
class TopkCase:
    """Scores for top-k, and a block table to translate positions."""

    name: str
    scores: Tensor
    lengths: Tensor
    k: int
    request_ids: Tensor
    block_table: Tensor
    page_size: int


def _low_bits(draw: Draw, tokens: int, width: int) -> Tensor:
    return (draw.integers(0, 1024, tokens, width) + 0x3F800000).view(torch.float32)


def _special_values(draw: Draw, tokens: int, width: int) -> Tensor:
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-45, 3.4e38],
        dtype=torch.float32,
        device="cpu",
    )
    return values[draw.integers(0, len(values), tokens, width).long()]


def _outliers(draw: Draw, tokens: int, width: int, block: int) -> Tensor:
    """Equal scores, but for one in each block, in another place of every block."""
    at = torch.arange(width, dtype=torch.int64, device="cpu")
    highest = 2.0 + (draw.integers(0, 9, tokens, width) // 3)
    # Numbers beside a tensor of whole numbers have the default dtype.
    return torch.where(at % block == at // block * 5 % block, highest, 1.0).to(torch.float32)


SCORES: dict[str, Callable[[Draw, int, int], Tensor]] = {
    "normal": lambda draw, tokens, width: draw.normal(tokens, width),
    "plateaus of zeros": lambda draw, tokens, width: torch.relu(draw.normal(tokens, width) - 1.5),
    "all equal": lambda draw, tokens, width: torch.full((tokens, width), -2.5, dtype=torch.float32, device="cpu"),
    "low bits": _low_bits,
    "ascending": lambda draw, tokens, width: (
        torch.arange(width, dtype=torch.int64, device="cpu").float().repeat(tokens, 1)
    ),
    "descending": lambda draw, tokens, width: (
        torch.arange(width, 0, -1, dtype=torch.int64, device="cpu").float().repeat(tokens, 1)
    ),
    "two values": lambda draw, tokens, width: draw.integers(0, 4, tokens, width).eq(0).float() - 0.5,
    "an outlier in each 64": lambda draw, tokens, width: _outliers(draw, tokens, width, 64),
    "an outlier in each 8": lambda draw, tokens, width: _outliers(draw, tokens, width, 8),
    "signed zeros": lambda draw, tokens, width: torch.copysign(
        torch.zeros(tokens, width, dtype=torch.float32, device="cpu"), draw.normal(tokens, width)
    ),
    "infinities": lambda draw, tokens, width: torch.copysign(
        torch.full((tokens, width), torch.inf, dtype=torch.float32, device="cpu"), draw.normal(tokens, width)
    ),
    "subnormal": lambda draw, tokens, width: draw.integers(-3, 4, tokens, width).float() * 1e-45,
    "special values": _special_values,
}


def topk_cases(*, quick: bool = False) -> Iterator[TopkCase]:
    """Distributions that are hard for thresholds, widths around top-k, lengths from below 0, gaps between rows, and
    garbage past the lengths."""
    widths = (1, 33, 2048, 2049, 70001) if not quick else (33, 2049)
    for label, make in SCORES.items():
        for width in widths:
            for k in (1, 33, 2048, 4096) if not quick else (33,):
                name = f"{label}, {width} wide, top {k}"
                draw = Draw(f"topk {name}")
                # There are gaps between rows, filled with the largest scores.
                block = torch.full((7, width + 5), torch.inf, dtype=torch.float32, device="cpu")
                scores = block[:, :width]
                scores.copy_(make(draw, 7, width))
                seen = [width, width, min(width, k), min(width, k + 1), 1, 0, INT_MIN]
                scores[1, width // 2 :] = torch.inf
                lengths = torch.tensor([*seen[:1], width // 2, *seen[2:]], dtype=torch.int32, device="cpu")
                pages = ceil_div(width, 64)
                table = draw.integers(0, 1000, 3, pages)
                table[1, 0] = -1
                yield TopkCase(name, scores, lengths, k, draw.integers(0, 3, 7), table, 64)


@dataclass(frozen=True, eq=False)
class KeysCase:
    """Index keys to normalise, rotate and write."""

    name: str
    keys: Tensor
    cache: PagedCache
    slots: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    positions: Tensor
    cos_sin: Tensor


def keys_cases(*, quick: bool = False) -> Iterator[KeysCase]:
    """Every recipe, written as float32 rows, so that nothing is rounded."""
    layout = rows(torch.float32, latent=128, rope=0)
    for interleaved in (False, True):
        for first in (False, True):
            for hadamard in (False, True) if not quick else (interleaved,):
                recipe = IndexRecipe(64, interleaved=interleaved, rope_first=first, hadamard=hadamard)
                draw = Draw(f"keys {recipe}")
                slots = draw.permutation(60)[:37]
                slots[::5] = -1
                positions = draw.integers(0, 5000, 40)
                angles = draw.normal(5000, 32) * 10
                yield KeysCase(
                    str(recipe),
                    draw.normal(40, 128) * 3 + 1,
                    PagedCache(layout, 4, 16, recipe=recipe),
                    slots,
                    draw.normal(128),
                    draw.normal(128),
                    positions,
                    torch.cat((angles.cos(), angles.sin()), dim=1),
                )
