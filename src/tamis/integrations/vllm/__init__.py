"""tamis as an attention backend of vLLM, for models with DeepSeek sparse attention.

`register` is the plugin's entry point; vLLM then loads `plugin` (V3.2, GLM-5) or `v4_plugin` (DeepSeek-V4) when it
needs them. These two, and `v4_layer`, import vLLM. The classes in the other modules have vLLM's names, shapes and call
order but import nothing of it: any objects with the same attributes serve, which is how they are tested without an
engine.
"""

from importlib import import_module
from logging import getLogger
from typing import Any

BACKEND = "tamis.integrations.vllm.plugin.Backend"
REFUSED = "tamis.integrations.vllm.versions.UnsupportedVersion"
_V4_MODELS = "tamis.integrations.vllm.v4_plugin"
V4_SOURCES = ("vllm.models.deepseek_v4", "vllm.models.deepseek_v41")
"""Packages whose models are registered anew."""


def register() -> None:
    """Make tamis vLLM's CUSTOM attention backend (`--attention-backend CUSTOM`).

    vLLM calls this in every process it starts, possibly more than once: it only stores paths of classes, which vLLM
    imports when they are chosen. Nothing here touches a device, and nothing changes for those who do not choose CUSTOM.

    It never raises, since that would end vLLM for everybody on the machine: under a vLLM that tamis does not know, one
    line is logged, and the backend is refused with the reason when it is chosen. A CUSTOM backend of another plugin
    stays, and a line says so.
    """
    try:
        problem = _register()
    except Exception as error:  # whatever another vLLM may do
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        getLogger("tamis").warning("tamis is not vLLM's CUSTOM attention backend: %s", problem)


def _register() -> str | None:
    """Why tamis is not registered, or None."""
    from tamis.integrations.vllm.versions import REGISTRY, plugin_refusal

    refusal = plugin_refusal()
    try:
        registry = import_module(REGISTRY)
        custom, store = registry.AttentionBackendEnum.CUSTOM, registry.register_backend
    except Exception:
        # Then vLLM itself knows no such choice.
        return refusal or f"{REGISTRY} is not as in the versions that tamis supports"
    other = _other_plugin(custom)
    if other is not None:
        return f"another plugin has registered {other}; to use tamis, load it alone with VLLM_PLUGINS=tamis"
    if refusal is None:
        try:
            _register_v4_models()
        except Exception as error:
            refusal = f"vLLM's registry of models does not take DeepSeek-V4's: {type(error).__name__}: {error}"
    store(custom, BACKEND if refusal is None else REFUSED)
    return refusal


def _other_plugin(custom: Any) -> str | None:
    """The path of the class that CUSTOM stands for, if somebody else has registered it."""
    try:
        path = str(custom.get_path())
    except Exception:  # vLLM's way of saying that nobody has
        return None
    return None if path in (BACKEND, REFUSED) else path


def _register_v4_models() -> None:
    """Have vLLM find V4's model classes in `v4_plugin`, where they know of CUSTOM."""
    models = import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture, known in list(models.models.items()):
        source = getattr(known, "module_name", None)
        if source in V4_SOURCES:
            models.register_model(architecture, f"{_V4_MODELS}:{source.rpartition('.')[2]}__{known.class_name}")
