"""The supported versions of SGLang."""

import re
from importlib import import_module

SUPPORTED = ("0.5.17", "0.5.23")
"""The versions that the plugin was written for and tested with."""
_NEEDED = {
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.server_args": ("ServerArgs",),
}
"""The modules and names of SGLang that every part of the plugin needs."""


def version_refusal(version: str) -> str | None:
    """Why this version of SGLang is not supported; None if it is. Post-releases and local builds count as their
    release."""
    if any(re.fullmatch(rf"{re.escape(known)}(\.post\d+)?(\+.*)?", version) for known in SUPPORTED):
        return None
    return f"tamis supports SGLang {' and '.join(SUPPORTED)}, and this is {version}; install one of those"


def plugin_refusal() -> str | None:
    """Why the plugin cannot work with the installed SGLang; None if it can. Imports parts of SGLang, never raises."""
    module = "sglang.version"
    try:
        version = str(import_module(module).__version__)
        refusal = version_refusal(version)
        if refusal is not None:
            return refusal
        for module, names in _NEEDED.items():
            missing = [name for name in names if not hasattr(import_module(module), name)]
            if missing:
                return f"SGLang {version} has no {module}.{missing[0]}, unlike the versions that tamis was written for"
    except Exception as error:
        return f"importing {module} failed with {type(error).__name__}: {error}"
    return None
