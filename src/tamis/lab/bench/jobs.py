"""The jobs that `tamis bench` measures: named suites of shapes, and how options change them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tamis import checks
from tamis.cache.layout import NAMES, Layout, named, rows, v32_fp8
from tamis.step.batch import parse_shape

PAGE_SIZE = 64
SIZES = "sizes"
"""The suite of the rows of `benchmarks/batch_sizes.py`, which measures every batch size."""
INDEXER = ("scores", "topk", "topk-ties", "index")
KEYS = ("index-fp8",)
SCORES = ("float32",)
WITHOUT_ROPE = {"v32-fp8-512": v32_fp8(rope=0), "v32-bf16-512": rows(rope=0)}
"""Rows of models without a rope (GLM-5.3-Flash): 528 bytes, and 512 bf16 numbers."""
LATENT = (*(name for name in NAMES if not name.startswith("index")), *WITHOUT_ROPE)
INDEX = tuple(name for name in NAMES if name.startswith("index"))


@dataclass(frozen=True)
class Job:
    """One stage at one shape, to be timed."""

    suite: str
    stage: str
    """attend, write, gather, select, translate; compress: all small launches of a C4A layer; for the indexer scores,
    topk, topk-ties (top-k of mostly equal scores) or index (scores and top-k in one call)."""
    shape: str
    """The batch, such as `128q1s16k`. New tokens are the last ones of their request; in indexer stages each sees all
    keys up to its own."""
    layout: str = "v32-fp8"
    """Byte format of the rows that are read or written."""
    heads: int | None = None
    topk: int | None = None
    window: int = 0
    """Consecutive rows that each token also attends to, from a second cache (V4)."""
    page_size: int = PAGE_SIZE

    @property
    def row_layout(self) -> Layout:
        """The byte format."""
        return WITHOUT_ROPE.get(self.layout) or named(self.layout)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that must be verified before a time is shown."""
        if self.stage in INDEXER:
            return ("index",)
        return {"attend": ("attend", "combine"), "compress": ("rotate", "compress")}.get(self.stage, (self.stage,))

    @property
    def query_dtype(self) -> torch.dtype:
        """The dtype of the queries, where the stage has any."""
        return torch.float8_e4m3fn if self.stage in INDEXER else torch.bfloat16


@dataclass(frozen=True)
class Grid:
    """All combinations of some shapes, layouts, heads and top-k, for one stage."""

    stage: str
    shapes: tuple[str, ...]
    layouts: tuple[str, ...] = ("v32-fp8",)
    heads: tuple[int, ...] = ()
    topks: tuple[int, ...] = ()
    window: int = 0

    @property
    def formats(self) -> tuple[str, ...]:
        """The layouts that `--layout` may choose for the stage: of latent rows or of index keys; none for scores."""
        return next((kind for kind in (LATENT, INDEX) if self.layouts[0] in kind), ())

    def replaced(
        self, shapes: Sequence[str], layouts: Sequence[str], heads: Sequence[int], topks: Sequence[int]
    ) -> "Grid":
        """This grid with the given values in place of its own, where it has values of that kind."""
        return replace(
            self,
            shapes=tuple(shapes) or self.shapes,
            layouts=tuple(name for name in layouts if name in self.formats) or self.layouts,
            heads=tuple(heads) if heads and self.heads else self.heads,
            topks=tuple(topks) if topks and self.topks else self.topks,
        )

    def jobs(self, suite: str) -> list[Job]:
        """One job per combination, in the order layouts, shapes, heads, top-k."""
        none = (None,)
        return [
            Job(suite, self.stage, shape, layout, heads, topk, self.window)
            for layout, shape, heads, topk in product(self.layouts, self.shapes, self.heads or none, self.topks or none)
        ]


TOPK_SHAPES = ("1q1s64k", "1q1s1024k", "32q1s128k", "64q1s32k", "64q1s128k", "128q1s64k", "1q1ks64k")
CHUNKS = ("1q4ks8k", "1q4ks32k", "1q4ks64k", "1q4ks128k", "1q1ks16k", "1q512s64k")
"""Chunks of a prompt: the last tokens of one request."""
SELECTED = (*CHUNKS, "128q1s64k", "32q1s128k")
SUITES: dict[str, tuple[Grid, ...]] = {
    "smoke": (
        Grid("attend", ("4q1s512", "1q16s256"), ("v32-fp8",), (4,), (128,)),
        Grid("attend", ("4q1s512",), ("v4-fp8",), (4,), (64,), window=32),
        Grid("write", ("2q256",)),
        Grid("gather", ("2q256",)),
        Grid("translate", ("4q1s512",), topks=(128,)),
        Grid("scores", ("4q1s512",), KEYS, (4,)),
        Grid("topk", ("4q1s512",), SCORES, topks=(128,)),
        Grid("index", ("4q1s512",), KEYS, (4,), (128,)),
    ),
    "decode": (
        Grid("attend", tuple(f"{b}q1s16k" for b in (1, 8, 32, 64, 128)), ("v32-fp8",), (8, 16, 32, 64, 128), (2048,)),
    ),
    "prefill": (
        Grid("attend", ("1q512s8k", "1q4ks8k", "1q4ks32k", "1q4ks128k"), ("v32-bf16",), (64, 128), (2048,)),
        Grid("attend", ("1q512s8k", "1q4ks8k", "1q4ks128k"), ("v32-fp8",), (16, 64, 128), (2048,)),
    ),
    "write": (
        Grid("write", ("8q8k",), ("v32-fp8", "v32-bf16", "v4-fp8")),
        Grid("gather", ("8q8k",), ("v32-fp8", "v4-fp8")),
        Grid("translate", ("128q1s16k",), topks=(2048,)),
    ),
    "v4": (
        Grid("attend", tuple(f"{b}q1s16k" for b in (2, 32, 64, 128)), ("v4-fp8",), (64, 128), (512,), window=128),
        Grid("select", ("64q1s16k", "64q1s128k", "1q4ks32k"), ("v4-fp8",), window=128),
        Grid("compress", ("64q1s16k", "1q4ks32k"), ("v4-fp8",), (64,)),
    ),
    "index": (
        Grid("scores", ("1q1s64k", "32q1s128k", "128q1s64k", "1q4ks64k"), KEYS, (64,)),
        Grid("topk", TOPK_SHAPES, SCORES, topks=(2048,)),
        Grid("topk-ties", ("1q1s64k", "128q1s64k"), SCORES, topks=(2048,)),
        Grid("index", ("32q1s128k", "128q1s64k"), KEYS, (64,), (2048,)),
    ),
    "select": (
        Grid("scores", SELECTED, KEYS, (64,)),
        Grid("topk", SELECTED, SCORES, topks=(2048,)),
        Grid("topk-ties", SELECTED, SCORES, topks=(2048,)),
        Grid("index", SELECTED, KEYS, (64,), (2048,)),
    ),
}
CUSTOM = (Grid("attend", ("128q1s16k",), ("v32-fp8",), (16,), (2048,)),)
"""The grid whose shapes `--shape` replaces when no suite is named."""


def make_jobs(
    suite: str | None,
    *,
    stages: Sequence[str] = (),
    shapes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    heads: Sequence[int] = (),
    topks: Sequence[int] = (),
) -> list[Job]:
    """The jobs of a suite, all or those of some stages, with the given values in place of its own.

    Without a suite, shapes are measured as decode-like attention (`CUSTOM`); without shapes either, the suite is smoke.
    """
    if suite is not None:
        checks.option("suite", suite, tuple(SUITES))
    _check_values(shapes, heads, topks)
    name = suite or ("custom" if shapes else "smoke")
    grids = SUITES.get(name, CUSTOM)
    for stage in stages:
        checks.option("stage", stage, tuple(dict.fromkeys(grid.stage for grid in grids)))
    grids = tuple(grid for grid in grids if not stages or grid.stage in stages)
    _check_used(name, "heads", heads, any(grid.heads for grid in grids))
    _check_used(name, "topk", topks, any(grid.topks for grid in grids))
    formats = tuple(dict.fromkeys(one for grid in grids for one in grid.formats))
    _check_used(name, "layout", layouts, bool(formats))
    for layout in layouts:
        checks.option("layout", layout, formats)
    changed = [grid.replaced(shapes, layouts, heads, topks) for grid in grids]
    # Grids that differed only in a replaced value now give equal jobs.
    return list(dict.fromkeys(job for grid in changed for job in grid.jobs(name)))


def _check_values(shapes: Sequence[str], heads: Sequence[int], topks: Sequence[int]) -> None:
    for shape in shapes:
        if 0 in parse_shape(shape)[0]:
            raise checks.refuse("shape", "requests with new tokens", repr(shape), "write q1 for a decode")
    for count in heads:
        checks.integer("heads", count, low=1, high=128)
    for count in topks:
        checks.integer("topk", count, low=1)


def _check_used(suite: str, option: str, given: Sequence[object], used: bool) -> None:
    """Refuse an option that no grid of the suite depends on."""
    if given and not used:
        raise checks.refuse(option, f"left out for the suite {suite!r}", list(given), "nothing there depends on it")
