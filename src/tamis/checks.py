"""Argument checks. Every refusal names the argument, what was expected, what came, and what to do.

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
T = TypeVar("T")


def refuse(name: str, expected: str, received: object, remedy: str) -> ValueError:
    """The one wording for a wrong value."""
    return ValueError(f"{name} must be {expected}, got {received}; {remedy}")


def refuse_type(name: str, expected: str, received: object, remedy: str) -> TypeError:
    """The one wording for a wrong type or dtype."""
    return TypeError(f"{name} must be {expected}, got {received}; {remedy}")


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
    if not isinstance(value, Tensor):
        raise refuse_type(name, f"a tensor [{shape.replace(' ', ', ')}]", describe(value), "pass a torch.Tensor")
    if value.dtype not in dtypes:
        allowed = " or ".join(dtype_name(d) for d in dtypes)
        first = next(iter(dtypes))
        raise refuse_type(name, allowed, dtype_name(value.dtype), f"convert it with .to({first})")
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


def instance(name: str, value: object, kind: type) -> None:
    """Check that an argument is an object of some class of this library."""
    if not isinstance(value, kind):
        raise refuse_type(name, f"a {kind.__name__}", describe(value), f"pass a {kind.__name__}")


def integer(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """Check a plain integer against inclusive bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse_type(name, "an int", describe(value), "pass a plain integer")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f">= {low}" if high is None else f"between {low} and {high}"
        raise refuse(name, bounds, value, f"choose a value {bounds}")
    return value


def positive_number(name: str, value: object) -> float:
    """Check a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse_type(name, "a number", describe(value), "pass a float")
    if not 0 < value < math.inf:
        raise refuse(name, "finite and > 0", value, "pass the factor the model defines")
    return float(value)


def scale_factor(name: str, value: object) -> float | Tensor:
    """Check a scale given as a number or as a one-element float32 tensor; both mean the same."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype != torch.float32:
            raise refuse_type(name, "one float32 element", describe(value), "pass a float or a one-element tensor")
        if visible(value):
            positive_number(name, float(value))
        return value.reshape(())
    return positive_number(name, value)


def option(name: str, value: T, allowed: Sequence[T]) -> T:
    """Check a choice from a short list."""
    if value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        raise refuse(name, f"one of {names}", repr(value), "choose one of these")
    return value


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
