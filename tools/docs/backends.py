"""What a backend must offer: the functions of each stage and the fields of a `Backend`, from their declarations."""

import ast
import inspect
from importlib import import_module
from itertools import pairwise
from typing import Annotated, get_origin, get_type_hints

from tamis.backends import STAGES, Backend
from tamis.ops.library import Operation
from tools.docs.markdown import table

PAGE = "reference/backends.md"
"""The page with every field of the functions' arguments."""
MORE_OPERATIONS = {"index": ("block_operations",)}
"""Further modules that declare operations of a stage."""
DEFAULTS = {"STAGES": "all", "checks.FLOATS": "bf16, fp16, fp32"}
"""Words for defaults that are names in the code."""


def operations(stage: str) -> list[Operation[tuple[object, ...], object]]:
    """The operations of a stage in the order of their declaration."""
    package = f"tamis.ops.{'attention' if stage == 'attend' else stage}"
    modules = [import_module(f"{package}.{name}") for name in ("operations", *MORE_OPERATIONS.get(stage, ()))]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Operation)]
    return [operation for operation in found if operation.stage == stage]


def functions() -> str:
    """A line per function: its stage, its argument, what it writes and what it returns."""
    lines = []
    for stage in STAGES:
        for operation in operations(stage):
            made = operation.arguments
            link = f"[`{made.__name__}`]({PAGE}#{made.__module__}.{made.__qualname__})"
            hints = get_type_hints(made, include_extras=True)
            written = [f"`{name}`" for name, hint in hints.items() if get_origin(hint) is Annotated]
            nothing = get_type_hints(operation.fake)["return"] is type(None)
            returned = "None" if nothing else inspect.getdoc(operation.fake) or ""
            lines.append((stage, f"`{operation.name}`", link, ", ".join(written) or "-", returned.rstrip(".")))
    return table(("stage", "function", "its one argument", "writes", "returns"), lines, "lllll")


def fields() -> str:
    """A line per field of a `Backend` that has a default: the default and the field's meaning."""
    (declared,) = ast.parse(inspect.getsource(Backend)).body
    assert isinstance(declared, ast.ClassDef)
    lines = []
    for field, text in pairwise(declared.body):
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        assert isinstance(text, ast.Expr)
        default = DEFAULTS.get(written := ast.unparse(field.value), f"`{written}`")
        lines.append((f"`{ast.unparse(field.target)}`", default, " ".join(ast.literal_eval(text.value).split())))
    return table(("field", "default", "meaning"), lines, "lll")
