"""Kernel parameters: a NamedTuple on the host and a C++ struct with the same fields in the kernel.

A kernel takes a single `const __grid_constant__` struct. Its twin here is a NamedTuple whose fields have the same names
in the same order, each annotated with one of the types below, or with the NamedTuple of a nested struct. Nested structs
come after all other fields, so that packing is a concatenation. The host compiles a kernel with `PARAMS_BYTES`, which
the source compares with `sizeof` in a `static_assert`; tests/cuda/test_params.py compares the fields one by one.
"""

import struct
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

Pointer = Annotated[int, "P"]
"""An address on the device, `tensor.data_ptr()`; 0 is a null pointer."""
Int = Annotated[int, "i"]
Long = Annotated[int, "q"]
"""A `long long`: strides and sizes that 32 bits may not hold."""
Float = Annotated[float, "f"]


class Format(NamedTuple):
    """The byte format of a NamedTuple of parameters."""

    letters: str
    """The format of the module `struct`, padded like the C++ struct."""
    plain: int
    """Number of fields before the nested structs."""
    nested: bool
    """Whether there are nested structs."""


@cache
def params_format(params: type) -> Format:
    """The format of a NamedTuple of parameters."""
    hints = get_type_hints(params, include_extras=True)
    names: tuple[str, ...] = params._fields  # type: ignore[attr-defined]
    kinds = [_letter(hints[name]) for name in names]
    plain = next((i for i, kind in enumerate(kinds) if len(kind) > 1), len(kinds))
    if any(len(kind) == 1 for kind in kinds[plain:]):
        raise TypeError(f"{params.__name__} has plain fields after its nested structs; move the structs to the end")
    letters = "".join(kinds)
    # Like a C++ compiler, pad a struct to its largest member: zero repeats of a letter align to it and add nothing.
    largest = max((kind for kind in letters if kind.isalpha()), key=struct.calcsize)
    return Format(f"0{largest}{letters}0{largest}", plain, plain < len(kinds))


def _letter(hint: Any) -> str:
    """The format of a field: one letter, or the format of a nested struct."""
    metadata = getattr(hint, "__metadata__", None)
    if metadata is not None:
        return str(metadata[0])
    inner = params_format(hint)
    if inner.nested:
        raise TypeError(f"{hint.__name__} is nested and has nested structs itself; declare its fields one by one")
    return inner.letters


class Place(NamedTuple):
    """Where a field lies in the packed struct."""

    letter: str
    """The field's type, as a letter of the module `struct`."""
    number: int
    """How many values of this type fit before it."""


@cache
def field_places(params: type) -> dict[str, Place]:
    """The place of every field of a NamedTuple of parameters; fields of nested structs are named "struct.field"."""
    hints = get_type_hints(params, include_extras=True)
    found, before = {}, "@"
    for name in params._fields:  # type: ignore[attr-defined]
        kind = _letter(hints[name])
        if len(kind) == 1:
            fields = {name: kind}
        else:
            inner = get_type_hints(hints[name], include_extras=True)
            fields = {f"{name}.{field}": _letter(inner[field]) for field in hints[name]._fields}
            before += kind[:2]  # aligned like its largest member
        for field, letter in fields.items():
            found[field] = Place(letter, struct.calcsize(f"{before}0{letter}") // struct.calcsize(letter))
            before += letter
        if len(kind) > 1:
            before += kind[-2:]
    return found


def params_bytes(params: type) -> int:
    """The size of the C++ struct, with which the source is compiled as `PARAMS_BYTES`."""
    return struct.calcsize(f"@{params_format(params).letters}")


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor's memory; 0, a null pointer, for None."""
    return 0 if tensor is None else tensor.data_ptr()


def aligned(values: Tensor) -> Tensor:
    """A tensor as copies of 16 bytes read it: the last axis contiguous, every row aligned."""
    unit = 16 // values.element_size()
    *strides, last = values.stride()
    if last == 1 and all(stride % unit == 0 for stride in strides) and values.data_ptr() % 16 == 0:
        return values
    return values.clone(memory_format=torch.contiguous_format)
