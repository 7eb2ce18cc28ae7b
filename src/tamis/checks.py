"""Argument checks. Every error names the argument, the expectation, the received value and, where it helps, a remedy.

Shapes, dtypes and devices are always checked. *Values* inside a tensor are checked only when the tensor is on the host,
because reading device values would wait for the device. Kernels skip values that a host check would have refused, so
wrong values on a device can give a wrong row but no access outside the tensors. While torch.compile traces there are no
values at all, so compiled code behaves on the host as it does on a device.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
T = TypeVar("T")

_FLOAT32_SMALLEST = 2.0**-126
_FLOAT32_LARGEST = (2.0 - 2.0**-23) * 2.0**127
_LONGEST_TEXT = 400
_LONGEST_LIST = 16


def refuse(name: str, expected: str, received: object, remedy: str = "") -> ValueError:
    """The error for a wrong value, in the wording that all errors share. A remedy should add to the expectation."""
    return ValueError(_refusal(name, expected, received, remedy))


def refuse_type(name: str, expected: str, received: object, remedy: str = "") -> TypeError:
    """The error for a wrong type or dtype, in the same wording."""
    return TypeError(_refusal(name, expected, received, remedy))


def _refusal(name: str, expected: str, received: object, remedy: str) -> str:
    return f"{name} must be {_cut(expected)}, got {_short(received)}" + (f"; {remedy}" if remedy else "")


def _short(value: object) -> str:
    """A value as text of bounded length. Python refuses to print integers of thousands of digits, and the text of a
    tensor would wait for its device."""
    if isinstance(value, Tensor):
        return describe(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return f"{'a negative' if value < 0 else 'an'} integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple) and len(value) > _LONGEST_LIST:
        return f"{_short(list(value[:_LONGEST_LIST]))} and {len(value) - _LONGEST_LIST} more"
    try:
        text = str(value)
    except Exception:  # an error in the object's own method must not hide this one
        return describe(value)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(text)} characters)"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """A short description for error messages: dtype, shape and device of a tensor, type of anything else."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} {list(value.shape)} on {value.device}"
    return type(value).__name__


def visible(value: Tensor) -> bool:
    """Whether a check may look at a tensor's values: only on the host, and not while torch.compile traces."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling()


def signature(*tensors: Tensor | None) -> tuple[object, ...]:
    """Everything that checks can see of tensors on a device. Tensors with the signature of checked ones pass too."""
    seen: list[object] = []
    for value in tensors:
        seen += (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else (type(value),)
    return tuple(seen)


def no_gradient(**tensors: Tensor | None) -> None:
    """Refuse tensors that require a gradient. The ops compute none, and dropping it silently would be worse."""
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            remedy = (
                "the ops are for inference: call them under torch.no_grad(), or pass .detach(). "
                "For training there is tamis.train; attention is tamis.train.attend_rows"
            )
            raise refuse(name, "without gradient", "a tensor that requires grad", remedy)


def dense(name: str, value: object, dtypes: Collection[torch.dtype], shape: str | None = None) -> Tensor:
    """Check that a value is a strided tensor of one of these dtypes. `shape` is only quoted in the error."""
    if not isinstance(value, Tensor):
        axes = "" if shape is None else f" [{shape.replace(' ', ', ')}]"
        raise refuse_type(name, f"a tensor{axes}", describe(value), "pass a torch.Tensor")
    if value.layout is not torch.strided:
        raise refuse_type(name, "a dense tensor", value.layout, "convert it with .to_dense()")
    if value.dtype not in dtypes:
        allowed = " or ".join(dtype_name(d) for d in dtypes)
        first = next(iter(dtypes))
        raise refuse_type(name, allowed, dtype_name(value.dtype), f"convert it with .to({first})")
    return value


def changeable(name: str, value: Tensor) -> None:
    """Refuse a tensor that torch does not allow to be written. Torch itself raises only after other writes."""
    if torch.compiler.is_compiling():
        return
    no_gradient(**{name: value})
    if frozen(value):
        remedy = "make this call under torch.inference_mode() too, or create the tensor outside of it"
        raise refuse(name, "a tensor that may be written here", "one made under torch.inference_mode()", remedy)


def frozen(value: Tensor) -> bool:
    """Whether a tensor was made under `torch.inference_mode` and is used outside of it, where it cannot be written."""
    return value.is_inference() and not torch.is_inference_mode_enabled()


def writable(name: str, value: Tensor, *inputs: Tensor | None) -> None:
    """Refuse a tensor to write into whose elements share memory with each other, or with an input of the same call.

    While torch.compile traces there are no addresses, so only strides are checked.
    """
    changeable(name, value)
    if not value.is_contiguous():
        reach = 1
        for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
            if size > 1 and stride < reach:
                raise refuse(name, "free of overlapping elements", f"strides {value.stride()}", "do not expand it")
            reach += stride * (size - 1)
    if not torch.compiler.is_compiling():
        apart(name, value, *inputs)


def apart(name: str, value: Tensor, *inputs: Tensor | None) -> None:
    """Refuse an output that shares memory with an input. Shapes do not show this, so every call checks it."""
    begin = value.data_ptr()
    end = begin + reach(value)
    for other in inputs:
        if not isinstance(other, Tensor):  # None, or an argument that its own check refuses later
            continue
        start = other.data_ptr()
        if start < end and start + reach(other) > begin and begin < end and not _in_other_columns(value, other):
            received = f"memory shared with one that is {describe(other)}"
            raise refuse(name, "separate from all inputs and caches", received, "allocate a separate tensor")


def reach(value: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if value.is_contiguous():
        return value.nbytes
    if value.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def _in_other_columns(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose memory interleaves are different columns of the same rows, as slices of one buffer."""
    if one.dim() == 0 or other.dim() == 0:
        return False
    pitch = one.stride(0) * one.element_size()
    if pitch == 0 or pitch != other.stride(0) * other.element_size() or not one.shape[0] or not other.shape[0]:
        return False
    between = (other.data_ptr() - one.data_ptr()) % pitch
    return between >= reach(one[0]) and between + reach(other[0]) <= pitch


def tensor(
    name: str,
    value: object,
    shape: str,
    dtypes: Collection[torch.dtype],
    *,
    device: torch.device | None = None,
    remedy: str | Callable[[], str] | None = None,
    **sizes: int,
) -> dict[str, int]:
    """Check a tensor against a shape such as `"T H D"` and return the sizes of its axes by letter.

    Sizes given as keywords must match; the others are bound by this tensor. A remedy that is expensive to format is
    given as a function, which only a failing check calls.
    """
    value = dense(name, value, dtypes, shape)
    axes = shape.split()
    bound = dict(sizes)
    if value.dim() == len(axes):
        for axis, size in zip(axes, value.shape, strict=True):
            expected = int(axis) if axis.isdigit() else bound.setdefault(axis, size)
            if size != expected:
                break
        else:
            if device is not None and value.device != device:
                raise refuse(name, f"on {device}", f"a tensor on {value.device}", f"move it with .to('{device}')")
            return bound
    wanted = ", ".join(f"{a}={sizes[a]}" if a in sizes else a for a in axes)
    told = remedy() if callable(remedy) else remedy
    raise refuse(name, f"of shape [{wanted}]", list(value.shape), told or "check its shape")


def instance(name: str, value: object, kind: type[T], remedy: str = "") -> T:
    """Check an object of one of the library's classes."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise refuse_type(name, f"{article} {kind.__name__}", describe(value), remedy)
    return value


def sequence(name: str, value: object, remedy: str = "pass one member per request") -> Sequence[Any]:
    """Check a list or tuple. Strings are refused, although they are sequences too."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise refuse_type(name, "a list", describe(value), remedy)
    return value


def hashable(name: str, value: object) -> None:
    """Check a name that serves as a dictionary key."""
    try:
        hash(value)
    except TypeError:
        raise refuse_type(name, "hashable", describe(value), "name requests by strings or numbers") from None


def flag(name: str, value: object) -> bool:
    """Check a bool. Other objects have a truth value too, but passing one is mostly a mistake."""
    if not isinstance(value, bool):
        raise refuse_type(name, "True or False", describe(value))
    return value


def integer(name: str, value: object, *, low: int | None = None, high: int = INT32_MAX) -> int:
    """Check an int against inclusive bounds. The upper bound is that of int32 by default, which is what kernels
    take."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse_type(name, "an int", describe(value))
    least = -high - 1 if low is None else low
    if value < least or value > high:
        bounds = f">= {least}" if high in (INT32_MAX, INT64_MAX) and value < least else f"between {least} and {high}"
        raise refuse(name, bounds, value)
    return value


def number(name: str, value: object, *, low: float | None = None) -> float:
    """Check a finite number in the range of float32, at least `low` if that is given."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse_type(name, "a number", describe(value))
    # Comparisons with integers of any size are exact, where a conversion would overflow.
    if not (-_FLOAT32_LARGEST if low is None else low) <= value <= _FLOAT32_LARGEST:
        raise refuse(name, "finite" if low is None else f"finite and >= {low:g}", value, "pass the model's value")
    return float(value)


def positive_number(name: str, value: object) -> float:
    """Check a finite number above zero. It must be a normal number in float32, where it will be used."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse_type(name, "a number", describe(value))
    if not _FLOAT32_SMALLEST <= value <= _FLOAT32_LARGEST:
        positive = isinstance(value, int) or math.isfinite(value)
        expected = "a normal number in float32" if positive and value > 0 else "finite and > 0"
        raise refuse(name, expected, value, "pass the model's factor")
    return float(value)


def is_factor(value: object) -> bool:
    """Whether a value is a float that `positive_number` accepts."""
    return type(value) is float and _FLOAT32_SMALLEST <= value <= _FLOAT32_LARGEST


def scale_factor(name: str, value: object) -> float | Tensor:
    """Check a scale given as a number or as a one-element float32 tensor; both mean the same."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype != torch.float32 or value.layout is not torch.strided:
            raise refuse_type(name, "one float32 element", describe(value), "pass a float or a one-element tensor")
        if visible(value):
            positive_number(name, value.item())
        return value.reshape(())
    return positive_number(name, value)


def option(name: str, value: T, allowed: Sequence[T]) -> T:
    """Check a choice from a short list, whose members are of one type."""
    # The type is compared first, because comparing an array or a tensor with a string gives no truth value.
    alike = isinstance(value, type(allowed[0]))
    if not alike or value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        if not alike:
            raise refuse_type(name, f"one of {names}", describe(value))
        raise refuse(name, f"one of {names}", repr(value))
    return value


def device(name: str, value: object, *, usable: bool = False) -> torch.device:
    """Check a device or its name; with `usable` also that tensors can be made there, which starts the device."""
    if not isinstance(value, str | torch.device):
        raise refuse_type(name, "a torch.device or its name", describe(value), "pass for example 'cpu' or 'cuda'")
    try:
        found = torch.device(value)
    except RuntimeError:
        raise refuse(name, "a torch.device or its name", repr(value), "pass for example 'cpu' or 'cuda'") from None
    if usable and found.type != "cpu":
        try:
            torch.empty(0, dtype=torch.uint8, device=found)
        except Exception as error:  # torch raises AssertionError, RuntimeError and others of its own here
            received = f"{str(found)!r} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            raise refuse(name, "one that this machine has", received, "see `tamis doctor`") from error
    return found


def finite_rows(name: str, table: Tensor, rows: Tensor) -> None:
    """Check that a table is not empty if any row is used, and that all used rows are finite. Negative rows are not
    used. Values on a device are not checked."""
    if table.shape[0] == 0 and rows.numel():
        raise refuse(name, "at least one row long", list(table.shape), "pass Rope.cos_sin_table")
    if not visible(table) or not visible(rows) or rows.numel() == 0:
        return
    used = rows.long().clamp(0, table.shape[0] - 1)
    wrong = ~table[used].isfinite().all(-1) & (rows >= 0)
    if bool(wrong.any()):
        raise refuse(name, "finite", f"NaN or infinity in row {int(used[wrong][0])}", "pass Rope.cos_sin_table")


def values_between(name: str, value: Tensor, low: int, high: int, remedy: str) -> None:
    """Check the values of a host tensor against inclusive bounds. Values on a device are not checked."""
    if not visible(value) or value.numel() == 0:
        return
    smallest, largest = (int(v) for v in torch.aminmax(value))
    if smallest < low or largest > high:
        bad = smallest if smallest < low else largest
        raise refuse(name, f"between {low} and {high}", f"a value of {bad}", remedy)


def same_device(**tensors: Any) -> torch.device:
    """Check that all given tensors (None is skipped) share one device and return it."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise refuse_type(name, "a tensor", describe(value), "pass a torch.Tensor")
    first_name, first = next((n, t) for n, t in tensors.items() if t is not None)
    device: torch.device = first.device
    for name, value in tensors.items():
        if value is not None and value.device != device:
            raise refuse(
                name, f"on {device} like {first_name}", f"a tensor on {value.device}", f"move it with .to('{device}')"
            )
    return device
