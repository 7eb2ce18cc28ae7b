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
LENGTH = 90
"""More tokens than the models select, and than V4's selected entries hold."""
IDS = tokens(2, LENGTH)
MASK = torch.ones_like(IDS)
MASK[1, :25] = 0


def recording_for(model: Any) -> Recording:
    """An empty recording of what a model's layers select."""
    rates = getattr(model.config, "compress_rates", None)
    ratio = None if rates is None else rates["compressed_sparse_attention"]
    return Recording(model.config.index_topk, ratio=ratio)


def selecting_layers(model: Any) -> list[int]:
    """The layers with an indexer of their own."""
    modules = [layer.self_attn for layer in model.model.layers]
    return [n for n, m in enumerate(modules) if getattr(getattr(m, "compressor", m), "indexer", None) is not None]


@pytest.fixture(params=["v32", "glm-shared", "hy4", "v4"])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model with peaked attention, attached for training with exact pages."""
    found = shared(request.param)
    attach(found, train=True, cache="fp32", deterministic=False)
    yield found.eval()
    detach(found)


def test_decode_steps_are_replayed_in_one_pass(model: Any) -> None:
    """The selections are those that the model would make itself, so that the gradients have the same bits."""
    kept = recording_for(model)
    with recording(model, kept, ["a", "b"]):
        whole = model.generate(IDS, attention_mask=MASK, max_new_tokens=6, do_sample=False)
    inputs = {"input_ids": whole[:, :-1], "attention_mask": torch.cat((MASK, MASK[:, :1].expand(-1, 5)), dim=1)}
    inputs["attention_mask"][:, LENGTH:] = 1
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
    """Recorded selections of the last tokens (or entries) that are visible, in a pack and with padding alike."""
    kept = recording_for(model)
    ratio = kept.ratio or 1
    window = (torch.arange(1, LENGTH + 1) // ratio - 1).unsqueeze(1) - torch.arange(kept.topk)
    for layer in selecting_layers(model):
        for name in ("a", "b", "c"):
            kept.load(layer, name, window.clamp_min(-1).int())
    mask, first = torch.ones_like(IDS), LENGTH if kept.ratio is None else LENGTH // ratio
    mask[1, 75:] = 0
    labels = IDS.where(mask != 0, -100)
    with trained_selections() as chosen, replaying(model, kept, ["a", "b"]):
        step(model, input_ids=IDS, attention_mask=mask, labels=labels)
    rows = torch.where(window >= 0, window, -1)
    assert torch.equal(chosen[0][:LENGTH].sort(1).values, rows.sort(1).values.int())
    moved = torch.where(rows[:75] >= 0, rows[:75] + first, -1)
    assert torch.equal(chosen[0][LENGTH : LENGTH + 75].sort(1).values, moved.sort(1).values.int())
    assert bool((chosen[0][LENGTH + 75 :] == -1).all())
    packed = torch.cat((IDS[:1], IDS[1:, :75]), dim=1)
    position_ids = torch.cat((torch.arange(LENGTH), torch.arange(75))).unsqueeze(0)
    with replaying(model, kept, ["a", "b"]), torch.no_grad():
        found = model(packed, position_ids=position_ids).logits
        separate = model(IDS, attention_mask=mask).logits
    assert relative_error(found[0, :LENGTH], separate[0]) < 1e-5
    assert relative_error(found[0, LENGTH:], separate[1, :75]) < 1e-5
    assert relative_error(model(packed, position_ids=position_ids).logits.detach(), found) > 1e-3


def test_indexers_learn_from_replayed_rows(model: Any) -> None:
    kept = recording_for(model)
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
    kept = recording_for(model)
    with pytest.raises(ValueError, match="per token, like the model, got 8 positions per token; make it with"):
        replaying(model, Recording(topk=8), ["a", "b"]).__enter__()
    with pytest.raises(TypeError, match="recording must be"):
        recording(model, {}, ["a", "b"]).__enter__()  # type: ignore[arg-type]
    with (
        replaying(model, kept, ["a", "b"]),
        pytest.raises(ValueError, match=f"recording must be at least {LENGTH} tokens"),
    ):
        model(IDS)
    with replaying(model, kept, ["a"]), pytest.raises(ValueError, match="2 different names"):
        model(IDS)
    detach(model)
    with pytest.raises(ValueError, match="attach"):
        recording(model, kept, ["a", "b"])
    attach(model)
    with pytest.raises(ValueError, match="attached for training"):
        replaying(model, kept, ["a", "b"])


@pytest.mark.parametrize("model", ["v4"], indirect=True)
def test_recordings_of_tokens_and_of_entries_are_told_apart(model: Any) -> None:
    for wrong in (Recording(topk=16), Recording(topk=16, ratio=16)):
        with pytest.raises(ValueError, match=r"16 entries of 4 tokens per token.*Recording\(topk=16, ratio=4\)"):
            replaying(model, wrong, ["a"]).__enter__()
    kept = recording_for(model)
    with pytest.raises(ValueError, match="positions must be 1 different entries up to 0 for token 3 of 'a'"):
        kept.load(1, "a", torch.tensor([[0, *[-1] * 15], [1, *[-1] * 15]], dtype=torch.int32).flip(0), first=3)
