"""The supported versions of vLLM, and what differs between them. The rest of this package is the same for all."""

from importlib import import_module
from typing import Any

from tamis._extras import install_command
from tamis.integrations._engine_refusal import engine_refusal

SUPPORTED = tuple(f"0.{minor}" for minor in range(25, 33))
"""The minor versions that the plugin was written for and tested with."""
_SPAN = f"vLLM {SUPPORTED[0]}.x to {SUPPORTED[-1]}.x"
REGISTRY = "vllm.v1.attention.backends.registry"
_NEEDED = {
    REGISTRY: ("AttentionBackendEnum", "register_backend"),
    "vllm.model_executor.models.registry": ("ModelRegistry",),
}
"""The modules and names of vLLM that `register` needs."""


def version_refusal(version: str) -> str | None:
    """Why this version of vLLM is not supported; None if it is."""
    if _minor(version) in SUPPORTED:
        return None
    return f"tamis supports {_SPAN}, and this is {version}; install one of those"


def _minor(version: str) -> str | None:
    """The minor version, such as "0.32", of a release or of a build of one; None for a text that is no version."""
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
    except InvalidVersion:
        return None
    return f"{found.major}.{found.minor}"


def plugin_refusal() -> str | None:
    """Why the plugin cannot work with the installed vLLM; None if it can. Imports parts of vLLM and never raises."""
    return engine_refusal("vLLM", "vllm", version_refusal, _NEEDED, _unusable)


def _unusable(module: str, error: Exception) -> str:
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "vllm":
        reason = f"there is no module {error.name!r}"
    else:
        # vLLM is installed but cannot be imported; its own error says why.
        reason = f"importing {module} failed with {type(error).__name__}: {error}"
    return f"it needs {_SPAN}, but {reason}; install it with {install_command('vllm')}"


def sparse_impl_base() -> type[Any]:
    """The class that a layer's attention must derive from.

    vLLM 0.25 recognises sparse attention by this base class. From 0.26 on it recognises it by the attribute
    `is_sparse`, so the base of all latent attention will do. (Its own base for sparse backends adds a dense prefill,
    not used here.)
    """
    from vllm.v1.attention import backend

    found = getattr(backend, "SparseMLAAttentionImpl", None) or backend.MLAAttentionImpl
    assert isinstance(found, type)
    return found


def divides_prompts() -> bool:
    """Whether this vLLM divides prompts among ranks (prefill context parallelism) in the way that tamis supports."""
    return _installed() == "0.32"


def calls_packed_rows_auto() -> bool:
    """Whether this vLLM asks for the shape of every cache as one of "auto", also for packed rows. From 0.26 on it means
    what it says, since single layers may have such rows (`--kv-cache-dtype-skip-layers`)."""
    return _installed() == "0.25"


def _installed() -> str | None:
    return _minor(str(import_module("vllm.version").__version__))


def v41_refusal() -> str | None:
    """Why DeepSeek-V4.1 is not supported in the installed vLLM; None if it is. Its layers were different before."""
    found = str(import_module("vllm.version").__version__)
    return None if _minor(found) == "0.32" else f"tamis supports it in vLLM 0.32.x, and this is {found}"


def keep_prefills_sparse(config: Any) -> None:
    """Keep a layer from sending short prompts to dense attention, which tamis' attention does not have.

    From vLLM 0.27 on a layer asks its attention (`supports_dense_mha_prefill`), and 0.25 never does this. 0.26 does it
    without asking, but its configuration has a switch.
    """
    base = sparse_impl_base()
    if hasattr(base, "is_sparse") and not hasattr(base, "supports_dense_mha_prefill"):
        config.attention_config.sparse_mla_force_mqa = True


class _Refusing(type):
    """Raises an error with the reason on any attribute access, since versions of vLLM differ in what they read
    first."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(UnsupportedVersion.reason())


class UnsupportedVersion(metaclass=_Refusing):
    """Registered as CUSTOM where the plugin cannot work. It is refused only if it is chosen."""

    @staticmethod
    def reason() -> str:
        """Why the plugin cannot work."""
        return plugin_refusal() or "tamis could not register its models with this vLLM; the log of its start says why"

    @classmethod
    def validate_configuration(cls, *_: Any, **__: Any) -> list[str]:
        """The reason, in the form in which vLLM asks for it."""
        return [cls.reason()]
