"""Registration, choice and refusals, through vLLM's own registry and selector."""

from importlib.metadata import entry_points
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.version
from vllm.config import VllmConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tamis.integrations.vllm import register, v4_plugin
from tamis.integrations.vllm.backend import TamisSparseBackend
from tamis.integrations.vllm.versions import SUPPORTED, divides_prompts, plugin_refusal, sparse_impl_base


def choose(**changes: Any) -> type[AttentionBackend]:
    selector._cached_get_attn_backend.cache_clear()
    options: dict[str, Any] = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    return selector.get_attn_backend(**(options | {"use_mla": True, "use_sparse": True} | changes))


def test_the_entry_point_is_found_and_registers() -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "tamis")
    assert point.load() is register
    backend: Any = AttentionBackendEnum.CUSTOM.get_class()
    assert issubclass(backend, TamisSparseBackend)
    assert issubclass(backend, AttentionBackend)
    assert issubclass(backend.get_impl_cls(), sparse_impl_base())
    assert issubclass(backend.get_builder_cls(), AttentionMetadataBuilder)
    assert not backend.get_impl_cls().__abstractmethods__
    assert not backend.get_builder_cls().__abstractmethods__
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is backend


def test_this_version_is_supported() -> None:
    assert vllm.version.__version__.startswith(SUPPORTED)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8_ds_mla", "fp8"])
def test_it_is_chosen(current: VllmConfig, cache_dtype: str) -> None:
    backend = choose(kv_cache_dtype=cache_dtype)
    assert backend is AttentionBackendEnum.CUSTOM.get_class()
    assert backend.get_supported_kernel_block_sizes() == [64]
    support = backend.get_builder_cls().get_cudagraph_support(current, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.usefixtures("hopper", "current")
@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"head_size": 128}, ["head size 128 is not one of 576, 512"]),
        ({"kv_cache_dtype": "int8_per_token_head"}, ["cache dtype 'int8_per_token_head' is not one of auto"]),
        ({"use_sparse": False}, ["the layer is not sparse"]),
        ({"use_mla": False, "head_size": 64}, ["not latent attention", "head size 64"]),
        ({"use_mm_prefix": True}, ["bidirectional multimodal prefixes"]),
        ({"attn_type": "encoder"}, ["attention type encoder not supported"]),
    ],
)
def test_layers_are_refused_with_reasons(changes: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(ValueError, match=r"CUSTOM is not valid for this configuration\. Reason") as caught:
        choose(**changes)
    assert all(reason in str(caught.value) for reason in reasons)


@pytest.mark.usefixtures("hopper")
def test_configurations_are_refused_with_reasons(current: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    current.attention_config.use_non_causal = True
    reasons = ["batch invariance not supported", "non-causal attention not supported"]
    if hasattr(current.attention_config, "hisparse_config"):
        current.attention_config.hisparse_config = object()
        reasons += ["host memory (HiSparse)"]
    if "use_pcp" in signature(AttentionBackend.validate_configuration).parameters:
        parallel = current.parallel_config
        parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size = 2, 4
        reasons += ["(TP x PCP) are not supported" if divides_prompts() else "PCP not supported"]
    current.model_config.hf_text_config.model_type = "dots3_note"
    reasons += ["dots3-note's layers choose their own attention in vLLM"]
    delattr(current.model_config.hf_config, "index_topk")
    reasons += ["the model config has no index_topk"]
    with pytest.raises(ValueError, match="CUSTOM is not valid") as caught:
        choose()
    assert all(reason in str(caught.value) for reason in reasons)


@pytest.mark.usefixtures("hopper", "current")
def test_other_versions_are_refused_when_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(vllm.version, "__version__", "0.24.1")
        register()
        with pytest.raises(ValueError, match=r"tamis supports vLLM 0\.25\.x to 0\.32\.x, and this is 0\.24\.1"):
            choose()
    register()
    assert issubclass(choose(), TamisSparseBackend)


def test_the_backend_of_another_plugin_stays(caplog: pytest.LogCaptureFixture) -> None:
    custom = AttentionBackendEnum.CUSTOM
    ours = custom.get_path()
    register_backend(custom, "their.plugin.Backend")
    try:
        register()
        assert custom.get_path() == "their.plugin.Backend"
        assert not v4_plugin._chosen(SimpleNamespace(attention_config=SimpleNamespace(backend=custom)))
    finally:
        register_backend(custom, ours)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "tamis")
    assert "another plugin has registered their.plugin.Backend" in line
    assert plugin_refusal() is None


@pytest.mark.usefixtures("hopper", "current")
def test_a_changed_registry_of_models_refuses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """V4's models would run on vLLM's own attention without a word: better none than half of it."""

    def frozen(*_: object) -> None:
        raise TypeError("another signature")

    with monkeypatch.context() as other:
        known = SimpleNamespace(module_name="vllm.models.deepseek_v4", class_name="Model")
        other.setattr(ModelRegistry, "models", {"V4": known})
        other.setattr(ModelRegistry, "register_model", frozen)
        register()
        with pytest.raises(ValueError, match=r"CUSTOM is not valid.*tamis could not register its models"):
            choose()
    register()
    assert issubclass(choose(), TamisSparseBackend)
