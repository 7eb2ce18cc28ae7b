"""Matrix products that keep the precision they are written in, whatever a program has set around the call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def multiply(function: Callable[..., Tensor], *matrices: Any, **options: Any) -> Tensor:
    """A product in the dtype that its matrices have: an autocast around the call would round them first.

    Nothing else here needs this. Autocast leaves other arithmetic in float32 alone, and kernels of our own never ask.
    """
    device: str = matrices[-1].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return function(*matrices, **options)
    return function(*matrices, **options)


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
