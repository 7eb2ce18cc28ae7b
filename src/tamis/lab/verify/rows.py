"""Checks of the stages that move rows: write and gather. Bytes and values must be equal, not close."""

from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, index_fp8, named
from tamis.cache.paged import PagedCache
from tamis.lab.testing import cases, compare, oracle
from tamis.lab.testing.cases import Draw, GatherCase, WriteCase
from tamis.lab.verify.check import Check, Target, Trial
from tamis.lab.verify.repeat import count_differences, graph_check, repeat_check
from tamis.ops import gather_index, gather_kv, read_kv, write_kv

ROUNDED = 1e-4
"""Relative error of rows whose scale is no power of two: the product may round differently on its way to 16 bits."""


def write_checks(target: Target) -> Iterator[Check]:
    """Every byte of the storage, also those that must not change."""
    found = [
        case
        for case in cases.write_cases(quick=target.quick)
        if target.takes("write", case.cache.layout, page_size=case.cache.page_size)
        and (target.device.type != "cpu" or not case.device_only)
    ]
    yield Check("write", "bytes", 0.0, [(case.name, partial(_write, target, case)) for case in found])
    formats = [named("v32-fp8"), named("v4-fp8"), named("v32-bf16")]
    formats = [layout for layout in formats if target.takes("write", layout)]
    twice = [(layout.name, partial(_same_slot_twice, target, layout)) for layout in formats]
    runs = target.runs("write")
    if runs is None or runs.name == "reference":
        yield Check("write", "one slot twice", 0.0, twice)
    else:
        reason = f"{runs.name} writes rows in parallel and may mix two rows for one slot"
        yield Check("write", "one slot twice", 0.0, reason=reason)
    repeated = [(case.name, partial(_written, target, case)) for case in islice(found, 0, None, 4)]
    yield repeat_check("write", repeated)
    replays = [(layout.name, partial(_write_again, target, layout)) for layout in formats]
    yield graph_check(target, "write", ["write"], replays)


def _written(target: Target, case: WriteCase) -> list[Tensor]:
    moved = target.here(case)
    write_kv(moved.kv, moved.cache, moved.slots, backend=target.backend)
    return [_all_bytes(moved.cache)]


def _all_bytes(cache: PagedCache) -> Tensor:
    """Every byte of the pages and between them, with all NaNs of a field written alike."""
    copy = cases.to_device(cache, torch.device("cpu"))
    for field in (copy.layout.values, copy.layout.tail):
        if field is None:
            continue
        view = copy.field(field)
        if field.dtype == torch.uint8:
            view[view == 0xFF] = oracle.NAN_CODE
        else:
            view[view.isnan()] = torch.nan
    return torch.as_strided(
        copy.storage.view(torch.uint8),
        ((copy.pages - 1) * copy.page_stride + copy.layout.row_bytes * copy.page_size,),
        (1,),
    )


def _write(target: Target, case: WriteCase) -> Trial:
    found = _written(target, case)[0]
    expected = cases.to_device(case.cache, torch.device("cpu"))
    oracle.write(case.kv, expected, case.slots)
    return count_differences([found], [_all_bytes(expected)])


def _same_slot_twice(target: Target, layout: Layout) -> Trial:
    """Of rows with the same slot one stays, whole: not the values of one with the scales of another."""
    draw = Draw(f"twice {layout.name}")
    cache = cases.garbage_cache(draw, layout, 3, 16)
    kv = draw.normal(64, layout.width) * torch.logspace(-2, 2, 64, dtype=torch.float32, device="cpu").unsqueeze(1)
    slots = draw.integers(0, 4, 64, dtype=torch.int64)
    moved = target.here(cache)
    write_kv(kv.to(target.device), moved, slots.to(target.device), backend=target.backend)
    back = cases.to_device(moved, torch.device("cpu"))
    wrong = []
    for slot in slots.unique().tolist():
        candidates = []
        for row in (slots == slot).nonzero().flatten().tolist():
            one = cases.to_device(cache, torch.device("cpu"))
            oracle.write(kv[row : row + 1], one, torch.tensor([slot], dtype=torch.int64, device="cpu"))
            candidates.append(oracle.rows_of(one, torch.tensor([slot], dtype=torch.int64, device="cpu")))
        row_found = oracle.rows_of(back, torch.tensor([slot], dtype=torch.int64, device="cpu"))
        if not any(torch.equal(row_found, candidate) for candidate in candidates):
            wrong.append(slot)
    return Trial(float(len(wrong)), f"slots {wrong} hold a mixture of rows" if wrong else "")


def _write_again(target: Target, layout: Layout) -> tuple[list[Tensor], list[Tensor], "_WriteCall"]:
    draw = Draw(f"write graph {layout.name}")
    first, second = draw.normal(40, layout.width), 100 * draw.normal(40, layout.width)
    slots, others = draw.permutation(60)[:40], draw.permutation(60)[:40]
    others[::5], others[30:] = -1, -1
    call = _WriteCall(target, cases.garbage_cache(draw, layout, 4, 16))
    return target.here([first, slots]), target.here([second, others]), call


class _WriteCall:
    """Writes into the same cache, wiped first, so that each call's bytes are its own."""

    def __init__(self, target: Target, cache: PagedCache) -> None:
        self._cache, self._backend = target.here(cache), target.backend

    def __call__(self, kv: Tensor, slots: Tensor) -> list[Tensor]:
        self._cache.storage.fill_(0)
        write_kv(kv, self._cache, slots, backend=self._backend)
        return [self._cache.storage.clone()]


def gather_checks(target: Target) -> Iterator[Check]:
    """Whole requests, single rows and raw index keys, against a decoding by table."""
    found = [
        case
        for case in cases.gather_cases(quick=target.quick)
        if target.takes("gather", case.cache.layout, page_size=case.cache.page_size)
    ]
    for name, bound, exact in (("values", 0.0, True), ("values, any scale", ROUNDED, False)):
        some = [case for case in found if (case.cache.layout.scale_mode not in ("tensor", "exact")) == exact]
        yield Check("gather", name, bound, [(case.name, partial(_gather, target, case)) for case in some])
    reads = [(case.name, partial(_read, target, case)) for case in found if case.out.dtype == torch.bfloat16]
    yield Check("gather", "single rows", ROUNDED, reads)
    sizes = [size for size in (1, 61, 64) if target.takes("gather", index_fp8(), page_size=size)]
    keys = [(f"pages of {size}", partial(_index_keys, target, size)) for size in sizes]
    yield Check("gather", "index keys", 0.0, keys)
    repeated = [(case.name, partial(_gathered, target, case)) for case in islice(found, 0, None, 4)]
    yield repeat_check("gather", repeated)
    replays = [(case.name, partial(_gather_again, target, case)) for case in islice(found, 0, None, 4)]
    yield graph_check(target, "gather", ["gather"], replays)


def _gathered(target: Target, case: GatherCase) -> list[Tensor]:
    moved = target.here(case)
    out = moved.out.clone()
    gather_kv(
        moved.cache,
        moved.block_table,
        moved.lengths,
        starts=moved.starts,
        first=moved.first,
        out=out,
        backend=target.backend,
    )
    return [out]


def _gather(target: Target, case: GatherCase) -> Trial:
    found = _gathered(target, case)[0].cpu()
    expected = case.out.clone()
    for request in range(len(case.lengths)):
        table = case.block_table[request].tolist()
        count, begin = int(case.lengths[request]), int(case.first[request])
        slots = [oracle.slot_of(begin + i, table, case.cache.page_size) for i in range(count)]
        rows = oracle.rows_of(case.cache, torch.tensor(slots, dtype=torch.int64, device="cpu"))
        at = int(case.starts[request])
        expected[at : at + count] = rows.float().to(expected.dtype)
    if case.cache.layout.scale_mode in ("tensor", "exact"):
        return Trial(compare.relative_error(found, expected), str(compare.first_mismatch(found, expected) or ""))
    return count_differences([found], [expected])


def _read(target: Target, case: GatherCase) -> Trial:
    """Rows by slot, with zeros where a slot is no row."""
    draw, rows = Draw(f"read {case.name}"), case.cache.rows
    slots = draw.integers(0, rows, 4, 25)
    slots[:, ::5] = torch.tensor([cases.INT_MIN, -1, rows, cases.INT_MAX, -123456], dtype=torch.int32, device="cpu")
    found = read_kv(target.here(case.cache), target.here(slots), backend=target.backend)
    inside = (slots >= 0) & (slots < rows)
    expected = oracle.rows_of(case.cache, torch.where(inside, slots, 0).flatten()).view(4, 25, -1)
    expected[~inside] = 0.0
    return Trial(compare.relative_error(found, expected), str(compare.first_mismatch(found, expected.float()) or ""))


def _index_keys(target: Target, page_size: int) -> Trial:
    draw = Draw(f"index keys {page_size}")
    cache = cases.filled_cache(draw, index_fp8(), 300, page_size)
    width = ceil_div(100, page_size)
    table = draw.permutation(cache.pages)[: 2 * width].view(2, -1).int()
    lengths = torch.tensor([90, 0], dtype=torch.int32, device="cpu")
    values, scales = gather_index(
        target.here(cache), target.here(table), target.here(lengths), rows=95, backend=target.backend
    )
    slots = [oracle.slot_of(i, table[0].tolist(), page_size) for i in range(90)]
    expected = torch.zeros(95, 128, dtype=torch.float64, device="cpu")
    expected[:90] = oracle.rows_of(cache, torch.tensor(slots, dtype=torch.int64, device="cpu"))
    return count_differences([values.float().cpu().double() * scales.cpu().double().unsqueeze(1)], [expected])


def _gather_again(target: Target, case: GatherCase) -> tuple[list[Tensor], list[Tensor], "_GatherCall"]:
    shorter = (case.lengths - 11).clamp_min(0)
    swapped = case.block_table[[1, 0, 2, 3]]
    first = target.here([case.block_table, case.lengths, case.starts, case.first])
    second = target.here([swapped, shorter, case.starts, case.first])
    return first, second, _GatherCall(target, case)


class _GatherCall:
    """Gathers into the same workspace, wiped first."""

    def __init__(self, target: Target, case: GatherCase) -> None:
        self._cache, self._out, self._backend = target.here(case.cache), target.here(case.out), target.backend

    def __call__(self, block_table: Tensor, lengths: Tensor, starts: Tensor, first: Tensor) -> list[Tensor]:
        self._out.fill_(0)
        backend = self._backend
        gather_kv(self._cache, block_table, lengths, starts=starts, first=first, out=self._out, backend=backend)
        return [self._out.clone()]
