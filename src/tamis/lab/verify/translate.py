"""Checks of stage `translate`."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.lab.testing import cases, oracle
from tamis.lab.testing.cases import TranslateCase
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differences, graph_check, repeat_check
from tamis.ops import translate_positions


def translate_checks(target: Target) -> Iterator[Check]:
    """Slots and counts must be exactly those of a loop over positions."""
    stage = "translate"
    if target.runs(stage) is None:
        yield Check(stage, "slots", 0.0, reason=f"{target.backend} does not have this stage")
        return
    found = [
        case
        for case in cases.translate_cases(quick=target.quick)
        if target.device.type != "cpu" or not case.device_only
    ]
    yield Check(stage, "slots", 0.0, named_calls(_translate, target, found))
    some = found[::3]
    yield repeat_check(stage, named_calls(_translated, target, some))
    yield graph_check(target, stage, [stage], named_calls(_translate_again, target, some))


def _translated(target: Target, case: TranslateCase) -> list[Tensor]:
    moved = target.here(case)
    found = translate_positions(
        moved.positions,
        moved.request_ids,
        moved.block_table,
        page_size=moved.page_size,
        backend=target.backend,
        **moved.options,
    )
    return [found.slots, found.counts]


def _translate(target: Target, case: TranslateCase) -> Trial:
    found = _translated(target, case)
    rows = [_translated_row(case, token) for token in range(len(case.positions))]
    counts = torch.tensor([sum(slot >= 0 for slot in row) for row in rows], dtype=torch.int32, device="cpu")
    return count_differences(found, [torch.tensor(rows, dtype=torch.int32, device="cpu"), counts])


def _translated_row(case: TranslateCase, token: int) -> list[int]:
    options = case.options
    ranks, rank, interleave = options.get("ranks", 1), options.get("rank", 0), options.get("interleave", 1)
    request = int(case.request_ids[token])
    table = case.block_table[request].tolist() if 0 <= request < len(case.block_table) else []
    prefill = -1
    if "workspace" in options:
        ids, starts = options["workspace"]
        prefill = int(ids[token])
    slots = []
    for position in case.positions[token].tolist():
        if position < 0 or position // interleave % ranks != rank:
            slots.append(-1)
            continue
        local = position // (interleave * ranks) * interleave + position % interleave
        slot = oracle.slot_of(local, table, case.page_size, options.get("rows_per_page"))
        if prefill >= 0:
            slot = int(starts[prefill]) + local if local // case.page_size < len(table) else -1
        slots.append(slot)
    if options.get("compact"):
        kept = [slot for slot in slots if slot >= 0]
        slots = kept + [-1] * (len(slots) - len(kept))
    return slots


def _translate_again(target: Target, case: TranslateCase) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    moved = target.here(case)
    first = [moved.positions, moved.request_ids, moved.block_table]
    second = [moved.positions.flip(1), moved.request_ids.flip(0), moved.block_table.flip(0)]
    return first, second, partial(_translate_call, target, moved)


def _translate_call(
    target: Target, case: TranslateCase, positions: Tensor, request_ids: Tensor, block_table: Tensor
) -> list[Tensor]:
    found = translate_positions(
        positions, request_ids, block_table, page_size=case.page_size, backend=target.backend, **case.options
    )
    return [found.slots, found.counts]
