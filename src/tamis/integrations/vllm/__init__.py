"""tamis as an attention backend of vLLM, for models with DeepSeek sparse attention.

The classes beside this file have vLLM's names, shapes and call order but import nothing of vLLM: any objects with the
same attributes serve, which is how they are tested without an engine.
"""

from importlib import import_module

BACKEND = "tamis.integrations.vllm.backend.TamisSparseBackend"
_REGISTRY = "vllm.v1.attention.backends.registry"


def register() -> None:
    """Make tamis vLLM's CUSTOM attention backend (`--attention-backend CUSTOM`).

    vLLM calls this in every process it starts, possibly more than once: it only stores a class path, which vLLM
    imports when the backend is chosen. Nothing here touches a device.
    """
    try:
        registry = import_module(_REGISTRY)
    except ImportError as error:
        missing = (error.name or "").split(".")[0] == "vllm"
        # A vLLM that is there but fails to import says best itself what it lacks.
        reason = f"there is no module {error.name!r}" if missing else f"importing it failed with: {error}"
        raise ImportError(
            f"tamis.integrations.vllm needs vLLM 0.25 or newer, but {reason}; install it with pip install 'tamis[vllm]'"
        ) from error
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND)
