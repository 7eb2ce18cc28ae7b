"""The versions and platforms of SGLang that the plugin supports."""

from importlib import import_module

from tamis.integrations._engine_refusal import engine_refusal

SUPPORTED = ("0.5.17", "0.5.23")
"""The versions that the plugin was written for and tested with."""
_NEEDED = {
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.server_args": ("ServerArgs",),
    "sglang.srt.utils": ("is_hip", "is_npu", "is_xpu", "is_musa"),
}
"""The modules and names of SGLang that every part of the plugin needs."""
_OTHER_PLATFORMS = {"is_hip": "ROCm", "is_npu": "Ascend", "is_xpu": "Intel XPU", "is_musa": "MUSA"}
"""Functions of SGLang that tell platforms whose pools have other bytes than those of CUDA, or were never tried."""


def version_refusal(version: str) -> str | None:
    """Why this version of SGLang is not supported; None if it is. Post-releases and local builds count as their
    release."""
    from packaging.version import InvalidVersion, Version

    try:
        found = Version(version)
        if found.base_version in SUPPORTED and not found.is_prerelease:
            return None
    except InvalidVersion:
        pass  # a text that is no version is none that is supported
    return f"tamis supports SGLang {' and '.join(SUPPORTED)}, and this is {version}; install one of those"


def plugin_refusal() -> str | None:
    """Why the plugin cannot work with the installed SGLang; None if it can. Imports parts of SGLang, never raises."""
    return engine_refusal("SGLang", "sglang", version_refusal, _NEEDED, _unusable) or _platform_refusal()


def _platform_refusal() -> str | None:
    module = "sglang.srt.utils"
    try:
        found = [platform for name, platform in _OTHER_PLATFORMS.items() if getattr(import_module(module), name)()]
    except Exception as error:
        return _unusable(module, error)
    return f"tamis runs in SGLang on NVIDIA GPUs, and this is {found[0]}" if found else None


def _unusable(module: str, error: Exception) -> str:
    return f"importing {module} failed with {type(error).__name__}: {error}"
