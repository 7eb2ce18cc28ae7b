"""Input sets for a job: filled caches, queries, selections. Built on the device, from a seed.

Each kind of set runs the stage of tamis on its tensors, measures the error of a result, and holds the tensors that
peers need for the same call.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.lab.bench.index_sets import IndexSet, ScoreSet, TopkSet, index_sets, score_sets, topk_sets
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.random_inputs import RandomInputs
from tamis.lab.bench.roofline import Cost, attend_cost, gather_cost, select_cost, translate_cost, write_cost
from tamis.lab.bench.timing import set_count
from tamis.lab.bench.v4_inputs import CompressSet, compress_sets
from tamis.lab.testing import compare, oracle
from tamis.ops import attend, gather_kv, select_entries, select_window, translate_positions, write_kv
from tamis.step.batch import parse_shape

V4_RATIOS = (4, 128)
V4_PAGE = 256
"""Tokens that a page of compressed entries stands for."""


@dataclass(frozen=True, eq=False)
class AttendSet:
    """One attention call. Its selections hold slots, so that every peer reads the same rows."""

    q: Tensor
    selections: tuple[Selection, ...]
    scale: float
    value_dim: int
    queries: int | None
    """New tokens per request; None if requests differ."""
    block_table: Tensor
    """int32 [B, W], the pages of each request; -1: absent."""
    lengths: Tensor
    """int32 [B], the rows of each request."""

    bound = 1e-2

    def run(self, backend: str) -> Tensor:
        """The output of tamis."""
        selections = list(self.selections)
        return attend(self.q, selections, scale=self.scale, value_dim=self.value_dim, backend=backend).out

    def error(self, result: Tensor) -> float:
        """Relative error of a few tokens against float64."""
        tokens, expected = self.expected
        return compare.relative_error(result[tokens], expected)

    @cached_property
    def expected(self) -> tuple[list[int], Tensor]:
        """A few tokens and their outputs in float64; computed once, since every version is compared with them."""
        tokens = sorted({0, len(self.q) // 2, len(self.q) - 1})
        q = self.q[tokens].double().cpu()
        selections = [replace(s, slots=s.slots[tokens].cpu()) for s in self.selections]
        return tokens, oracle.attend(q, selections, scale=self.scale, value_dim=self.value_dim)[0]


@dataclass(frozen=True, eq=False)
class WriteSet:
    """One write of many rows."""

    kv: Tensor
    cache: PagedCache
    slots: Tensor

    bound = 5e-2

    def run(self, backend: str) -> PagedCache:
        """The cache after the write by tamis."""
        write_kv(self.kv, self.cache, self.slots, backend=backend)
        return self.cache

    def error(self, result: PagedCache) -> float:
        """Relative error of some stored rows, which includes the rounding of the format."""
        some = torch.linspace(0, len(self.kv) - 1, 64, dtype=torch.float32, device="cpu").long().to(self.kv.device)
        return compare.relative_error(oracle.rows_of(result, self.slots[some].cpu()), self.kv[some])


@dataclass(frozen=True, eq=False)
class GatherSet:
    """One gather of whole requests."""

    cache: PagedCache
    block_table: Tensor
    lengths: Tensor
    starts: Tensor
    out: Tensor

    bound = 1e-2

    def run(self, backend: str) -> Tensor:
        """The workspace after the gather by tamis."""
        return gather_kv(self.cache, self.block_table, self.lengths, starts=self.starts, out=self.out, backend=backend)

    def error(self, result: Tensor) -> float:
        """Relative error of some rows of the first and the last request."""
        found, expected = [], []
        for request in {0, len(self.lengths) - 1}:
            table, start = self.block_table[request].tolist(), int(self.starts[request])
            last = int(self.lengths[request]) - 1
            positions = torch.linspace(0, last, 32, dtype=torch.float32, device="cpu").long().tolist()
            slots = [oracle.slot_of(position, table, self.cache.page_size) for position in positions]
            expected.append(oracle.rows_of(self.cache, torch.tensor(slots, dtype=torch.int64, device="cpu")))
            found.append(result[[start + position for position in positions]])
        return compare.relative_error(torch.cat(found), torch.cat(expected))


@dataclass(frozen=True, eq=False)
class TranslateSet:
    """One translation of positions to slots."""

    positions: Tensor
    request_ids: Tensor
    block_table: Tensor
    page_size: int

    bound = 0.0

    def run(self, backend: str) -> Tensor:
        """The slots from tamis."""
        return translate_positions(
            self.positions, self.request_ids, self.block_table, page_size=self.page_size, backend=backend
        ).slots

    def error(self, result: Tensor) -> float:
        """How many slots of a few tokens are wrong."""
        wrong = 0
        for token in {0, len(self.positions) - 1}:
            table = self.block_table[int(self.request_ids[token])].tolist()
            expected = [oracle.slot_of(p, table, self.page_size) for p in self.positions[token].tolist()]
            wrong += sum(a != b for a, b in zip(result[token].tolist(), expected, strict=True))
        return float(wrong)


@dataclass(frozen=True, eq=False)
class SelectSet:
    """One V4 step's row selection: windows, completed entries of both ratios, and all entries of the larger ratio."""

    positions: Tensor
    request_ids: Tensor
    window_table: Tensor
    entry_table: Tensor
    page_size: int
    """Tokens per page of the window cache."""
    windows: Tensor
    every: Tensor
    completed: tuple[Tensor, Tensor]
    counts: tuple[Tensor, ...]

    bound = 0.0

    def run(self, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots of windows, of all entries, and of the entries completed at each ratio, in three launches."""
        tokens = (self.positions, self.request_ids)
        select_window(
            *tokens,
            self.window_table,
            page_size=self.page_size,
            window=self.windows.shape[1],
            slots=self.windows,
            lengths=self.counts[0],
            backend=backend,
        )
        for ratio, completed, every, counts in zip(
            V4_RATIOS, self.completed, (None, self.every), (self.counts[1:3], self.counts[3:5]), strict=True
        ):
            select_entries(
                *tokens,
                self.entry_table,
                ratio=ratio,
                page_size=V4_PAGE // ratio,
                completed=completed,
                visible=counts[0],
                lengths=counts[1],
                every=every,
                backend=backend,
            )
        return self.windows, self.every, *self.completed

    def error(self, result: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
        """How many slots of a few tokens are wrong."""
        wrong = 0
        for token in {0, len(self.positions) - 1}:
            position, request = int(self.positions[token]), int(self.request_ids[token])
            raw, pages = self.window_table[request].tolist(), self.entry_table[request].tolist()
            seen = range(max(0, position + 1 - self.windows.shape[1]), position + 1)
            expected = [[oracle.slot_of(x, raw, self.page_size) for x in seen]]
            largest = V4_RATIOS[-1]
            expected += [[oracle.slot_of(n, pages, V4_PAGE // largest) for n in range((position + 1) // largest)]]
            for ratio in V4_RATIOS:
                ends = (position + 1) % ratio == 0
                expected += [[oracle.slot_of(position // ratio, pages, V4_PAGE // ratio) if ends else -1]]
            for found, wanted in zip(result, expected, strict=True):
                row = found[token].reshape(-1).tolist()
                wanted = wanted + [-1] * (len(row) - len(wanted))
                wrong += sum(a != b for a, b in zip(row, wanted, strict=True))
        return float(wrong)


InputSet = AttendSet | WriteSet | GatherSet | TranslateSet | SelectSet | CompressSet | ScoreSet | TopkSet | IndexSet


@dataclass(frozen=True, eq=False)
class Prepared:
    """The input sets of a job and the lowest possible cost of one call."""

    job: Job
    sets: list[InputSet]
    cost: Cost


def prepare(job: Job, device: torch.device, seed: int = 0, drawn: RandomInputs | None = None) -> Prepared:
    """Build so many sets that no call finds its inputs in the GPU's cache.

    Args:
        job: what is to be timed.
        device: where the sets are.
        seed: the seed of their numbers.
        drawn: where tensors and caches come from, if not from that seed.
    """
    builders: dict[str, Callable[[Job, RandomInputs], Prepared]] = {
        "attend": _attend,
        "write": _write,
        "gather": _gather,
        "translate": _translate,
        "select": _select,
        "compress": _compress,
    }
    indexer: dict[str, Callable[[Job, RandomInputs], tuple[Sequence[InputSet], Cost]]] = {
        "scores": score_sets,
        "topk": topk_sets,
        "topk-ties": topk_sets,
        "index": index_sets,
    }
    drawn = RandomInputs(device, seed) if drawn is None else drawn
    if job.stage in indexer:
        sets, cost = indexer[job.stage](job, drawn)
        return Prepared(job, list(sets), cost)
    return builders[job.stage](job, drawn)


def _attend(job: Job, drawn: RandomInputs) -> Prepared:
    assert job.heads is not None
    assert job.topk is not None
    layout = job.row_layout
    # A V4 row is key and value as a whole; in V3.2 the rope dimensions are key only.
    value_dim = layout.width if job.layout.startswith("v4") else layout.latent
    queries, lengths = parse_shape(job.shape)
    picks = [job.topk, job.window] if job.window else [job.topk]
    requests = list(zip(queries, lengths, strict=True))
    cost = attend_cost(requests, heads=job.heads, picks=picks, layout=layout, value_dim=value_dim)
    uniform = queries[0] if len(set(queries)) == 1 else None
    wanted = set_count(cost.bytes, drawn.device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=drawn.device)
    sets: list[InputSet] = []
    while len(sets) < wanted:
        table, pages = drawn.block_table(lengths, job.page_size)
        for selections in _selections(job, layout, queries, lengths, (table, pages), drawn, wanted - len(sets)):
            q = drawn.normal(sum(queries), job.heads, layout.width)
            sets.append(AttendSet(q, selections, layout.width**-0.5, value_dim, uniform, table, counts))
    return Prepared(job, sets, cost)


def _selections(
    job: Job,
    layout: Layout,
    queries: list[int],
    lengths: list[int],
    placed: tuple[Tensor, int],
    drawn: RandomInputs,
    most: int,
) -> Iterator[tuple[Selection, ...]]:
    """Selections from one cache (two with a window) that share no row with each other where tokens are few."""
    assert job.topk is not None
    table, pages = placed
    cache = drawn.cache(layout, pages, job.page_size)
    second = drawn.cache(layout, pages, job.page_size) if job.window else None
    decode = max(queries) == 1
    count = max(1, min(most, min(lengths) // job.topk if decode else 1))
    # Each context is shuffled once and divided between the sets, so that no set reads the rows of another.
    columns = count * job.topk
    shuffled = [drawn.picks(new, min(columns, length), length) for new, length in zip(queries, lengths, strict=True)]
    ids = drawn.request_ids(queries)
    for number in range(count):
        span = slice(number * job.topk, (number + 1) * job.topk)
        positions = torch.cat([_padded(part[:, span], job.topk) for part in shuffled])
        chosen = Selection(cache, _slots(positions, table, ids, job.page_size))
        if second is None:
            yield (chosen,)
            continue
        window = torch.arange(job.window, dtype=torch.int64, device=drawn.device).repeat(len(ids), 1)
        starts = [number * job.window % max(1, length - job.window + 1) for length in lengths]
        window += torch.tensor(starts, dtype=torch.int64, device=drawn.device)[ids].unsqueeze(1)
        window[window >= torch.tensor(lengths, dtype=torch.int64, device=drawn.device)[ids].unsqueeze(1)] = -1
        yield (Selection(second, _slots(window, table, ids, job.page_size)), chosen)


def _padded(picks: Tensor, k: int) -> Tensor:
    return torch.nn.functional.pad(picks, (0, k - picks.shape[1]), value=-1)


def _slots(positions: Tensor, table: Tensor, ids: Tensor, page_size: int) -> Tensor:
    page = table.long()[ids].gather(1, positions.clamp_min(0) // page_size)
    return torch.where(positions >= 0, page * page_size + positions % page_size, -1).int()


def _write(job: Job, drawn: RandomInputs) -> Prepared:
    layout, tokens = job.row_layout, sum(parse_shape(job.shape)[0])
    cost = write_cost(tokens, layout)
    sets: list[InputSet] = []
    for _ in range(set_count(cost.bytes, drawn.device)):
        cache = drawn.cache(layout, ceil_div(tokens, job.page_size), job.page_size, filled=False)
        if layout.scale_mode == "tensor":
            cache = cache.with_scale(0.02)
        slots = drawn.picks(1, tokens, cache.rows)[0]
        sets.append(WriteSet(drawn.normal(tokens, layout.width), cache, slots))
    return Prepared(job, sets, cost)


def _gather(job: Job, drawn: RandomInputs) -> Prepared:
    layout, lengths = job.row_layout, parse_shape(job.shape)[1]
    cost = gather_cost(sum(lengths), layout, job.page_size)
    starts = torch.tensor([sum(lengths[:n]) for n in range(len(lengths))], dtype=torch.int32, device=drawn.device)
    counts = torch.tensor(lengths, dtype=torch.int32, device=drawn.device)
    sets: list[InputSet] = []
    for _ in range(set_count(cost.bytes, drawn.device)):
        table, pages = drawn.block_table(lengths, job.page_size)
        out = torch.zeros(sum(lengths), layout.width, dtype=torch.bfloat16, device=drawn.device)
        sets.append(GatherSet(drawn.cache(layout, pages, job.page_size), table, counts, starts, out))
    return Prepared(job, sets, cost)


def _translate(job: Job, drawn: RandomInputs) -> Prepared:
    assert job.topk is not None
    queries, lengths = parse_shape(job.shape)
    ids = drawn.request_ids(queries).int()
    pages = sum(ceil_div(length, job.page_size) for length in lengths)
    cost = translate_cost(len(ids), job.topk, pages)
    sets: list[InputSet] = []
    for _ in range(set_count(cost.bytes, drawn.device)):
        table, _ = drawn.block_table(lengths, job.page_size)
        parts = [drawn.picks(new, min(job.topk, length), length) for new, length in zip(queries, lengths, strict=True)]
        positions = torch.cat([_padded(part, job.topk) for part in parts]).int()
        sets.append(TranslateSet(positions, ids, table, job.page_size))
    return Prepared(job, sets, cost)


def _select(job: Job, drawn: RandomInputs) -> Prepared:
    queries, lengths = parse_shape(job.shape)
    ids = drawn.request_ids(queries).int()
    starts = [
        torch.arange(length - new, length, dtype=torch.int64, device="cpu")
        for new, length in zip(queries, lengths, strict=True)
    ]
    positions = torch.cat(starts).int().to(drawn.device)
    tokens, columns = len(ids), ceil_div(max(lengths), V4_RATIOS[-1] * 128) * 128
    cost = select_cost(tokens, job.window, sum(length // V4_RATIOS[-1] for length in lengths), columns)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=drawn.device)

    sets: list[InputSet] = []
    for _ in range(set_count(cost.bytes, drawn.device)):
        (raw, _), (pages, _) = drawn.block_table(lengths, job.page_size), drawn.block_table(lengths, V4_PAGE)
        counts = tuple(empty(tokens) for _ in range(5))
        completed = (empty(tokens, dtype=torch.int64), empty(tokens, dtype=torch.int64))
        outputs = (empty(tokens, job.window), empty(tokens, columns), completed, counts)
        sets.append(SelectSet(positions, ids, raw, pages, job.page_size, *outputs))
    return Prepared(job, sets, cost)


def _compress(job: Job, drawn: RandomInputs) -> Prepared:
    assert job.heads is not None
    queries, lengths = parse_shape(job.shape)
    make = partial(compress_sets, queries, lengths, job.heads, job.row_layout, drawn.device)
    first, cost = make(seed=0)
    more = range(1, set_count(cost.bytes, drawn.device))
    return Prepared(job, [first, *(make(seed=seed)[0] for seed in more)], cost)


def worst_error(item: InputSet, result: object) -> float:
    """The set's `error` of a result, infinite where that is NaN."""
    error = item.error(result)  # type: ignore[arg-type]
    return math.inf if math.isnan(error) else error
