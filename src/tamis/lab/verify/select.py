"""Checks of stage `select`: rows that follow from positions."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.lab.testing.select_cases import SelectCase, expected_rows, select_cases
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differences, graph_check, repeat_check
from tamis.ops import select_chosen, select_entries, select_gathered, select_groups, select_window


def select_checks(target: Target) -> Iterator[Check]:
    """Rows and lengths must be exactly those of a loop over tokens, whatever the buffers held before."""
    stage = "select"
    if target.runs(stage) is None:
        yield Check(stage, "rows", 0.0, reason=f"{target.backend} does not have this stage")
        return
    found = list(select_cases(quick=target.quick))
    yield Check(stage, "rows", 0.0, named_calls(_compare, target, found))
    yield repeat_check(stage, named_calls(_selected, target, found[:2]))
    yield graph_check(target, stage, [stage], named_calls(_again, target, found[:2]))


def _compare(target: Target, case: SelectCase) -> Trial:
    return count_differences([output.long() for output in _selected(target, case)], expected_rows(case))


def _selected(target: Target, case: SelectCase) -> list[Tensor]:
    moved = target.here(case)
    return _call(target, moved, moved.positions, moved.request_ids, moved.own, moved.block_table, moved.chosen)


def _again(target: Target, case: SelectCase) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    moved = target.here(case)
    first = [moved.positions, moved.request_ids, moved.own, moved.block_table, moved.chosen]
    return first, [value.flip(0).contiguous() for value in first], partial(_call, target, moved)


def _call(
    target: Target, case: SelectCase, positions: Tensor, ids: Tensor, own: Tensor, table: Tensor, chosen: Tensor
) -> list[Tensor]:
    tokens, backend = len(positions), target.backend

    def stale(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, 77, dtype=dtype, device=positions.device)

    window, window_lengths = stale(tokens, case.window), stale(tokens)
    select_window(
        positions,
        ids,
        table,
        page_size=case.page_size,
        window=case.window,
        slots=window,
        lengths=window_lengths,
        own=own,
        backend=backend,
    )
    completed, visible, lengths = stale(tokens, dtype=torch.int64), stale(tokens), stale(tokens)
    every = stale(tokens, case.columns)
    select_entries(
        positions,
        ids,
        table,
        ratio=case.ratio,
        page_size=case.page_size,
        completed=completed,
        visible=visible,
        lengths=lengths,
        every=every,
        own=own,
        backend=backend,
    )
    slots, counts = stale(tokens, case.columns), stale(tokens)
    select_chosen(chosen, ids, table, page_size=case.page_size, slots=slots, lengths=counts, own=own, backend=backend)
    rows, row_lengths = stale(tokens, case.columns + case.window), stale(tokens)
    first = torch.full((case.requests,), 3, dtype=torch.int32, device=positions.device)
    select_gathered(
        positions,
        ids,
        first,
        chosen,
        ratio=case.ratio,
        window=case.window,
        entries=20,
        rows=50,
        columns=case.columns,
        slots=rows,
        lengths=row_lengths,
        backend=backend,
    )
    found = [window, window_lengths, completed, visible, lengths, every, slots, counts, rows, row_lengths]
    picked, size = chosen[:, : case.groups.shape[1]], case.group_size
    tokens_of_groups = stale(tokens, picked.shape[1] * size + size - 1)
    return [*found, select_groups(picked, positions + 1, size=size, positions=tokens_of_groups, backend=backend)]
