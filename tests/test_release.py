"""The packages that `make wheel` leaves in dist/ are complete and self-contained. Run by `make check-wheel`."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

from tamis._version import __version__

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
NEEDED = re.compile(r"[\w.-]+")

pytestmark = [
    pytest.mark.wheel,
    pytest.mark.skipif(not DIST.is_dir(), reason="nothing is built: run `make check-wheel`"),
]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return DIST / f"tamis-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds what pip would install for the wheel, and nothing else.

    Packages are borrowed from the one that runs the tests, so nothing is fetched; pip still resolves the wheel's
    requirements against them.
    """
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in _closure(wheel):
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    _run([*pip, "install", "--quiet", "--no-index", "--no-cache-dir", str(wheel)], folder)
    return folder


def _closure(wheel: Path) -> set[str]:
    """Names of everything the wheel needs, directly or not, extras aside."""
    metadata = Parser().parsestr(_member(wheel, "METADATA"))
    waiting, known = list(metadata.get_all("Requires-Dist", [])), set()
    while waiting:
        requirement = waiting.pop()
        found = NEEDED.match(requirement)
        assert found is not None
        if "extra ==" in requirement or found[0] in known:
            continue
        try:
            waiting += importlib.metadata.requires(found[0]) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # behind a marker of another platform; pip would refuse to go on if it were needed here
        known.add(found[0])
    return known


def _member(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"tamis-{__version__}.dist-info/{name}").decode()


def _run(command: list[str], folder: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "tamis").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted
    assert "tamis/py.typed" in held
    assert {PurePosixPath(name).suffix for name in held} >= {".py", ".cu", ".cuh"}


def test_the_source_distribution_can_be_tested() -> None:
    with tarfile.open(DIST / f"tamis-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/test_release.py", "tests/support/emulator.hpp", "Makefile", "constraints.txt", "mkdocs.yml"} <= names
    assert {"SECURITY.md", "CITATION.cff", "requirements-lock.txt"} <= names
    assert {"constraints-vllm.txt", "constraints-sglang.txt", "benchmarks/results/install/versions.csv"} <= names
    assert {"docs/index.md", "tools/docs/__main__.py", "benchmarks/results/h200_decode.csv"} <= names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_metadata_is_what_an_index_shows(wheel: Path) -> None:
    found = Parser().parsestr(_member(wheel, "METADATA"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["Summary"] == project["description"]
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text()
    assert found["Author"] == found["Maintainer"] == project["authors"][0]["name"]
    assert found["License-Expression"] == "Apache-2.0"
    assert found["License-File"] == "LICENSE"
    assert found["Requires-Python"] == project["requires-python"]
    assert found.get_all("Classifier") == project["classifiers"]
    assert found["Keywords"].split(",") == project["keywords"]
    assert set(found.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    urls = [line.split(", ") for line in found.get_all("Project-URL") or []]
    assert dict(urls) == project.get("urls", {})
    points = _member(wheel, "entry_points.txt")
    assert "tamis = tamis.cli:main" in points
    assert "tamis = tamis.integrations.vllm:register" in points


def test_the_version_comes_from_one_place(wheel: Path, environment: Path) -> None:
    assert Parser().parsestr(_member(wheel, "METADATA"))["Version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    for command in (["bin/tamis"], ["bin/python", "-m", "tamis"]):
        found = _run([str(environment / command[0]), *command[1:], "--version"], environment)
        assert found.strip() == f"tamis {__version__}"


def test_what_is_installed_is_what_runs(environment: Path) -> None:
    code = "import tamis, sys; print(tamis.__file__); import importlib.util as u; print(u.find_spec('transformers'))"
    place, transformers = _run([str(environment / "bin/python"), "-c", code], environment).split()
    assert Path(place).is_relative_to(environment)
    assert transformers == "None"


def test_doctor_and_verify_pass_there(environment: Path) -> None:
    tamis = str(environment / "bin" / "tamis")
    assert json.loads(_run([tamis, "doctor", "--json"], environment))["ok"]
    found = json.loads(_run([tamis, "verify", "--json"], environment))
    assert found["ok"]
    assert sum(check["cases"] for check in found["checks"]) > 200
