"""Division that rounds up, and matrix products that keep their precision whatever the program has set."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

N = TypeVar("N", int, NDArray[Any])

_NOTHING: AbstractContextManager[object] = nullcontext()


def ceil_div(dividend: N, divisor: int) -> N:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def output_dtype(query: torch.dtype) -> torch.dtype:
    """The dtype of attention's output for queries of this dtype: the same, but bf16 for e4m3."""
    return torch.bfloat16 if query == torch.float8_e4m3fn else query


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context manager that disables autocast, so that torch multiplies and joins tensors in their own dtypes.

    Autocast would round the factors of a product, and it refuses to join tensors of a 16-bit dtype other than its own.
    """
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def float32_products(device: torch.device) -> torch.dtype:
    """The dtype for products that promise float32 precision: float64 if torch may round the factors of float32 ones.

    `torch.set_float32_matmul_precision` and `torch.backends.*.fp32_precision` allow TF32 on a GPU and bf16 on a CPU.
    These settings belong to the process, so changing them for a moment would affect other threads. torch.compile cannot
    read them while it traces: traced projections follow the program's settings, and stages are not traced.
    """
    if torch.compiler.is_compiling():
        return torch.float32
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return torch.float32 if backend.matmul.fp32_precision in ("none", "ieee") else torch.float64
