"""Compares results with expected ones: relative errors, the first difference, equality of bits."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis import checks


@dataclass(frozen=True)
class Mismatch:
    """How many elements differ, and the first of them."""

    count: int
    total: int
    at: tuple[int, ...]
    found: str
    expected: str

    def __str__(self) -> str:
        """A line such as `3 of 640 differ, first at [0, 2, 17]: found 0.5, expected 0.25`."""
        return (
            f"{self.count} of {self.total} differ, first at {list(self.at)}: "
            f"found {self.found}, expected {self.expected}"
        )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in the 2-norm, computed in float64.

    Elements that are the same infinity, or NaN on both sides, agree. Any other value that is not finite makes the
    error infinite, so that NaN never passes a comparison with a bound.
    """
    left, right = _pair(found, expected)
    left, right = left.double(), right.double()
    agree = _agree(left, right)
    if bool((~agree & ~(left.isfinite() & right.isfinite())).any()):
        return math.inf
    difference = float(torch.where(agree, 0.0, left - right).norm())
    if difference == 0:
        return 0.0
    size = float(torch.where(right.isfinite(), right, 0.0).norm())
    return difference / size if size > 0 else math.inf


def worst_block_error(found: Tensor, expected: Tensor, block: int) -> float:
    """The largest relative error of any block of columns, so that large columns cannot hide wrong small ones."""
    left, right = _pair(found, expected)
    columns = right.shape[-1]
    checks.integer("block", block, low=1)
    return max(
        (relative_error(left[..., at : at + block], right[..., at : at + block]) for at in range(0, columns, block)),
        default=0.0,
    )


def worst_row_error(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of any element of the first axis (a token), so that one wrong token shows."""
    left, right = _pair(found, expected)
    return max((relative_error(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def first_mismatch(found: Tensor, expected: Tensor, *, tolerance: float = 0.0) -> Mismatch | None:
    """The first element that differs by more than `tolerance`; None if there is none. NaN equals NaN."""
    left, right = _pair(found, expected)
    differ = ~_agree(left, right)
    if tolerance > 0:
        # Written so that a NaN on one side counts as a difference.
        differ &= ~((left.double() - right.double()).abs() <= tolerance)
    places = differ.nonzero()
    if len(places) == 0:
        return None
    at = tuple(int(i) for i in places[0])
    return Mismatch(len(places), differ.numel(), at, _text(left[at]), _text(right[at]))


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same shape, the same dtype and the same bytes."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(raw_bytes(found), raw_bytes(expected))


def first_differing_bits(found: Tensor, expected: Tensor) -> Mismatch | None:
    """The first element whose bytes differ, shown by value; -0.0 and 0.0 have different bits."""
    checks.option("dtype", found.dtype, (expected.dtype,))
    left, right = _pair(found, expected)
    if left.numel() == 0:
        return None
    item = left.element_size()
    differ = (raw_bytes(left).view(-1, item) != raw_bytes(right).view(-1, item)).any(1).view(left.shape)
    places = differ.nonzero()
    if len(places) == 0:
        return None
    at = tuple(int(i) for i in places[0])
    return Mismatch(len(places), differ.numel(), at, _text(left[at]), _text(right[at]))


def raw_bytes(value: Tensor) -> Tensor:
    """The bytes of a tensor's elements on the host, uint8 [N], without gaps between them."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _pair(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    if found.shape != expected.shape:
        raise checks.refuse("found", f"of shape {list(expected.shape)}", list(found.shape), "compare like with like")
    return found.detach().cpu(), expected.detach().cpu()


def _agree(left: Tensor, right: Tensor) -> Tensor:
    if left.is_floating_point() or right.is_floating_point():
        left, right = left.double(), right.double()
        return (left == right) | (left.isnan() & right.isnan())
    return left == right


def _text(value: Tensor) -> str:
    plain = value.double().item() if value.is_floating_point() else value.item()
    return f"{plain:.6g}" if isinstance(plain, float) else str(plain)
