"""FP8 and bf16 caches change the results of attached models only by the rounding of rows, index keys and queries.

The oracle is the untouched model over a cache that rounds (`hf_rounding`). Both then differ by the noise of float32,
2e-7 in these models, and by values which that noise carries over the edge of a rounding step, of which there are a few.
One of them changes one of at least 24 columns of one of at least 20 rows attended to: 1 / (sqrt(24) * 20) of a step.
"""

from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import FAMILIES, RELATIVES, build, every_model, logits, tokens
from hf_rounding import recorded_selections, rounded_logits

from tamis.integrations.transformers import attach, detach

STEPS = {"bf16": 2**-7, "fp8": 2**-3}
EDGE = 0.01
"""Of a step: what one value on its other side may change."""
KEY_EDGE = 2**-3 / 32
"""Of a score: what one of the 32 columns of a V3.2 or GLM key on the other side of an e4m3 step may change."""


@every_model
@pytest.mark.parametrize("kind", STEPS)
def test_rounding_is_the_only_difference(model: Any, kind: Any) -> None:
    ids, bound = tokens(2, 200), EDGE * STEPS[kind]
    exact = logits(model, ids)
    attach(model, cache=kind)
    with recorded_selections() as selections:
        found = logits(model, ids)
    assert torch.equal(logits(model, ids), found)
    detach(model)
    expected, lack = rounded_logits(model, ids, kind, selections)
    assert relative_error(found, expected) < bound
    assert relative_error(found, exact) > 2 * bound  # a cache that does not round would not pass
    assert lack < KEY_EDGE


@pytest.mark.parametrize("name", [*FAMILIES, *RELATIVES])
def test_fp8_selections_are_not_those_of_exact_keys(name: str) -> None:
    """Check that the test above, with its allowance for values at an edge, can tell the two apart."""
    model, ids = build(name), tokens(2, 200)
    attach(model, cache="fp8")
    with recorded_selections() as selections:
        logits(model, ids)
    detach(model)
    assert rounded_logits(model, ids, "fp32", selections)[1] > 5 * KEY_EDGE


@pytest.mark.parametrize("name", [*FAMILIES, *RELATIVES])
@pytest.mark.parametrize("kind", ["fp32", *STEPS])
def test_16_bit_models_are_as_exact_as_untouched(name: str, kind: Any) -> None:
    """Both compute the same thing in float16 and are compared with it in float32: their errors are of one size."""
    model, ids = build(name).half(), tokens(2, 90)
    attach(model, cache=kind)
    with recorded_selections() as selections:
        found = logits(model, ids)
    assert found.dtype == torch.float16
    detach(model)
    untouched, _ = rounded_logits(model, ids, kind, selections)
    expected, _ = rounded_logits(model.float(), ids, kind, selections)
    assert relative_error(found, expected) < 1.25 * relative_error(untouched, expected)
