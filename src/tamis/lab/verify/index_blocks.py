"""Checks of stage `index` for selection in two levels (DeepSeek-V4.1), on steps whose scores are known exactly."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.lab.testing.exact_steps import ExactStep
from tamis.lab.testing.index_cases import best_positions
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import Replay, count_differences
from tamis.ops import index_topk_and_blocks, index_topk_within

SIZES = ((3, 8), (16, 33))
"""Numbers of candidate blocks and positions per block, of which one divides neither pages nor contexts."""
SPACES = (1 << 28, 1)
"""Bytes of workspace: for all tokens at once, and for one after another."""


def block_checks(target: Target, steps: list[ExactStep]) -> Iterator[Check]:
    """Blocks, and selections within them, are those of the definition."""
    yield Check("index", "exact blocks", 0.0, named_calls(_blocks, target, steps))
    yield Check("index", "exact selections within blocks", 0.0, named_calls(_within, target, steps))


def best_blocks(scores: Tensor, length: int, count: int, size: int) -> list[int]:
    """The definition: blocks by the highest of their scores that the token sees, and always the newest block."""
    seen = torch.where(scores.isnan(), -math.inf, scores)[: max(0, length)]
    parts = seen.split(size) if len(seen) else ()
    tops = torch.tensor([float(part.max()) for part in parts], dtype=torch.float32, device="cpu")
    tops[-1:] = math.inf
    return best_positions(tops, len(tops), count)


def _expected_blocks(step: ExactStep, count: int, size: int) -> Tensor:
    pairs = zip(step.scores, step.lengths.tolist(), strict=True)
    found = [best_blocks(row, length, count, size) for row, length in pairs]
    return torch.tensor(found, dtype=torch.int32, device="cpu").view(-1, count)


def _expected_within(step: ExactStep, blocks: Tensor, size: int) -> Tensor:
    at = torch.arange(step.scores.shape[1], dtype=torch.int64, device="cpu") // size
    found = []
    for row, held in zip(step.scores, blocks, strict=True):
        allowed = torch.isin(at, held.long())
        found.append(best_positions(row.masked_fill(~allowed, -math.inf), len(row), step.k))
    return torch.tensor(found, dtype=torch.int32, device="cpu").view(-1, step.k)


def _blocks(target: Target, step: ExactStep) -> Trial:
    moved = target.here(step)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for count, size in SIZES:
        for space in SPACES:
            options = {"blocks": count, "block_size": size, "workspace_bytes": space, "backend": target.backend}
            found += index_topk_and_blocks(*moved.inputs, step.k, **options)  # type: ignore[arg-type]
            expected += [step.expected(), _expected_blocks(step, count, size)]
    return count_differences(found, expected)


def _within(target: Target, step: ExactStep) -> Trial:
    moved = target.here(step)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for count, size in SIZES:
        blocks = _expected_blocks(step, count, size)
        for space in SPACES:
            options = {"block_size": size, "workspace_bytes": space, "backend": target.backend}
            found.append(index_topk_within(*moved.inputs, target.here(blocks), step.k, **options))  # type: ignore[arg-type]
            expected.append(_expected_within(step, blocks, size))
    return count_differences(found, expected)


def both_levels(target: Target, step: ExactStep, q: Tensor, weights: Tensor, lengths: Tensor) -> list[Tensor]:
    """Positions and blocks from all scores, and positions within these blocks."""
    _, _, cache, ids, table, _ = step.inputs
    given, (count, size) = (q, weights, cache, ids, table, lengths), SIZES[0]
    positions, blocks = index_topk_and_blocks(*given, step.k, blocks=count, block_size=size, backend=target.backend)
    within = index_topk_within(*given, blocks, step.k, block_size=size, backend=target.backend)
    return [positions, blocks, within]


def levels_of(target: Target, step: ExactStep) -> list[Tensor]:
    """Both levels of a step."""
    moved = target.here(step)
    return both_levels(target, moved, moved.q, moved.weights, moved.lengths)


def levels_again(target: Target, step: ExactStep) -> Replay:
    """Both levels captured in one graph, and replayed with other queries and lengths."""
    moved = target.here(step)
    turned = moved.q.view(torch.uint8).flip(0).view(moved.q.dtype) if moved.q.element_size() == 1 else moved.q.flip(0)
    second = [turned, moved.weights.flip(0), (moved.lengths - 7).clamp_min(0)]
    return [moved.q, moved.weights, moved.lengths], second, partial(both_levels, target, moved)
