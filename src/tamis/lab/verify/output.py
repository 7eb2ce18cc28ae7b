"""Checks of stage `output`, against the exact projection in float64."""

from collections.abc import Iterator
from functools import partial

import torch

from tamis.lab.testing.cases import Draw
from tamis.lab.verify.check import Check, Target, Trial
from tamis.lab.verify.v4_inputs import LENGTH, ROTARY, norm_error, rotated
from tamis.ops import lower_groups, quantise_blocks, rotate_to_fp8

OUTPUT_BOUND = 5e-2


def output_checks(target: Target) -> Iterator[Check]:
    """Heads rotated back, quantised and lowered in FP8."""
    if target.runs("output") is None:
        yield Check("output", "lowered in FP8", 0.0, reason=f"{target.backend} does not have this stage")
        return
    trials = [(f"{tokens} tokens", partial(_lower, target, tokens)) for tokens in (1, 7, 70)]
    yield Check("output", "lowered in FP8", OUTPUT_BOUND, trials)


def _lower(target: Target, tokens: int) -> Trial:
    """Eight heads in two groups, rotated back, quantised and lowered, against the exact projection."""
    draw = Draw(f"lower {tokens}")
    x, positions, weight = draw.normal(tokens, 8, 512), draw.integers(-1, LENGTH, tokens), draw.normal(2, 100, 2048)
    here, at, table, held = target.here([x, positions, ROTARY.cos_sin_table(LENGTH), weight])
    values, scales = rotate_to_fp8(here, at, table, backend=target.backend)
    grouped, exponents = (part.flatten(1).unflatten(1, (2, -1)) for part in (values, scales))
    found = lower_groups(grouped, exponents, *quantise_blocks(held), dtype=torch.float32, backend=target.backend)
    exact = rotated(x, positions, inverse=True).flatten(1).unflatten(1, (2, -1))
    return norm_error(found, torch.einsum("tgk,gok->tgo", exact, weight.double()))
