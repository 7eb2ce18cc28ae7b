"""Attached models in training, compared with the same models before attaching: the loss and every gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import RELATIVES, V4_KINDS, RowsByThemselves, greedy, logits, tokens
from hf_rounding import recorded_selections
from hf_training import (
    BOUND,
    MIXING,
    SEPARATE,
    assert_agree,
    assert_same,
    batches,
    shared,
    step,
    trainable,
    trained_selections,
)

from tamis.integrations.transformers import attach, detach, index_losses, recording, replaying
from tamis.layers.recording import Recording

pytestmark = pytest.mark.own_settings("the models' own")
V32 = ("v32", "glm-shared", *RELATIVES)
GLM5 = pytest.mark.parametrize("model", ["glm5-next"], indirect=True)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model with peaked attention; every test gets, and leaves, it untouched."""
    found = shared(request.param)
    yield found
    detach(found)
    found.gradient_checkpointing_disable()
    found.requires_grad_(True)


each_v32 = pytest.mark.parametrize("model", V32, indirect=True)
each_family = pytest.mark.parametrize(
    "model", ["v32", "glm-shared", "mistral-large4", "v4", "glm5-next"], indirect=True
)
v4_only = pytest.mark.parametrize("model", ["v4"], indirect=True)


@each_v32
@pytest.mark.parametrize("batch", ["whole", "left", "right", "packed"])
def test_loss_and_gradients_are_the_untouched_models(model: Any, batch: str) -> None:
    inputs = batches()[batch]
    loss, expected = step(model, **inputs)
    attach(model, train=True, deterministic=False)
    found_loss, found = step(model, **inputs)
    assert relative_error(found_loss, loss) < 1e-6
    if "HYV4" in type(model).__name__:
        assert_agree(found, expected, MIXING, but="")
    assert_agree(found, expected, but="hc" if "HYV4" in type(model).__name__ else "")
    assert index_losses(model) == {}


@GLM5
@pytest.mark.parametrize("batch", ["whole", "left", "right"])
def test_pooled_keys_train_as_the_untouched_model(model: Any, batch: str) -> None:
    """GLM-5.3-Flash past its top-k, with sequences of whole and of incomplete groups. The gradients of the scalars with
    which it forgets states cancel over tokens, so its sums are not left to float32; those of its streams are Hy4's."""
    inputs = batches()[batch]
    with RowsByThemselves():
        loss, expected = step(model, **inputs)
        attach(model, train=True, deterministic=False)
        found_loss, found = step(model, **inputs)
    assert relative_error(found_loss, loss) < 1e-6
    assert_agree(found, expected, MIXING, but="")
    assert_agree(found, expected, but="hc")


@GLM5
def test_selections_of_pooled_keys_are_replayed(model: Any) -> None:
    """What inference recorded is what the indexer would select, so the gradients are those of a step of its own."""
    ids = tokens(2, 90)
    attach(model, train=True, cache="fp32", deterministic=False)
    model.eval()
    kept = Recording(32, kpool=4)
    with recording(model, kept, ["a", "b"]):
        logits(model, ids)
    loss, expected = step(model, input_ids=ids, labels=ids)
    with replaying(model, kept, ["a", "b"]):
        found_loss, found = step(model, input_ids=ids, labels=ids)
    assert relative_error(found_loss, loss) < 1e-6
    assert_agree(found, expected, MIXING, but="")
    token = torch.arange(90).unsqueeze(1)
    last = 4 * ((token + 1) // 4 - 8).clamp_min(0) + torch.arange(35)  # the last eight groups, and those after them
    last = torch.where(last <= token, last, -1).int()
    for name in ("a", "b"):
        kept.load(1, name, last)
    with replaying(model, kept, ["a", "b"]):
        assert relative_error(step(model, input_ids=ids, labels=ids)[0], loss) > 1e-4
    detach(model)
    attach(model, train=True, indexer="sparse", cache="fp32")
    with pytest.raises(ValueError, match="indexer must be 'frozen' to replay"):
        replaying(model, kept, ["a", "b"]).__enter__()


@pytest.mark.parametrize("name", ["v32", "glm-shared", "v4"])
def test_float64_steps_are_the_untouched_models(name: str) -> None:
    """Ten times closer than float32: the untouched model computes its softmax in float32, and nothing else."""
    model, ids = trainable(name), tokens(2, 40)
    model.set_experts_implementation("eager")  # torch has no grouped products of float64
    loss, expected = step(model.double(), input_ids=ids, labels=ids)
    attach(model.float(), train=True)
    found_loss, found = step(model.double(), input_ids=ids, labels=ids)
    assert relative_error(found_loss, loss) < 1e-6
    assert_agree(found, expected, 1e-6, but="hc")
    assert_agree(found, expected, but="")


@v4_only
@pytest.mark.parametrize("columns", [90, 17, 3])
def test_v4s_loss_and_gradients_are_the_untouched_models(model: Any, columns: int) -> None:
    """Seventeen tokens are one entry of the longer spans, and three tokens are none of either."""
    ids = tokens(2, columns)
    loss, expected = step(model, input_ids=ids, labels=ids)
    attach(model, train=True, deterministic=False)
    found_loss, found = step(model, input_ids=ids, labels=ids)
    assert relative_error(found_loss, loss) < 1e-6
    assert_agree(found, expected, BOUND if columns == 90 else SEPARATE, but="")


@v4_only
@pytest.mark.parametrize("batch", ["left", "right", "packed"])
def test_v4s_sequences_give_what_they_give_alone(model: Any, batch: str) -> None:
    """An untouched V4 compresses padding, and lets packed sequences see each other's entries."""
    inputs = batches()[batch]
    ids, labels = inputs["input_ids"], inputs["labels"].clone()
    if batch == "packed":
        labels[:, 60] = -100  # the first token of the second sequence has no predecessor
        parts = [(row, columns) for row in (0, 1) for columns in (slice(0, 60), slice(60, 90))]
    else:
        real = inputs["attention_mask"][1].nonzero()
        parts = [(0, slice(0, 90)), (1, slice(int(real[0]), int(real[-1]) + 1))]
    items = int((labels[:, 1:] != -100).sum())
    alone = [
        step(model, input_ids=ids[row : row + 1, some], labels=labels[row : row + 1, some], num_items_in_batch=items)
        for row, some in parts
    ]
    expected = {name: sum(grads[name] for _, grads in alone) for name, g in alone[0][1].items() if g is not None}
    untouched = step(model, **inputs | {"labels": labels}, num_items_in_batch=items)[0]
    attach(model, train=True, deterministic=False)
    loss, found = step(model, **inputs | {"labels": labels}, num_items_in_batch=items)
    total = sum(part for part, _ in alone)
    assert relative_error(loss, total) < 1e-6
    assert batch == "right" or relative_error(untouched, total) > 1e-4
    assert_agree({name: found[name] for name in expected}, expected, SEPARATE, but="")


@each_family
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


@each_family
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
    if type(model).__name__.startswith("Glm5Next"):
        with pytest.raises(ValueError, match="position_ids must be those of one sequence per row"), torch.no_grad():
            model(**packed)
        return
    with torch.no_grad():
        served = model(**packed).loss
    assert relative_error(served, step(model, **packed)[0]) < 1e-6  # packed sequences do not see each other


@each_family
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


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("name", ["v32", "glm-shared", "v4"])
def test_layers_select_as_a_cache_of_each_format_would(name: str, kind: Any) -> None:
    """Selections of a training step are those of a prefill through pages, for FP8 index keys as well."""
    changes = {"layer_types": [V4_KINDS[1]], "mlp_layer_types": ["moe"]} if name == "v4" else {}
    model, ids = trainable(name, num_hidden_layers=1, **changes), tokens(1, 120)
    attach(model, train=True, cache=kind, deterministic=False)
    model.eval()
    with recorded_selections() as served:
        logits(model, ids)
    with trained_selections() as found:
        step(model, input_ids=ids, labels=ids)
    assert len(found) == len(served) == 1
    assert torch.equal(found[0].sort(1).values, served[0].sort(1).values)
