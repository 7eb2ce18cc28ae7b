"""Calls of a backend's `index_topk` without the checks of the public function."""

from typing import Any

import torch
from torch import Tensor

from tamis.ops.index.operations import IndexTopk


def select(backend: Any, *arguments: Any, batch: int | None = None) -> Tensor:
    """The positions that a backend's module writes, into memory that held something else.

    Args:
        backend: the module.
        *arguments: the fields of `IndexTopk` up to the workspace, then the backend's name.
        batch: tokens of the whole batch; None if these are all.
    """
    q, k = arguments[0], arguments[6]
    out = torch.full((q.shape[0], k), -7, dtype=torch.int32, device=q.device)
    backend.index_topk(IndexTopk(*arguments[:-1], q.shape[0] if batch is None else batch, out, arguments[-1]))
    return out
