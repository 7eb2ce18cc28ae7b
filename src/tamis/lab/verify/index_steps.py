"""Checks of stage `index` on steps whose scores are known exactly."""

from collections.abc import Iterator

from tamis.lab.testing.exact_steps import ExactStep, exact_steps
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differences
from tamis.ops import index_scores, index_topk, topk_positions


def steps_taken(target: Target) -> list[ExactStep]:
    """The steps that are checked on a target."""
    steps = list(exact_steps(33, 400, quick=target.quick))
    if target.device.type == "cuda":
        steps += exact_steps(2048, 9001, quick=target.quick)
    return [step for step in steps if _takes(target, step)]


def step_checks(target: Target, taken: list[ExactStep]) -> Iterator[Check]:
    """Scores are those intended, and so are selections from them and in one call."""
    yield Check("index", "exact scores", 0.0, named_calls(_scores, target, taken))
    yield Check("index", "exact selections", 0.0, named_calls(_selections, target, taken))


def _takes(target: Target, step: ExactStep) -> bool:
    layout = step.cache.layout
    return target.takes("index", layout, page_size=step.cache.page_size) and target.covers(layout, step.q.dtype)


def _scores(target: Target, step: ExactStep) -> Trial:
    """The number of scores that differ; NaN is like NaN, and -0.0 like 0.0."""
    found = index_scores(*target.here(step).inputs, backend=target.backend).cpu()
    wrong = (found != step.scores) & ~(found.isnan() & step.scores.isnan())
    if not bool(wrong.any()):
        return Trial(0.0)
    token, position = wrong.nonzero()[0].tolist()
    shown = f"{float(found[token, position])}, expected {float(step.scores[token, position])}"
    return Trial(float(wrong.sum()), f"token {token}, position {position}: {shown}")


def _selections(target: Target, step: ExactStep) -> Trial:
    moved, backend = target.here(step), target.backend
    scores = moved.scores
    found = [topk_positions(scores, moved.lengths, step.k, backend=backend)]
    for room in (1 << 28, 1 << 20, 1):
        found.append(index_topk(*moved.inputs, step.k, workspace_bytes=room, backend=backend))
    return count_differences(found, [step.expected()] * len(found))
