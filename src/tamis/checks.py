"""Argument checks. Every refusal names the argument, what was expected and what came, and a remedy if there is one.

Shapes, dtypes and devices are always checked. *Values* inside a tensor are checked only when the tensor lives on the
host: looking at device values would wait for the device. Kernels skip what a host check would have refused, so a
device tensor can give a wrong row but never touch memory it should not. While torch.compile traces there are no values
at all, so compiled code behaves on the host as it does on a device.
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
    """The one wording for a wrong value. A remedy is given where it says more than the expectation does."""
    return ValueError(_refusal(name, expected, received, remedy))


def refuse_type(name: str, expected: str, received: object, remedy: str = "") -> TypeError:
    """The one wording for a wrong type or dtype."""
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
    except Exception:  # whatever an object's own method raises must not take the refusal's place
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
    """All that checks can see of tensors on a device: what passed once passes again as long as this is the same."""
    seen: list[object] = []
    for value in tensors:
        seen += (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else (type(value),)
    return tuple(seen)


def no_gradient(**tensors: Tensor | None) -> None:
    """Refuse tensors that would need a gradient: the ops have none, and a silent zero would be worse than an error."""
    if not torch.is_grad_enabled():
        return
    for name, value in tensors.items():
        if value is not None and value.requires_grad:
            remedy = "the ops are for inference: call them under torch.no_grad(), or pass .detach()"
            raise refuse(name, "without gradient", "a tensor that requires grad", remedy)


def dense(name: str, value: object, dtypes: Collection[torch.dtype], shape: str | None = None) -> Tensor:
    """Check a tensor of one of these dtypes, of whatever shape (which is only told), in plain strided memory."""
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
    """Refuse a tensor that torch itself would not let anybody write to, which it says only after other writes."""
    if torch.compiler.is_compiling():
        return
    no_gradient(**{name: value})
    if frozen(value):
        remedy = "make the call, too, under torch.inference_mode(), or the tensor outside of it"
        raise refuse(name, "a tensor that may be written here", "one made under torch.inference_mode()", remedy)


def frozen(value: Tensor) -> bool:
    """Whether a tensor was made under `torch.inference_mode` and is used outside of it, where it cannot be written."""
    return value.is_inference() and not torch.is_inference_mode_enabled()


def writable(name: str, value: Tensor, *inputs: Tensor | None) -> None:
    """Refuse a tensor to write into whose elements share memory with each other, or with an input of the same call.

    Addresses are unknown to a trace, which sees strides only.
    """
    changeable(name, value)
    if not value.is_contiguous():
        reach = 1
        for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
            if size > 1 and stride < reach:
                raise refuse(name, "of elements that lie apart", f"strides {value.stride()}", "do not expand it")
            reach += stride * (size - 1)
    if not torch.compiler.is_compiling():
        apart(name, value, *inputs)


def apart(name: str, value: Tensor, *inputs: Tensor | None) -> None:
    """Refuse a tensor to write into that shares memory with an input. Shapes do not show it: it is for every call."""
    begin = value.data_ptr()
    end = begin + _reach(value)
    for other in inputs:
        if other is None:
            continue
        start = other.data_ptr()
        if start < end and start + _reach(other) > begin and begin < end and not _in_other_columns(value, other):
            remedy = "write to memory of its own"
            raise refuse(name, "apart from all inputs and caches", f"memory of one that is {describe(other)}", remedy)


def _reach(value: Tensor) -> int:
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
    return between >= _reach(one[0]) and between + _reach(other[0]) <= pitch


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

    Sizes given as keywords must match; the others are bound by this tensor. A remedy that takes work to word is given
    as a function, so that calls that pass do not pay for it.
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


def sequence(name: str, value: object) -> Sequence[Any]:
    """Check a list or tuple; texts are sequences too, but of letters."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise refuse_type(name, "a list", describe(value), "pass one member per request")
    return value


def hashable(name: str, value: object) -> None:
    """Check what is looked up by its hash."""
    try:
        hash(value)
    except TypeError:
        raise refuse_type(name, "hashable", describe(value), "name requests by texts or numbers") from None


def flag(name: str, value: object) -> bool:
    """Check a switch: other objects have a truth value too, which is seldom what was meant."""
    if not isinstance(value, bool):
        raise refuse_type(name, "True or False", describe(value))
    return value


def integer(name: str, value: object, *, low: int | None = None, high: int = INT32_MAX) -> int:
    """Check a plain integer against inclusive bounds; the upper one is that of the 32-bit numbers that kernels take,
    unless the caller knows better."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse_type(name, "an int", describe(value))
    least = -high - 1 if low is None else low
    if value < least or value > high:
        bounds = f">= {least}" if high in (INT32_MAX, INT64_MAX) and value < least else f"between {least} and {high}"
        raise refuse(name, bounds, value)
    return value


def number(name: str, value: object, *, low: float | None = None) -> float:
    """Check a finite number that float32 holds, from `low` on where that is given."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse_type(name, "a number", describe(value))
    # Comparisons with integers of any size are exact, where a conversion would overflow.
    if not (-_FLOAT32_LARGEST if low is None else low) <= value <= _FLOAT32_LARGEST:
        raise refuse(name, "finite" if low is None else f"finite and >= {low:g}", value, "pass what the model defines")
    return float(value)


def positive_number(name: str, value: object) -> float:
    """Check a finite number above zero. It must be a normal number in float32, where it will be used."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse_type(name, "a number", describe(value))
    if not _FLOAT32_SMALLEST <= value <= _FLOAT32_LARGEST:
        positive = isinstance(value, int) or math.isfinite(value)
        expected = "a normal number in float32" if positive and value > 0 else "finite and > 0"
        raise refuse(name, expected, value, "pass the factor the model defines")
    return float(value)


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
    # The type comes first: comparing an array or a tensor with a text gives no truth value.
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
        raise refuse_type(name, "a torch.device or its name", describe(value), "pass 'cpu' or 'cuda', say")
    try:
        found = torch.device(value)
    except RuntimeError:
        raise refuse(name, "a torch.device or its name", repr(value), "pass 'cpu' or 'cuda', say") from None
    if usable and found.type != "cpu":
        try:
            torch.empty(0, dtype=torch.uint8, device=found)
        except Exception as error:  # torch raises AssertionError, RuntimeError and others of its own here
            received = f"{str(found)!r} ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            raise refuse(name, "one that this machine has", received, "see `tamis doctor`") from error
    return found


def finite_rows(name: str, table: Tensor, rows: Tensor) -> None:
    """Check that a table has rows if any is asked for, and that those of a host table that will be used (not negative
    ones) are finite; device tensors pass unseen."""
    if table.shape[0] == 0 and rows.numel():
        raise refuse(name, "at least one row long", list(table.shape), "pass Rope.cos_sin_table")
    if not visible(table) or not visible(rows) or rows.numel() == 0:
        return
    used = rows.long().clamp(0, table.shape[0] - 1)
    wrong = ~table[used].isfinite().all(-1) & (rows >= 0)
    if bool(wrong.any()):
        raise refuse(name, "finite", f"a row {int(used[wrong][0])} that is not", "pass Rope.cos_sin_table")


def values_between(name: str, value: Tensor, low: int, high: int, remedy: str) -> None:
    """Check the values of a host tensor against inclusive bounds; device tensors pass unseen."""
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
