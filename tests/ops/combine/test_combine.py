"""Merging partial outputs."""

import math

import bounds
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded

from tamis.ops import Partials, combine_parts


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4), st.floats(0, 60), st.integers(0, 2**31), st.booleans())
def test_merging_parts_equals_one_softmax(parts, tokens, heads, spread, seed, with_sink) -> None:
    generator = seeded(seed)
    columns = 7
    logits = torch.randn(parts, tokens, heads, columns, generator=generator, dtype=torch.float64) * spread
    hidden = torch.rand(parts, tokens, heads, columns, generator=generator) < 0.4
    logits = logits.masked_fill(hidden, -torch.inf)
    values = torch.randn(parts, tokens, heads, columns, 3, generator=generator, dtype=torch.float64)
    lse = logits.logsumexp(-1)
    weights = torch.softmax(logits, -1)
    out = (weights.unsqueeze(-1) * values).sum(-2)  # NaN where a part is empty: it must not survive
    sink = torch.randn(heads, generator=generator) * spread if with_sink else None
    merged = combine_parts(Partials(out, lse), sink=sink, dtype=torch.float64)
    joint = logits.permute(1, 2, 0, 3).flatten(2)
    total = joint.logsumexp(-1)
    expected = (torch.softmax(joint, -1).unsqueeze(-1) * values.permute(1, 2, 0, 3, 4).flatten(2, 3)).sum(-2)
    expected = torch.where((total == -torch.inf).unsqueeze(-1), 0.0, expected)
    if sink is not None:
        expected *= torch.where(total == -torch.inf, 0.0, 1 / (1 + torch.exp(sink.double() - total))).unsqueeze(-1)
    torch.testing.assert_close(merged.out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(merged.lse, total, rtol=1e-12, atol=1e-12)


def test_order_of_parts_and_an_empty_part_do_not_matter() -> None:
    out, lse = torch.randn(3, 4, 2, 5), torch.randn(3, 4, 2)
    whole = combine_parts(Partials(out, lse), dtype=torch.float32)
    empty = (torch.full((1, 4, 2, 5), torch.nan), torch.full((1, 4, 2), -torch.inf))
    more = Partials(torch.cat((out.flip(0), empty[0])), torch.cat((lse.flip(0), empty[1])))
    again = combine_parts(more, dtype=torch.float32)
    weights, total = torch.softmax(lse.double(), 0).unsqueeze(-1), lse.double().logsumexp(0)
    terms = weights * out.double()
    # A weight has the errors of a subtraction and of exp; it is divided by a sum of them.
    error = bounds.summed(terms, 0, roundings=8) + bounds.rounded(terms.abs().sum(0), torch.float32, 4)
    for found in (whole, again):
        bounds.agree(found.out, terms.sum(0), error)
        bounds.agree(found.lse, total, bounds.rounded(1 + total.abs() + lse.abs().amax(0), torch.float32, 8))


def test_everything_empty_gives_zeros_and_minus_infinity_with_any_sink() -> None:
    partials = Partials(torch.full((2, 1, 3, 4), torch.nan), torch.full((2, 1, 3), -torch.inf))
    sink = torch.tensor([-torch.inf, 0.0, torch.inf])
    result = combine_parts(partials, sink=sink)
    assert (result.out == 0).all()
    assert (result.lse == -torch.inf).all()
    assert result.max_logits is None


def test_output_buffer_dtype_and_base_two() -> None:
    partials = Partials(torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2), torch.randn(2, 3, 2))
    buffer = torch.empty(3, 2, 4, dtype=torch.float16)
    result = combine_parts(partials, out=buffer, lse_base="2")
    assert result.out is buffer
    plain = combine_parts(partials)
    assert plain.out.dtype == torch.bfloat16
    bounds.agree(result.lse, plain.lse / math.log(2), bounds.rounded(plain.lse / math.log(2), torch.float32, 3))
    assert torch.equal(plain.max_logits, partials.max_logits.amax(0))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"partials": Partials(torch.zeros(2, 3, 4), torch.zeros(2, 3))}, ValueError, "partials.out must be of shape"),
        ({"partials": Partials(torch.zeros(0, 3, 2, 4), torch.zeros(0, 3, 2))}, ValueError, "at least one split"),
        ({"partials": Partials(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 1))}, ValueError, "partials.lse must be of"),
        ({"sink": torch.zeros(3)}, ValueError, "sink must be of shape"),
        ({"sink": torch.full((2,), torch.nan)}, ValueError, "sink must be free of NaN"),
        ({"out": torch.zeros(3, 2, 5)}, ValueError, "out must be of shape"),
        ({"out": torch.zeros(3, 2, 4, dtype=torch.int32)}, TypeError, "out must be float32"),
        ({"lse_base": "ten"}, ValueError, "lse_base must be one of"),
        ({"backend": "none"}, ValueError, "backend must be"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(fields, kind, message) -> None:
    arguments = {"partials": Partials(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2))} | fields
    with pytest.raises(kind, match=message):
        combine_parts(**arguments)
