"""Seeded adversarial inputs for attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, named, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.lab.testing import oracle
from tamis.lab.testing.cases import INT_MAX, INT_MIN, Draw, filled_cache, garbage_cache, latent_layouts

Kind = Literal["values", "adversarial", "tile maxima"]
MAXIMA = (1e-5, 1e-3, 1.0, 1e2, 1e4)
QUICK_MAXIMA = (1e-5, 1e4)


@dataclass(frozen=True, eq=False)
class AttendCase:
    """Queries and selections on the host."""

    name: str
    q: Tensor
    selections: tuple[Selection, ...]
    scale: float
    value_dim: int
    kind: Kind = "values"
    sink: Tensor | None = None
    q_scale: float = 1.0
    splits: int | None = None
    block: int | None = None
    """Width of the blocks of columns with one tile maximum; the error of each block is bounded separately."""
    strided: bool = False
    """Whether the query passed to the call has gaps between its rows."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def caches(self) -> list[PagedCache]:
        """The caches that the selections read."""
        return [selection.cache for selection in self.selections]


def attend_cases(*, quick: bool = False) -> Iterator[AttendCase]:
    """All cases; a case's name and content do not depend on `quick`."""
    yield from _formats(quick)
    yield from _shapes(quick)
    yield from _adversarial(quick)
    yield from _several_selections(quick)
    yield from _tile_maxima(quick)


def _case(
    name: str,
    layout: Layout,
    *,
    tokens: int = 5,
    heads: int = 16,
    k: int = 77,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    gap: int = 0,
) -> AttendCase:
    draw = Draw(f"attend {name}")
    cache = filled_cache(draw, layout, 300, page_size, gap=gap)
    q = draw.normal(tokens, heads, layout.width, dtype=dtype)
    selection = Selection(cache, draw.integers(0, cache.rows, tokens, k))
    return AttendCase(name, q, (selection,), layout.width**-0.5, _value_dim(layout))


def _value_dim(layout: Layout) -> int:
    # A V4 row is key and value as a whole; in V3.2 the rope dimensions are key only.
    return layout.width if layout.name.startswith("v4") else layout.latent


def _formats(quick: bool) -> Iterator[AttendCase]:
    for label, layout in latent_layouts(quick=quick):
        yield _case(label, layout)
    fp8, fp32 = named("v32-fp8"), named("v32-fp32")
    yield _case("v32-fp8, fp32 queries", fp8, dtype=torch.float32)
    yield _case("v32-fp32, fp32 queries", fp32, dtype=torch.float32)
    yield _case("v32-fp8, fp16 queries", fp8, dtype=torch.float16)
    wide = _case("plain-fp8, e4m3 queries", named("plain-fp8"))
    yield replace(wide, q=(wide.q.float() / 0.25).to(torch.float8_e4m3fn), q_scale=0.25)
    for page_size in (1, 2, 61, 64, 69, 256) if not quick else (1, 61):
        for name in ("v32-fp8", "v4-fp8", "v32-bf16"):
            yield _case(f"{name}, pages of {page_size}", named(name), page_size=page_size)
    yield _case("v32-fp8, pages 4 bytes more apart", fp8, gap=4)
    yield _case("v4-fp8, pages 4 bytes more apart", named("v4-fp8"), gap=4)


def _shapes(quick: bool) -> Iterator[AttendCase]:
    fp8 = named("v32-fp8")
    for heads in (1, 2, 3, 7, 8, 16, 20, 32, 48, 64, 100, 128) if not quick else (1, 7, 20, 32, 128):
        yield _case(f"{heads} heads", fp8, heads=heads)
    for heads in (20, 32, 48, 64, 128) if not quick else (64,):
        yield _case(f"{heads} heads over bf16 rows", named("v32-bf16"), heads=heads)
    for k in (1, 15, 16, 64, 129, 512, 2048) if not quick else (1, 129):
        yield _case(f"{k} columns", fp8, k=k)
    for tokens in (1, 2, 33, 130, 257) if not quick else (1, 33, 130):
        yield _case(f"{tokens} tokens", fp8, tokens=tokens, heads=4, k=40)
    for splits in (1, 3, 8, 100):
        yield replace(_case(f"{splits} splits", fp8, k=150), splits=splits)
    yield replace(_case("strided queries", fp8), strided=True)
    if not quick:
        yield _case("a prefill over bf16 rows", named("v32-bf16"), tokens=130, heads=64, k=64)
        yield _case("a prefill over FP8 rows", fp8, tokens=130, heads=64, k=64)
        yield _case("a prefill of 24 heads over bf16 rows", named("v32-bf16"), tokens=130, heads=24, k=64)


def _adversarial(quick: bool) -> Iterator[AttendCase]:
    for name in ("v32-fp8", "v4-fp8", "v32-bf16") if not quick else ("v32-fp8", "v32-bf16"):
        for heads in (16, 32, 64) if not quick else (16,):  # each of these has its own kernel
            yield from _adversarial_rows(name if heads == 16 else f"{name}, {heads} heads", named(name), heads)
    peaked = _case("one row takes all", named("v32-fp8"))
    yield replace(peaked, kind="adversarial", scale=3.0)


def _adversarial_rows(name: str, layout: Layout, heads: int) -> Iterator[AttendCase]:
    for splits in (None, 4):
        label = f"{name}, {splits or 'free'} splits"
        yield replace(_bad_slots(f"bad slots, {label}", layout, heads), kind="adversarial", splits=splits)
        yield replace(_lengths(f"lengths, {label}", layout, heads), kind="adversarial", splits=splits)
        yield replace(_poisoned(f"NaN around, {label}", layout, heads), kind="adversarial", splits=splits)
    yield replace(_positions(f"positions, {name}", layout, heads), kind="adversarial")
    case = _bad_slots(f"sinks, {name}", layout, heads)
    sink = Draw(case.name).normal(case.heads)
    sink[0], sink[1], sink[2] = torch.inf, -torch.inf, 80.0
    yield replace(case, kind="adversarial", sink=sink)


def _bad_slots(name: str, layout: Layout, heads: int) -> AttendCase:
    case = _case(name, layout, tokens=6, heads=heads, k=130)
    draw = Draw(f"bad slots {name}")
    slots = case.selections[0].slots.clone()
    rows = case.caches[0].rows
    bad = torch.tensor([INT_MIN, -123456, -1, rows, rows + 1, INT_MAX], dtype=torch.int32, device="cpu")
    slots[:, ::3] = bad[draw.integers(0, 6, *slots[:, ::3].shape).long()]
    slots[2, 1:] = -1  # only one row is left
    slots[3, :64] = INT_MAX  # nothing in the first tile
    slots[4], slots[5] = -1, rows
    return replace(case, selections=(Selection(case.caches[0], slots),))


def _lengths(name: str, layout: Layout, heads: int) -> AttendCase:
    case = _case(name, layout, tokens=6, heads=heads, k=130)
    lengths = torch.tensor([0, 1, 17, 64, 129, 130], dtype=torch.int32, device="cpu")
    slots = case.selections[0].slots.clone()
    slots[torch.arange(130, dtype=torch.int64, device="cpu") >= lengths.unsqueeze(1)] = INT_MAX
    slots[5, 5] = -1
    return replace(case, selections=(Selection(case.caches[0], slots, lengths),))


def _poisoned(name: str, layout: Layout, heads: int) -> AttendCase:
    """Every row that no token selects, row 0 included, is NaN in all its fields."""
    case = _case(name, layout, tokens=5, heads=heads, k=90)
    cache, draw = case.caches[0], Draw(f"poison {name}")
    wanted = draw.permutation(cache.rows - 1)[:40] + 1
    unused = torch.ones(cache.rows, dtype=torch.bool, device="cpu")
    unused[wanted] = False
    poison = unused.nonzero().squeeze(1)
    for field in (layout.values, layout.scales, layout.tail):
        if field is not None:
            nan = {torch.uint8: 0x7F if field is layout.values else 0xFF}.get(field.dtype, torch.nan)
            cache.field(field)[poison // cache.page_size, poison % cache.page_size] = nan
    slots = wanted[draw.integers(0, 40, 5, 90).long()].int()
    slots[:, 70:] = -1
    slots[0, 5:] = int(poison[1])
    lengths = torch.tensor([5, 90, 80, 71, 0], dtype=torch.int32, device="cpu")
    return replace(case, selections=(Selection(cache, slots, lengths),))


def _positions(name: str, layout: Layout, heads: int) -> AttendCase:
    """Positions instead of slots, which attention translates by a block table with absent pages."""
    case = _case(name, layout, tokens=6, heads=heads, k=100, page_size=16)
    cache, draw = case.caches[0], Draw(f"positions {name}")
    table = draw.permutation(cache.pages)[:12].view(3, 4).int()
    table[1, 2], table[2, 0] = -1, INT_MIN
    positions = draw.integers(-3, 70, 6, 100)  # 64 is past the table
    positions[:, ::10] = torch.tensor([INT_MIN, INT_MAX], dtype=torch.int32, device="cpu").repeat(5)
    positions[5] = -1
    ids = torch.tensor([0, 0, 1, 2, 2, 1], dtype=torch.int32, device="cpu")
    lengths = torch.tensor([100, 33, 100, 100, 0, 100], dtype=torch.int32, device="cpu")
    return replace(case, selections=(Selection(cache, positions, lengths, ids, table),))


def _several_selections(quick: bool) -> Iterator[AttendCase]:
    """A window and compressed entries under one softmax, of different page sizes, formats and lengths."""
    pairs = [("v4-fp8", "v4-fp8"), ("v4-bf16", "v4-fp8"), ("v32-fp8", "v32-bf16")]
    for first, second in pairs[: 1 if quick else 3]:
        for splits in (None, 3):
            name = f"{first} window and {second} entries, {splits or 'free'} splits"
            window = _case(f"{name}: window", named(first), tokens=6, k=128, page_size=64)
            entries = _case(f"{name}: entries", named(second), tokens=6, k=200, page_size=2)
            seen = torch.tensor([128, 1, 0, 77, 0, 128], dtype=torch.int32, device="cpu")
            slots = entries.selections[0].slots.clone()
            slots[3, 100:], slots[4], slots[5] = -1, -1, -1
            selections = (
                Selection(window.caches[0], window.selections[0].slots, seen),
                Selection(entries.caches[0], slots),
            )
            sink = Draw(name).normal(16)
            sink[0] = torch.inf
            yield replace(window, name=name, selections=selections, sink=sink, splits=splits)


def _tile_maxima(quick: bool) -> Iterator[AttendCase]:
    """Rows whose tiles have a given maximum, with logits of ordinary size: nothing may overflow or underflow."""
    formats = [("v32-fp8", named("v32-fp8")), ("v32-fp8 exact", v32_fp8(scale_mode="exact"))]
    formats += [("v4-fp8", named("v4-fp8")), ("v32-bf16", named("v32-bf16"))]
    for label, layout in formats:
        tile = layout.tile or 128
        mixed = torch.logspace(-5, 4, ceil_div(layout.width, tile), dtype=torch.float32, device="cpu")
        for largest in QUICK_MAXIMA if quick else MAXIMA:
            name = f"{label}, tile maxima {largest:g}"
            yield _with_maxima(name, layout, torch.full_like(mixed, largest), tile, 16)
        for heads in (16, 32, 64) if not quick else (16,):
            name = f"{label}, tile maxima 1e-5 to 1e4" + (f", {heads} heads" if heads != 16 else "")
            yield _with_maxima(name, layout, mixed, tile, heads)


def _with_maxima(name: str, layout: Layout, maxima: Tensor, tile: int, heads: int) -> AttendCase:
    draw = Draw(f"attend {name}")
    cache = garbage_cache(draw, layout, 5, 64)
    kv = draw.normal(cache.rows, len(maxima), tile)
    kv = (kv / kv.abs().amax(-1, keepdim=True) * maxima.unsqueeze(-1)).flatten(1)[:, : layout.width]
    oracle.write(kv, cache, torch.arange(cache.rows, dtype=torch.int64, device="cpu"))
    scale = 1 / (float(maxima.max()) * layout.width**0.5)
    selection = Selection(cache, draw.integers(0, cache.rows, 5, 100))
    q = draw.normal(5, heads, layout.width, dtype=torch.bfloat16)
    return AttendCase(name, q, (selection,), scale, _value_dim(layout), "tile maxima", block=tile)
