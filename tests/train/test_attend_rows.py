"""Attention over rows and its gradients, against autograd of dense masked attention and against finite differences."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from training import dense_attention, hostile_slots, normal, relative

from tamis.ops.attention import gradients
from tamis.train import Rows, attend_rows

TOKENS, HEADS, WIDTH, COUNT, COLUMNS = 6, 3, 10, 8, 7
MODES = pytest.mark.parametrize("deterministic", [False, True])


class Case:
    """One call with two selections and everything that is hostile."""

    def __init__(self, *, value_dim: int = 6, sink: bool = True, dtype: torch.dtype = torch.float64) -> None:
        self.q = normal(TOKENS, HEADS, WIDTH, dtype=dtype).requires_grad_()
        self.rows = [normal(n, WIDTH, dtype=dtype).requires_grad_() for n in (COUNT, 4)]
        self.slots = [hostile_slots(TOKENS, k, n) for k, n in ((COLUMNS, COUNT), (3, 4))]
        self.lengths = [torch.tensor([7, 3, 5, 7, 0, 6], dtype=torch.int32), None]
        self.sink = normal(HEADS).requires_grad_() if sink else None
        self.options = {"scale": 0.4, "value_dim": value_dim}

    def selections(self, rows: list[Tensor] | None = None) -> list[Rows]:
        return [Rows(*one) for one in zip(rows or self.rows, self.slots, self.lengths, strict=True)]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.q, *self.rows, *([] if self.sink is None else [self.sink])]

    def run(self, attention, **options) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output, lse and gradients for a fixed upstream gradient of both."""
        found = attention(self.q, self.selections(), sink=self.sink, **self.options, **options)
        seen = found.lse.isfinite()
        torch.manual_seed(5)
        upstream = torch.randn_like(found.out), torch.randn_like(found.lse).masked_fill(~seen, 0.0)
        finite = found.lse.masked_fill(~seen, 0.0)
        return found.out, found.lse, list(torch.autograd.grad((found.out, finite), self.inputs, upstream))


@MODES
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("value_dim", [6, WIDTH])
def test_gradients_are_those_of_dense_masked_attention(value_dim: int, sink: bool, deterministic: bool) -> None:
    case = Case(value_dim=value_dim, sink=sink)
    found, expected = case.run(attend_rows, deterministic=deterministic), case.run(dense_attention)
    assert relative(found[0], expected[0]) < 1e-12
    assert torch.equal(found[1].isinf(), expected[1].isinf())
    assert relative(found[1].nan_to_num(neginf=0), expected[1].nan_to_num(neginf=0)) < 1e-12
    for one, other in zip(found[2], expected[2], strict=True):
        assert relative(one, other) < 1e-12


@MODES
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("value_dim", [6, WIDTH])
def test_finite_differences(value_dim: int, sink: bool, deterministic: bool) -> None:
    case = Case(value_dim=value_dim, sink=sink)

    def attention(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        given = case.selections(list(rest[:2]))
        found = attend_rows(q, given, sink=rest[2] if sink else None, **case.options, deterministic=deterministic)
        return found.out, found.lse[found.lse.detach().isfinite().all(1)]

    assert gradcheck(attention, tuple(case.inputs))


def test_chunks_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "WORKING_BYTES", 1)
    case = Case()
    for one, other in zip(case.run(attend_rows, deterministic=False)[2], case.run(dense_attention)[2], strict=True):
        assert relative(one, other) < 1e-12
