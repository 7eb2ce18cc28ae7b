"""Checks of the stages that choose and address rows: translate and index."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from tamis.ops import index_topk, translate_positions
from tamis.testing import cases, oracle
from tamis.testing.cases import IndexCase, TranslateCase
from tamis.verify.check import Check, Target, Trial
from tamis.verify.repeat import count_differences, graph_check, repeat_check

SCORE_BOUND = 1e-5
"""By how much an unselected score may exceed a selected one, relative to the largest score: float32 sums."""


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
    yield Check(stage, "slots", 0.0, [(case.name, partial(_translate, target, case)) for case in found])
    some = list(islice(found, 0, None, 3))
    yield repeat_check(stage, [(case.name, partial(_translated, target, case)) for case in some])
    yield graph_check(target, stage, [stage], [(case.name, partial(_translate_again, target, case)) for case in some])


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
    counts = torch.tensor([sum(slot >= 0 for slot in row) for row in rows], dtype=torch.int32)
    return count_differences(found, [torch.tensor(rows, dtype=torch.int32), counts])


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


def index_checks(target: Target) -> Iterator[Check]:
    """The selected positions have the highest scores; where scores are exact, they are the lowest such positions."""
    found = [
        case
        for case in cases.index_cases(quick=target.quick)
        if target.takes("index", case.cache.layout, page_size=case.cache.page_size)
    ]
    for name, bound, exact in (("best scores", SCORE_BOUND, False), ("ties", 0.0, True)):
        some = [case for case in found if case.exact == exact]
        yield Check("index", name, bound, [(case.name, partial(_index, target, case)) for case in some])
    some = list(islice(found, 0, None, 4))
    yield repeat_check("index", [(case.name, partial(_indexed, target, case)) for case in some])
    yield graph_check(target, "index", ["index"], [(case.name, partial(_index_again, target, case)) for case in some])


def _index_call(target: Target, case: IndexCase, q: Tensor, weights: Tensor, lengths: Tensor) -> list[Tensor]:
    ids, table = case.request_ids, case.block_table
    return [index_topk(q, weights, case.cache, ids, table, lengths, case.k, backend=target.backend)]


def _indexed(target: Target, case: IndexCase) -> list[Tensor]:
    moved = target.here(case)
    return _index_call(target, moved, moved.q, moved.weights, moved.lengths)


def _index(target: Target, case: IndexCase) -> Trial:
    found = _indexed(target, case)[0].cpu()
    scores = oracle.index_scores(case.q, case.weights, case.cache, case.request_ids, case.block_table, case.lengths)
    worst, note = 0.0, ""
    for token in range(len(found)):
        error, told = _row_error(found[token].tolist(), scores[token], case)
        if error > worst:
            worst, note = error, f"token {token}: {told}"
    return Trial(worst, note)


def _row_error(row: list[int], scores: Tensor, case: IndexCase) -> tuple[float, str]:
    visible = int((scores > -math.inf).sum())
    count = min(case.k, visible)
    chosen, rest = row[:count], row[count:]
    if any(position != -1 for position in rest):
        return math.inf, f"{sum(p != -1 for p in rest)} positions after the {count} there are"
    if any(not 0 <= p < len(scores) or scores[p] == -math.inf for p in chosen) or len(set(chosen)) < count:
        return math.inf, "a position that the token cannot see, or one twice"
    if case.exact:
        # A stable sort leaves equal scores in the order of their positions.
        best = set(scores.argsort(descending=True, stable=True)[:count].tolist())
        wrong = len(set(chosen) - best)
        return float(wrong), f"{wrong} of {count} positions are not the lowest of the best"
    left = scores.clone()
    left[chosen] = -math.inf
    if count in (0, visible):
        return 0.0, ""
    size = float(scores[scores > -math.inf].abs().max())
    excess = float(left.max() - scores[chosen].min())
    return max(0.0, excess / size), f"a score of {float(left.max()):.6g} was left out"


def _index_again(target: Target, case: IndexCase) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    moved = target.here(case)
    first = [moved.q, moved.weights, moved.lengths]
    second = [moved.q.flip(0), moved.weights.flip(0), (moved.lengths - 7).clamp_min(0)]
    return first, second, partial(_index_call, target, moved)
