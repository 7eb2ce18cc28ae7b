"""`python -m tools.versions_matrix`: test a wheel with the lowest, the newest and other versions of what it needs.

    python -m tools.versions_matrix list             the environments, one a line, with what pip is asked for
    python -m tools.versions_matrix run [NAME ...]   make them (or those named), test them, record them, remove them

`make test-matrix` builds the wheel and runs all. The versions of torch and Triton are those that the package index has
within the ranges of pyproject.toml: the newest patch of every minor version. An environment takes about 5 GB while it
is tested, because torch comes with CUDA there; if pip finds torch's build for CPUs (in PIP_EXTRA_INDEX_URL), it takes
that. Python versions that are not on the PATH are left out, and named.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tools import records
from tools.records import Row

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "install" / "versions.csv"
BUILD = ROOT / "build" / "versions"
PACKAGES = ("torch", "triton", "numpy", "transformers", "nvidia-cuda-nvrtc")
"""The packages whose versions are recorded."""
COLUMNS = ("environment", "python", *PACKAGES, "passed", "failed", "skipped", "gigabytes", "date")
LOWEST, PINNED = "lowest", "constraints.txt"
"""The environments with the lower bound of every requirement, and with what development and CI install."""
PYTHONS = ("3.11", "3.12", "3.13")
"""The first is the lowest that pyproject.toml admits, and the one of all environments that do not name another."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "transformers", "nvidia-cuda-nvrtc")
"""What the tests need besides the wheel. torch's CUDA builds bring an NVRTC of their own, which is kept."""
TESTS = (
    # Triton's kernels in its interpreter, and the definitions in torch.
    *(f"tests/ops/{name}.py" for name in ("test_library", "rows/test_triton_launch")),
    *(f"tests/ops/attention/test_{name}.py" for name in ("attend", "triton_attend")),
    *(f"tests/ops/{stage}/test_{stage}.py" for stage in ("combine", "gather", "index", "rotate", "select")),
    *(f"tests/ops/{stage}/test_triton_{stage}.py" for stage in ("compress", "index", "rotate", "select", "translate")),
    *(f"tests/ops/write/test_{name}.py" for name in ("write", "triton_write")),
    # Planning, layers, transformers' models, and the public names.
    *(f"tests/{name}.py" for name in ("cache/test_paged", "step/test_planner", "step/test_v4_planner")),
    *(f"tests/layers/test_{name}.py" for name in ("mla", "v4")),
    *(f"tests/integrations/{name}.py" for name in ("hf/test_transformers_attach", "test_flash_mla_contract")),
    "tests/cli/test_doctor.py",
    "tests/test_public_api.py::test_every_promised_name_is_there",
    # Kernels compiled without a GPU: every kernel in Triton once, and CUDA C++ by NVRTC.
    "tests/lab/offline/test_offline.py::test_every_kernel_compiles_and_fits[sm_100]",
    *(f"tests/{name}.py" for name in ("cuda/test_compiler", "lab/verify/test_verify_resources")),
)


@dataclass(frozen=True)
class Environment:
    """One combination of versions."""

    name: str
    requirements: tuple[str, ...]
    """What pip is asked for together with the wheel."""
    tools: tuple[str, ...] = TOOLS
    replaced: tuple[str, ...] = ()
    """What is installed afterwards in place of what torch asks for: its CUDA builds name one version of Triton."""
    python: str = PYTHONS[0]

    @property
    def folder(self) -> Path:
        """Where it is made."""
        return BUILD / re.sub(r"\W+", "-", self.name)


def needed() -> dict[str, Requirement]:
    """What pyproject.toml names: the library's requirements, and transformers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["transformers"]]
    return {one.name: one for one in map(Requirement, lines)}


def lower_bound(requirement: Requirement) -> str:
    """The lowest version that a requirement admits."""
    (bound,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return bound


def pins() -> dict[str, str]:
    """The versions in constraints.txt."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))


def offered(name: str) -> list[str]:
    """The versions of a package that the index has for this Python."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = re.findall(r"^Available versions: (.*)$", done.stdout, flags=re.M)
    return [text.strip() for text in line.split(",")]


def newest_patches(versions: Iterable[str], admitted: SpecifierSet) -> dict[str, str]:
    """The newest patch release of each minor version, by minor version, the lowest first."""
    final = [one for one in map(Version, versions) if not one.is_prerelease and one in admitted]
    found = sorted({Version(one.base_version) for one in final})
    return {f"{one.major}.{one.minor}": str(one) for one in found}


def environments(index: Callable[[str], Sequence[str]] = offered) -> list[Environment]:
    """All of them: the lowest versions, those of constraints.txt, every torch, every Triton, every Python."""
    requirements, pinned = needed(), pins()
    lowest = {name: f"{name}=={lower_bound(one)}" for name, one in requirements.items()}
    fixed = {name: f"{name}=={pinned[name]}" for name in requirements}
    torches, tritons = (newest_patches(index(name), requirements[name].specifier) for name in ("torch", "triton"))
    newest = (f"torch=={list(torches.values())[-1]}",)
    development = Environment(PINNED, tuple(fixed.values()), tuple(f"{name}=={pinned[name]}" for name in TOOLS))
    return [
        Environment(LOWEST, tuple(lowest.values())),
        development,
        *(Environment(f"torch {minor}", (f"torch=={patch}",)) for minor, patch in torches.items()),
        *(
            replace(development, name=f"triton {minor}", replaced=(f"triton=={patch}",))
            for minor, patch in tritons.items()
            if patch != pinned["triton"]
        ),
        *(Environment(f"Python {python}", newest, python=python) for python in PYTHONS[1:]),
    ]


def wheel() -> Path:
    """The wheel that `make wheel` has built."""
    found = list((ROOT / "dist").glob("tamis-*.whl"))
    if len(found) != 1:
        raise SystemExit(f"dist/ must hold one wheel of tamis, got {len(found)}; run `make wheel`")
    return found[0]


def test(environment: Environment) -> Row:
    """Make an environment, run the tests there, remove it, and return what is recorded."""
    shutil.rmtree(environment.folder, ignore_errors=True)
    python = environment.folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    report = BUILD / f"{environment.folder.name}.xml"
    try:
        _run([f"python{environment.python}", "-m", "venv", str(environment.folder)])
        _run([*pip, str(wheel()), *environment.requirements])
        size = _size(environment.folder)
        if environment.replaced:
            _run([*pip, "--no-deps", *environment.replaced])
        _run([*pip, *environment.tools])
        versions = _versions(python)
        # The wheel is tested, not the checkout, and nothing that another Triton has compiled is taken for this one's.
        settings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
        settings["TRITON_CACHE_DIR"] = str(environment.folder / "triton")
        command = [
            str(python),
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "worksteal",
            "-m",
            "not gpu",
            "--junitxml",
            str(report),
        ]
        subprocess.run([*command, "-p", "no:cacheprovider", *TESTS], cwd=ROOT, env=settings, check=False)
        counts = records.counts(report)
    finally:
        shutil.rmtree(environment.folder, ignore_errors=True)
    told = {name: str(count) for name, count in counts._asdict().items()}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return {"environment": environment.name, **versions, **told, "gigabytes": f"{size / 1e9:.1f}", "date": today}


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def _size(folder: Path) -> int:
    """The bytes of all files of an environment, links aside."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _versions(python: Path) -> Row:
    """The installed versions. torch's own text tells its builds for CPUs and CUDA apart; its metadata does not."""
    code = (
        "import json, platform, torch; from importlib.metadata import version\n"
        f"found = {{name: version(name) for name in {PACKAGES!r}}}\n"
        "print(json.dumps({'python': platform.python_version()} | found | {'torch': torch.__version__}))"
    )
    done = subprocess.run([str(python), "-c", code], cwd=python.parent, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout)
    return found


def record(row: Row) -> None:
    """Write a row, in place of an earlier one of the same environment."""
    rows = [old for old in records.read(RESULTS) if old["environment"] != row["environment"]]
    records.write(RESULTS, COLUMNS, sorted([*rows, row], key=_order))


def _order(row: Row) -> tuple[object, ...]:
    return *(Version(row[name]) for name in ("torch", "triton", "python", "numpy")), row["environment"]


def run(names: Sequence[str]) -> bool:
    """Test the named environments, or all; whether nothing failed."""
    known = {one.name: one for one in environments()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(
            f"environments must be among {', '.join(map(repr, known))}; got {', '.join(map(repr, unknown))}"
        )
    passed = True
    for name in names or known:
        environment = known[name]
        if shutil.which(f"python{environment.python}") is None:
            print(f"{name}: left out, because there is no python{environment.python} on the PATH")
            continue
        print(f"{name}: {' '.join((*environment.requirements, *environment.replaced))}", flush=True)
        try:
            row = test(environment)
        except subprocess.CalledProcessError as error:
            print(f"{name}: nothing is recorded, because {error}")
            passed = False
            continue
        record(row)
        passed &= row["failed"] == "0"
    return passed


def main(arguments: list[str]) -> None:
    """Run the command."""
    match arguments:
        case ["list"]:
            for one in environments():
                print(f"{one.name}: Python {one.python}, {' '.join((*one.requirements, *one.replaced))}")
        case ["run", *names]:
            raise SystemExit(0 if run(names) else 1)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
