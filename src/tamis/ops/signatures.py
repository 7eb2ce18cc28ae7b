"""Signatures of calls: what checks and launches depend on, for calls on a device, as a tuple that is a dictionary key.

A signature has shapes, strides, dtypes, devices and options, but no addresses and no values. Functions that build one
return None for calls that must be looked at: on the host, where checks see values, with tensors that require a gradient
or cannot be written, on another device than the current one, and with arguments that checks will refuse.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache

Signature: TypeAlias = tuple[object, ...]

NOT_ARGUMENTS = (AttributeError, TypeError, RuntimeError)
"""What building a signature raises for objects that are no arguments of the call, such as numbers in place of tensors
or sparse tensors, which have no strides."""


def remembered_on(tensor: Tensor) -> bool:
    """Whether calls on this tensor's device are remembered."""
    return tensor.is_cuda and tensor.get_device() == torch._C._cuda_getDevice()


def of_tensors(*tensors: Tensor | None) -> list[object]:
    """What a call depends on of its tensors, apart from their addresses."""
    seen: list[object] = []
    for tensor in tensors:
        if tensor is None:
            seen.append(None)
        else:
            seen += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return seen


def of_cache(cache: PagedCache) -> list[object]:
    """What a call depends on of a cache."""
    scale = cache.scale
    seen = of_tensors(cache.storage, scale) if isinstance(scale, Tensor) else [*of_tensors(cache.storage), scale]
    seen += (cache.layout.key, cache.page_size, cache.page_stride)
    return seen


def of_options(*options: object) -> list[object]:
    """Options with their types, since True and 1.0 are equal to 1."""
    return [*options, *map(type, options)]


def has_gradient(*tensors: Tensor | None) -> bool:
    """Whether one of a call's tensors requires a gradient where that matters."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
