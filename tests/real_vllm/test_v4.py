"""DeepSeek-V4: vLLM's layer class is replaced where CUSTOM is chosen, says so where it is not, and attends."""

import pickle
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import v4_standin as v4
from vllm.model_executor.models.registry import ModelRegistry
from vllm.models.deepseek_v4 import attention as engine_attention
from vllm.models.deepseek_v4.nvidia import flashmla, model
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tamis.integrations.vllm import v4_plugin
from tamis.integrations.vllm.v4_layer import TamisV4Attention


def config_with(backend: AttentionBackendEnum | None, cache_dtype: str = "fp8_ds_mla") -> SimpleNamespace:
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


CHOSEN, USUAL = config_with(AttentionBackendEnum.CUSTOM), config_with(None)


@pytest.fixture
def selecting(monkeypatch: pytest.MonkeyPatch, hopper: type[Any]) -> type[Any]:
    """vLLM's own choice, to be replaced in a test and found again after it."""
    monkeypatch.setattr(model, "_select_dsv4_attn_cls", model._select_dsv4_attn_cls)
    monkeypatch.setattr(model, "current_platform", hopper())
    return hopper


def test_every_v4_model_is_found_in_the_plugin() -> None:
    registered = {
        name: known for name, known in ModelRegistry.models.items() if known.module_name.endswith(".v4_plugin")
    }
    assert {"DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "DSparkDraftModel"} <= set(registered)
    for known in registered.values():
        package, _, class_name = known.class_name.partition("__")
        ours, theirs = known.load_model_cls(), getattr(import_module(f"vllm.models.{package}"), class_name)
        assert ours.__bases__ == (theirs,)
        assert pickle.loads(pickle.dumps(ours)) is ours
    for name in ("NoSuchModel", "deepseek_v4__NoSuchModel"):
        with pytest.raises(AttributeError, match="NoSuchModel"):
            getattr(v4_plugin, name)


@pytest.mark.usefixtures("selecting")
def test_the_class_is_replaced_where_custom_is_chosen() -> None:
    usual = model._select_dsv4_attn_cls(CHOSEN)
    assert usual is flashmla.DeepseekV4FlashMLAAttention, "what vLLM makes of an unknown choice"
    v4_plugin.replace_attention()
    v4_plugin.replace_attention()
    assert model._select_dsv4_attn_cls(CHOSEN) is TamisV4Attention
    assert model._select_dsv4_attn_cls(USUAL) is usual
    assert not TamisV4Attention.__abstractmethods__
    assert TamisV4Attention.get_padded_num_q_heads(13) == 13


def test_other_devices_are_refused(selecting: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "get_device_capability", classmethod(lambda *_: DeviceCapability(12, 0)))
    with pytest.raises(ValueError, match=r"compute capability 9\.x and 10\.x, and this one has .*12"):
        v4_plugin.replace_attention()


class Model:
    """A model class of vLLM's, as far as the plugin looks: it builds one attention layer by vLLM's choice."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        kind = model._select_dsv4_attn_cls(vllm_config)
        vllm_config.compilation_config.static_forward_context["layers.0.attn"] = kind.__new__(kind)


@pytest.mark.usefixtures("selecting")
def test_a_model_checks_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = v4_plugin._checked(Model, "Model")
    chosen, usual = config_with(AttentionBackendEnum.CUSTOM), config_with(None)
    checked(vllm_config=usual)
    assert (
        type(usual.compilation_config.static_forward_context["layers.0.attn"]) is flashmla.DeepseekV4FlashMLAAttention
    )
    checked(vllm_config=chosen)
    assert type(chosen.compilation_config.static_forward_context["layers.0.attn"]) is TamisV4Attention
    # A later vLLM may choose elsewhere: then nothing was replaced, and nothing may run silently.
    monkeypatch.setattr(v4_plugin, "replace_attention", lambda *_: None)
    monkeypatch.setattr(model, "_select_dsv4_attn_cls", lambda _: flashmla.DeepseekV4FlashMLAAttention)
    with pytest.raises(RuntimeError, match="CUSTOM was chosen, but vLLM built DeepseekV4FlashMLAAttention"):
        checked(vllm_config=config_with(AttentionBackendEnum.CUSTOM))
    with pytest.raises(RuntimeError, match="no V4 attention at all"):
        v4_plugin.check_attention([])


@pytest.mark.usefixtures("selecting")
def test_models_that_tamis_cannot_run_are_refused() -> None:
    for name in v4_plugin._REFUSED:
        refused = v4_plugin._checked(Model, name)
        refused(vllm_config=config_with(None))
        with pytest.raises(ValueError, match="tamis does not run Model: "):
            refused(vllm_config=config_with(AttentionBackendEnum.CUSTOM))


@pytest.mark.usefixtures("selecting")
def test_context_parallelism_is_refused() -> None:
    sizes = ("decode_context_parallel_size", "prefill_context_parallel_size")
    for size, reason in zip(sizes, ("spread over 2 ranks", "divided among 2 ranks"), strict=True):
        for ranks in (1, 2):
            config = config_with(AttentionBackendEnum.CUSTOM)
            config.parallel_config = SimpleNamespace(**{size: ranks})
            checked = v4_plugin._checked(Model, "Model")
            if ranks == 1:
                checked(vllm_config=config)
                continue
            with pytest.raises(ValueError, match=f"tamis does not run Model: .*{reason}"):
                checked(vllm_config=config)


def record(kind: type[Any], of: Any, **more: Any) -> Any:
    """vLLM's own record with the values of ours."""
    fields = kind.__dataclass_fields__
    return kind(**{name: getattr(of, name) for name in fields if hasattr(of, name)}, **more)


@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("shape", v4.SHAPES)
def test_the_replaced_layer_attends(shape: str, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own `forward_mqa` around our kernels, with vLLM's records, and rows of padding behind the step."""
    step, padding = v4.V4Step("v4-fp8", *v4.SHAPES[shape]), 3
    layer = TamisV4Attention.__new__(TamisV4Attention)
    torch.nn.Module.__init__(layer)
    for name, value in vars(v4.layer_of(step, ratio)).items():
        setattr(layer, name, value)
    layer.prefix, layer.swa_cache_layer.prefix = "attn", "window"
    metadata = {"window": record(DeepseekSparseSWAMetadata, v4.window_builder().build(0, step.common("window")))}
    if ratio > 1:
        metadata["attn"] = record(DeepseekV4FlashMLAMetadata, v4.main_builder(ratio).build(0, step.common("main")))
    monkeypatch.setattr(flashmla, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
    q = torch.cat((step.q, torch.ones(padding, *step.q.shape[1:])))
    output = torch.full_like(q, 3.0)
    positions = torch.tensor([p for _, p in step.tokens] + [0] * padding)
    assert isinstance(layer, engine_attention.DeepseekV4Attention)
    layer.forward_mqa(q, None, positions, output)
    step.agrees(output[: len(step.tokens)], ratio)
