"""Why a plugin cannot work with the engine that is installed."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def engine_refusal(
    name: str,
    package: str,
    version_refusal: Callable[[str], str | None],
    needed: Mapping[str, Sequence[str]],
    unusable: Callable[[str, Exception], str],
) -> str | None:
    """The reason; None if the plugin can work. Imports parts of the engine, and never raises.

    Args:
        name: the engine's name, for people.
        package: its package, which has a module `version`.
        version_refusal: says why a version is not supported.
        needed: names that the plugin needs, by their module.
        unusable: the reason if importing this module raised this error.
    """
    module = f"{package}.version"
    try:
        version = str(import_module(module).__version__)
        refusal = version_refusal(version)
        if refusal is not None:
            return refusal
        for module, names in needed.items():
            missing = [wanted for wanted in names if not hasattr(import_module(module), wanted)]
            if missing:
                return f"{name} {version} has no {module}.{missing[0]}, unlike the versions that tamis was written for"
    except Exception as error:  # an engine that was changed may fail in any way
        return unusable(module, error)
    return None
