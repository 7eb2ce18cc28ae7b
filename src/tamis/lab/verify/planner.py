"""Checks of the planner: its metadata against a recomputation one token at a time."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.lab.testing import oracle
from tamis.lab.verify.check import Check, Target, Trial
from tamis.lab.verify.layer import LIMITS, PAGE, LayerCase, Served
from tamis.lab.verify.repeat import count_differences
from tamis.model.spec import LayerSpec
from tamis.step.batch import Batch
from tamis.step.plan import Mode, Plan


def planner_checks(target: Target) -> Iterator[Check]:
    """Plans against a recomputation one token at a time, several steps through one planner."""
    trials = [(mode, partial(_plans, target, mode)) for mode in ("mixed", "separate")]
    yield Check("planner", "metadata of several steps", 0.0, trials)


def _plans(target: Target, mode: Mode) -> Trial:
    case = LayerCase(f"plan {mode}", LayerSpec(64, scale=0.05, topk=32), "v32-fp8", mode)
    served = Served(target, case)
    total, note = 0.0, ""
    # The third step is smaller than the second, whose values must not remain. A paused request has no new token.
    for number, (new_tokens, padding) in enumerate([([50, 3], 0), ([1, 1, 60, 30], 8), ([1, 1, 0, 0], 3)]):
        batch, plan = served.plan(new_tokens, padded=sum(new_tokens) + padding)
        found = count_differences(_fields(plan), _recomputed(batch, plan.rows, served))
        problem = found.note or _chunk_problem(plan)
        if problem:
            total, note = total + max(found.error, 1.0), note or f"step {number}: {problem}"
    return Trial(total, note)


def _fields(plan: Plan) -> list[Tensor]:
    return [plan.request_ids, plan.positions, plan.slots, plan.lengths, plan.query_starts, plan.block_table]


def _recomputed(batch: Batch, rows: int, served: Served) -> list[Tensor]:
    ids, positions = [0] * rows, [-1] * rows
    starts = batch.query_starts.tolist()
    slots = [-1] * rows
    width = ceil_div(LIMITS.max_length, PAGE)
    table = served.pool.block_table(list(range(len(starts) - 1)), width)
    for request, (begin, end) in enumerate(pairwise(starts)):
        for token in range(begin, end):
            ids[token], positions[token] = request, served.lengths[request] - (end - token)
            slots[token] = oracle.slot_of(positions[token], table[request].tolist(), PAGE)
    made = [torch.tensor(values, dtype=torch.int32, device="cpu") for values in (ids, positions)]
    made.append(torch.tensor(slots, dtype=torch.int64, device="cpu"))
    made.append(torch.tensor(served.lengths, dtype=torch.int32, device="cpu"))
    return [*made, batch.query_starts, table]


def _chunk_problem(plan: Plan) -> str:
    """The first error in how prefills share the workspace; empty if there is none."""
    if plan.mode == "mixed" or plan.prefill is None:
        return ""
    token = plan.tokens - plan.prefill.tokens
    for chunk in plan.prefill.chunks:
        if chunk.tokens.start != token:
            return f"a chunk begins at token {chunk.tokens.start} instead of {token}"
        token = chunk.tokens.stop
        lengths, starts = chunk.lengths.tolist(), chunk.starts.tolist()
        if starts != [sum(lengths[:n]) for n in range(len(lengths))] or sum(lengths) > LIMITS.workspace_rows:
            return f"requests of {lengths} rows begin at workspace rows {starts}"
    return "" if token == plan.tokens else f"the chunks end at token {token} instead of {plan.tokens}"
