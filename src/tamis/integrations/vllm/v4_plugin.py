"""DeepSeek-V4's model classes for vLLM, whose layers run on tamis if CUSTOM is chosen.

vLLM does not choose V4 layers through its registry of backends: a function picks one of several fixed classes, and
silently takes its default for a choice that it does not know. So the plugin registers V4's model classes again, as
subclasses of vLLM's own. They behave like vLLM's until CUSTOM is chosen; then their layers are those of `v4_layer`, and
a model that got other layers is an error. vLLM imports this module when it looks up one of these classes by name.
"""

from functools import cache
from importlib import import_module
from typing import Any

from tamis.integrations.vllm import BACKEND, V4_SOURCES
from tamis.integrations.vllm.context_parallel import Ranks
from tamis.integrations.vllm.v4_caches import PACKED, announce, check_cache_dtype

_OTHER_FORMAT = "DeepSeek-V4.1 has another cache format"
_REFUSED = {
    "deepseek_v4__DeepseekV4ForConditionalGeneration": "images are attended to in both directions",
    "deepseek_v41__DeepseekV41ForCausalLM": _OTHER_FORMAT,
    "deepseek_v41__DSparkDeepseekV4ForCausalLM": _OTHER_FORMAT,
}
"""Model classes that cannot run with tamis, and why. Without this list they would silently run without it."""

_CAPABILITIES = (9, 10)
"""Major compute capabilities on which vLLM gives V4 layers the cache formats that tamis reads."""


def __getattr__(name: str) -> type[Any]:
    """The model class of this name, `<package of vllm.models>__<class>`, which takes CUSTOM into account."""
    package, _, class_name = name.partition("__")
    if f"vllm.models.{package}" not in V4_SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _checked(getattr(import_module(f"vllm.models.{package}"), class_name), name)


@cache
def _checked(model_class: type[Any], name: str) -> type[Any]:
    """A subclass that behaves like vLLM's own class until CUSTOM is chosen; `name` is its name in this module."""

    # vLLM inspects the signature for these two names.
    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        if not _chosen(vllm_config):
            model_class.__init__(self, vllm_config=vllm_config, prefix=prefix)
            return
        refusal = _REFUSED.get(name) or _parallel_refusal(vllm_config)
        if refusal is not None:
            remedy = "choose another attention backend"
            raise ValueError(f"tamis does not run {model_class.__name__}: {refusal}; {remedy}")
        replace_attention()
        check_cache_dtype(_cache_dtype(vllm_config))
        layers = vllm_config.compilation_config.static_forward_context
        before = set(layers)
        model_class.__init__(self, vllm_config=vllm_config, prefix=prefix)
        check_attention([layer for key, layer in layers.items() if key not in before])

    members = {"__init__": __init__, "__module__": __name__, "__qualname__": name}
    return type(model_class.__name__, (model_class,), members)


def _parallel_refusal(vllm_config: Any) -> str | None:
    ranks = Ranks.read(getattr(vllm_config, "parallel_config", None))
    if ranks.decode > 1:
        return f"its rows cannot be spread over {ranks.decode} ranks (decode context parallelism)"
    if ranks.prefill > 1:
        return f"its prompts cannot be divided among {ranks.prefill} ranks (prefill context parallelism)"
    return None


def _cache_dtype(vllm_config: Any) -> str:
    return str(vllm_config.cache_config.cache_dtype)


def _chosen(vllm_config: Any) -> bool:
    """Whether tamis was chosen, that is CUSTOM, unless another plugin registered its backend as CUSTOM later."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return vllm_config.attention_config.backend is custom and custom.get_path() == BACKEND


def replace_attention() -> None:
    """Make vLLM's function that chooses a V4 layer's class return one of `v4_layer` if CUSTOM is chosen. May be called
    repeatedly."""
    from vllm import platforms

    capability = platforms.current_platform.get_device_capability()
    if not platforms.current_platform.is_cuda() or capability is None or capability.major not in _CAPABILITIES:
        majors = " and ".join(f"{major}.x" for major in _CAPABILITIES)
        raise ValueError(
            f"tamis runs DeepSeek-V4 in vLLM on CUDA devices of compute capability {majors}, and this one has "
            f"{capability}; choose another attention backend"
        )
    from vllm.models.deepseek_v4.nvidia import model

    if model._select_dsv4_attn_cls.__module__ == __name__:
        return
    usual = model._select_dsv4_attn_cls

    def select(vllm_config: Any) -> type[Any]:
        from tamis.integrations.vllm.v4_layer import TamisV4Attention, TamisV4PlainAttention

        if not _chosen(vllm_config):
            theirs: type[Any] = usual(vllm_config)
            return theirs
        dtype = _cache_dtype(vllm_config)
        announce(dtype)
        return TamisV4Attention if dtype in PACKED else TamisV4PlainAttention

    model._select_dsv4_attn_cls = select


def check_attention(layers: list[Any]) -> None:
    """Raise unless there is V4 attention among these layers, and all of it is tamis'."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

    from tamis.integrations.vllm.v4_layer import TamisV4Attention, TamisV4PlainAttention

    found = {type(layer) for layer in layers if isinstance(layer, DeepseekV4Attention)}
    if found not in ({TamisV4Attention}, {TamisV4PlainAttention}):
        built = ", ".join(sorted(kind.__name__ for kind in found)) or "no V4 attention at all"
        raise RuntimeError(
            f"CUSTOM was chosen, but vLLM built {built} instead of tamis' attention alone; "
            "this version of vLLM chooses V4 layers in a way that tamis does not know"
        )
