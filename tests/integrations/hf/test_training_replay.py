"""Selections recorded while an attached model generates, and replayed in training."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import tokens
from hf_training import assert_agree, assert_same, shared, step, trained_selections

from tamis.integrations.transformers import attach, detach, recording, replaying
from tamis.layers.recording import Recording

pytestmark = pytest.mark.own_settings("the models' own")
IDS = tokens(2, 60)
MASK = torch.ones_like(IDS)
MASK[1, :25] = 0


@pytest.fixture(params=["v32", "glm-shared", "hy4"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model with peaked attention, attached for training with exact pages."""
    found = shared(request.param)
    attach(found, train=True, cache="fp32", deterministic=False)
    yield found.eval()
    detach(found)


def test_decode_steps_are_replayed_in_one_pass(model: Any) -> None:
    """The selections are those that the model would make itself, so that the gradients have the same bits."""
    kept = Recording(topk=model.config.index_topk)
    with recording(model, kept, ["a", "b"]):
        whole = model.generate(IDS, attention_mask=MASK, max_new_tokens=6, do_sample=False)
    inputs = {"input_ids": whole[:, :-1], "attention_mask": torch.cat((MASK, MASK[:, :1].expand(-1, 5)), dim=1)}
    inputs["attention_mask"][:, 60:] = 1
    inputs["labels"] = inputs["input_ids"]
    with trained_selections() as own:
        loss, expected = step(model, **inputs)
    with trained_selections() as replayed, replaying(model, kept, ["a", "b"]):
        found_loss, found = step(model, **inputs)
    assert len(own) == len(replayed)
    for one, other in zip(own, replayed, strict=True):
        assert torch.equal(one.sort(1).values, other.sort(1).values)
    assert torch.equal(found_loss, loss)
    assert_same(found, expected)


def test_replayed_rows_are_attended_to_whatever_the_indexer_says(model: Any) -> None:
    """Recorded selections of the last tokens that are visible are a window, in a pack and with padding alike."""
    topk, kept = model.config.index_topk, Recording(topk=model.config.index_topk)
    window = torch.arange(60).unsqueeze(1) - torch.arange(topk)
    layers = [n for n, layer in enumerate(model.model.layers) if layer.self_attn.indexer is not None]
    for layer in layers:
        for name in ("a", "b", "c"):
            kept.load(layer, name, window.clamp_min(-1).int())
    mask = torch.ones_like(IDS)
    mask[1, 35:] = 0
    labels = IDS.where(mask != 0, -100)
    with trained_selections() as chosen, replaying(model, kept, ["a", "b"]):
        step(model, input_ids=IDS, attention_mask=mask, labels=labels)
    rows = torch.where(window >= 0, window, -1)
    assert torch.equal(chosen[0][:60].sort(1).values, rows.sort(1).values.int())
    moved = torch.where(rows[:35] >= 0, rows[:35] + 60, -1)
    assert torch.equal(chosen[0][60:95].sort(1).values, moved.sort(1).values.int())
    assert bool((chosen[0][95:] == -1).all())
    packed = torch.cat((IDS[:1], IDS[1:, :35]), dim=1)
    position_ids = torch.cat((torch.arange(60), torch.arange(35))).unsqueeze(0)
    with replaying(model, kept, ["a", "b"]), torch.no_grad():
        found = model(packed, position_ids=position_ids).logits
        separate = model(IDS, attention_mask=mask).logits
    assert relative_error(found[0, :60], separate[0]) < 1e-5
    assert relative_error(found[0, 60:], separate[1, :35]) < 1e-5
    assert relative_error(model(packed, position_ids=position_ids).logits.detach(), found) > 1e-3


def test_indexers_learn_from_replayed_rows(model: Any) -> None:
    kept = Recording(topk=model.config.index_topk)
    with recording(model, kept, [0, 1]), torch.no_grad():
        model(IDS)
    detach(model)
    attach(model, train=True, indexer="sparse", cache="fp32", deterministic=False)
    loss, expected = step(model, input_ids=IDS, labels=IDS)
    with replaying(model, kept, [0, 1]):
        found_loss, found = step(model, input_ids=IDS, labels=IDS)
    assert relative_error(found_loss, loss) < 1e-6
    assert_agree(found, expected, but="")


def test_wrong_recordings_are_refused(model: Any) -> None:
    kept = Recording(topk=model.config.index_topk)
    with pytest.raises(ValueError, match=r"of 32 positions per token, like the model, got 8"):
        replaying(model, Recording(topk=8), ["a", "b"]).__enter__()
    with pytest.raises(TypeError, match="recording must be"):
        recording(model, {}, ["a", "b"]).__enter__()  # type: ignore[arg-type]
    with replaying(model, kept, ["a", "b"]), pytest.raises(ValueError, match="recording must be at least 60 tokens"):
        model(IDS)
    with replaying(model, kept, ["a"]), pytest.raises(ValueError, match="2 different names"):
        model(IDS)
    detach(model)
    with pytest.raises(ValueError, match="attach"):
        recording(model, kept, ["a", "b"])
    attach(model)
    with pytest.raises(ValueError, match="attached for training"):
        replaying(model, kept, ["a", "b"])


def test_v4_is_refused() -> None:
    model = shared("v4")
    attach(model, train=True)
    try:
        with pytest.raises(ValueError, match="whose layers select tokens, got DeepSeek-V4"):
            replaying(model, Recording(topk=16), ["a"]).__enter__()
    finally:
        detach(model)
