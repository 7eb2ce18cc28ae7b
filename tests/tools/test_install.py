"""Install commands come from one place, right before and after a release; metadata agrees with what was tested."""

import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement

from tamis import _extras
from tamis._version import __version__
from tamis.integrations.sglang import versions as sglang
from tools import records
from tools.docs import install
from tools.docs.__main__ import TEXTS
from tools.versions_matrix import RESULTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FROM_INDEX = re.compile(r"pip install (?!.*--no-index)[^\n`#]*?'?\btamis(\[\w+\])?(?=['`\s]|$)(?! @)")
"""A command that makes pip look for tamis on its index."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pytest.mark.parametrize(
    ("extra", "before", "after"), [("", ".", "tamis"), ("vllm", "'.[vllm]'", "'tamis[vllm]'")], ids=["library", "extra"]
)
def test_what_pip_is_asked_for(extra: str, before: str, after: str) -> None:
    assert install.requirement(extra, released=False) == before
    assert install.requirement(extra, released=True) == after


def commands(text: str) -> list[str]:
    return re.findall(r"^pip (?:install|wheel) .*?(?= *#|$)", text, flags=re.M)


def test_commands_before_a_release_name_a_clone_a_file_or_a_repository() -> None:
    wheel = f"dist/tamis-{__version__}-py3-none-any.whl"
    git = f"git+{install.REPOSITORY}"
    assert commands(install.first(released=False)) == ["pip install .", "pip install '.[transformers]'"]
    assert commands(install.extra("sglang", released=False)) == ["pip install '.[sglang]'"]
    told = install.ways(released=False)
    assert commands(told) == ["pip install .", f"pip install {wheel}", f"pip install 'tamis @ {git}'"]
    assert told.startswith("tamis is not on a package index yet")
    assert "| `vllm` | the plugin for vLLM | `vllm>=0.25,<0.33` | `pip install '.[vllm]'` |" in install.extras(
        released=False
    )
    assert commands(install.cpu(released=False))[1] == "pip install ."
    assert commands(install.offline(released=False))[0] == "pip wheel --wheel-dir wheels '.[transformers]'"


def test_commands_after_a_release_name_the_index() -> None:
    assert commands(install.first(released=True)) == ["pip install tamis", "pip install 'tamis[transformers]'"]
    assert commands(install.extra("sglang", released=True)) == ["pip install 'tamis[sglang]'"]
    told = install.ways(released=True)
    assert commands(told)[0] == "pip install tamis"
    assert "not on a package index" not in told
    assert "`pip install 'tamis[vllm]'`" in install.extras(released=True)
    assert commands(install.cpu(released=True))[1] == "pip install tamis"
    assert commands(install.offline(released=True))[0] == "pip wheel --wheel-dir wheels 'tamis[transformers]'"
    assert all("clone" not in one(released=True) for one in (install.first, install.extras, install.cpu))


def test_every_page_takes_its_commands_from_there() -> None:
    """Outside generated parts no command installs tamis; before a release none names the index, messages included."""
    generated = re.compile(r"<!-- generated: .*?<!-- end -->", re.S)
    texts = {path: path.read_text() for path in [*PAGES, *(ROOT / "src").rglob("*.py")]}
    written = {path: generated.sub("", text) for path, text in texts.items()}
    allowed = "`pip install tamis` finds nothing"
    for path, text in (written if install.RELEASED else texts).items():
        assert not FROM_INDEX.search(text.replace(allowed, "")), path
    for path, text in written.items():
        assert not re.search(r"pip install '?\.\[", text), path
    shown = "".join(texts[path] for path in PAGES)
    unused = [name for name in TEXTS if name.startswith("install") and f"<!-- generated: {name} -->" not in shown]
    assert unused == ["install report"]  # which has no page of its own


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("pip install tamis", True),
        ("pip install 'tamis[vllm]'", True),
        ("pip install --upgrade tamis", True),
        ("pip install 'tamis @ git+https://x/tamis.git'", False),
        ("pip install 'tamis[vllm] @ git+https://x/tamis.git'", False),
        ("pip install dist/tamis-0.1.0-py3-none-any.whl", False),
        ("pip install --no-index --find-links wheels 'tamis[vllm]'", False),
        ("pip install .    # in a clone of tamis", False),
    ],
)
def test_commands_that_need_the_index_are_told_apart(command: str, found: bool) -> None:
    assert bool(FROM_INDEX.search(command)) == found


def test_messages_name_the_packages_of_the_extras(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert set(_extras.PACKAGES) == set(install.PURPOSES) == set(extras) - {"dev", "docs"}
    for name, text in _extras.PACKAGES.items():
        (line,) = extras[name]
        if name == "sglang":
            assert text == f"sglang=={sglang.SUPPORTED[-1]}"
            assert Requirement(line).specifier.contains(sglang.SUPPORTED[-1])
        else:
            assert text == line
    assert _extras.install_command("report") == "pip install 'matplotlib>=3.9'"


def test_a_public_repository_is_named_everywhere_or_nowhere(project: dict[str, Any]) -> None:
    """URLs in the metadata, and absolute links in README, which an index shows without the files around it."""
    public = "HOST" not in install.REPOSITORY
    assert public or not install.RELEASED, "a release needs a repository that readers can reach"
    urls = project.get("urls", {})
    assert set(urls) == ({"Homepage", "Documentation", "Source", "Issues", "Changelog"} if public else set())
    assert all(urlsplit(url).scheme == "https" for url in urls.values())
    if install.RELEASED:
        relative = re.findall(r"\]\((?!https://|#)([^)]+)\)", (ROOT / "README.md").read_text())
        assert not relative


def test_classifiers_name_the_versions_of_python_that_were_tested(project: dict[str, Any]) -> None:
    tested = {row["python"].rpartition(".")[0] for row in records.read(RESULTS) if row["failed"] == "0"}
    prefix = "Programming Language :: Python :: 3."
    assert {line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)} == {
        version.removeprefix("3.") for version in tested
    }
    assert project["requires-python"] == f">={min(tested, key=lambda text: int(text.split('.')[1]))}"


def test_the_citation_is_of_this_version(project: dict[str, Any]) -> None:
    text = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([\w-]+): *(\S.*)$", text, flags=re.M))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == __version__
    assert fields["license"] == project["license"]
    assert f"  - name: {project['authors'][0]['name']}\n" in text
    assert ("date-released" in fields) == install.RELEASED


def test_the_readme_is_rendered_as_an_index_would() -> None:
    """Without a renderer of Markdown `twine check` passes every README."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    assert markdown.variants, "install readme-renderer[md]"
    html = markdown.render((ROOT / "README.md").read_text())
    assert html is not None
    assert html.count("<pre") == (ROOT / "README.md").read_text().count("```") // 2
    assert "<table>" in html
