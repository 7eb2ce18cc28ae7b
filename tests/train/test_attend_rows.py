"""Attention over rows and its gradients, against autograd of dense masked attention and against finite differences."""

import bounds
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from training import WITH_GRADIENTS, dense_attention, hostile_slots, normal, relative

from tamis.ops.attention import gradients
from tamis.train import Rows, attend_rows

pytestmark = WITH_GRADIENTS
TOKENS, HEADS, WIDTH, COUNT, COLUMNS = 6, 3, 8, 8, 7
MODES = pytest.mark.parametrize("deterministic", [False, True])


class Case:
    """One call with two selections and everything that is hostile."""

    def __init__(self, *, value_dim: int = 5, sink: bool = True, dtype: torch.dtype = torch.float64) -> None:
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
@pytest.mark.parametrize("value_dim", [5, WIDTH])
def test_gradients_are_those_of_dense_masked_attention(value_dim: int, sink: bool, deterministic: bool) -> None:
    case = Case(value_dim=value_dim, sink=sink)
    found, expected = case.run(attend_rows, deterministic=deterministic), case.run(dense_attention)
    assert relative(found[0], expected[0]) < 1e-12
    assert torch.equal(found[1].isinf(), expected[1].isinf())
    assert relative(found[1].nan_to_num(neginf=0), expected[1].nan_to_num(neginf=0)) < 1e-12
    for one, other in zip(found[2], expected[2], strict=True):
        assert relative(one, other) < 1e-12


@pytest.mark.parametrize(
    ("value_dim", "sink", "deterministic"), [(3, True, False), (3, False, True), (4, True, True), (4, False, False)]
)
def test_finite_differences(value_dim: int, sink: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("HEADS", 2), ("WIDTH", 4), ("COUNT", 6)):
        monkeypatch.setitem(globals(), name, size)
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


def test_rows_that_nobody_chose_may_hold_anything() -> None:
    case = Case()
    case.slots[0] = case.slots[0].masked_fill(case.slots[0] == 5, 4)
    for deterministic in (False, True):
        with torch.no_grad():
            case.rows[0][5] = 0.0
        expected = case.run(attend_rows, deterministic=deterministic)
        with torch.no_grad():
            case.rows[0][5] = torch.nan
        found = case.run(attend_rows, deterministic=deterministic)
        for one, other in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True):
            assert torch.equal(one, other)
        assert (found[2][1][5] == 0).all()


@MODES
def test_upstream_gradients_of_empty_rows_may_be_anything(deterministic: bool) -> None:
    """Padding's may be NaN, where a program divides by its number of tokens, for example."""
    case = Case()
    found = attend_rows(case.q, case.selections(), sink=case.sink, **case.options, deterministic=deterministic)
    empty = found.lse.detach().isinf().all(1)
    assert empty.any()
    upstream = [torch.randn_like(x).masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0.0) for x in found[:2]]
    expected = torch.autograd.grad(found[:2], case.inputs, upstream, retain_graph=True)
    for x in upstream:
        x[empty] = torch.nan
    for one, other in zip(torch.autograd.grad(found[:2], case.inputs, upstream), expected, strict=True):
        assert torch.equal(one, other)


@MODES
def test_infinite_sinks(deterministic: bool) -> None:
    case = Case()
    with torch.no_grad():
        case.sink.copy_(torch.tensor([torch.inf, -torch.inf, 0.3]))
    out, _, (dq, *rows, dsink) = case.run(attend_rows, deterministic=deterministic)
    other = Case(sink=False)
    other.__dict__ |= {"q": case.q, "rows": case.rows, "slots": case.slots}
    plain = other.run(attend_rows, deterministic=deterministic)
    assert (out[:, 0] == 0).all()
    assert torch.equal(out[:, 1], plain[0][:, 1])
    assert torch.equal(dq[:, 1], plain[2][0][:, 1])
    assert dsink[:2].abs().max() == 0
    assert dsink[2] != 0
    assert all(gradient.isfinite().all() for gradient in (dq, *rows, dsink))


def test_a_sink_of_infinity_leaves_the_gradient_of_the_lse() -> None:
    """The usual form divides by the share that the sink leaves, which is zero here."""
    case = Case()
    with torch.no_grad():
        case.sink.fill_(torch.inf)
    lse = attend_rows(case.q, case.selections(), sink=case.sink, **case.options).lse
    found = torch.autograd.grad(lse[lse.isfinite()].sum(), case.inputs[:3])
    lse = dense_attention(case.q, case.selections(), **case.options).lse
    expected = torch.autograd.grad(lse[lse.isfinite()].sum(), case.inputs[:3])
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-12


def test_parts_merged_by_their_lse_are_one_call() -> None:
    """Attention in parts, merged as `combine_parts` merges: gradients flow through the outputs and the lses."""
    case = Case(sink=False)
    whole = case.run(attend_rows)

    def merged(q: Tensor, selections: list[Rows], *, scale: float, value_dim: int, sink: None):
        parts = [attend_rows(q, [one], scale=scale, value_dim=value_dim) for one in selections]
        lses = torch.stack([part.lse for part in parts])
        lse = lses.logsumexp(0)
        weights = (lses - lse.masked_fill(lse.isinf(), 0.0)).exp()
        out = sum(w.unsqueeze(-1) * part.out for w, part in zip(weights, parts, strict=True))
        return type(parts[0])(out, lse)

    parted = case.run(merged)
    for one, other in zip((parted[0], *parted[2]), (whole[0], *whole[2]), strict=True):
        assert relative(one.nan_to_num(0.0), other) < 1e-12


def test_heads_on_two_ranks() -> None:
    """The gradient of rows that ranks share is the sum over the ranks; everything else belongs to one of them."""
    case = Case()
    whole = attend_rows(case.q, case.selections(), sink=case.sink, **case.options)
    upstream = torch.randn_like(whole.out)
    expected = torch.autograd.grad(whole.out, case.inputs, upstream)
    found: list[list[Tensor]] = []
    for heads in (slice(0, 2), slice(2, 3)):
        part = attend_rows(case.q[:, heads], case.selections(), sink=case.sink[heads], **case.options)
        assert relative(part.out, whole.out[:, heads]) < 1e-12
        found.append(list(torch.autograd.grad(part.out, case.inputs, upstream[:, heads])))
    for one, other, both in zip(*found, expected, strict=True):
        assert relative(one + other, both) < 1e-12


@MODES
@pytest.mark.parametrize(
    ("tokens", "columns", "count"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1), (1, 5, 1), (0, 0, 0)]
)
def test_empty_and_smallest_sizes(tokens: int, columns: int, count: int, deterministic: bool) -> None:
    q, rows = normal(tokens, 2, 6).requires_grad_(), normal(count, 6).requires_grad_()
    slots = torch.zeros(tokens, columns, dtype=torch.int32)
    found = attend_rows(q, Rows(rows, slots), scale=0.5, value_dim=4, deterministic=deterministic)
    dq, drows = torch.autograd.grad(found.out.sum(), (q, rows))
    seen = tokens > 0 and columns > 0 and count > 0
    assert found.out.shape == (tokens, 2, 4)
    if seen:
        # Every column is the same row, whose weights sum to one: the output is the row itself.
        assert relative(found.out, rows[:1, :4].expand(tokens, 2, 4)) < 1e-15
        assert relative(drows[0, :4], torch.full((4,), 2.0 * tokens)) < 1e-14
        assert drows[0, 4:].abs().max() < 1e-14
    else:
        assert (found.out == 0).all()
        assert (found.lse == -torch.inf).all()
        assert (drows == 0).all()
    assert dq.abs().max() < 1e-14 if dq.numel() else dq.shape == q.shape


@MODES
def test_upstream_gradients_of_any_strides(deterministic: bool) -> None:
    case = Case()
    found = attend_rows(case.q, case.selections(), sink=case.sink, **case.options, deterministic=deterministic)
    shape = found.out.shape
    turned = torch.randn(shape[::-1]).double().permute(2, 1, 0)
    for strided in (turned, torch.tensor(0.7).double().expand(shape)):
        one, other = (
            torch.autograd.grad(found.out, case.inputs, x, retain_graph=True) for x in (strided, strided.clone())
        )
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_arguments_without_a_gradient_cost_nothing() -> None:
    case = Case()
    case.rows[0].requires_grad_(False)
    case.rows[1].requires_grad_(False)
    found = attend_rows(case.q, case.selections(), sink=case.sink, **case.options)
    (dq,) = torch.autograd.grad(found.out.sum(), case.q, retain_graph=True)
    case.rows[1].requires_grad_()
    again = attend_rows(case.q, case.selections(), sink=case.sink, **case.options)
    assert torch.equal(torch.autograd.grad(again.out.sum(), (case.q, case.rows[1]))[0], dq)
    assert not found.max_logits.requires_grad
    with torch.no_grad():
        plain = attend_rows(case.q, case.selections(), sink=case.sink, **case.options)
    assert torch.equal(plain.out, found.out)
    assert not plain.out.requires_grad


@pytest.mark.parametrize("amplitude", [0.05, 1.0, 4.0])
def test_gradients_of_16_bit_inputs_are_rounded_once(amplitude: float) -> None:
    """With an output of large values, a delta from the rounded output would be several times further off."""
    torch.manual_seed(1)
    q = (torch.randn(8, 4, 32) * amplitude).bfloat16().requires_grad_()
    rows = torch.randn(64, 32).bfloat16().requires_grad_()
    slots = torch.stack([torch.randperm(64)[:24] for _ in range(8)]).int()
    upstream = torch.randn(8, 4, 16).bfloat16()
    found = attend_rows(q, Rows(rows, slots), scale=0.5, value_dim=16)
    assert found.out.dtype == torch.bfloat16
    wide = [x.detach().double().requires_grad_() for x in (q, rows)]
    exact = dense_attention(wide[0], [Rows(wide[1], slots)], scale=0.5, value_dim=16)
    expected = torch.autograd.grad(exact.out, wide, upstream.double())
    for one, other in zip(torch.autograd.grad(found.out, (q, rows), upstream), expected, strict=True):
        assert one.dtype == torch.bfloat16
        # Before the rounding everything is float32: sums of at most 192 terms, which may cancel.
        bounds.agree(one, other, 192 * bounds.FLOAT32 * other.abs().max(), torch.bfloat16)


def test_autocast_converts_queries_and_rows_at_the_door() -> None:
    case = Case(dtype=torch.float32, sink=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend_rows(case.q.bfloat16(), case.selections(), **case.options)
    half = [x.detach().bfloat16().requires_grad_() for x in case.inputs]
    expected = attend_rows(half[0], case.selections(half[1:]), **case.options)
    assert torch.equal(found.out, expected.out)
    gradients_of = torch.autograd.grad(found.out.sum(), case.rows)
    for one, other in zip(gradients_of, torch.autograd.grad(expected.out.sum(), half[1:]), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


@pytest.mark.own_settings("autocast makes dtypes alike that are refused without it", without=("autocast",))
def test_wrong_arguments_are_refused_by_name() -> None:
    case = Case()
    good, long = case.selections(), Rows(case.rows[0], case.slots[0].long())
    options, nan = {"scale": 0.4, "value_dim": 5}, case.sink * torch.nan
    wrong = [
        (TypeError, "selections must be Rows, got list; wrap", lambda: attend_rows(case.q, [1], **options)),
        (ValueError, "selections must be at least one Rows", lambda: attend_rows(case.q, [], **options)),
        (
            TypeError,
            r"selections\[0\].rows must be \w+ like q, got float64; convert one of them$",
            lambda: attend_rows(case.q.float(), good, **options),
        ),
        (ValueError, r"selections\[0\].slots must be of shape", lambda: attend_rows(case.q[:2], good, **options)),
        (
            TypeError,
            r"slots must be int32",
            lambda: attend_rows(case.q, long, **options),
        ),
        (ValueError, "value_dim must be", lambda: attend_rows(case.q, good, scale=0.4, value_dim=9)),
        (ValueError, "scale must be", lambda: attend_rows(case.q, good, scale=0.0, value_dim=5)),
        (ValueError, "sink must be of shape", lambda: attend_rows(case.q, good, sink=case.sink[:2], **options)),
        (
            ValueError,
            "sink must be free of NaN",
            lambda: attend_rows(case.q, good, sink=nan, **options),
        ),
        (
            TypeError,
            "deterministic must be True",
            lambda: attend_rows(case.q, good, deterministic=1, **options),
        ),
        (ValueError, "that trains attend_rows on cpu", lambda: attend_rows(case.q, good, backend="hopper", **options)),
    ]
    for error, message, run in wrong:
        with pytest.raises(error, match=message):
            run()


def test_second_derivatives_are_refused() -> None:
    case = Case()
    found = attend_rows(case.q, case.selections(), **case.options)
    with pytest.raises(ValueError, match=r"gradients of attend_rows must be computed once, got create_graph=True"):
        torch.autograd.grad(found.out.sum(), case.q, create_graph=True)
