"""DeepSeek-V4's and V4.1's model classes for vLLM, whose layers run on tamis if CUSTOM is chosen.

vLLM does not choose V4 layers through its registry of backends: a function picks one of several fixed classes, and
silently takes its default for a choice that it does not know. So the plugin registers V4's model classes again, as
subclasses of vLLM's own. They behave like vLLM's until CUSTOM is chosen; then their layers are those of `v4_layer` or
`v41_layer`, and a model that got other layers is an error. vLLM imports this module when it looks up one of these
classes by name.
"""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from tamis.integrations.vllm import BACKEND, V4_SOURCES
from tamis.integrations.vllm.context_parallel import Ranks
from tamis.integrations.vllm.v4_caches import PACKED, announce, check_cache_dtype, check_v41_cache_dtype
from tamis.integrations.vllm.versions import v41_refusal

_REFUSED = {"deepseek_v4__DeepseekV4ForConditionalGeneration": "images are attended to in both directions"}
"""Model classes that cannot run with tamis, and why. Without this list they would silently run without it."""


class _Family(NamedTuple):
    """The models of one package of `vllm.models`."""

    title: str
    majors: tuple[int, ...]
    """Major compute capabilities on which vLLM gives its layers the cache formats that tamis reads."""
    elsewhere: str
    """Why others are refused."""


_V4, _V41 = "deepseek_v4", "deepseek_v41"
_FAMILIES = {
    _V4: _Family("DeepSeek-V4", (9, 10), ""),
    _V41: _Family("DeepSeek-V4.1", (9,), " (on 10.x its rows have other formats, of 528 and 288 bytes)"),
}


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
        family = _V41 if name.startswith(f"{_V41}__") else _V4
        refusal = _REFUSED.get(name) or _parallel_refusal(vllm_config)
        refusal = refusal or (v41_refusal() if family == _V41 else None)
        if refusal is not None:
            remedy = "choose another attention backend"
            raise ValueError(f"tamis does not run {model_class.__name__}: {refusal}; {remedy}")
        replace_attention(family)
        (check_cache_dtype if family == _V4 else check_v41_cache_dtype)(_cache_dtype(vllm_config))
        layers = vllm_config.compilation_config.static_forward_context
        before = set(layers)
        model_class.__init__(self, vllm_config=vllm_config, prefix=prefix)
        check_attention([layer for key, layer in layers.items() if key not in before], family)

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


def replace_attention(family: str = _V4) -> None:
    """Make vLLM's function that chooses the class of a family's layers return tamis' if CUSTOM is chosen. May be called
    repeatedly."""
    from vllm import platforms

    capability = platforms.current_platform.get_device_capability()
    title, allowed, elsewhere = _FAMILIES[family]
    if not platforms.current_platform.is_cuda() or capability is None or capability.major not in allowed:
        majors = " and ".join(f"{major}.x" for major in allowed)
        raise ValueError(
            f"tamis runs {title} in vLLM on CUDA devices of compute capability {majors}{elsewhere}, and this one has "
            f"{capability}; choose another attention backend"
        )
    model = import_module(f"vllm.models.{family}.nvidia.model")
    if model._select_dsv4_attn_cls.__module__ == __name__:
        return
    usual = model._select_dsv4_attn_cls

    def select(vllm_config: Any) -> type[Any]:
        if not _chosen(vllm_config):
            theirs: type[Any] = usual(vllm_config)
            return theirs
        dtype = _cache_dtype(vllm_config)
        if family == _V4:
            announce(dtype)
        packed, *plain = _layer_classes(family)
        return plain[0] if plain and dtype not in PACKED else packed

    model._select_dsv4_attn_cls = select  # type: ignore[attr-defined]


def _layer_classes(family: str) -> list[type[Any]]:
    """The layers of a family: for packed rows and, if tamis has one, for plain rows."""
    if family == _V41:
        from tamis.integrations.vllm.v41_layer import TamisV41Attention

        return [TamisV41Attention]
    from tamis.integrations.vllm.v4_layer import TamisV4Attention, TamisV4PlainAttention

    return [TamisV4Attention, TamisV4PlainAttention]


def check_attention(layers: list[Any], family: str = _V4) -> None:
    """Raise unless there is the family's attention among these layers, and all of it is tamis'."""
    theirs = import_module(f"vllm.models.{family}.attention").DeepseekV4Attention
    found = {type(layer) for layer in layers if isinstance(layer, theirs)}
    if found not in [{kind} for kind in _layer_classes(family)]:
        built = ", ".join(sorted(kind.__name__ for kind in found)) or "no V4 attention at all"
        raise RuntimeError(
            f"CUSTOM was chosen, but vLLM built {built} instead of tamis' attention alone; "
            "this version of vLLM chooses V4 layers in a way that tamis does not know"
        )
