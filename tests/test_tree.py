"""The order of imports: every module imports only from folders before its own in `ORDER`.

Imports inside functions and under `TYPE_CHECKING` count as well, and so does `import_module` with a name that begins
with "tamis.". Names that a table holds as data (`Backend.stage_module`) are not seen; `ops/library.py` and `choice.py`
import those.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tamis"

ORDER = (
    ("_extras", "_version", "checks", "arithmetic"),
    ("model",),
    ("cache",),
    ("cuda",),
    ("backends",),
    ("ops",),
    ("choice",),
    ("step",),
    ("train",),
    ("layers",),
    ("integrations",),
    ("lab",),
    ("cli",),
)
"""Folders and modules of `tamis`, the lowest first. Those on one line are independent of each other."""

OPEN: frozenset[str] = frozenset()
"""Imports "file -> module" that break the rule and are still to be mended. This must be empty."""

_LEVELS = {name: level for level, names in enumerate(ORDER) for name in names}
_PACKAGE = _LEVELS["layers"]
"""`import tamis` and `from tamis import SparseMLA` load names of folders up to this one."""
_FREE = {"tamis/__init__.py", "tamis/__main__.py"}
"""The package itself offers names of all folders, and `python -m tamis` runs the command line."""


class Import(NamedTuple):
    """One import of a module of tamis."""

    file: str
    line: int
    module: str

    @property
    def edge(self) -> str:
        return f"{self.file} -> {self.module}"


def imports_of(text: str, file: str, package: str) -> Iterator[Import]:
    """All imports of tamis' modules in a module's text, wherever they stand."""
    for node in ast.walk(ast.parse(text)):
        for module in _modules(node, package):
            if module == "tamis" or module.startswith("tamis."):
                yield Import(file, node.lineno, module)


def _modules(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        # `from tamis import checks` imports a module, and `from tamis.cache import layout` may.
        return [f"{base}.{alias.name}" for alias in node.names] if base == "tamis" else [base]
    if isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__"):
            return [_text(node.args[0])]
    return []


def _text(node: ast.expr) -> str:
    """The literal text of an expression, or the literal beginning of an f-string."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def place_of(module: str) -> str:
    """The folder or root module that a module of tamis belongs to: "cache" for "tamis.cache.layout"."""
    return module.split(".")[1] if "." in module else ""


def broken_rules(found: Iterator[Import]) -> list[tuple[Import, str]]:
    """The imports that break the order, each with the rule that it breaks."""
    wrong = []
    for one in found:
        own = one.file.split("/")[1].removesuffix(".py")
        target = place_of(one.module)
        if one.file in _FREE or target in (own, "__version__"):
            continue
        if _LEVELS.get(target, _PACKAGE) >= _LEVELS[own]:
            named = target if target in _LEVELS else "the package, which offers names up to layers,"
            wrong.append((one, f"{own} may import only what comes before it, and {named} does not"))
    return wrong


def source_imports() -> Iterator[Import]:
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE.parent).as_posix()
        package = ".".join(path.relative_to(SOURCE.parent).parent.parts)
        yield from imports_of(path.read_text(), file, package)


def test_every_import_follows_the_order_of_folders() -> None:
    wrong = broken_rules(source_imports())
    told = [f"{one.file}:{one.line}: imports {one.module}: {rule}" for one, rule in wrong if one.edge not in OPEN]
    assert not told, "\n" + "\n".join(told)


def test_mended_imports_are_taken_off_the_list() -> None:
    assert {one.edge for one, _ in broken_rules(source_imports())} >= OPEN


def test_every_folder_has_a_place_in_the_order() -> None:
    found = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "__main__", "__pycache__"} == set(_LEVELS)


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("import tamis.ops.library", "tamis.ops.library"),
        ("from tamis import checks, ops", "tamis.ops"),
        ("from tamis.ops import attend", "tamis.ops"),
        ("from ..ops import attend", "tamis.ops"),
        ("from .. import ops", "tamis.ops"),
        ("def f():\n    from tamis.ops import attend", "tamis.ops"),
        ("if TYPE_CHECKING:\n    from tamis.ops import attend", "tamis.ops"),
        ("import_module('tamis.ops.write')", "tamis.ops.write"),
        ("importlib.import_module(f'tamis.ops.{stage}')", "tamis.ops."),
    ],
)
def test_imports_are_found_wherever_they_stand(text: str, module: str) -> None:
    found = list(imports_of(text, "tamis/cache/paged.py", "tamis.cache"))
    assert module in [one.module for one in found]
    (one, rule), *_ = broken_rules(iter(found))
    assert (one.file, one.line) == ("tamis/cache/paged.py", text.count("\n") + 1)
    assert rule == "cache may import only what comes before it, and ops does not"


@pytest.mark.parametrize("text", ["import tamis", "from tamis import Planner"])
def test_the_package_comes_after_the_layers(text: str) -> None:
    assert broken_rules(imports_of(text, "tamis/integrations/deep_gemm.py", "tamis.integrations")) == []
    (_, rule), *_ = broken_rules(imports_of(text, "tamis/layers/mla.py", "tamis.layers"))
    assert "the package, which offers names up to layers, does not" in rule


def test_imports_that_follow_the_order_pass() -> None:
    text = "from tamis import __version__, checks\nfrom tamis.cache import layout\nimport torch\nimport_module(name)"
    assert broken_rules(imports_of(text, "tamis/step/plan.py", "tamis.step")) == []


@pytest.mark.parametrize("module", ["tamis", "tamis.ops"])
def test_the_library_does_not_load_what_it_does_not_need(module: str) -> None:
    """Triton and transformers cost seconds, and the library never imports its own laboratory or command line."""
    code = (
        f"import sys, {module}\n"
        "names = ('triton', 'transformers', 'tamis.lab', 'tamis.cli')\n"
        "found = [m for m in sys.modules if any(m == n or m.startswith(n + '.') for n in names)]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_attend_is_a_function_and_its_stage_is_a_package() -> None:
    code = (
        "import tamis.ops.attention.hopper as hopper\n"
        "import tamis\n"
        "assert callable(tamis.ops.attend)\n"
        "assert hopper.__name__ == 'tamis.ops.attention.hopper'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
