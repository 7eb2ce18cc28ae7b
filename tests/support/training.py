"""Inputs and independent references for the tests of `tamis.train`."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tamis.train import Rows

WITH_GRADIENTS = pytest.mark.own_settings("has gradients, which inference mode has not", without=("inference",))
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
"""Row numbers that are skipped whatever the number of rows."""


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu").to(dtype)


def hostile_slots(tokens: int, columns: int, rows: int) -> Tensor:
    """Slots of which a third is invalid in every way there is, with a duplicate in the first token and an empty row."""
    slots = torch.randint(0, rows, (tokens, columns), dtype=torch.int32, device="cpu")
    bad = torch.tensor([*HOSTILE, rows, rows + 3], dtype=torch.int32, device="cpu")
    wrong = torch.rand(tokens, columns, device="cpu") < 1 / 3
    slots = torch.where(wrong, bad[torch.randint(0, len(bad), (tokens, columns), device="cpu")], slots)
    if columns > 1:
        slots[0, :2] = rows - 1
    slots[tokens // 2] = -1
    return slots


class Dense(NamedTuple):
    """Attention of every token over all rows of all selections, with the number of times that it chose each."""

    out: Tensor
    lse: Tensor


def dense_attention(
    q: Tensor, selections: Sequence[Rows], *, scale: float, value_dim: int, sink: Tensor | None = None
) -> Dense:
    """The same attention by masks: autograd of this is what gradients are compared with.

    A row that is chosen n times has log(n) added to its logit.
    """
    keys = torch.cat([s.rows for s in selections])
    counts = torch.cat([_counts(s) for s in selections], dim=1)
    # Rows that nobody chose may hold NaN.
    keys = keys.masked_fill((counts.sum(0) == 0).unsqueeze(1), 0.0)
    logits = torch.einsum("thd,nd->thn", q, keys) * scale + counts.log().unsqueeze(1)
    empty = (counts.sum(1) == 0).view(-1, 1, 1)
    logits = logits.masked_fill((counts == 0).unsqueeze(1), -torch.inf).masked_fill(empty, 0.0)
    lse = logits.logsumexp(-1)
    p = (logits - lse.unsqueeze(-1)).exp().masked_fill(empty, 0.0)
    out = torch.einsum("thn,nv->thv", p, keys[:, :value_dim])
    if sink is not None:
        out = out * torch.sigmoid(lse - sink).unsqueeze(-1)
    return Dense(out, lse.masked_fill(empty.squeeze(-1), -torch.inf))


def _counts(selection: Rows) -> Tensor:
    """How often each token chose each row [T, N], by a loop."""
    slots, lengths = selection.slots.tolist(), selection.lengths
    found = torch.zeros(len(slots), len(selection.rows), dtype=torch.float64, device="cpu")
    for token, row in enumerate(slots):
        for slot in row[: None if lengths is None else int(lengths[token])]:
            if 0 <= slot < len(selection.rows):
                found[token, slot] += 1
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number that is expected; NaN counts as infinite."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    found, expected = found.detach().double(), expected.detach().double()
    difference, scale = (found - expected).abs().nan_to_num(torch.inf), expected.abs()
    return float(difference.max() / scale.max().clamp_min(1e-30)) if found.numel() else 0.0
