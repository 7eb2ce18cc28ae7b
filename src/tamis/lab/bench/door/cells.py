"""The cells of `tamis bench door`: which functions are timed, and on which shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.lab.bench.jobs import Job
from tamis.step.batch import parse_shape

Kind = Literal["attend", "layer", "index", "v4-layer", "write", "plan"]

DROP_IN = "flash_mla_with_kvcache"
PREFILL = "flash_mla_sparse_fwd"
LAYER = "SparseMLA"
POSITIONS = "attend_positions"
INDEX = "index_topk"
V4_LAYER = "SparseV4"
ENGINE = "forward_mqa"
ATTEND = "attend"
WRITE = "write_kv"
PLAN = "plan"
DOORS = (DROP_IN, PREFILL, LAYER, POSITIONS, INDEX, V4_LAYER, ENGINE, ATTEND, WRITE, PLAN)
"""The functions, by the names of the command line: `SparseMLA` is a whole layer call and `plan` is `Planner.plan`."""

BATCHES = (1, 2, 8, 32, 128)
HEADS = (16, 64, 128)
CONTEXT = 16384
INDEX_HEADS = 64


@dataclass(frozen=True)
class Cell:
    """One shape, on which several functions do the same work."""

    kind: Kind
    job: Job

    @property
    def requests(self) -> int:
        """How many requests the shape has."""
        return len(parse_shape(self.job.shape)[0])

    @property
    def prefill(self) -> bool:
        """Whether requests have more than one new token."""
        return max(parse_shape(self.job.shape)[0]) > 1

    @property
    def doors(self) -> tuple[str, ...]:
        """The functions that are timed on this shape."""
        if self.kind != "attend":
            return ({"layer": LAYER, "index": INDEX, "v4-layer": V4_LAYER, "write": WRITE, "plan": PLAN}[self.kind],)
        if self.job.layout == "v32-bf16":
            return (PREFILL, ATTEND)
        if self.job.window:
            return (DROP_IN, ATTEND)
        return (DROP_IN, LAYER, ATTEND) if self.prefill else (DROP_IN, POSITIONS, ENGINE, ATTEND)

    @property
    def title(self) -> str:
        """The shape in a few words, the same for all functions."""
        job = self.job
        parts = [job.shape, job.layout]
        parts += [f"{job.heads} heads"] if job.heads else []
        parts += [f"top-k {job.window}+{job.topk}" if job.window else f"top-k {job.topk}"] if job.topk else []
        return ", ".join(parts)


def make_cells(
    *,
    doors: Sequence[str] = (),
    heads: Sequence[int] = (),
    batches: Sequence[int] = (),
    quick: bool = False,
    long: bool = False,
    tiny: bool = False,
) -> list[Cell]:
    """The cells of a run.

    Args:
        doors: the functions to be timed; all if empty.
        heads: query heads in place of each grid's own.
        batches: numbers of decodes in place of each grid's own.
        quick: a few cells of every kind.
        long: prefills over 128K too.
        tiny: small enough for a CPU.
    """
    for door in doors:
        checks.option("doors", door, DOORS)
    for count in heads:
        checks.integer("heads", count, low=1, high=128)
    for count in batches:
        checks.integer("batches", count, low=1)
    if tiny:
        cells = _tiny()
    elif quick:
        cells = _grid((1, 8, 128), (16, 128), contexts=("8k",), specials=False)
    else:
        cells = _grid(tuple(batches) or BATCHES, tuple(heads) or HEADS, contexts=("8k", "128k") if long else ("8k",))
    wanted = [cell for cell in cells if not doors or set(cell.doors) & set(doors)]
    return [cell for cell in wanted if _fits(cell, heads, batches)]


def _fits(cell: Cell, heads: Sequence[int], batches: Sequence[int]) -> bool:
    by_heads = not heads or cell.job.heads is None or cell.kind == "index" or cell.job.heads in heads
    return by_heads and (not batches or cell.prefill or cell.requests in batches)


def _attend(shape: str, layout: str, heads: int, topk: int, window: int = 0) -> Cell:
    return Cell("attend", Job("door", "attend", shape, layout, heads, topk, window))


def _grid(
    batches: tuple[int, ...], heads: tuple[int, ...], *, contexts: tuple[str, ...], specials: bool = True
) -> list[Cell]:
    v4_heads = tuple(count for count in heads if count >= 64) or heads
    cells = [_attend(f"{b}q1s16k", "v32-fp8", h, 2048) for h in heads for b in batches]
    if specials:
        cells += [_attend("5q1s16k", "v32-fp8", h, 192) for h in (3, 16, 96)]
        cells += [_attend("133q1s16k", "v32-fp8", 32, 192), _attend("37q1s16k", "v32-fp8", 128, 2176)]
    cells += [_attend(f"{b}q1s16k", "v4-fp8", h, k, 128) for k in (512, 1024) for h in v4_heads for b in batches]
    for context in contexts:
        prompt = f"1q4ks{context}"
        cells += [_attend(prompt, layout, h, 2048) for layout in ("v32-bf16", "v32-fp8") for h in heads]
    cells += [Cell("layer", Job("door", "attend", f"{b}q1s16k", "v32-fp8", h, 2048)) for h in heads for b in batches]
    cells += [
        Cell("v4-layer", Job("door", "attend", f"{b}q1s16k", "v4-fp8", h, 512, 128)) for h in v4_heads for b in batches
    ]
    cells += [Cell("index", Job("door", "index", f"{b}q1s16k", "index-fp8", INDEX_HEADS, 2048)) for b in batches]
    cells += [Cell("write", Job("door", "write", f"{b}q1s1", "v32-fp8")) for b in batches]
    # Launches outside of a graph are counted with a profiler, which slows later calls, so plans come last.
    return cells + [Cell("plan", Job("door", "plan", f"{b}q1s16k", "v32-fp8", HEADS[0], 2048)) for b in batches]


def _tiny() -> list[Cell]:
    cells = [_attend("3q1s128", "v32-fp8", h, 64) for h in (3, 16)]
    cells += [_attend("2q1s128", "v4-fp8", 4, 64, 32), _attend("1q8s128", "v32-bf16", 4, 64)]
    cells += [_attend("1q8s128", "v32-fp8", 4, 64)]
    cells += [Cell("layer", Job("door", "attend", "2q1s128", "v32-fp8", 4, 64))]
    cells += [Cell("v4-layer", Job("door", "attend", "2q1s512", "v4-fp8", 8, 16, 32))]
    cells += [Cell("index", Job("door", "index", "2q1s128", "index-fp8", 8, 64))]
    cells += [Cell("write", Job("door", "write", "2q1s1", "v32-fp8"))]
    return [*cells, Cell("plan", Job("door", "plan", "2q1s128", "v32-fp8", 4, 64))]


def pages_needed(cells: Sequence[Cell]) -> int:
    """The pages that the largest cell needs. All of its sets share them: each reads more than a cache holds.

    There are no more, since offsets beyond 2**31 bytes would go further than what peers are known to take.
    """
    counts = [[ceil_div(length, cell.job.page_size) for length in parse_shape(cell.job.shape)[1]] for cell in cells]
    return max((sum(pages) for pages in counts), default=1)
