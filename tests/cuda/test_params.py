"""The parameter structs of kernels are declared in C++ and in Python; both declarations must have the same fields."""

import re
import struct
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple, get_type_hints

import pytest

from tamis.cuda.params import Float, Int, Long, Pointer, field_places, params_bytes, params_format
from tamis.ops.attention.hopper import gradients as attention_gradients
from tamis.ops.attention.hopper import many_heads, splits
from tamis.ops.attention.hopper import params as attention
from tamis.ops.index.hopper import gradients as index_gradients
from tamis.ops.index.hopper import topk
from tamis.ops.rows import ordered_sums

ATTENTION = "tamis.ops.attention.hopper"
STRUCTS = [
    (attention.QueryParams, ATTENTION, "params.cuh"),
    (attention.OutputParams, ATTENTION, "params.cuh"),
    (attention.SelectionParams, ATTENTION, "params.cuh"),
    (attention.AttendParams, ATTENTION, "params.cuh"),
    (many_heads.ManyHeadsParams, ATTENTION, "items.cuh"),
    (splits.MergeParams, ATTENTION, "merge_splits.cu"),
    (topk.TopkParams, "tamis.ops.index.hopper", "topk_parts.cuh"),
    (attention_gradients.GradientParams, ATTENTION, "gradients.cu"),
    (index_gradients.IndexLossParams, "tamis.ops.index.hopper", "index_loss.cu"),
    (ordered_sums.SumParams, "tamis.ops.rows", "ordered_sums.cu"),
]
TYPES = {"int": "i", "long long": "q", "float": "f"}


class Field(NamedTuple):
    name: str
    kind: str
    comment: str


def cpp_fields(text: str, name: str) -> Iterator[Field]:
    """The fields of a C++ struct, which has one field per line."""
    found = re.search(rf"^struct {name} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    assert found, f"no struct {name}"
    for line in found[1].splitlines():
        field = re.fullmatch(r"    ([\w ]+?)(\*?) (\w+);\s*(?://\s*(.*))?", line)
        assert field, f"{name}: {line!r} does not declare one field"
        kind = "P" if field[2] else TYPES.get(field[1], field[1])
        yield Field(field[3], kind, field[4] or "")


def python_fields(params: type) -> Iterator[tuple[str, str]]:
    for name, hint in get_type_hints(params, include_extras=True).items():
        yield name, hint.__metadata__[0] if hasattr(hint, "__metadata__") else hint.__name__


@pytest.mark.parametrize(("params", "package", "file"), STRUCTS, ids=lambda value: getattr(value, "__name__", None))
def test_both_declarations_have_the_same_fields(params: type, package: str, file: str) -> None:
    text = resources.files(package).joinpath(file).read_text()
    fields = list(cpp_fields(text, params.__name__))
    assert [(field.name, field.kind) for field in fields] == list(python_fields(params))
    for field in fields:
        if field.kind == "P":
            assert re.match(r"\[.+\]", field.comment), f"{params.__name__}.{field.name} has no shape"


class Inner(NamedTuple):
    start: Pointer
    size: Int


class Outer(NamedTuple):
    count: Int
    scale: Float
    stride: Long
    last: Int
    first: Inner
    second: Inner


def test_bytes_lie_where_a_compiler_puts_them() -> None:
    assert params_bytes(Inner) == 16
    assert params_bytes(Outer) == 4 + 4 + 8 + 4 + 4 + 2 * 16
    letters, plain, nested = params_format(Outer)
    assert (plain, nested) == (4, True)
    packed = struct.pack(f"@{letters}", 1, 0.5, 2, 3, 4, 5, 6, 7)
    assert struct.unpack("@ifqi4xqi4xqi4x", packed) == (1, 0.5, 2, 3, 4, 5, 6, 7)


class Early(NamedTuple):
    inner: Inner
    count: Int


class Deep(NamedTuple):
    outer: Outer


class Ints(NamedTuple):
    a: Int


def test_nested_structs_come_last_and_are_flat() -> None:
    with pytest.raises(TypeError, match="Early has plain fields after its nested structs"):
        params_format(Early)
    with pytest.raises(TypeError, match="Outer is nested and has nested structs itself"):
        params_format(Deep)
    assert params_format(Ints).letters == "0ii0i"


@pytest.mark.parametrize("params", [params for params, _, _ in STRUCTS], ids=lambda params: params.__name__)
def test_every_field_is_where_packing_puts_it(params: type) -> None:
    places = field_places(params)
    letters = f"@{params_format(params).letters}"
    for number, (name, place) in enumerate(places.items()):
        values = [0] * len(places)
        values[number] = 1
        packed, own = struct.pack(letters, *values), struct.pack(f"@{place.letter}", 1)
        begin = place.number * len(own)
        assert packed[begin : begin + len(own)] == own, name
        assert not any(packed[:begin] + packed[begin + len(own) :]), name
