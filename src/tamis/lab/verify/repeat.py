"""Checks for every stage: the same bits on every run, and the bits of an eager call from a captured graph."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from tamis.lab.testing import compare
from tamis.lab.verify.check import NOT_CAPTURABLE, Check, Target, Trial

RUNS = 10
Outputs: TypeAlias = Sequence[Tensor]
Replay: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor], Callable[..., Outputs]]
"""The inputs of the capture, inputs of the same shapes for the replay, and the call."""

Replays: TypeAlias = list[tuple[str, Callable[[], Replay]]]
"""The name of each case and the function that prepares its replay."""


def count_differences(found: Outputs, expected: Outputs) -> Trial:
    """How many elements differ, over all outputs; NaN equals NaN."""
    return _count(compare.first_mismatch, found, expected)


def count_differing_bits(found: Outputs, expected: Outputs) -> Trial:
    """How many elements differ in any bit, over all outputs."""
    return _count(compare.first_differing_bits, found, expected)


def _count(first: Callable[[Tensor, Tensor], compare.Mismatch | None], found: Outputs, expected: Outputs) -> Trial:
    total, note = 0, ""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        mismatch = first(one, other)
        if mismatch is not None:
            total += mismatch.count
            note = note or f"output {number}: {mismatch}"
    return Trial(float(total), note)


def repeat_check(stage: str, calls: Sequence[tuple[str, Callable[[], Outputs]]]) -> Check:
    """The same inputs give the same bits, ten times."""
    return Check(stage, "same bits on ten runs", 0.0, [(name, partial(_repeat, call)) for name, call in calls])


def _repeat(call: Callable[[], Outputs]) -> Trial:
    first = [output.clone() for output in call()]
    for run in range(1, RUNS):
        found = count_differing_bits(call(), first)
        if found.error:
            return Trial(found.error, f"run {run + 1}: {found.note}")
    return Trial(0.0)


def graph_check(
    target: Target, stage: str, stages: Sequence[str], replays: Sequence[tuple[str, Callable[[], Replay]]]
) -> Check:
    """A call captured in a CUDA graph and replayed with other inputs gives the bits of an eager call with them."""
    name = "graph replay with changed inputs"
    reason = target.not_capturable(stages)
    if reason:
        return Check(stage, name, 0.0, reason=reason)
    trials = [(label, partial(_replay, prepare)) for label, prepare in replays]
    return Check(stage, name, 0.0, trials, remedy=NOT_CAPTURABLE)


def _replay(prepare: Callable[[], Replay]) -> Trial:
    first, second, call = prepare()
    held = [value.clone() for value in first]
    # This call compiles kernels and allocates workspaces before the capture.
    for _ in range(2):
        call(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call(*held)
    trial = Trial(0.0)
    # The first inputs come again at the end: a replay must not depend on the one before.
    for inputs in (second, first):
        for place, value in zip(held, inputs, strict=True):
            place.copy_(value)
        for output in outputs:
            output.view(torch.uint8).fill_(0xA5)
        graph.replay()
        found = [output.clone() for output in outputs]
        torch.cuda.synchronize()
        expected = call(*[value.clone() for value in inputs])
        differences = count_differing_bits(found, expected)
        if differences.error > trial.error:
            trial = differences
    return trial
