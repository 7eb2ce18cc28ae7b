"""The jobs that `tamis bench` measures: named suites of shapes, and how options change them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tamis import checks
from tamis.cache.layout import NAMES
from tamis.step.batch import parse_shape

PAGE_SIZE = 64
INDEXER = ("scores", "topk", "topk-ties", "index")
KEYS = ("index-fp8",)
SCORES = ("float32",)
LATENT = tuple(name for name in NAMES if not name.startswith("index"))


@dataclass(frozen=True)
class Job:
    """One thing to measure."""

    suite: str
    stage: str
    """attend, write, gather, select, translate, or compress: all of a C4A layer's small launches; of the indexer
    scores, topk, topk-ties (from scores that are mostly equal) or index (scores and top-k in one call)."""
    shape: str
    """In the batch notation: `128q1s16k`. In the indexer every token sees its whole request."""
    layout: str = "v32-fp8"
    """Of the rows that are read or written."""
    heads: int | None = None
    topk: int | None = None
    window: int = 0
    """Consecutive rows that each token also attends to, from a second cache (V4)."""
    page_size: int = PAGE_SIZE

    @property
    def stages(self) -> tuple[str, ...]:
        """What must be verified before a time is shown."""
        if self.stage in INDEXER:
            return ("index",)
        return {"attend": ("attend", "combine"), "compress": ("rotate", "compress")}.get(self.stage, (self.stage,))

    @property
    def query_dtype(self) -> torch.dtype:
        """Of the queries, where the stage has some."""
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
    def latent(self) -> bool:
        """Whether it is about latent rows, whose format can be another one."""
        return self.layouts[0] in LATENT

    def jobs(self, suite: str) -> list[Job]:
        """Expanded, shapes first."""
        none = (None,)
        return [
            Job(suite, self.stage, shape, layout, heads, topk, self.window)
            for layout, shape, heads, topk in product(self.layouts, self.shapes, self.heads or none, self.topks or none)
        ]


TOPK_SHAPES = ("1q1s64k", "1q1s1024k", "32q1s128k", "64q1s32k", "64q1s128k", "128q1s64k", "1q1ks64k")
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
}
CUSTOM = (Grid("attend", ("128q1s16k",), ("v32-fp8",), (16,), (2048,)),)
"""What `--shape` without a suite varies."""


def make_jobs(
    suite: str | None,
    *,
    shapes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    heads: Sequence[int] = (),
    topks: Sequence[int] = (),
) -> list[Job]:
    """The jobs of a suite, with some of its numbers replaced; without a suite and without a shape, the smallest one."""
    name = suite or ("custom" if shapes else "smoke")
    if suite is not None:
        checks.option("suite", suite, tuple(SUITES))
    for shape in shapes:
        if 0 in parse_shape(shape)[0]:
            raise checks.refuse("shape", "requests with new tokens", repr(shape), "write q1 for a decode")
    for layout in layouts:
        checks.option("layout", layout, LATENT)
    for count in heads:
        checks.integer("heads", count, low=1, high=128)
    for count in topks:
        checks.integer("topk", count, low=1)
    grids = CUSTOM if name == "custom" else SUITES[name]
    varied = {
        "heads": (heads, [bool(grid.heads) for grid in grids]),
        "topk": (topks, [bool(grid.topks) for grid in grids]),
        "layout": (layouts, [grid.latent for grid in grids]),
    }
    for option, (given, used) in varied.items():
        if given and not any(used):
            raise checks.refuse(option, f"left out for the suite {name!r}", list(given), "nothing there depends on it")
    changed = [
        replace(
            grid,
            shapes=tuple(shapes) or grid.shapes,
            layouts=tuple(layouts) if layouts and grid.latent else grid.layouts,
            heads=tuple(heads) if heads and grid.heads else grid.heads,
            topks=tuple(topks) if topks and grid.topks else grid.topks,
        )
        for grid in grids
    ]
    # Two grids of a suite may differ in nothing but what was replaced.
    return list(dict.fromkeys(job for grid in changed for job in grid.jobs(name)))
