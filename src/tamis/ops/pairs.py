"""Rows and queries as one tensor, or as the pair (latent part, rope part) in which projections leave them."""

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import without_autocast


def join_pair(name: str, value: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """One tensor from either form; a pair that does not fit is refused."""
    if not isinstance(value, tuple):
        return value
    check_pair(name, value)
    return joined(value)


def joined(pair: tuple[Tensor, Tensor]) -> Tensor:
    """A pair that fits as one tensor."""
    with without_autocast(pair[0].device):
        return torch.cat(pair, dim=-1)


def check_pair(name: str, value: tuple[Tensor, Tensor]) -> None:
    """Refuse a latent part and a rope part that do not fit each other."""
    if len(value) != 2:
        raise checks.refuse(name, "one tensor or a pair (latent, rope)", f"{len(value)} parts", "pass two tensors")
    first, second = value
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        received = f"{checks.describe(first)} and {checks.describe(second)}"
        raise checks.refuse_type(name, "a pair of tensors", received, "pass torch.Tensors")
    if first.layout is not torch.strided or second.layout is not torch.strided:
        received = f"{first.layout} and {second.layout}"
        raise checks.refuse_type(name, "a pair of dense tensors", received, "convert them with .to_dense()")
    alike = first.dim() > 0 and first.shape[:-1] == second.shape[:-1] and first.device == second.device
    floats = first.dtype in checks.FLOATS and second.dtype in checks.FLOATS
    if not alike or (first.dtype != second.dtype and not floats):
        expected = "a pair of tensors alike except for the last axis"
        raise checks.refuse(
            name,
            expected,
            f"{checks.describe(first)} and {checks.describe(second)}",
            "match their shapes, dtypes and devices",
        )
