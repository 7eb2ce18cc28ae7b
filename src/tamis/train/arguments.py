"""What the functions of `tamis.train` do with their arguments: autocast, dtypes, the deterministic mode."""

from typing import overload

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.autograd import forward_ad

from tamis import checks

DTYPES = (*checks.FLOATS, torch.float64)


def in_autocast(first: object, *others: object) -> list[Tensor]:
    """The tensors in autocast's dtype where it is enabled for their device; otherwise as they are. float64 stays, as
    everywhere under autocast. What is no tensor is left to its own check."""
    values: list[object] = [first, *others]
    if not isinstance(first, Tensor) or not _autocast(first):
        return values  # type: ignore[return-value]
    dtype = torch.get_autocast_dtype(first.device.type)
    cast = [isinstance(value, Tensor) and value.dtype in checks.FLOATS for value in values]
    return [value.to(dtype) if here else value for value, here in zip(values, cast, strict=True)]  # type: ignore[attr-defined, misc]


def widened_in_autocast(first: object, *others: object) -> list[Tensor]:
    """The tensors in float32 if their dtypes differ and autocast is enabled for their device, as autocast does for
    what is computed in float32 anyway; otherwise as they are. What is no such tensor is left to its own check."""
    values: list[object] = [first, *others]
    dtypes = {value.dtype if isinstance(value, Tensor) else None for value in values}
    if len(dtypes) == 1 or not dtypes <= set(checks.FLOATS) or not _autocast(first):
        return values  # type: ignore[return-value]
    return [value.to(torch.float32) for value in values]  # type: ignore[attr-defined]


def same_dtype(name: str, value: Tensor, **others: Tensor) -> None:
    """Refuse tensors of another dtype than the first."""
    for other_name, other in others.items():
        if other.dtype != value.dtype:
            expected = f"{checks.dtype_name(value.dtype)} like {name}"
            # Autocast leaves float64 alone.
            wide = torch.float64 in (value.dtype, other.dtype)
            remedy = "convert one of them" if wide else "convert one of them, or call this under torch.autocast"
            raise checks.refuse_type(other_name, expected, checks.dtype_name(other.dtype), remedy)


def _autocast(value: object) -> bool:
    """Whether autocast is enabled for a tensor's device."""
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return False
    return torch.is_autocast_enabled(value.device.type)


def deterministic_mode(given: bool | None) -> bool:
    """The mode that an argument `deterministic` asks for."""
    if given is None:
        return torch.are_deterministic_algorithms_enabled()
    return checks.flag("deterministic", given)


def recorded(*tensors: Tensor | None) -> bool:
    """Whether a gradient of any of these will be asked for."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_transforms(function: str, **tensors: Tensor | None) -> None:
    """Refuse forward-mode differentiation, and `torch.func`. Torch would drop the tangents of a call that records no
    gradient: the derivative would be zero without an error. Its error about `torch.func` names something else."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            remedy = f"{function} has a backward pass only: use torch.autograd.grad or backward()"
            raise checks.refuse(name, "without a tangent of forward-mode differentiation", "one with it", remedy)
        if tensor is not None and is_gradtrackingtensor(tensor):
            remedy = f"differentiate {function} with torch.autograd.grad or backward()"
            raise checks.refuse(name, "without a transform of torch.func", "one with it", remedy)


@overload
def detached(value: Tensor) -> Tensor: ...
@overload
def detached(value: None) -> None: ...
def detached(value: Tensor | None) -> Tensor | None:
    """A constant of the same value."""
    return None if value is None else value.detach()
