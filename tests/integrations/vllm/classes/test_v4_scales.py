"""Which factors V4's attention multiplies with: those of the layer, for the formats that the layer declares."""

from typing import Any

import pytest
import torch
from v4_standin import HEADS, RATIOS, SCALE, Records, V4Step, attend_mixed, attend_pages, layer_of

from tamis.cache.layout import plain_fp8
from tamis.integrations.vllm.classes.v4_impl import V4Impl, init_layer_buffers

E4M3 = torch.float8_e4m3fn
Q_SCALE, KV_SCALE = 0.05, 0.02
"""Half a unit in the last of bf16's eight bits: an e4m3 query has an output in bf16."""


def scaled_step(held: torch.dtype = E4M3) -> V4Step:
    """Rows in e4m3 under one scale, in a tensor of this dtype."""
    step = V4Step(plain_fp8(latent=448), scale=KV_SCALE)
    for cache in (step.window, *step.entries.values()):
        cache.storage = cache.storage.view(held)
    return step


def scaled_layer(step: V4Step, ratio: int, **more: Any) -> Any:
    factors = {"_q_scale_float": Q_SCALE, "_k_scale_float": KV_SCALE, "kv_cache_torch_dtype": E4M3}
    layer = layer_of(step, ratio, **(factors | more))
    init_layer_buffers(layer)
    return layer


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("held", [E4M3, torch.uint8])
@pytest.mark.parametrize("attend", [attend_mixed, attend_pages])
def test_real_scales_of_fp8_queries_and_caches(attend: Any, held: torch.dtype, ratio: int) -> None:
    """Engines may hold an e4m3 cache as bytes, so the layer and not the tensor determines the format."""
    step = scaled_step(held)
    layer = scaled_layer(step, ratio)
    assert layer._flashinfer_fp8_bmm1_scale == SCALE * Q_SCALE * KV_SCALE
    q = (step.q * layer._flashinfer_fp8_q_scale_inv).to(E4M3)
    output = attend(step, q, layer, Records(step, ratio))
    step.agrees(output[:, :HEADS], ratio, q.double() * Q_SCALE)


@pytest.mark.parametrize("ratio", RATIOS)
def test_queries_that_were_never_scaled_have_no_scale(ratio: int) -> None:
    """Over pages, where query and cache have factors of their own, a 16-bit query may meet e4m3 rows."""
    step = scaled_step()
    output = attend_pages(step, step.q, scaled_layer(step, ratio), Records(step, ratio))
    step.agrees(output[:, :HEADS], ratio)


@pytest.mark.parametrize("layout", ["v4-bf16", "v4-fp8"])
def test_queries_and_caches_of_two_kinds_are_refused(layout: str) -> None:
    """In the mixed-index style one factor serves query and cache, so these combinations have none."""
    step = V4Step(layout, [1], [200])
    layer, records = layer_of(step, 4, _q_scale_float=Q_SCALE), Records(step, 4)
    kind = "bfloat16" if layout == "v4-bf16" else "uint8"
    expected = f"q must be bfloat16 or float16 or float32 for the layer's {kind} cache, got float8_e4m3fn"
    with pytest.raises(TypeError, match=expected):
        attend_mixed(step, step.q.to(E4M3), layer, records)
    step = V4Step(plain_fp8(latent=448), [1], [200], scale=KV_SCALE)
    with pytest.raises(TypeError, match=r"q must be float8_e4m3fn for the layer's float8_e4m3fn cache, got float32"):
        attend_mixed(step, step.q, scaled_layer(step, 4), Records(step, 4))


@pytest.mark.parametrize("attend", [attend_mixed, attend_pages])
def test_caches_that_are_not_what_the_layer_declares_are_refused(attend: Any) -> None:
    step = V4Step("v4-bf16", [1], [200])
    records = Records(step, 4)
    for declared, expected in ((torch.uint8, "uint8 rows of 584"), (torch.float32, "float32 rows of 512")):
        layer = layer_of(step, 4, kv_cache_torch_dtype=declared)
        with pytest.raises(ValueError, match=rf"swa_kv_cache must be {expected}, .*, got bfloat16 rows of 512"):
            attend(step, step.q, layer, records)
    layer = layer_of(step, 4, kv_cache=step.entries[4].storage.float())
    with pytest.raises(ValueError, match=r"kv_cache must be bfloat16 rows of 512, .*, got float32 rows of 512"):
        attend(step, step.q, layer, records)


def test_a_scaled_cache_needs_the_layers_buffers() -> None:
    step = V4Step(plain_fp8(latent=448), [1], [200], scale=KV_SCALE)
    layer = layer_of(step, 1, kv_cache_torch_dtype=E4M3)
    output = torch.empty(1, HEADS, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"layer._flashinfer_fp8_bmm1_scale must be set.*call init_layer_buffers"):
        V4Impl().forward_mqa(layer, step.q.to(E4M3), None, None, output, swa_metadata=Records(step, 1).window)
