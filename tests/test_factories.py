"""Every tensor that `src` makes names its dtype and its device: neither may follow what a program has set for itself.

`torch.set_default_dtype` and `torch.set_default_device` change what a factory returns. A buffer of the wrong dtype is
smaller than the kernel that writes to it believes, and memory behind it is destroyed without an error.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

SOURCES = Path(__file__).parents[1] / "src"
# Torch's own list of what follows the default device, and what it lacks: samplers, and types called as constructors.
FACTORIES = {function.__name__ for function in _device_constructors() if function.__module__ == "torch"}
FACTORIES |= {"normal", "frombuffer"}
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"}
GLOBALS = {"set_default_dtype", "get_default_dtype", "set_default_device", "get_default_device"}


def refused(source: str) -> list[str]:
    """What a source does that a program's defaults would change, as `line: why`.

    - `torch.empty`, `torch.tensor` and all others that torch lists must be given both `dtype=` and `device=`, by name.
      That arange counts in int64 whatever the default is follows from its arguments being integers, which a reader of
      the call cannot see; so it is no exception.
    - `x.new_empty(shape)` has the device of `x`, which no default changes and which is what the call says. Its dtype is
      that of `x` too, but a kernel that is handed the result believes in one dtype, not in that of whatever `x` came
      to be: `dtype=` must be named (`dtype=x.dtype` where it is meant).
    - `empty_like` and its kin have both from their argument, by their meaning. `from_numpy` has a host array's.
    - `torch.Generator` must be given a device.
    - A factory handed on as a value (`make = torch.empty`) or keywords that cannot be seen (`**options`) are refused,
      since nobody can check them here; so are legacy constructors, imports of factories by name, and asking for
      defaults.
    """
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            names = {name.name for name in node.names} & (FACTORIES | GLOBALS)
            found += [f"{node.lineno}: import of {name}" for name in sorted(names)]
        elif isinstance(node, ast.Name) and node.id in LEGACY and id(node) in called:
            found.append(f"{node.lineno}: {node.id} called as a constructor")
        elif isinstance(node, ast.Attribute):
            found += [f"{node.lineno}: {why}" for why in _about(node, called.get(id(node)))]
    return found


def _about(node: ast.Attribute, call: ast.Call | None) -> Iterator[str]:
    """What is wrong with `something.name`, which `call` calls if it is given."""
    name, of_torch = node.attr, isinstance(node.value, ast.Name) and node.value.id == "torch"
    if of_torch and (name in GLOBALS or (name in LEGACY and call is not None)):
        yield f"torch.{name}"
    elif of_torch and name == "Generator" and call is not None:
        if not call.args and "device" not in _named(call):
            yield "torch.Generator without device"
    elif of_torch and name in FACTORIES:
        yield from _missing(f"torch.{name}", call, {"dtype", "device"})
    elif not of_torch and name in {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"}:
        yield from _missing(name, call, {"dtype"})


def _missing(name: str, call: ast.Call | None, wanted: set[str]) -> Iterator[str]:
    if call is None:
        yield f"{name} handed on as a value"
    elif missing := sorted(wanted - _named(call)):
        yield f"{name} without {' and '.join(missing)}"


def _named(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_every_tensor_names_its_dtype_and_its_device(path: Path) -> None:
    assert refused(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("torch.empty(3)", "torch.empty without device and dtype"),
        ("torch.empty(3, device=q.device)", "torch.empty without dtype"),
        ("torch.zeros(3, dtype=torch.int32)", "torch.zeros without device"),
        ("torch.tensor([1], dtype=torch.int32)", "torch.tensor without device"),
        ("torch.tensor(1.0)", "torch.tensor without device and dtype"),
        ("torch.as_tensor(x, device=d)", "torch.as_tensor without dtype"),
        ("torch.full((), 0.5, dtype=d)", "torch.full without device"),
        ("torch.arange(4, device=d)", "torch.arange without dtype"),
        ("torch.linspace(0, 1, 4)", "torch.linspace without device and dtype"),
        ("torch.logspace(0, 1, 4, dtype=d)", "torch.logspace without device"),
        ("torch.eye(3)", "torch.eye without device and dtype"),
        ("torch.ones(3)", "torch.ones without device and dtype"),
        ("torch.rand(3, generator=g)", "torch.rand without device and dtype"),
        ("torch.randn(3, dtype=d)", "torch.randn without device"),
        ("torch.randint(0, 4, (3,), device=d)", "torch.randint without dtype"),
        ("torch.randperm(4, generator=g)", "torch.randperm without device and dtype"),
        ("torch.normal(0.0, 1.0, (3,))", "torch.normal without device and dtype"),
        ("torch.empty_strided((2,), (1,))", "torch.empty_strided without device and dtype"),
        ("torch.scalar_tensor(1)", "torch.scalar_tensor without device and dtype"),
        ("torch.tril_indices(3, 3)", "torch.tril_indices without device and dtype"),
        ("torch.empty(3, **options)", "torch.empty without device and dtype"),
        ("torch.Generator()", "torch.Generator without device"),
        ("torch.Generator().manual_seed(1)", "torch.Generator without device"),
        ("torch.Tensor([1.0])", "torch.Tensor"),
        ("torch.FloatTensor(3)", "torch.FloatTensor"),
        ("Tensor(3)", "Tensor called as a constructor"),
        ("make = torch.zeros", "torch.zeros handed on as a value"),
        ("partial(torch.empty, 3)", "torch.empty handed on as a value"),
        ("torch.get_default_dtype()", "torch.get_default_dtype"),
        ("torch.set_default_dtype(d)", "torch.set_default_dtype"),
        ("from torch import Tensor, empty", "import of empty"),
        ("x.new_empty(3)", "new_empty without dtype"),
        ("x.new_zeros((3,), device=d)", "new_zeros without dtype"),
        ("x[0].new_full((3,), 1)", "new_full without dtype"),
        ("make(x.new_zeros)", "new_zeros handed on as a value"),
    ],
)
def test_what_a_default_could_change_is_refused(source: str, why: str) -> None:
    assert refused(f"import torch\n\n{source}\n") == [f"3: {why}"]


@pytest.mark.parametrize(
    "source",
    [
        "torch.empty(3, dtype=torch.int32, device=q.device)",
        "torch.empty_like(x)",
        "torch.full_like(x, 1.0)",
        "torch.from_numpy(array)",
        "x.new_empty(3, dtype=x.dtype)",
        "torch.Generator('cpu')",
        "torch.Generator(device=d)",
        "def f(x: torch.Tensor) -> Tensor: return isinstance(x, torch.Tensor)",
        "tl.zeros((4,), tl.float32)",
        "numpy.empty(3)",
    ],
)
def test_what_no_default_changes_is_accepted(source: str) -> None:
    assert refused(source) == []


def test_torch_itself_still_names_its_factories() -> None:
    """The list is private to torch: should it go or shrink, this says so, not a green test over an empty list."""
    common = "empty zeros ones full arange linspace logspace eye tensor as_tensor asarray rand randn randint randperm"
    common += " empty_strided scalar_tensor tril_indices triu_indices"
    assert set(common.split()) <= FACTORIES
    assert all(hasattr(torch, name) for name in FACTORIES)
