"""Seeded adversarial inputs for the stages that move rows; the others are in `attend_cases` and `index_cases`.

Every case is built on the host from its own name, so that it is the same on every machine and in every subset of cases;
`to_device` moves it. A case marked `device_only` holds invalid values: on the host, where values can be read, the call
refuses them; on a device it must skip them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, named, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.lab.testing import oracle

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
T = TypeVar("T")


class Draw:
    """Random tensors on the host that depend on a name only."""

    def __init__(self, name: str) -> None:
        """Seed by the name."""
        self._generator = torch.Generator("cpu").manual_seed(crc32(name.encode()))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu").to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Integers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=torch.int64, device="cpu").to(dtype)

    def permutation(self, count: int) -> Tensor:
        """0 .. count - 1 in a random order."""
        return torch.randperm(count, generator=self._generator, dtype=torch.int64, device="cpu")

    def distinct(self, tokens: int, k: int, count: int) -> Tensor:
        """int32 [tokens, k], different numbers below `count` in each row."""
        return torch.stack([self.permutation(count)[:k] for _ in range(tokens)]).int()


def to_device(value: T, device: torch.device) -> T:
    """A copy on a device of tensors, caches (with the bytes between pages), and tuples or dataclasses of these."""
    moved: Any = value
    if isinstance(value, Tensor):
        moved = value.to(device)
    elif isinstance(value, PagedCache):
        scale = value.scale.to(device) if isinstance(value.scale, Tensor) else value.scale
        storage = _strided_copy(value.storage, device)
        moved = PagedCache.wrap(storage, value.layout, value.page_size, scale=scale, recipe=value.recipe)
    elif isinstance(value, tuple | list):
        moved = type(value)(to_device(item, device) for item in value)
    elif isinstance(value, dict):
        moved = {name: to_device(item, device) for name, item in value.items()}
    elif is_dataclass(value) and not isinstance(value, type | Layout):
        moved = replace(value, **{f.name: to_device(getattr(value, f.name), device) for f in fields(value)})
    return moved  # type: ignore[no-any-return]


def _strided_copy(storage: Tensor, device: torch.device) -> Tensor:
    size = 1 + sum((n - 1) * step for n, step in zip(storage.shape, storage.stride(), strict=True))
    flat = torch.as_strided(storage, (size,), (1,), storage.storage_offset())
    return torch.as_strided(flat.to(device, copy=True), storage.shape, storage.stride())


def garbage_cache(draw: Draw, layout: Layout, pages: int, page_size: int, *, gap: int = 0) -> PagedCache:
    """Pages full of random bytes, `gap` bytes apart, as if pages of other layers lay in between."""
    stride = layout.page_bytes(page_size) + gap
    raw = draw.integers(0, 256, pages, stride, dtype=torch.uint8)
    used = raw[:, : layout.row_bytes * page_size].unflatten(1, (page_size, layout.row_bytes)).view(layout.element)
    return PagedCache.wrap(used, layout, page_size, scale=0.37 if layout.scale_mode == "tensor" else 1.0)


def filled_cache(draw: Draw, layout: Layout, count: int, page_size: int, *, gap: int = 0) -> PagedCache:
    """A cache whose rows are all normal numbers, with at least `count` rows."""
    cache = garbage_cache(draw, layout, ceil_div(count, page_size), page_size, gap=gap)
    oracle.write(
        draw.normal(cache.rows, layout.width), cache, torch.arange(cache.rows, dtype=torch.int64, device="cpu")
    )
    return cache


def latent_layouts(*, quick: bool = False) -> list[tuple[str, Layout]]:
    """Byte formats of latent rows, at their usual widths and at others."""
    names = ["v32-bf16", "v32-fp32", "v32-fp8", "v4-fp8", "plain-fp8"]
    found = [(name, named(name)) for name in names] + [("v32-fp8 exact", v32_fp8(scale_mode="exact"))]
    if quick:
        return found
    found += [(name, named(name)) for name in ("v32-fp16", "v4-bf16", "v4-fp32")]
    for name in ("v32-bf16", "v32-fp8", "v4-fp8", "plain-fp8"):
        found += [(f"{name} {a}+{b}", named(name, latent=a, rope=b)) for a, b in ((512, 0), (128, 32))]
    return found


@dataclass(frozen=True, eq=False)
class WriteCase:
    """Rows to write into a cache of random bytes."""

    name: str
    kv: Tensor
    cache: PagedCache
    slots: Tensor
    device_only: bool = False


def write_cases(*, quick: bool = False) -> Iterator[WriteCase]:
    """Every format and page size; magnitudes from 1e-6 to 1e4, zeros, NaN, infinities; slots outside the cache."""
    formats = [*latent_layouts(quick=quick), ("index-fp8", index_fp8()), ("index-fp8 64", index_fp8(dim=64))]
    formats += [("index-mxfp4", index_mxfp4()), ("index-mxfp4 64", index_mxfp4(dim=64))]
    for label, layout in formats:
        for page_size in (1, 61, 64) if not quick else (61,):
            for gap in (0, layout.row_bytes, layout.alignment) if page_size == 61 and not quick else (0,):
                yield _write_case(f"{label}, pages of {page_size}, {gap} bytes apart", layout, page_size, gap)
    for dtype in (torch.float16, torch.bfloat16) if not quick else (torch.bfloat16,):
        case = _write_case(f"v32-fp8 from {dtype}", named("v32-fp8"), 64, 0)
        yield replace(case, kv=case.kv.clamp(-6e4, 6e4).to(dtype))
    foreign = _write_case("slots past the cache", named("v32-fp8"), 16, 0)
    slots = foreign.slots.clone()
    slots[1:4] = torch.tensor([foreign.cache.rows, 2**31, 2**40], dtype=torch.int64, device="cpu")
    yield replace(foreign, slots=slots, device_only=True)


def _write_case(name: str, layout: Layout, page_size: int, gap: int) -> WriteCase:
    draw = Draw(f"write {name}")
    cache = garbage_cache(draw, layout, ceil_div(150, page_size), page_size, gap=gap)
    kv = draw.normal(100, layout.width) * torch.logspace(-6, 4, 100, dtype=torch.float32, device="cpu").unsqueeze(1)
    kv[3], kv[4, ::3], kv[5] = 0.0, 0.0, kv[5].sign()
    kv[6, 1], kv[7, 2], kv[8, 3] = torch.nan, torch.inf, -torch.inf
    slots = draw.permutation(cache.rows)[:100]
    slots[::7] = -1
    slots[14] = -123456
    # A padded batch has more rows than slots.
    return WriteCase(name, kv, cache, slots[:96])


@dataclass(frozen=True, eq=False)
class GatherCase:
    """Whole requests to gather into a workspace with older contents."""

    name: str
    cache: PagedCache
    block_table: Tensor
    lengths: Tensor
    starts: Tensor
    first: Tensor
    out: Tensor


def gather_cases(*, quick: bool = False) -> Iterator[GatherCase]:
    """Every format, several page sizes, empty requests, and workspace rows that belong to no request."""
    for label, layout in latent_layouts(quick=quick):
        for page_size in (1, 61, 64) if not quick else (61,):
            for dtype in (torch.bfloat16, torch.float32) if not quick else (torch.bfloat16,):
                name = f"{label}, pages of {page_size}, to {dtype}"
                draw = Draw(f"gather {name}")
                cache = filled_cache(draw, layout, 260, page_size, gap=layout.row_bytes)
                width = ceil_div(130, page_size)
                table = draw.permutation(cache.pages)[: 2 * width].int()
                if len(table) < 2 * width:
                    table = draw.integers(0, cache.pages, 2 * width)
                table = torch.cat((table.view(2, width), torch.full((2, width), -1, dtype=torch.int32, device="cpu")))
                lengths, first = torch.tensor([[77, 50, 0, 0], [0, 3, 0, 0]], dtype=torch.int32, device="cpu")
                starts = torch.tensor([2, 80, 131, 131], dtype=torch.int32, device="cpu")
                out = draw.normal(140, layout.width, dtype=dtype)
                yield GatherCase(name, cache, table, lengths, starts, first, out)


@dataclass(frozen=True, eq=False)
class TranslateCase:
    """Positions of several requests, including all kinds that must give -1."""

    name: str
    positions: Tensor
    request_ids: Tensor
    block_table: Tensor
    page_size: int
    options: dict[str, Any] = field(default_factory=dict)
    device_only: bool = False


def translate_cases(*, quick: bool = False) -> Iterator[TranslateCase]:
    """Page sizes, positions out of range, absent and huge pages, workspaces, shards, compaction, invalid requests."""
    draw = Draw("translate options")
    ids = draw.integers(-1, 3, 9)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "pages apart": {"rows_per_page": 300},
        "workspace": {"workspace": (ids, torch.tensor([0, 700, 90], dtype=torch.int32, device="cpu"))},
        "one of three ranks": {"ranks": 3, "rank": 1, "interleave": 4},
        "compact": {"compact": True},
        "compact, ranked": {"ranks": 2, "rank": 0, "compact": True},
    }
    for page_size in (1, 61, 64) if not quick else (61,):
        for label, chosen in options.items():
            for k in (1, 130, 2048) if label == "plain" and not quick else (130,):
                yield _translate_case(f"{label}, pages of {page_size}, {k} columns", page_size, k, chosen)
    foreign = _translate_case("foreign requests", 64, 130, {})
    ids = foreign.request_ids.clone()
    ids[:3] = torch.tensor([-1, 5, INT_MAX], dtype=torch.int64, device="cpu")
    yield replace(foreign, request_ids=ids, device_only=True)


def _translate_case(name: str, page_size: int, k: int, options: dict[str, Any]) -> TranslateCase:
    draw = Draw(f"translate {name}")
    table = draw.integers(0, 1000, 5, 7)
    table[1, 2], table[2, 0], table[3] = -1, INT_MIN, -1
    table[4, 1] = INT_MAX // page_size + 1 if page_size > 1 else 5
    positions = draw.integers(0, 7 * page_size, 9, k)
    outside = torch.tensor([INT_MIN, -123456, -1, 7 * page_size, INT_MAX], dtype=torch.int32, device="cpu")
    places = draw.integers(0, 4, 9, k) == 0
    positions[places] = outside[draw.integers(0, 5, int(places.sum())).long()]
    positions[6] = -1
    return TranslateCase(name, positions, draw.integers(0, 5, 9), table, page_size, options)


@dataclass(frozen=True, eq=False)
class CombineCase:
    """Outputs of splits to merge."""

    name: str
    out: Tensor
    lse: Tensor
    sink: Tensor | None
    dtype: torch.dtype


def combine_cases(*, quick: bool = False) -> Iterator[CombineCase]:
    """One to many splits, NaN in empty splits, rows with only empty splits, lses far apart, infinite sinks."""
    for parts, heads, width in (
        ((1, 3, 512), (2, 16, 512), (7, 128, 128), (33, 1, 512)) if not quick else ((7, 5, 128),)
    ):
        for dtype in (torch.float32, torch.bfloat16):
            for sinks in (False, True):
                name = f"{parts} parts, {heads} heads, {width} wide, {dtype}{', sinks' if sinks else ''}"
                draw = Draw(f"combine {name}")
                out, lse = draw.normal(parts, 6, heads, width), 30 * draw.normal(parts, 6, heads)
                empty = draw.integers(0, 3, parts, 6, heads) == 0
                empty[:, 4] = True
                lse[empty], out[empty] = -torch.inf, torch.nan
                sink = 30 * draw.normal(heads) if sinks else None
                if sink is not None:
                    sink[0], sink[-1] = torch.inf, -torch.inf
                yield CombineCase(name, out, lse, sink, dtype)
