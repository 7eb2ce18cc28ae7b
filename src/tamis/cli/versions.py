"""The versions of packages that tamis needs, from its own metadata."""

from importlib import metadata


def minimums() -> dict[str, str]:
    """The lowest versions that tamis' metadata names, by package; empty for a checkout that was never installed, or
    without the package that reads versions."""
    try:
        from packaging.requirements import Requirement
        from packaging.specifiers import SpecifierSet

        own = metadata.metadata("tamis")
    except ImportError:  # PackageNotFoundError is one too
        return {}
    needed = [Requirement(line) for line in own.get_all("Requires-Dist") or []]
    sets = {"python": SpecifierSet(str(own["Requires-Python"]))} | {one.name: one.specifier for one in needed}
    lowest = {name: [one.version for one in found if one.operator == ">="] for name, found in sets.items()}
    return {name: versions[0] for name, versions in lowest.items() if versions}


def older(version: str, minimum: str) -> bool:
    """Whether a version comes before the release `minimum`. A local build, a pre-release or a development build counts
    as its release; a version that no rule covers counts as older."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(Version(version).base_version) < Version(minimum)
    except InvalidVersion:
        return True
