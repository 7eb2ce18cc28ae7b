"""The tiny DeepSeek-V4 of the engine benchmarks: its weights, its prompts, and tokens that follow from attention."""

import importlib
import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(scope="module")
def made() -> ModuleType:
    return importlib.import_module("vllm_v4_model")


@pytest.fixture(scope="module")
def weights(made: ModuleType) -> Any:
    return made.Weights(made.tiny_config(8))


@pytest.fixture(scope="module")
def tensors(weights: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = weights.tensors()
    return found


def test_blocks_have_scales_of_their_own(made: ModuleType) -> None:
    weight = torch.randn(2, 200, 256, generator=torch.Generator().manual_seed(1))
    weight[:, :128, 128:] *= 1000
    values, scales = made.quantised(weight)
    assert values.dtype == torch.float8_e4m3fn
    assert (values.shape, scales.shape) == (weight.shape, (2, 2, 2))
    assert torch.equal(scales.log2(), scales.log2().round())
    # No value saturates, and the largest uses the upper half of the range.
    assert 224 < values.float().abs().max() <= 448
    error = (made.restored(values, scales) - weight).abs()
    assert (error <= weight.abs() / 16 + 0.01 * scales.max()).all()
    assert (error[:, :128, :128] <= weight[:, :128, :128].abs() / 16 + 2.0**-9 * scales[:, :1, :1]).all()


class Model(nn.Module):
    """Parameters under names that vLLM gives them."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        for name, (shape, dtype) in shapes.items():
            parent: nn.Module = self
            *folders, leaf = name.split(".")
            for folder in folders:
                if not hasattr(parent, folder):
                    parent.add_module(folder, nn.Module())
                parent = getattr(parent, folder)
            parent.register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))


def test_a_model_of_vllm_is_filled(made: ModuleType, tensors: dict[str, Tensor]) -> None:
    fp8, wide = torch.float8_e4m3fn, torch.float32
    model = Model(
        {
            "model.embed_tokens.weight": ((1024, 1024), torch.bfloat16),
            "model.layers.1.attn.fused_wqa_wkv.weight": ((1024, 1024), fp8),
            "model.layers.1.attn.fused_wqa_wkv.weight_scale_inv": ((8, 8), wide),
            "model.layers.1.attn.attn_sink": ((64,), wide),
            "model.layers.1.attn.indexer.compressor.ape": ((4, 256), wide),
            "model.layers.2.ffn.experts.routed_experts.w13_weight": ((8, 512, 1024), fp8),
            "model.layers.2.ffn.experts.routed_experts.w13_weight_scale_inv": ((8, 4, 8), wide),
            "model.layers.2.ffn.gate.e_score_correction_bias": ((8,), wide),
            "lm_head.weight": ((1024, 1024), torch.bfloat16),
        }
    )
    made.fill(model, tensors)
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    weight = "model.layers.1.attn.fused_wqa_wkv.weight"
    near = made.restored(found[weight], found[f"{weight}_scale_inv"])
    assert (near - tensors["layers.1.attn.fused_wqa_wkv.weight"]).norm() < 0.04 * near.norm()
    sinks = found["model.layers.1.attn.attn_sink"]
    assert torch.equal(sinks[:8], tensors["layers.1.attn.attn_sink"])
    assert (sinks[8:] == -torch.inf).all()
    experts = "model.layers.2.ffn.experts.routed_experts.w13_weight"
    assert made.restored(found[experts], found[f"{experts}_scale_inv"]).norm() > 0
    with pytest.raises(KeyError, match=r"no weights for model\.layers\.0\.attn\.other"):
        made.fill(Model({"model.layers.0.attn.other": ((4,), wide)}), tensors)
    with pytest.raises(ValueError, match="has shape"):
        made.fill(Model({"model.layers.0.attn.wq_b.weight": ((4, 4), wide)}), tensors)


@pytest.mark.parametrize(("length", "most"), [(1500, 140), (3000, 240), (18000, 200)])
def test_an_indexer_can_select_every_salient_token(weights: Any, made: ModuleType, length: int, most: int) -> None:
    tokens = made.prompt(weights, length, random.Random(3))
    assert len(tokens) == length
    salient = set(weights.salient)
    places = [place for place, token in enumerate(tokens) if token in salient]
    assert len(places) <= most
    # A salient token is in two entries of four.
    assert len({entry for place in places for entry in (place // 4, place // 4 + 1)}) < 512
    # The window has some, and candidates are not among the tokens.
    assert sum(place >= length - 128 for place in places) >= 3
    assert not set(tokens) & {*weights.plain[-made.CANDIDATES :], 0, 1}


def dequantised(made: ModuleType, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b", "experts")
    return {
        name: made.restored(*made.quantised(tensor)) if any(part in name for part in parts) else tensor
        for name, tensor in tensors.items()
    }


def transformers_state(tensors: dict[str, Tensor], ratios: list[int], rank: int) -> dict[str, Tensor]:
    """The same weights under the names of Hugging Face's model."""
    state = {
        "model.embed_tokens.weight": tensors["embed_tokens.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    state |= {f"model.hc_head.hc_{part}": tensors[f"hc_head_{part}"] for part in ("fn", "base", "scale")}
    for number, ratio in enumerate(ratios):
        start = f"layers.{number}."
        given = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        layer, attention = f"model.layers.{number}.", f"model.layers.{number}.self_attn."
        joint = given["attn.fused_wqa_wkv.weight"]
        state |= {
            f"{attention}q_a_proj.weight": joint[:rank],
            f"{attention}kv_proj.weight": joint[rank:],
            f"{attention}q_a_norm.weight": given["attn.q_norm.weight"],
            f"{attention}kv_norm.weight": given["attn.kv_norm.weight"],
            f"{attention}q_b_proj.weight": given["attn.wq_b.weight"],
            f"{attention}o_a_proj.weight": given["attn.wo_a.weight"],
            f"{attention}o_b_proj.weight": given["attn.wo_b.weight"],
            f"{attention}sinks": given["attn.attn_sink"],
            f"{layer}input_layernorm.weight": given["attn_norm.weight"],
            f"{layer}post_attention_layernorm.weight": given["ffn_norm.weight"],
            f"{layer}mlp.gate.weight": given["ffn.gate.weight"],
            f"{layer}mlp.gate.e_score_correction_bias": given["ffn.gate.e_score_correction_bias"],
            f"{layer}mlp.experts.gate_up_proj": given["ffn.experts.w13_weight"],
            f"{layer}mlp.experts.down_proj": given["ffn.experts.w2_weight"],
            f"{layer}mlp.shared_experts.down_proj.weight": given["ffn.shared_experts.down_proj.weight"],
        }
        gate, up = given["ffn.shared_experts.gate_up_proj.weight"].chunk(2)
        state |= {f"{layer}mlp.shared_experts.gate_proj.weight": gate, f"{layer}mlp.shared_experts.up_proj.weight": up}
        for part in ("attn", "ffn"):
            state |= {f"{layer}{part}_hc.{name}": given[f"hc_{part}_{name}"] for name in ("fn", "base", "scale")}
        places = [("attn.compressor.", f"{attention}compressor.")] if ratio else []
        places += [("attn.indexer.compressor.", f"{attention}compressor.indexer.")] if ratio == 4 else []
        for source, target in places:
            values, gates = given[f"{source}fused_wkv_wgate.weight"].chunk(2)
            state |= {
                f"{target}kv_proj.weight": values,
                f"{target}gate_proj.weight": gates,
                f"{target}position_bias": given[f"{source}ape"],
                f"{target}kv_norm.weight": given[f"{source}norm.weight"],
            }
        if ratio == 4:
            index = f"{attention}compressor.indexer."
            state[f"{index}q_b_proj.weight"] = given["attn.indexer.wq_b.weight"]
            state[f"{index}scorer.weights_proj.weight"] = given["attn.indexer.weights_proj.weight"]
    return state


class Attention:
    """Attention of Hugging Face's model with noise on its outputs, or without some of what it sees."""

    def __init__(self) -> None:
        self.noise, self.without = 0.0, ""
        self.entries: dict[int, int] = {}

    def __call__(self, module: Any, q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        rows = key[:, 0]
        entries = self.entries.get(module.layer_idx, 0)
        scores = torch.einsum("bhsd,btd->bhst", q, rows) * options["scaling"]
        if mask is not None:
            scores = scores + mask
        window = scores.shape[-1] - entries
        if self.without == "entries":
            scores[..., window:] = -torch.inf
        if self.without == "window":
            scores[..., : window - 1] = -torch.inf
        sinks = module.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        found = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ rows[:, None]
        found = found * (1 + self.noise * torch.randn(found.shape, generator=torch.Generator().manual_seed(5)))
        return found.transpose(1, 2), None


@torch.inference_mode()
def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    cache = sys.modules["transformers"].DynamicCache(config=model.config)
    tokens, step = [], torch.tensor([prompt])
    for _ in range(count):
        logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
        step = torch.tensor([tokens[-1:]])
    return tokens


def test_tokens_follow_from_attention_and_not_from_rounding(
    made: ModuleType, weights: Any, tensors: dict[str, Tensor]
) -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = made.tiny_config(8)
    unused = ("architectures", "expert_dtype", "model_type", "quantization_config", "swiglu_limit", "topk_method")
    known = {name: value for name, value in config.items() if name not in (*unused, "torch_dtype", "rope_scaling")}
    scaling = {name: value for name, value in config["rope_scaling"].items() if name != "type"}
    model = modeling.DeepseekV4ForCausalLM(
        modeling.DeepseekV4Config(**known, swiglu_limit=1e6, rope_parameters=scaling, attn_implementation="eager")
    ).eval()
    state = transformers_state(dequantised(made, tensors), config["compress_ratios"], config["q_lora_rank"])
    model.load_state_dict(state)
    attention = Attention()
    modeling.ALL_ATTENTION_FUNCTIONS.register("measured", attention)
    model.config._attn_implementation = "measured"
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.compressor is not None:

            def count(module: Any, given: Any, found: Any, number: int = number) -> None:
                attention.entries[number] = found[0].shape[2]

            layer.self_attn.compressor.register_forward_hook(count)

    long = made.prompt(weights, 1200, random.Random(7))
    with torch.inference_mode():
        best = model(input_ids=torch.tensor([long]), use_cache=False).logits[0, 600:].topk(2).values
    # Engines should agree on 95% of the tokens, so near-ties must be rarer than 5%. Errors of attention are 0.2%; 3%
    # leaves room for what later layers make of them.
    assert (best[:, 0] - best[:, 1] < 0.03 * best[:, 0]).float().mean() <= 0.05

    prompt = made.prompt(weights, 600, random.Random(7))
    usual = generate(model, prompt, 16)
    assert set(usual) <= set(weights.plain[-made.CANDIDATES :])
    assert len(set(usual)) >= 3
    attention.noise = 0.002
    assert equal(generate(model, prompt, 16), usual) >= 15 / 16
    attention.noise = 0.0
    for attention.without in ("entries", "window"):
        assert equal(generate(model, prompt, 16), usual) <= 0.7


def equal(left: list[int], right: list[int]) -> float:
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)
