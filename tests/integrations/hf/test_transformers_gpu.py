"""Attached models on a GPU: logits, greedy tokens and gradients of the untouched models there."""

import pytest
import torch
from bounds import relative_error
from hf_models import MODELS, build, greedy, logits, tokens
from hf_training import MIXING, assert_agree, batches, step, trainable

from tamis.integrations.transformers import attach

pytestmark = [pytest.mark.gpu, pytest.mark.own_settings("the models' own")]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(name: str) -> None:
    model, ids = build(name).cuda(), tokens(2, 200).cuda()
    expected, generated = logits(model, ids), greedy(model, ids[:, :100], 32)
    attach(model, cache="fp32")
    found = logits(model, ids)
    assert relative_error(found.cpu(), expected.cpu()) < 1e-5
    assert torch.equal(logits(model, ids), found)
    assert torch.equal(greedy(model, ids[:, :100], 32), generated)


@pytest.mark.parametrize("name", ["v32", "v4", "glm5-next"])
def test_gradients(name: str) -> None:
    model = trainable(name).cuda()
    inputs = {part: x.cuda() if isinstance(x, torch.Tensor) else x for part, x in batches()["whole"].items()}
    loss, expected = step(model, **inputs)
    attach(model, train=True, deterministic=False)
    found_loss, found = step(model, **inputs)
    assert relative_error(found_loss.cpu(), loss.cpu()) < 1e-6
    on_host = ({n: None if g is None else g.cpu() for n, g in grads.items()} for grads in (found, expected))
    assert_agree(*on_host, MIXING, but="")
