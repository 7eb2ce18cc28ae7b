"""The changes that `attach` makes to a model and `detach` undoes, and the arguments that both refuse."""

import copy
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import (
    FAMILIES,
    MODELS,
    SMALL,
    base_of,
    build,
    every_kind_of_cache,
    greedy,
    logits,
    tokens,
    transformers,
    v32_only,
)
from settings import default_dtype

from tamis.integrations import transformers as attaching
from tamis.integrations.hf import train_attach
from tamis.integrations.transformers import attach, detach, is_attached, new_cache

# What transformers itself computes follows the default device, and an autocast or shorter products as they should.
pytestmark = pytest.mark.own_settings("the models' own", without=("meta", "cuda", "autocast", "tf32"))


@every_kind_of_cache
def test_detach_restores_everything(model: Any) -> None:
    ids = tokens(2, 60)
    expected, tokens_before = logits(model, ids), greedy(model, ids, 8)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    names = list(model.state_dict())
    attach(model)
    assert is_attached(model)
    logits(model, ids)
    assert list(model.state_dict()) == names
    detach(model)
    assert not is_attached(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(greedy(model, ids, 8), tokens_before)
    detach(model)
    detach(torch.nn.Linear(2, 2))


@every_kind_of_cache
def test_a_copied_model_has_its_own_attention(model: Any) -> None:
    ids = tokens(1, 50)
    attach(model, cache="fp32")
    expected = logits(model, ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(logits(other, ids), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_attached_again_after_a_conversion(name: str) -> None:
    model, ids = build(name), tokens(1, 50)
    attach(model, cache="fp32")
    logits(model, ids)
    model.half()
    with pytest.raises(ValueError, match="float32 on cpu, as when it was attached, got float16"):
        logits(model, ids)
    expected = logits(model.float(), ids)
    detach(model)
    assert relative_error(expected, logits(model, ids)) < 1e-5


@v32_only
def test_a_layer_that_is_no_plain_linear_is_absorbed_too(model: Any) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.halved = torch.nn.Parameter(inner.weight / 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.halved) * 2

    ids = tokens(1, 60)
    expected = logits(model, ids)
    attention = model.model.layers[0].self_attn
    plain = attention.kv_b_proj
    attention.kv_b_proj = Scaled(plain)
    attach(model, cache="fp32")
    try:
        assert relative_error(logits(model, ids), expected) < 1e-5
    finally:
        attention.kv_b_proj = plain


@v32_only
def test_wrong_attachments_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="cache must be one of 'fp8', 'bf16', 'fp32'"):
        attach(model, cache="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonesuch"):
        attach(model, backend="nonesuch")
    assert not is_attached(model)
    known = "DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM, DeepseekV4ForCausalLM, .*"
    with pytest.raises(ValueError, match=rf"{known}, got Linear; this one has no sparse latent attention"):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=rf"{known}, got DeepseekV32Model; this is a part of a model"):
        attach(model.model)
    with pytest.raises(ValueError, match=rf"{known}, got DeepseekV32DecoderLayer; this is a part of a model"):
        attach(model.model.layers[0])
    with pytest.raises(ValueError, match="call attach"):
        new_cache(model)
    attach(model)
    with pytest.raises(ValueError, match="detach"):
        attach(model)
    detach(model)
    model.model.forward = model.model.forward
    try:
        with pytest.raises(ValueError, match="hooks"):
            attach(model)
    finally:
        del model.model.forward


def test_the_refusal_names_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made from the list of models, in inference as in training."""
    model, name = build("axk2"), "AXK2ForCausalLM"
    monkeypatch.setattr(train_attach, "FORWARDS", {n: f for n, f in train_attach.FORWARDS.items() if n != name})
    with pytest.raises(ValueError, match=rf"to train, got {name}; attach it without train=True") as refused:
        attach(model, train=True)
    assert all(known in str(refused.value) for known in train_attach.FORWARDS)
    monkeypatch.setattr(attaching, "_MODELS", {n: parts for n, parts in attaching._MODELS.items() if n != name})
    with pytest.raises(ValueError, match=rf"got {name}; this one has an indexer too, but tamis does not") as refused:
        attach(model)
    assert str(refused.value).startswith(f"model must be one of {', '.join(attaching._MODELS)}, got")
    assert not is_attached(model)


def test_an_indexer_that_only_the_config_has_is_none() -> None:
    """LongCat's config may have one, and transformers' class attends densely all the same."""
    config = transformers.LongcatFlashConfig(
        **{name: SMALL[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "vocab_size")},
        num_layers=1,
        kv_lora_rank=32,
        ffn_hidden_size=32,
        expert_ffn_hidden_size=32,
        n_routed_experts=2,
        zero_expert_num=1,
        moe_topk=1,
        index_topk=32,
    )
    with torch.device("cpu"):
        model = transformers.LongcatFlashForCausalLM(config)
    assert model.config.index_topk == 32
    with pytest.raises(ValueError, match="got LongcatFlashForCausalLM; this one has no sparse latent attention"):
        attach(model)


@pytest.mark.parametrize(("name", "first"), [("glm-shared", 0), ("hy4", 0), ("mistral-large4", 0), ("glm5-next", 1)])
def test_a_first_layer_without_a_selection_is_refused(name: str, first: int) -> None:
    model = build(name, indexer_types=["shared"] * MODELS[name][1]["num_hidden_layers"])
    with pytest.raises(ValueError, match=rf"config.indexer_types\[{first}\] must be 'full' in the first layer"):
        attach(model)
    assert not is_attached(model)


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"backend": "tritn"}, "backend must be one of 'auto', .*, got 'tritn'"),
    "no function": ({"wrap_layer": None}, "wrap_layer must be a function .*, got NoneType; leave it out"),
    "no layer": (
        {"wrap_layer": lambda number, layer: None},
        r"wrap_layer\(\d, layer\) must be a Sparse\w+, got NoneType",
    ),
    "indexer": ({"indexer": "sparse"}, "indexer must be left out without train=True, got 'sparse'; pass train=True"),
    "index loss": ({"index_loss": 0.5}, "index_loss must be left out without train=True, got 0.5"),
    "deterministic": ({"deterministic": False}, "deterministic must be left out without train=True"),
    "teachers": ({"teachers": "readers"}, "teachers must be left out without train=True"),
}


@every_kind_of_cache
@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_options_that_cannot_be_meant_are_refused(model: Any, name: str) -> None:
    given, message = WRONG_OPTIONS[name]
    before = {name: set(vars(module)) for name, module in model.named_modules()}

    def use() -> None:
        attach(model, **given)
        logits(model, tokens(1, 8))  # which makes V4's layers

    with pytest.raises((ValueError, TypeError), match=message):
        use()
    detach(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@every_kind_of_cache
def test_wrong_inputs_are_refused_by_name(model: Any) -> None:
    """Before a token is counted: the cache can be used as if the call had not been made."""
    ids, positions = tokens(2, 20), torch.arange(20).unsqueeze(0)
    attach(model, cache="fp32")
    held = new_cache(model)
    expected = logits(model, ids, past_key_values=held)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids[0]}, r"input_ids must be of shape \[requests, columns\], got \[20\]"),
        ({"input_ids": ids.unsqueeze(0)}, r"input_ids must be of shape \[requests, columns\], got \[1, 2, 20\]"),
        ({"input_ids": ids.float()}, "input_ids must be int32 or int64, got float32"),
        ({"input_ids": ids[:, :0]}, r"input_ids must be of at least one request and one token, got \[2, 0\]"),
        ({"input_ids": ids[:0]}, r"input_ids must be of at least one request and one token, got \[0, 20\]"),
        ({"inputs_embeds": torch.zeros(2, 20)}, r"inputs_embeds must be of shape \[requests, columns, hidden\]"),
        ({"input_ids": ids, "position_ids": positions[:, 1:]}, r"position_ids must be of shape \[rows, columns=20\]"),
        ({"input_ids": ids, "position_ids": positions.float()}, "position_ids must be int32 or int64, got float32"),
        ({"input_ids": ids, "position_ids": positions.expand(3, 20)}, "position_ids must be of 1 or 2 rows"),
        ({"input_ids": ids, "output_attentions": True}, "output_attentions must be False for an attached model"),
    ]
    for given, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            base_of(model)(**given, past_key_values=held)
    assert held.get_seq_length() == 20
    fresh = new_cache(model)
    assert torch.equal(logits(model, ids, past_key_values=fresh), expected)
    found = logits(model, ids[:, :1], past_key_values=held)
    assert torch.equal(found, logits(model, ids[:, :1], past_key_values=fresh))


@pytest.mark.parametrize("name", [*FAMILIES, "mistral-large4"])
def test_weights_that_are_written_through_data_count(name: str) -> None:
    """As programs write them that copy a trainer's weights: torch counts no change."""
    ids, model = tokens(1, 40), build(name).to(torch.bfloat16)
    attach(model, cache="bf16")
    before = logits(model, ids)
    for module in base_of(model).layers:
        for parameter in module.self_attn.parameters():
            parameter.data.mul_(1.5)
    found = logits(model, ids)
    detach(model)
    attach(model, cache="bf16")
    assert torch.equal(found, logits(model, ids))
    assert not torch.equal(found, before)


@every_kind_of_cache
def test_packed_sequences_are_refused(model: Any) -> None:
    """Where transformers would keep them apart: in a call without mask and cache."""
    ids, own = tokens(1, 40), torch.arange(20)
    packed = torch.cat((own, own)).unsqueeze(0)
    expected = logits(model, ids, position_ids=packed, use_cache=True)
    attach(model, cache="fp32")
    with pytest.raises(ValueError, match="position_ids must be those of one sequence per row, got packed sequences"):
        logits(model, ids, position_ids=packed, use_cache=False)
    alone = logits(model, ids, position_ids=torch.arange(3, 43).unsqueeze(0), use_cache=False)
    assert alone.shape == expected.shape
    if type(model).__name__ != "DeepseekV4ForCausalLM":  # which counts a request's own tokens
        assert relative_error(logits(model, ids, position_ids=packed, use_cache=True), expected) < 1e-4


def test_models_that_are_none_or_of_another_dtype_are_refused() -> None:
    model = build("hy4")
    for wrong in (model.config, None, "tencent/Hy4-preview"):
        with pytest.raises(TypeError, match=r"model must be a model of transformers, got .*; pass the loaded model"):
            attach(wrong)
    with pytest.raises(TypeError, match=r"model must be of bfloat16, float16 or float32, got float64; convert it with"):
        attach(model.double())
    assert not is_attached(model)


@v32_only
@pytest.mark.own_settings("refuses a gradient, which inference mode has none of", without=("inference",))
def test_wrong_uses_are_refused(model: Any) -> None:
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    attach(model)
    with pytest.raises(ValueError, match="no_grad"):
        model(ids)
    with pytest.raises(ValueError, match="TamisCache, got DynamicCache"):
        logits(model, ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="padding mask"):
        logits(model, ids, attention_mask=torch.ones(2, 1, 20, 20))
    with pytest.raises(ValueError, match="cache_implementation"):
        greedy(model, ids, 2, cache_implementation="static")
    held = new_cache(model)
    logits(model, ids, attention_mask=mask, past_key_values=held)
    with pytest.raises(ValueError, match="unchanged"):
        logits(model, ids[:, :1], attention_mask=torch.ones(2, 21), past_key_values=held)
    with pytest.raises(ValueError, match="attention_mask must be given for a cache with padding"):
        logits(model, ids[:, :1], past_key_values=held)
    with pytest.raises(ValueError, match="of 2 rows"):
        logits(model, ids[:1, :1], past_key_values=held)
    assert held.get_seq_length() == 20
    detach(model)
    with pytest.raises(ValueError, match="attach the model"):
        logits(model, ids[:, :1], past_key_values=held)
    attach(model, cache="bf16")
    with pytest.raises(ValueError, match="another model's"):
        logits(model, ids[:, :1], past_key_values=held)


@pytest.mark.own_settings("makes its own")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@every_kind_of_cache
def test_an_attached_model_does_not_follow_defaults(model: Any, dtype: torch.dtype) -> None:
    """ "meta" stands for any default device that is not the model's."""
    attach(model)
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    expected = logits(model, ids, attention_mask=mask)
    with default_dtype(dtype), torch.device("meta"):
        found = logits(model, ids, attention_mask=mask)
    assert torch.equal(found, expected)
