"""Adapters that write to caches or outputs check everything first: a refused call leaves them as they were."""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
from engine_standin import LATENT, NOPE, ROPE, VALUE
from hf_models import tokens
from v4_standin import HEADS, Records, V4Step, layer_of

from tamis.integrations.transformers import attach, new_cache
from tamis.integrations.vllm.classes.v4_impl import V4Impl
from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill

TOKENS, ENGINE_HEADS = 3, 2


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize(
    "fault", ["q width", "output width", "output rows", "positions width", "sink heads", "page size", "no weights"]
)
def test_the_one_call_form_of_vllm_checks_before_it_writes(cache_dtype: str, fault: str) -> None:
    lengths, queries = [40, 9], [1, 2]
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    slots = torch.tensor([64 + 39, 128 + 7, 128 + 8])
    configuration = engine.config(ENGINE_HEADS, cache_dtype)
    metadata = engine.builder(configuration).build(0, engine.common(lengths, queries, table, slots))
    positions = torch.zeros(8, engine.TOPK, dtype=torch.int32)
    sinks = torch.zeros(ENGINE_HEADS) if fault != "sink heads" else torch.zeros(ENGINE_HEADS + 1)
    weight = torch.nn.Linear(LATENT, ENGINE_HEADS * (NOPE + VALUE), bias=False, dtype=torch.bfloat16)
    impl = engine.impl(ENGINE_HEADS, cache_dtype, topk_indices_buffer=positions, sinks=sinks, kv_b_proj=weight)
    if fault != "no weights":
        impl.process_weights_after_loading(torch.bfloat16)
    if fault == "positions width":
        impl.topk_indices_buffer = positions[:, :-1]
    size = 32 if fault == "page size" else 64
    packed = cache_dtype == "fp8_ds_mla"
    row, dtype = (656, torch.uint8) if packed else (LATENT + ROPE, torch.bfloat16)
    storage = torch.zeros(6, size, row, dtype=dtype)
    q = torch.randn(TOKENS, ENGINE_HEADS, NOPE + ROPE + (fault == "q width"), dtype=torch.bfloat16)
    rows = TOKENS - (fault == "output rows")
    output = torch.full((rows, ENGINE_HEADS * (VALUE + (fault == "output width"))), 3.0, dtype=torch.bfloat16)
    latent, rope = torch.randn(TOKENS, LATENT).bfloat16(), torch.randn(TOKENS, ROPE).bfloat16()
    with pytest.raises((ValueError, TypeError)), torch.no_grad():
        impl.forward(engine.layer(), q, latent, rope, storage, metadata, output)
    assert not storage.view(torch.uint8).any()
    assert output.eq(3).all()


def spoil(layer: SimpleNamespace, q: torch.Tensor, output: torch.Tensor, fault: str) -> tuple[torch.Tensor, ...]:
    if fault == "sink":
        layer.attn_sink = layer.attn_sink[: HEADS - 1]
    elif fault == "scale":
        layer.scale = float("nan")
    elif fault == "q dtype":
        q = q.to(torch.int32)
    else:
        output = output.to(torch.int32)
    return q, output


FAULTS = ["sink", "scale", "q dtype", "output dtype"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ratio", [1, 4])
def test_a_v4_layer_of_vllm_checks_before_it_zeroes_padded_heads(ratio: int, fault: str) -> None:
    step = V4Step("v4-bf16")
    records, layer = Records(step, ratio), layer_of(step, ratio)
    given = torch.full((len(step.tokens), 64, 512), 3.0)
    q, output = spoil(layer, step.q, given, fault)
    window, main, first = records.window, records.main, records.decodes
    positions = torch.tensor([p for _, p in step.tokens])
    raw, entries = layer.swa_cache_layer.kv_cache, layer.kv_cache
    with pytest.raises((ValueError, TypeError)):
        forward_decode(layer, q[:first], entries, window, main, ratio == 1, output[:first])
    with pytest.raises((ValueError, TypeError)):
        forward_prefill(layer, q[first:], positions[first:], entries, raw, output[first:], main, window)
    assert output.eq(3).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_mixed_indices_are_checked_before_padded_heads_are_zeroed(fault: str) -> None:
    step = V4Step("v4-bf16")
    records, layer = Records(step, 4), layer_of(step, 4)
    q, output = spoil(layer, step.q, torch.full((len(step.tokens), 64, 512), 3.0), fault)
    options: dict[str, Any] = {"swa_metadata": records.window, "attn_metadata": records.main}
    with pytest.raises((ValueError, TypeError)):
        V4Impl().forward_mqa(layer, q, None, None, output, **options)
    assert output.eq(3).all()


@pytest.mark.own_settings("the models' own", without=("meta", "cuda", "autocast", "tf32"))
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("part", ["q_b_proj", "kv_a_layernorm", "kv_a_proj_with_mqa"])
@pytest.mark.parametrize("model", ["v32"], indirect=True)
def test_an_attached_model_checks_before_it_writes_index_keys(
    model: Any, kind: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make a part of the first layer give numbers that attention refuses."""
    attach(model, cache=kind)
    cache, ids = new_cache(model), tokens(2, 9)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        before = {name: held.storage.clone() for name, held in cache.paged[0].items()}
        module = getattr(model.model.layers[0].self_attn, part)
        original = module.forward
        monkeypatch.setattr(module, "forward", lambda x: original(x).to(torch.int32))
        with pytest.raises((ValueError, TypeError)):
            model(ids[:, 8:], past_key_values=cache)
    assert cache.get_seq_length() == 8
    for name, held in cache.paged[0].items():
        assert torch.equal(held.storage.view(torch.uint8), before[name].view(torch.uint8)), name
