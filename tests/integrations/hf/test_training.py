"""Attached models in training, compared with the same models before attaching: the loss and every gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import greedy, logits, tokens
from hf_rounding import recorded_selections
from hf_training import assert_agree, assert_same, batches, shared, step

from tamis.integrations.hf import train_v32
from tamis.integrations.transformers import attach, detach, index_losses

pytestmark = pytest.mark.own_settings("the models' own")
V32 = ("v32", "glm-shared")


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model with peaked attention; every test gets, and leaves, it untouched."""
    found = shared(request.param)
    yield found
    detach(found)
    found.gradient_checkpointing_disable()
    found.requires_grad_(True)


each_v32 = pytest.mark.parametrize("model", V32, indirect=True)


@each_v32
@pytest.mark.parametrize("batch", ["whole", "left", "right", "packed"])
def test_loss_and_gradients_are_the_untouched_models(model: Any, batch: str) -> None:
    inputs = batches()[batch]
    loss, expected = step(model, **inputs)
    attach(model, train=True, deterministic=False)
    found_loss, found = step(model, **inputs)
    assert relative_error(found_loss, loss) < 1e-6
    assert_agree(found, expected, but="")
    assert index_losses(model) == {}


@each_v32
@pytest.mark.parametrize("keep", [False, True])
def test_checkpointed_layers_give_the_same_bits(model: Any, keep: bool) -> None:
    inputs = batches(70)["left"]
    attach(model, train=True, indexer="sparse", deterministic=False)
    loss, expected = step(model, **inputs)
    losses = index_losses(model)
    detach(model)
    attach(model, train=True, indexer="sparse", deterministic=False, keep_selections=keep)
    model.gradient_checkpointing_enable()
    found_loss, found = step(model, **inputs)
    assert torch.equal(found_loss, loss)
    assert_same(found, expected)
    assert index_losses(model) == losses  # recomputed layers are not counted twice


@each_v32
def test_the_same_attachment_serves_between_steps(model: Any) -> None:
    ids = tokens(2, 60)
    attach(model, cache="fp32")
    model.eval()
    expected, generated = logits(model, ids), greedy(model, ids, 6)
    detach(model)
    attach(model, train=True, cache="fp32", deterministic=False)
    step(model, input_ids=ids, labels=ids)
    model.eval()
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(greedy(model, ids, 6), generated)
    packed = batches()["packed"]
    with torch.no_grad():
        served = model(**packed).loss
    assert relative_error(served, step(model, **packed)[0]) < 1e-6  # packed sequences do not see each other


@each_v32
def test_detach_restores_the_model(model: Any) -> None:
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    inputs = batches(60)["whole"]
    loss, expected = step(model, **inputs)
    for stage in ("frozen", "sparse"):
        attach(model, train=True, indexer=stage, deterministic=False)
        step(model, **inputs)
        detach(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert all(parameter.requires_grad for parameter in model.parameters())
    found_loss, found = step(model, **inputs)
    assert torch.equal(found_loss, loss)
    assert_same(found, expected)


@pytest.mark.parametrize("model", ["v32"], indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
def test_layers_select_as_a_cache_of_each_format_would(model: Any, kind: Any) -> None:
    """Selections of a training step are those of a prefill through pages, for FP8 index keys as well."""
    ids = tokens(1, 120)
    attach(model, train=True, cache=kind, deterministic=False)
    model.eval()
    with recorded_selections() as served:
        logits(model, ids)
    chosen, plain = [], train_v32.select
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_v32, "select", lambda *args: chosen.append(plain(*args)) or chosen[-1])
        step(model, input_ids=ids, labels=ids)
    # Pages that round change the hidden states of later layers, so that only the first selects from equal bits.
    for found, expected in list(zip(chosen, served, strict=True))[: 3 if kind == "fp32" else 1]:
        assert torch.equal(found.sort(1).values, expected.sort(1).values)
