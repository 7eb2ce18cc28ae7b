"""Spoiled arguments: other kinds of objects, numbers out of range, tensors of another dtype, shape or place."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract.calls import Call
from contract.draw import INT_MAX, INT_MIN, Draw
from tamis import IndexRecipe, LayerSpec, Layout, PagedCache, Plan, V4Plan

_LEAVES = (PagedCache, Layout, LayerSpec, Plan, V4Plan, IndexRecipe)
"""Objects that are replaced as a whole: what is inside was checked when they were made."""
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@dataclass
class Spoiled:
    """What was done to one argument."""

    path: str
    what: str
    value: Any
    must_refuse: bool


class Odd:
    """An object that is nothing in particular."""

    def __repr__(self) -> str:
        return "Odd()"


def paths(arguments: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Where something can be replaced: arguments, and what lies in tuples, lists, records and dictionaries of them."""
    found: list[tuple[Any, ...]] = []

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        found.append(path)
        if len(path) > 3 or isinstance(value, _LEAVES):
            return
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            for name in value._fields:
                walk(getattr(value, name), (*path, name))
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value[:3]):
                walk(part, (*path, number))
        elif isinstance(value, dict):
            for name, part in value.items():
                walk(part, (*path, name))
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                if field.init:
                    walk(getattr(value, field.name), (*path, field.name))

    for name, value in arguments.items():
        if name != "self":
            walk(value, (name,))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = (
            value[step]
            if isinstance(value, dict | list | tuple) and not isinstance(step, str)
            else (value[step] if isinstance(value, dict) else getattr(value, step))
        )
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The same with one part replaced; nothing that exists is changed."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, step: put(value[step], rest, new)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._replace(**{step: put(getattr(value, step), rest, new)})
    if isinstance(value, list | tuple):
        parts = list(value)
        parts[step] = put(parts[step], rest, new)
        return type(value)(parts)
    return replace(value, **{step: put(getattr(value, step), rest, new)})


def spoil(draw: Draw, call: Call) -> list[Spoiled]:
    """Replace one or two arguments of a call, in place; what was done."""
    done: list[Spoiled] = []
    for _ in range(2 if draw.chance(0.2) else 1):
        path = draw.pick(paths(call.arguments))
        if done and done[0].path.split(".")[0] == str(path[0]):
            continue
        value = at(call.arguments, path)
        text = ".".join(map(str, path))
        what, new, must = _other(draw, value, str(path[0]) in call.written, _donors(call.arguments), text in call.sizes)
        if any(text == name or text.startswith(f"{name}.") for name in call.lenient):
            must = False
        if new is None and text in call.optional:
            must = False
        if isinstance(new, list | dict) and isinstance(value, list | dict) and not new and not value:
            must = False  # what was empty still is
        call.arguments = put(call.arguments, path, new)
        done.append(Spoiled(text, what, new, must))
    return done


def _donors(arguments: dict[str, Any]) -> list[Tensor]:
    return [value for path in paths(arguments) if isinstance(value := at(arguments, path), Tensor)]


def _other(draw: Draw, value: Any, written: bool, donors: list[Tensor], size: bool) -> tuple[str, Any, bool]:
    if isinstance(value, Tensor):
        return _tensor(draw, value, written, donors)
    if isinstance(value, bool):
        return ("kind", draw.pick(["yes", None, 2, Odd(), torch.ones(2), [True]]), True)
    if isinstance(value, int):
        return _integer(draw, value, size)
    if isinstance(value, float):
        return _number(draw)
    if isinstance(value, str) and value == "cpu":
        return ("device", draw.pick(["", "nonsense", None, 3, [], Odd(), "cuda:99", "mps", b"cpu", 1.5]), True)
    if isinstance(value, str):
        return ("text", draw.pick(["", "nonsense", None, 3, [], {}, b"auto", Odd(), "x" * 10**5, torch.zeros(2)]), True)
    if isinstance(value, torch.dtype):
        return ("dtype", draw.pick(["float32", None, torch.int8, torch.complex64, Odd(), np.float32, 7]), True)
    if value is None:
        return ("for none", draw.pick([Odd(), "nonsense", 10**400, {"a": 1}, float("nan")]), True)
    return ("kind", _kind(draw), True)


def _kind(draw: Draw) -> Any:
    many: list[Callable[[], Any]] = [
        Odd,
        lambda: None,
        lambda: "nonsense",
        lambda: 3,
        lambda: 10**400,
        lambda: float("nan"),
        lambda: [1, 2],
        list,
        dict,
        lambda: np.zeros(3, np.int32),
        lambda: Odd,
        lambda: torch.float32,
        lambda: [0] * 10**5,
        lambda: (torch.zeros(2), None),
    ]
    return draw.pick(many)()


def _integer(draw: Draw, value: int, size: bool) -> tuple[str, Any, bool]:
    if draw.chance(0.5):
        return (
            "huge or odd",
            draw.pick(
                [
                    2**63,
                    -(2**63),
                    10**400,
                    -(10**400),
                    10**5000,
                    True,
                    False,
                    2.0,
                    "3",
                    None,
                    np.int64(3),
                    Odd(),
                    torch.tensor(2),
                ]
            ),
            True,
        )
    small = [-1, 0, 1, value + 1, max(value - 1, 0), 2 * value, INT_MIN]
    return "number", draw.pick(small if size else [*small, INT_MAX, 2**40, 2**63 - 1]), False


def _number(draw: Draw) -> tuple[str, Any, bool]:
    nan, inf = float("nan"), float("inf")
    if draw.chance(0.7):
        bad = [
            nan,
            inf,
            -inf,
            10**400,
            -(10**400),
            10**5000,
            "1",
            None,
            True,
            1j,
            Odd(),
            np.array([1.0, 2.0]),
            1e39,
            1e308,
            1e-320,
        ]
        bad += [torch.tensor(nan), torch.tensor([1.0, 1.0]), torch.tensor(-1.0), torch.tensor(1), [1.0]]
        return ("number", draw.pick(bad), True)
    return ("number", draw.pick([-1.0, 0.0, -0.0, 1, 3, 1e-30, 1e30, 0.5, torch.tensor(0.5)]), False)


def _tensor(draw: Draw, value: Tensor, written: bool, donors: list[Tensor]) -> tuple[str, Any, bool]:
    kinds: list[Callable[[], tuple[str, Any, bool]]] = [
        lambda: ("kind", _kind(draw), True),
        lambda: ("as numpy", value.detach().cpu().float().numpy(), True),
        lambda: ("as list", value.detach().cpu().float().tolist() if value.dim() else [1.0], True),
        lambda: ("meta", value.to("meta"), True),
        lambda: ("dtype", _recast(value, draw.pick(_DTYPES)), False),
        lambda: ("rank", draw.pick([value.unsqueeze(0), value.flatten(), value.unsqueeze(-1)]), False),
        lambda: ("0-d", value.new_zeros(()), False),
        lambda: ("size", _resized(draw, value), False),
        lambda: ("empty", value[:0] if value.dim() else value, False),
        lambda: ("sparse", _sparse(value), True),
        lambda: (
            "gradient",
            value.detach().clone().requires_grad_()
            if value.is_floating_point() and value.element_size() > 1
            else value,
            False,
        ),
        lambda: (
            "expanded",
            value[:1].expand(value.shape) if value.dim() and len(value) > 1 else value,
            written and value.dim() > 0 and len(value) > 1 and value.numel() > 1,
        ),
        lambda: ("values", _values(draw, value), False),
        lambda: ("values", _values(draw, value), False),
    ]
    if written:
        kinds.append(lambda: _alias(draw, value, donors))
    return draw.pick(kinds)()


def _alias(draw: Draw, value: Tensor, donors: list[Tensor]) -> tuple[str, Any, bool]:
    """The memory of another argument, where one is large enough."""
    others = [d for d in donors if d is not value and d.layout == torch.strided and d.device == value.device]
    others = [
        d
        for d in others
        if d.is_contiguous() and d.numel() * d.element_size() >= value.numel() * value.element_size() > 0
    ]
    if not others:
        return ("same", value, False)
    donor = draw.pick(others)
    flat = donor.detach().reshape(-1).view(torch.uint8)[: value.numel() * value.element_size()]
    if flat.storage_offset() % value.element_size():
        return ("same", value, False)
    return ("alias", flat.view(value.dtype).view(value.shape), True)


def _recast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.detach().float().to(dtype) if value.element_size() == 1 else value.detach().to(dtype)


def _resized(draw: Draw, value: Tensor) -> Tensor:
    if value.dim() == 0:
        return value.expand(2)
    axis = draw.size(0, value.dim() - 1)
    if value.shape[axis] > 1 and draw.chance(0.5):
        return value.narrow(axis, 0, value.shape[axis] - 1)
    if value.shape[axis] == 0:
        return value.new_zeros([max(size, 1) for size in value.shape])
    raw = value.detach()
    return torch.cat((raw.view(torch.uint8) if raw.element_size() == 1 else raw,) * 2, axis).view(value.dtype)


def _sparse(value: Tensor) -> Tensor:
    plain = value.detach().float() if value.element_size() == 1 else value.detach()
    return plain.to_sparse() if plain.device.type != "meta" else value


def _values(draw: Draw, value: Tensor) -> Tensor:
    """The same tensor with a value that no engine means."""
    if value.numel() == 0 or value.element_size() == 1:
        return value
    found = value.detach().clone()
    where = tuple(draw.size(0, extent - 1) for extent in value.shape)
    if value.is_floating_point():
        found[where] = draw.pick([float("nan"), float("inf"), -float("inf")])
    else:
        limits = torch.iinfo(value.dtype)
        found[where] = draw.pick([limits.min, limits.max, -1, INT_MAX, 0, 1])
    return found
