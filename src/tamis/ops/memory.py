"""What is remembered of calls on a device, so that the next one like it repeats neither checks nor choices.

Checks and launches depend on a call's signature: shapes, strides, dtypes, devices and options, but no addresses and no
values. The function that a user calls builds the signature as a tuple and looks it up; what it finds was prepared when
such a call passed all checks. Functions that build signatures return None for calls that must be looked at every time:
on the host, where checks see values, with tensors that require a gradient or cannot be written, on another device than
the current one, and with arguments that checks will refuse.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops.library import Operation

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound=tuple[Any, ...])
Signature: TypeAlias = tuple[object, ...]

MOST = 1024
"""Signatures that a memory holds unless it is told otherwise. A serving engine has one per batch size of its decodes;
those of prefills come and go."""
NOT_ARGUMENTS = (AttributeError, TypeError, RuntimeError)
"""What building a signature raises for objects that are no arguments of the call, such as numbers in place of tensors,
or sparse tensors, which have no strides."""


class Memory(Generic[T]):
    """Prepared calls by their signature. A full memory forgets everything, which costs each call one more check."""

    def __init__(self, most: int | None = None) -> None:
        """Start empty, with room for this many signatures."""
        self._known: dict[Signature, T] = {}
        self._most = most
        _MEMORIES.add(self)

    def find(self, signature: Signature | None) -> T | None:
        """What was prepared for a signature, if anything was."""
        try:
            return self._known.get(signature)  # type: ignore[arg-type]
        except TypeError:
            return None  # an option cannot be hashed, and the checks will refuse it

    def keep(self, signature: Signature, prepared: T | None) -> None:
        """Remember what was prepared, if anything could be."""
        if prepared is None:
            return
        if len(self._known) >= (MOST if self._most is None else self._most):
            self._known.clear()
        self._known[signature] = prepared

    def forget(self) -> None:
        """Forget everything."""
        self._known.clear()


class Calls(Memory[Callable[[C], R]], Generic[C, R]):
    """Prepared calls of one operation."""

    def run(self, operation: Operation[C, R], call: C, signature: Signature | None) -> R:
        """Run a checked call, and remember it if it has a signature and can be prepared."""
        found = operation(call)
        if signature is not None:
            self.keep(signature, operation.prepared(call))
        return found


_MEMORIES: WeakSet[Memory[Any]] = WeakSet()


def forget_all() -> None:
    """Forget all calls, for programs that change what a choice depends on, as tests do."""
    for memory in _MEMORIES:
        memory.forget()


def remembered_on(tensor: Tensor) -> bool:
    """Whether calls on this tensor's device are remembered."""
    return tensor.is_cuda and tensor.get_device() == torch._C._cuda_getDevice()


def has_gradient(*tensors: Tensor | None) -> bool:
    """Whether one of a call's tensors requires a gradient where that matters."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def sign(tensor: Tensor | None) -> Signature | None:
    """What a call depends on of a tensor, apart from its address."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def sign_cache(cache: PagedCache) -> Signature:
    """What a call depends on of a cache."""
    held, scale = cache.storage, cache.scale
    # The page stride stands for the strides: pages are contiguous.
    return (
        held.shape,
        held.dtype,
        held.device,
        cache.layout.key,
        cache.page_size,
        cache.page_stride,
        sign(scale) if isinstance(scale, Tensor) else scale,
    )


def sign_selection(selection: Selection) -> Signature:
    """What a call depends on of a selection."""
    slots, lengths, ids, table = selection.slots, selection.lengths, selection.request_ids, selection.block_table
    return (
        *sign_cache(selection.cache),
        slots.shape,
        slots.stride(),
        slots.dtype,
        slots.device,
        None if lengths is None else sign(lengths),
        None if ids is None and table is None else (sign(ids), sign(table)),
    )


class Apart:
    """Whether an output is separate from what its call reads, for calls of one signature.

    Addresses are not part of a signature, so every call with a given output must be looked at.
    """

    def __init__(self, out: Tensor, *inputs: Tensor | None) -> None:
        """Remember how far each tensor reaches from its address."""
        self._out = checks.reach(out)
        self._inputs = [0 if tensor is None else checks.reach(tensor) for tensor in inputs]

    def __call__(self, out: Tensor, *inputs: Tensor | None) -> bool:
        """False if an input begins before the output ends, and the reverse: then `checks.apart` must decide."""
        begin = out.data_ptr()
        end = begin + self._out
        for tensor, reach in zip(inputs, self._inputs, strict=True):
            if tensor is not None:
                start = tensor.data_ptr()
                if start < end and begin < start + reach:
                    return False
        return True
