"""PEFT's adapters in models that serve: the weights that tamis reads off a layer are those that act right now."""

from typing import Any

import pytest
from bounds import relative_error
from hf_models import logits, tokens
from hf_training import step, trainable
from torch import Tensor

from tamis.integrations.transformers import attach

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.own_settings("the models' own")
IDS = tokens(2, 48)
TARGETS = {"v32": ["kv_b_proj", "q_b_proj"], "v4": ["q_a_proj", "kv_proj", "gate_proj", "o_b_proj"]}
BOUND = 1e-4
"""Of logits, between float32 sums of other orders; an adapter that is missing changes them by 1."""


def config(name: str, **options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=TARGETS[name], init_lora_weights=False, **options)


def served(model: Any) -> dict[str, Tensor]:
    """The logits with one adapter after another."""
    found = {"first": logits(model, IDS)}
    with model.disable_adapter():
        found["none"] = logits(model, IDS)
    model.set_adapter("other")
    found["other"] = logits(model, IDS)
    model.set_adapter("default")
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 2.0)
    found["twice"] = logits(model, IDS)
    model.merge_adapter()
    found["merged"] = logits(model, IDS)
    model.unmerge_adapter()
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_the_chosen_adapter_serves(name: str) -> None:
    """In reinforcement learning, the reference is often the same model with its adapter switched off."""
    model = peft.get_peft_model(trainable(name), config(name))
    model.add_adapter("other", config(name))
    model.eval()
    expected = served(model)
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 1.0)
    attach(model, train=True, cache="fp32")
    for adapter, found in served(model).items():
        assert relative_error(found, expected[adapter]) < BOUND, adapter


@pytest.mark.parametrize("name", TARGETS)
def test_dropout_never_stays_in_a_weight(name: str) -> None:
    model = peft.get_peft_model(trainable(name), config(name, lora_dropout=0.5)).eval()
    expected = logits(model, IDS)
    attach(model, train=True, cache="fp32")
    model.train()
    with pytest.raises(ValueError, match=r"_proj\.lora_dropout.*without dropout.*serve after model.eval"):
        logits(model, IDS)
    assert relative_error(logits(model.eval(), IDS), expected) < BOUND


@pytest.mark.parametrize("name", TARGETS)
def test_adapters_with_a_bias_are_refused(name: str) -> None:
    """The bias would be in the image of every unit vector."""
    model = peft.get_peft_model(trainable(name), config(name, lora_bias=True))
    attach(model, train=True, deterministic=False)
    with pytest.raises(ValueError, match=r"_proj\.lora_B.default must be without a bias.*set lora_bias=False"):
        logits(model.eval(), IDS)
    if name == "v4":
        step(model, input_ids=IDS, labels=IDS)  # training calls all modules of V4 with tokens
        return
    with pytest.raises(ValueError, match=r"kv_b_proj.lora_B.default must be without a bias"):
        step(model, input_ids=IDS, labels=IDS)
