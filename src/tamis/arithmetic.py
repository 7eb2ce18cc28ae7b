"""Whole-number division that rounds up, and products that keep their precision whatever a program has set."""

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
    """The smallest multiple that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def output_dtype(query: torch.dtype) -> torch.dtype:
    """The dtype of attention's output for queries of this dtype: the same, but bf16 for e4m3."""
    return torch.bfloat16 if query == torch.float8_e4m3fn else query


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Within it, torch multiplies and joins tensors in the dtypes they have.

    An autocast around the call would round factors of a product, and refuses to join tensors of a 16-bit dtype that is
    not its own.
    """
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def float32_products(device: torch.device) -> torch.dtype:
    """What to multiply in where float32 is promised: float64 if torch may shorten factors of float32 products there.

    `torch.set_float32_matmul_precision` and `torch.backends.*.fp32_precision` allow TF32 on a GPU and bf16 on a CPU.
    They belong to the process: setting them back for a moment would be seen by other threads. A trace of torch.compile
    cannot ask for them; the dense projections in it follow the program, and stages are not traced.
    """
    if torch.compiler.is_compiling():
        return torch.float32
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return torch.float32 if backend.matmul.fp32_precision in ("none", "ieee") else torch.float64
