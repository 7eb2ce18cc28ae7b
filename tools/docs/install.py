"""The commands that install tamis, and the versions that they were tested with, for every page that shows them.

`RELEASED` is what a release changes here: all commands then name the package index. `make generate` writes them.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tamis._version import __version__
from tamis.integrations.sglang.versions import SUPPORTED as SGLANG
from tools import records
from tools.docs.markdown import table
from tools.versions_matrix import LOWEST, PINNED, RESULTS

ROOT = Path(__file__).parents[2]
RELEASED = False
"""Whether the package index has tamis. Until then a clone, a wheel file and a git URL are what works."""
REPOSITORY = "https://HOST/PATH/tamis.git"
"""Where the repository can be cloned from. While no public host has it, HOST and PATH stand for the reader's own."""
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of builds without CUDA."""
WHEEL = f"dist/tamis-{__version__}-py3-none-any.whl"
NOT_YET = """\
tamis is not on a package index yet: `pip install tamis` finds nothing, or somebody else's package. Three ways work
today. The repository has no public place yet either; `HOST` and `PATH` stand for where your copy of it is."""
PURPOSES = {
    "transformers": "Hugging Face models: `attach`, `tamis generate`, `tamis inspect`",
    "vllm": "the plugin for vLLM",
    "sglang": "the plugin for SGLang",
    "report": "figures of `tamis bench --report`",
}
"""The extras for users, and what they are for."""


def requirement(extra: str = "", *, released: bool = RELEASED) -> str:
    """What pip is asked for: the package of the index, or the clone in which the command is run."""
    extras = f"[{extra}]" if extra else ""
    place = "tamis" if released else "."
    return f"'{place}{extras}'" if extras else place


def first(*, released: bool = RELEASED) -> str:
    """For README and the first page: the library, and the library with Hugging Face models."""
    where = "" if released else "in a clone: "
    words = {"": f"{where}the library and the command", "transformers": "with Hugging Face models"}
    commands = {name: f"pip install {requirement(name, released=released)}" for name in words}
    return _network(*(f"{commands[name]:<33}# {words[name]}" for name in words))


def extra(name: str, *, released: bool = RELEASED) -> str:
    """For the page of an integration: the library with one extra."""
    command = f"pip install {requirement(name, released=released)}"
    return _network(command if released else f"{command}    # in a clone of tamis")


def ways(*, released: bool = RELEASED) -> str:
    """Each way to install the library, with its commands."""
    index = "Releases are on the package index:\n\n" + _network("pip install tamis")
    clone = _network(f"git clone {REPOSITORY}", "cd tamis", "pip install .")
    wheel = f"```sh\nmake wheel    # in a clone; writes {WHEEL}\n```\n\n" + _network(f"pip install {WHEEL}")
    git = _network(f"pip install 'tamis @ git+{REPOSITORY}'")
    parts = {
        "From a clone": clone,
        "From a wheel file": f"A wheel is built once and can be copied to other machines:\n\n{wheel}",
        "From a git URL": f"pip clones and builds by itself, and no checkout stays:\n\n{git}",
    }
    if released:
        parts = {"From the package index": index, **parts}
    found = "\n\n".join(f"### {heading}\n\n{text}" for heading, text in parts.items())
    return found if released else f"{NOT_YET}\n\n{found}"


def extras(*, released: bool = RELEASED) -> str:
    """The table of extras, and how other ways to install than the first name them."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [
        (f"`{name}`", words, _range(*asked[name]), f"`pip install {requirement(name, released=released)}`")
        for name, words in PURPOSES.items()
    ]
    shown = table(("extra", "for", "installs", "command" if released else "command, in a clone"), lines, "llll")
    others = _network(f"pip install '{WHEEL}[transformers]'", f"pip install 'tamis[transformers] @ git+{REPOSITORY}'")
    return f"{shown}\n\nFrom a wheel file and from a git URL:\n\n{others}"


def cpu(*, released: bool = RELEASED) -> str:
    """The commands for a machine without a GPU."""
    return _network(f"pip install torch --index-url {CPU_BUILDS}", f"pip install {requirement(released=released)}")


def offline(*, released: bool = RELEASED) -> str:
    """The commands for a machine without a network, with the folder that is carried there."""
    here = _network(f"pip wheel --wheel-dir wheels {requirement('transformers', released=released)}")
    there = _block("without a network", "pip install --no-index --find-links wheels 'tamis[transformers]'")
    return f"{here}\n\nCopy the folder `wheels` and install from it:\n\n{there}"


def requirements() -> str:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [("Python", project["requires-python"])]
    for one in map(Requirement, project["dependencies"]):
        lines.append((f"{one.name}, on Linux" if one.marker else one.name, str(one.specifier)))
    return table(("package", "versions"), [(name, f"`{versions}`") for name, versions in lines], "ll")


def sizes() -> str:
    """The sentence on how much a plain install and one without CUDA take."""
    newest = {"+cpu" in row["torch"]: row for row in records.read(RESULTS)}  # they are sorted by versions
    words = {
        False: "On Linux, torch from the package index brings CUDA's libraries: a plain install takes",
        True: "With torch's build for CPUs it takes",
    }
    return "\n".join(
        f"{told} {row['gigabytes']} GB on disk (torch {row['torch']}, Triton {row['triton']})."
        for kind, told in words.items()
        if (row := newest.get(kind))
    )


def tested() -> str:
    """What ran with which versions."""
    names = {LOWEST: "the lowest versions that tamis admits", PINNED: "development and CI (`constraints.txt`)"}
    columns = ("python", "torch", "triton", "numpy", "transformers", "nvidia-cuda-nvrtc")
    lines = []
    for row in records.read(RESULTS):
        counts = records.Counts(*(int(row[name]) for name in records.Counts._fields))
        result = f"**{counts}**" if counts.failed else str(counts)
        lines.append((*(row[name] for name in columns), result, row["date"], names.get(row["environment"], "")))
    header = ("Python", "torch", "Triton", "NumPy", "transformers", "NVRTC", "tests", "date", "")
    return table(header, lines, "l" * len(header))


def _range(line: str) -> str:
    """A requirement as text. SGLang's has a clause for each version between those that are supported."""
    return f"`{line}`" if "!=" not in line else f"`{Requirement(line).name}` {' or '.join(SGLANG)}"


def _network(*lines: str) -> str:
    return _block("needs a network", *lines)


def _block(title: str, *lines: str) -> str:
    return "\n".join([f'```sh title="{title}"', *lines, "```"])
