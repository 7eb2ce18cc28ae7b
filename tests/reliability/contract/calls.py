"""What a fuzzed call is, and what can be seen of the objects that were passed to it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Wrong(Exception):
    """A result that differs from the oracle's, or arguments that nothing documents and that were accepted."""


def require(holds: object, text: str) -> None:
    """Raise `Wrong` unless this holds."""
    if not bool(holds):
        raise Wrong(text)


@dataclass
class Call:
    """One call with everything needed to judge it."""

    target: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any, dict[str, Any], dict[str, Any]], None]
    """Raises if the result is wrong: of the result, the arguments before the call, and the arguments after it."""
    written: tuple[str, ...] = ()
    """Arguments that a call that returns may write to."""
    lenient: tuple[str, ...] = ()
    """Arguments that may be anything: documented as without effect, or of no fixed type."""
    optional: tuple[str, ...] = ()
    """Arguments that may be None instead of what they are here."""
    free: bool = False
    """The oracle cannot tell values, only that they were refused or not: spoiled calls may be accepted unless they
    must be refused."""
    sizes: tuple[str, ...] = ()
    """Numbers that memory is allocated by: they are never spoiled to be merely large."""
    names: tuple[str, ...] = ()
    """What a refusal may name beside the arguments, their fields and attributes."""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value inside arguments, with a path to it. Objects of the library are looked into."""
    if value is None or isinstance(value, Tensor | np.ndarray | str | bytes | int | float | torch.dtype | torch.device):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}[{number}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif type(value).__module__.startswith("tamis") and hasattr(value, "__dict__"):
        for key, part in vars(value).items():
            yield from leaves(part, f"{path}.{key}")


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are now. Tensors that share memory still do, and bytes between a view's rows are kept."""
    memo: dict[int, Any] = {}
    found = {}
    for name, value in arguments.items():
        try:
            found[name] = copy.deepcopy(value, memo)
        except Exception:  # an object that cannot be copied is none of the library's: it cannot change either
            found[name] = value
    return found


def memory(value: Tensor) -> Tensor | None:
    """All bytes of the memory that a tensor is a view of; None where there is none to look at."""
    if value.device.type == "meta" or value.layout != torch.strided or value.is_quantized:
        return None
    store = value.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(store)  # type: ignore[call-overload]


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Paths of what differs, to the last bit and the bytes between rows included."""
    found = []
    old, new = list(leaves(before)), list(leaves(after))
    known = dict(new)
    found += sorted(set(known) ^ {path for path, _ in old})
    for path, was in old:
        if path not in known:
            continue
        now = known[path]
        if isinstance(was, Tensor) and isinstance(now, Tensor):
            first, second = memory(was), memory(now)
            same = first is None or second is None or torch.equal(first, second)
        elif isinstance(was, np.ndarray):
            same = isinstance(now, np.ndarray) and was.tobytes() == now.tobytes()
        else:
            same = type(was) is type(now) and (was == now or was != was)
        if not same:
            found.append(path)
    return found


def outside_unchanged(name: str, before: Tensor, after: Tensor) -> None:
    """Refuse a write beside the rows that a view shows."""
    first, second = memory(before), memory(after)
    if first is None or second is None:
        return
    inside = torch.zeros_like(second, dtype=torch.bool)
    size = after.element_size()
    if after.numel():
        base = after.storage_offset() * size
        strides = [stride * size for stride in after.stride()]
        inside.as_strided((*after.shape, size), (*strides, 1), base).fill_(True)
    require(torch.equal(first[~inside], second[~inside]), f"{name} was written outside of its view")
