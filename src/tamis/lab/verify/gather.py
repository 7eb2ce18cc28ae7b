"""Checks of stage `gather`: values must be equal, or within a rounding where a scale is not a power of two."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import index_fp8
from tamis.lab.testing import cases, compare, oracle
from tamis.lab.testing.cases import Draw, GatherCase
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differences, graph_check, repeat_check
from tamis.ops import gather_index, gather_kv, read_kv

ROUNDED = 1e-4
"""Relative error of rows whose scale is not a power of two: products may be rounded differently to 16 bits."""


def gather_checks(target: Target) -> Iterator[Check]:
    """Whole requests, single rows and raw index keys, against decoding with a table."""
    found = [
        case
        for case in cases.gather_cases(quick=target.quick)
        if target.takes("gather", case.cache.layout, page_size=case.cache.page_size)
    ]
    for name, bound, exact in (("values", 0.0, True), ("values, any scale", ROUNDED, False)):
        some = [case for case in found if (case.cache.layout.scale_mode not in ("tensor", "exact")) == exact]
        yield Check("gather", name, bound, named_calls(_gather, target, some))
    reads = named_calls(_read, target, [case for case in found if case.out.dtype == torch.bfloat16])
    yield Check("gather", "single rows", ROUNDED, reads)
    sizes = [size for size in (1, 61, 64) if target.takes("gather", index_fp8(), page_size=size)]
    keys = [(f"pages of {size}", partial(_index_keys, target, size)) for size in sizes]
    yield Check("gather", "index keys", 0.0, keys)
    repeated = named_calls(_gathered, target, found[::4])
    yield repeat_check("gather", repeated)
    replays = named_calls(_gather_again, target, found[::4])
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
    """Rows by slot, with zeros for slots outside the cache."""
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
    """Gathers into one workspace, which is cleared before each call."""

    def __init__(self, target: Target, case: GatherCase) -> None:
        self._cache, self._out, self._backend = target.here(case.cache), target.here(case.out), target.backend

    def __call__(self, block_table: Tensor, lengths: Tensor, starts: Tensor, first: Tensor) -> list[Tensor]:
        self._out.fill_(0)
        backend = self._backend
        gather_kv(self._cache, block_table, lengths, starts=starts, first=first, out=self._out, backend=backend)
        return [self._out.clone()]
