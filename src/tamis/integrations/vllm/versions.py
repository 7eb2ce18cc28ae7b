"""Which vLLM this is, and what differs between the versions that are supported.

Everything else in this package is the same for all of them.
"""

from importlib import import_module
from typing import Any

SUPPORTED = ("0.25", "0.32")
"""Minor versions whose sources the plugin was written and tested against."""
REGISTRY = "vllm.v1.attention.backends.registry"
_NEEDED = {
    REGISTRY: ("AttentionBackendEnum", "register_backend"),
    "vllm.model_executor.models.registry": ("ModelRegistry",),
}
"""What registering needs of vLLM."""


def version_refusal(version: str) -> str | None:
    """Why this version of vLLM is not supported, or None."""
    if any(version == minor or version.startswith(f"{minor}.") for minor in SUPPORTED):
        return None
    known = " and ".join(f"{minor}.x" for minor in SUPPORTED)
    return f"tamis supports vLLM {known}, and this is {version}; install one of those"


def plugin_refusal() -> str | None:
    """Why the plugin cannot work with the vLLM that is installed here, or None. Imports parts of vLLM; never raises."""
    module = "vllm.version"
    try:
        version = str(import_module(module).__version__)
        refusal = version_refusal(version)
        if refusal is not None:
            return refusal
        for module, names in _NEEDED.items():
            missing = [name for name in names if not hasattr(import_module(module), name)]
            if missing:
                return f"vLLM {version} has no {module}.{missing[0]}, unlike the versions that tamis was written for"
    except Exception as error:
        return _unusable(module, error)
    return None


def _unusable(module: str, error: Exception) -> str:
    known = " or ".join(SUPPORTED)
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "vllm":
        reason = f"there is no module {error.name!r}"
    else:
        # A vLLM that is there but fails to import says best itself what it lacks.
        reason = f"importing {module} failed with {type(error).__name__}: {error}"
    return f"it needs vLLM {known}, but {reason}; install it with pip install 'tamis[vllm]'"


def sparse_impl_base() -> type[Any]:
    """The class that a layer's attention must derive from.

    vLLM 0.25 routes tokens by this type; from 0.32 on by the attribute `is_sparse`, below the base of all latent
    attention. (The base that 0.32 adds for sparse backends brings a dense prefill path that is not used here.)
    """
    from vllm.v1.attention import backend

    found = getattr(backend, "SparseMLAAttentionImpl", None) or backend.MLAAttentionImpl
    assert isinstance(found, type)
    return found


class _Refusing(type):
    """Versions of vLLM differ in what they ask of a backend first: whatever it is, the answer is the reason."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(UnsupportedVersion.reason())


class UnsupportedVersion(metaclass=_Refusing):
    """What CUSTOM names where the plugin cannot work: it is refused when chosen, and nobody else is bothered."""

    @staticmethod
    def reason() -> str:
        """Why."""
        return plugin_refusal() or "tamis could not register its models with this vLLM; the log of its start says why"

    @classmethod
    def validate_configuration(cls, *_: Any, **__: Any) -> list[str]:
        """The one reason, as vLLM asks for it."""
        return [cls.reason()]
