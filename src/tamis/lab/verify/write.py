"""Checks of stage `write`: every byte must be equal, not close."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tamis.cache.layout import Layout, named
from tamis.cache.paged import PagedCache
from tamis.lab.testing import cases, oracle
from tamis.lab.testing.cases import Draw, WriteCase
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differences, graph_check, repeat_check
from tamis.ops import write_kv


def write_checks(target: Target) -> Iterator[Check]:
    """Every byte of the storage, including those that must not change."""
    found = [
        case
        for case in cases.write_cases(quick=target.quick)
        if target.takes("write", case.cache.layout, page_size=case.cache.page_size)
        and (target.device.type != "cpu" or not case.device_only)
    ]
    yield Check("write", "bytes", 0.0, named_calls(_write, target, found))
    formats = [named("v32-fp8"), named("v4-fp8"), named("v32-bf16")]
    formats = [layout for layout in formats if target.takes("write", layout)]
    twice = named_calls(_same_slot_twice, target, formats)
    runs = target.runs("write")
    if runs is None or runs.name == "reference":
        yield Check("write", "one slot twice", 0.0, twice)
    else:
        reason = f"{runs.name} writes rows in parallel and may mix two rows for one slot"
        yield Check("write", "one slot twice", 0.0, reason=reason)
    repeated = named_calls(_written, target, found[::4])
    yield repeat_check("write", repeated)
    replays = named_calls(_write_again, target, formats)
    yield graph_check(target, "write", ["write"], replays)


def _written(target: Target, case: WriteCase) -> list[Tensor]:
    moved = target.here(case)
    write_kv(moved.kv, moved.cache, moved.slots, backend=target.backend)
    return [_all_bytes(moved.cache)]


def _all_bytes(cache: PagedCache) -> Tensor:
    """Every byte of the pages and between them, with all NaNs replaced by one."""
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
    """Of rows with the same slot one must be stored whole, not the values of one with the scales of another."""
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
    """Writes into one cache, which is cleared before each call."""

    def __init__(self, target: Target, cache: PagedCache) -> None:
        self._cache, self._backend = target.here(cache), target.backend

    def __call__(self, kv: Tensor, slots: Tensor) -> list[Tensor]:
        self._cache.storage.fill_(0)
        write_kv(kv, self._cache, slots, backend=self._backend)
        return [self._cache.storage.clone()]
