"""tamis as an attention backend of vLLM, for models with DeepSeek sparse attention.

`register` is the plugin's entry point; vLLM then loads `plugin` (V3.2, GLM-5) or `v4_plugin` (DeepSeek-V4) when it
needs them. These two, and `v4_layer`, import vLLM. The classes in the other modules have vLLM's names, shapes and call
order but import nothing of it: any objects with the same attributes serve, which is how they are tested without an
engine.
"""

from importlib import import_module

BACKEND = "tamis.integrations.vllm.plugin.Backend"
_UNSUPPORTED = "tamis.integrations.vllm.versions.UnsupportedVersion"
_V4_MODELS = "tamis.integrations.vllm.v4_plugin"
V4_SOURCES = ("vllm.models.deepseek_v4", "vllm.models.deepseek_v41")
"""Packages whose models are registered anew."""
_REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Make tamis vLLM's CUSTOM attention backend (`--attention-backend CUSTOM`).

    vLLM calls this in every process it starts, possibly more than once: it only stores paths of classes, which vLLM
    imports when they are chosen. Nothing here touches a device, and nothing changes for those who do not choose CUSTOM.
    """
    from tamis.integrations.vllm.versions import SUPPORTED, version_refusal

    try:
        version: str = import_module("vllm.version").__version__
        registry = import_module(_REGISTRY)
    except ImportError as error:
        missing = (error.name or "").split(".")[0] == "vllm"
        # A vLLM that is there but fails to import says best itself what it lacks.
        reason = f"there is no module {error.name!r}" if missing else f"importing it failed with: {error}"
        known = " or ".join(SUPPORTED)
        raise ImportError(
            f"tamis.integrations.vllm needs vLLM {known}, but {reason}; install it with pip install 'tamis[vllm]'"
        ) from error
    supported = version_refusal(version) is None
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND if supported else _UNSUPPORTED)
    if supported:
        _register_v4_models()


def _register_v4_models() -> None:
    """Have vLLM find V4's model classes in `v4_plugin`, where they know of CUSTOM."""
    models = import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture, known in list(models.models.items()):
        source = getattr(known, "module_name", None)
        if source in V4_SOURCES:
            models.register_model(architecture, f"{_V4_MODELS}:{source.rpartition('.')[2]}__{known.class_name}")
