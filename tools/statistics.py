"""Count files, functions and their sizes: `python -m tools.statistics [FOLDER]`, with `src/tamis` by default.

Lines include comments, docstrings and blank lines, and a function's lines include its decorators. A kernel (a function
with a `jit` decorator) is counted apart from the functions that run on the host. Cyclomatic complexity is 1 plus the
number of branches, loops, exception handlers, conditions of comprehensions and further operands of `and` and `or`;
nested functions count for themselves. FOLDER is read as text, so it may hold any state of the tree.
"""

import argparse
import ast
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CUDA = (".cu", ".cuh")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)


@dataclass(frozen=True)
class Measured:
    """One function."""

    place: str
    lines: int
    signature: int
    """Number of lines from `def` to the colon."""
    parameters: int
    """Number of parameters without self and cls."""
    complexity: int
    kernel: bool


def functions_of(tree: ast.Module, file: str) -> Iterator[Measured]:
    """All functions and methods of a module."""
    methods = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body if isinstance(f, Function)}
    for node in ast.walk(tree):
        if isinstance(node, Function):
            assert node.end_lineno is not None
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield Measured(
                f"{file}:{node.lineno} {node.name}",
                node.end_lineno - first + 1,
                max(1, node.body[0].lineno - node.lineno),
                _parameters(node, bound=id(node) in methods),
                _complexity(node),
                any("jit" in ast.unparse(decorator) for decorator in node.decorator_list),
            )


def _parameters(node: Function, *, bound: bool) -> int:
    given = node.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    return len(names) + bool(given.vararg) + bool(given.kwarg) - (bound and not static)


def _complexity(node: Function) -> int:
    count, pending = 1, list(ast.iter_child_nodes(node))
    while pending:
        inner = pending.pop()
        if isinstance(inner, Function | ast.Lambda):
            continue
        if isinstance(inner, _BRANCHES):
            count += 1
        elif isinstance(inner, ast.BoolOp):
            count += len(inner.values) - 1
        elif isinstance(inner, ast.comprehension):
            count += 1 + len(inner.ifs)
        pending += ast.iter_child_nodes(inner)
    return count


def spread(values: Sequence[int], percentiles: Sequence[int] = (50, 90)) -> str:
    """Percentiles by nearest rank (the median may lie between two values), and the maximum."""
    if not values:
        return "none"
    told = []
    for percent in percentiles:
        rank = math.ceil(percent * len(values) / 100) - 1
        found = statistics.median(values) if percent == 50 else sorted(values)[rank]
        told.append(f"{'median' if percent == 50 else f'p{percent}'} {found:g}")
    return ", ".join([*told, f"max {max(values)}"])


def report(folder: Path) -> list[str]:
    """The lines that `main` prints."""
    python = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    cuda = {path: path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in CUDA}
    trees = {path: ast.parse(text) for path, text in python.items()}
    found = [f for path, tree in trees.items() for f in functions_of(tree, path.relative_to(folder).as_posix())]
    classes = [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(folder).as_posix()}:{node.lineno} {node.name}")
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    ]
    told = [_files("Python", python), _files("CUDA", cuda)]
    told += _functions("host functions", [f for f in found if not f.kernel])
    told += _functions("kernels", [f for f in found if f.kernel])
    complicated = sorted((f for f in found if f.complexity > 10), key=lambda f: -f.complexity)
    told.append(f"cyclomatic complexity > 10: {len(complicated)} of {len(found)}")
    told += [f"  {f.complexity} {f.place}" for f in complicated[:5]]
    told.append(f"classes: {len(classes)}; lines {spread([lines for lines, _ in classes])}")
    told += [f"  {lines} {place}" for lines, place in sorted(classes, reverse=True)[:3]]
    told.append(f"signature lines of functions in ops: {sum(f.signature for f in found if f.place.startswith('ops/'))}")
    told.append("lines by folder:")
    return told + _folders(folder, python | cuda)


def _files(name: str, files: dict[Path, str]) -> str:
    lines = [text.count("\n") for text in files.values()]
    return f"{name}: {len(lines)} files, {sum(lines)} lines; lines of a file {spread(lines)}"


def _functions(name: str, found: list[Measured]) -> list[str]:
    parameters = [f.parameters for f in found]
    many = ", ".join(f"{sum(p >= least for p in parameters)} with >= {least}" for least in (8, 10))
    return [
        f"{name}: {len(found)}; lines {spread([f.lines for f in found], (50, 90, 99))}",
        f"  parameters {spread(parameters)}; {many}",
    ]


def _folders(folder: Path, files: dict[Path, str]) -> list[str]:
    sums: dict[str, int] = {}
    for path, text in files.items():
        top = path.relative_to(folder).parts
        name = top[0] if len(top) > 1 else "(root)"
        sums[name] = sums.get(name, 0) + text.count("\n")
    return [f"  {lines:6} {name}" for name, lines in sorted(sums.items(), key=lambda one: -one[1])]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m tools.statistics", description="Count files, functions and sizes.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "src" / "tamis", help="a package's folder")
    folder: Path = parser.parse_args().folder
    # `src` holds one package; the folders inside it are counted.
    packages = [path.parent for path in folder.glob("*/__init__.py")]
    print("\n".join(report(packages[0] if len(packages) == 1 and not (folder / "__init__.py").exists() else folder)))


if __name__ == "__main__":
    main()
