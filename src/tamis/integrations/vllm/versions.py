"""Which vLLM this is, and what differs between the versions that are supported.

Everything else in this package is the same for all of them.
"""

from typing import Any

SUPPORTED = ("0.25", "0.32")
"""Minor versions whose sources the plugin was written and tested against."""


def version_refusal(version: str) -> str | None:
    """Why this version of vLLM is not supported, or None."""
    if any(version == minor or version.startswith(f"{minor}.") for minor in SUPPORTED):
        return None
    known = " and ".join(f"{minor}.x" for minor in SUPPORTED)
    return f"tamis supports vLLM {known}, and this is {version}; install one of those"


def sparse_impl_base() -> type[Any]:
    """The class that a layer's attention must derive from.

    vLLM 0.25 routes tokens by this type; from 0.32 on by the attribute `is_sparse`, below the base of all latent
    attention. (The base that 0.32 adds for sparse backends brings a dense prefill path that is not used here.)
    """
    from vllm.v1.attention import backend

    found = getattr(backend, "SparseMLAAttentionImpl", None) or backend.MLAAttentionImpl
    assert isinstance(found, type)
    return found


class UnsupportedVersion:
    """What CUSTOM names under other versions: it is refused when chosen, and nobody else is bothered."""

    @classmethod
    def validate_configuration(cls, **_: Any) -> list[str]:
        """The one reason."""
        from vllm.version import __version__

        reason = version_refusal(__version__)
        return [] if reason is None else [reason]
