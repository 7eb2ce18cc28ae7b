"""The packages that the optional parts of tamis need, and the commands that install them.

Messages name a package itself rather than `tamis[...]`, because such a command works wherever tamis came from: a
package index, a clone, a wheel file or a git URL. The ranges are those of pyproject.toml; tests compare them.
"""

PACKAGES = {
    "transformers": "transformers>=5.18",
    "vllm": "vllm>=0.25,<0.33",
    "sglang": "sglang==0.5.23",  # the newest that the extra admits; its whole range has seven clauses
    "report": "matplotlib>=3.9",
}
"""By extra, what pip is to be asked for."""


def install_command(extra: str) -> str:
    """The command that installs what an extra of tamis needs into an environment that has tamis."""
    return f"pip install '{PACKAGES[extra]}'"


def is_admitted(extra: str, version: str) -> bool:
    """Whether a version of an extra's package is one that pip would take. Development builds are, from the lowest
    release on."""
    from packaging.requirements import Requirement

    return Requirement(PACKAGES[extra]).specifier.contains(version, prereleases=True)
