"""Slow, obvious fp64 versions of the maths, written without the library's own stages."""

from collections.abc import Sequence

import bounds
import torch
from torch import Tensor

from tamis import Selection

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def rows_of(selection: Selection, token: int) -> Tensor:
    """fp64 rows that one token attends to, in column order, duplicates included."""
    slots = selection.slots[token].tolist()
    if selection.lengths is not None:
        slots = slots[: int(selection.lengths[token])]
    kept = [s for s in slots if 0 <= s < selection.cache.rows]
    if not kept:
        return torch.zeros(0, selection.cache.layout.width, dtype=torch.float64)
    return selection.cache.read(torch.tensor(kept)).double()


def attention(
    q: Tensor, selections: Sequence[Selection], *, scale: float, value_dim: int, sink: Tensor | None = None, **options
) -> bounds.Attention:
    """Output, natural-log lse and largest logit, one token at a time, each with the error that its arithmetic allows;
    options are those of `bounds.attention`."""
    options |= {"scale": scale, "value_dim": value_dim, "sink": sink}
    rows = (torch.cat([rows_of(s, t) for s in selections]) for t in range(len(q)))
    return bounds.stacked([bounds.attention(heads, seen, **options) for heads, seen in zip(q, rows, strict=True)])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, in the 2-norm; NaN never passes a comparison with it."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def hadamard_matrix(dim: int) -> Tensor:
    """The orthonormal one, by Sylvester's construction, in fp64."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < dim:
        found = torch.cat((torch.cat((found, found), 1), torch.cat((found, -found), 1)))
    return found / dim**0.5
