"""How far a result may lie from float64, derived from the arithmetic that makes it.

Three arguments carry all bounds, and each function says which it rests on.

*One rounding.* An operation returns the exact value times 1 + d with |d| <= u, the rounding unit: half of a dtype's
`eps`. Libraries promise elementary functions (exp, log, rsqrt) within one unit in the last place, which is 2 u.

*Many roundings.* Their errors are taken as independent and evenly spread over -u..u, so that each has a variance of
u^2 / 3 and they add up like steps of a random walk (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019). A bound is `DEVIATIONS` standard deviations of the walk. It holds for any order of summation, so for
any CPU, number of threads and batch; worst cases over the signs of all errors would be twenty times as wide here and
could not tell float32 from bf16 weights any more.

*Partial sums.* Adding n terms rounds n partial sums. Where terms are drawn independently, those are a random walk to
the sum: their squares add up to n/2 of the terms' squares and n/3 of the sum's square. Sums of positive terms are the
second part alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import Selection
from tamis.lab.testing import compare
from tamis.lab.testing.oracle import selected_rows

DEVIATIONS = 8.0
"""Deviations that no error exceeds: a normal number does so once in 10**15, and suites compare some 10**9 values."""
FLOAT32, FLOAT64 = 2.0**-24, 2.0**-53


def unit(dtype: torch.dtype) -> float:
    """The rounding unit of a dtype: half the gap between 1 and the next number."""
    return torch.finfo(dtype).eps / 2


def rounded(value: Tensor, dtype: torch.dtype, times: int = 1) -> Tensor:
    """Error of rounding each value to a dtype, or of so many operations in it. Argument: one rounding."""
    info = torch.finfo(dtype)
    return times * (unit(dtype) * value.double().abs() + info.smallest_normal * info.eps / 2)


def summed(terms: Tensor, dim: int = -1, *, u: float = FLOAT32, roundings: float = 1) -> Tensor:
    """Error of adding up float64 terms along an axis, each of which was rounded so many times before.

    Arguments: many roundings, partial sums. A dot product is the sum of its products, with one rounding each.
    """
    squares = terms.square().sum(dim)
    return _walk(_sum_variance(squares, terms.sum(dim), terms.shape[dim], u, roundings))


def product(left: Tensor, right: Tensor, *, u: float = FLOAT32, roundings: float = 1) -> Tensor:
    """Error of the matrix product of two float64 matrices [..., m, k] and [..., k, n], as of `summed` for each
    element."""
    squares = left.square() @ right.square()
    return _walk(_sum_variance(squares, left @ right, left.shape[-1], u, roundings))


class Attention(NamedTuple):
    """The exact results of one token's heads in float64, and the largest errors of float32."""

    out: Tensor
    lse: Tensor
    top: Tensor
    out_error: Tensor
    lse_error: Tensor
    top_error: Tensor


def attention(
    q: Tensor,
    rows: Tensor,
    *,
    scale: float,
    value_dim: int | None = None,
    sink: Tensor | None = None,
    parts: int = 1,
    u: float = FLOAT32,
    row_unit: float = 0.0,
    weight_unit: float = 0.0,
) -> Attention:
    """Heads [H, D] of one token over rows [N, D], whose first `value_dim` columns are the values.

    Args:
        q: queries.
        rows: keys and values; N may be 0.
        scale: factor of the logits.
        value_dim: all of D unless given.
        sink: [H], one more logit whose value is zero.
        parts: the most splits of the rows, or blocks of an online softmax.
        u: rounding unit of products, sums and softmax.
        row_unit: rounding unit of a copy of the rows, such as a bf16 workspace.
        weight_unit: rounding unit of the weights that multiply the values, such as those of a bf16 product.

    Arguments: a logit is a sum of D products (many roundings, partial sums), then scaled, lowered by the largest logit
    and exponentiated (one rounding each). An error e_j of a logit is the relative error of its weight w_j, which moves
    the output by w_j e_j (v_j - out); errors of different rows are independent. The weighted sum and the sum of
    weights are sums of N terms. Merging parts multiplies each by exp(lse_part - lse), whose error is that of the two
    logarithms, the same for all rows of a part.
    """
    q, rows = q.double(), rows.double()
    values = rows[:, : value_dim or rows.shape[1]]
    if len(rows) == 0:
        zeros, none = q.new_zeros(len(q), values.shape[1]), q.new_full((len(q),), -torch.inf)
        return Attention(zeros, none, none, zeros, none.new_zeros(len(q)), none.new_zeros(len(q)))
    logits = q @ rows.T * scale
    top, lse = logits.amax(1), logits.logsumexp(1)
    weights = (logits - lse.unsqueeze(1)).exp()
    out = weights @ values

    squares = q.square() @ rows.square().T * scale**2
    # Beside the sum: the scale itself is rounded, perhaps times log2(e), then the product with it; exp at the end.
    variance = _sum_variance(squares, logits, rows.shape[1], u, 3) + row_unit**2 / 3 * squares
    variance += u**2 * (4 * logits.square() + (logits - top.unsqueeze(1)).square() + 4)
    moved = weights.square() * variance
    # sum_j moved_j (v_j - out)^2, without a tensor of H x N x V
    spread = moved @ values.square() - 2 * out * (moved @ values) + out.square() * moved.sum(1, keepdim=True)
    terms = weights.square() @ values.square()
    count = len(rows) + 2 * parts
    total = _sum_variance(weights.square().sum(1), torch.ones_like(lse), count, u, 2)
    spread = spread.clamp_min(0) + _sum_variance(terms, out, count, u, 2) + row_unit**2 / 3 * terms
    out_error = _walk(spread + out.square() * total.unsqueeze(1)) + 4 * u * out.abs()
    lse_error = _walk(moved.sum(1) + total) + 4 * u * (1 + lse.abs() + top.abs())
    # Where few weights matter, their errors cannot exceed one rounding each, whatever their deviation.
    out_error += torch.minimum(_walk(weight_unit**2 / 3 * terms), weight_unit * (weights @ values.abs()))
    if parts > 1:
        out_error += (4 * u * (2 + lse.abs() + top.abs())).unsqueeze(1) * (weights @ values.abs() + out.abs())
    if sink is not None:
        share = torch.sigmoid(lse - sink.double())
        gap = torch.where(share < 1, (lse - sink.double()).abs(), 0.0)
        error = (1 - share) * (lse_error + u * gap.clamp_max(1 / u)) + 6 * u
        out, out_error = (part * share.unsqueeze(1) for part in (out, out_error))
        out_error += out.abs() * error.unsqueeze(1)
    return Attention(out, lse, top, out_error, lse_error, _walk(variance.amax(1)) + 2 * u * top.abs())


def selected_attention(q: Tensor, selections: Sequence[Selection], **options) -> Attention:
    """`attention` of each token [T, H, D] over the rows that its selections name; results are [T, H, ...]."""
    rows = (selected_rows(selections, token) for token in range(len(q)))
    return stacked([attention(heads, seen, **options) for heads, seen in zip(q, rows, strict=True)])


def stacked(tokens: list[Attention]) -> Attention:
    """The results of all tokens as one, [T, H, ...]."""
    return Attention(*(torch.stack(part) for part in zip(*tokens, strict=True)))


def softmax_mean(scores: Tensor, values: Tensor, *, u: float = FLOAT32) -> tuple[Tensor, Tensor]:
    """The mean of values by the softmax of scores along the first axis, for each column, and its error.

    Arguments: as of `attention`, with scores that were rounded once when they were made.
    """
    weights = scores.softmax(0)
    mean = (weights * values).sum(0)
    variance = u**2 * (scores.square() + (scores - scores.amax(0)).square() + 4)
    spread = (weights.square() * variance * (values - mean).square()).sum(0)
    terms, count = (weights * values).square().sum(0), len(scores)
    total = _sum_variance(weights.square().sum(0), torch.ones_like(mean), count, u, 2)
    return mean, _walk(spread + _sum_variance(terms, mean, count, u, 2) + mean.square() * total) + 2 * u * mean.abs()


def rms_norm(normed: Tensor, *, u: float = FLOAT32) -> Tensor:
    """Error of x / rms(x) * weight, from its float64 result. Arguments: the mean is a sum of n positive terms, whose
    relative error a root halves (partial sums); then rsqrt and two products (one rounding each)."""
    count = normed.shape[-1]
    relative = 0.5 * DEVIATIONS * u * math.sqrt((count / 3 + 2) / 3) + 6 * u
    return relative * normed.double().abs()


def layer_norm(centred: Tensor, *, u: float = FLOAT32) -> Tensor:
    """Error of (x - mean) / sqrt(var) before weight and bias, from its float64 result, which has a mean square of one.
    Arguments: as of `rms_norm`, and the mean that is subtracted is a sum of n terms as large as the result's."""
    count = centred.shape[-1]
    shift = DEVIATIONS * u * math.sqrt((count / 2 + 2) / 3 / count)
    return 2 * rms_norm(centred, u=u) + shift + 2 * u


def rotation(length: Tensor, angle: Tensor, *, u: float = FLOAT32) -> Tensor:
    """Error of a rotated pair of this length by an angle that was itself computed in float32. Arguments (one rounding):
    the angle is a rounded product with a rounded frequency, its cosine and sine are elementary functions, and each new
    value is two products and a sum."""
    return length * (2 * u * angle.abs() + 6 * u)


def hadamard(row_size: Tensor, dim: int, *, u: float = FLOAT32) -> Tensor:
    """Error of each value of a row of this root mean square after an orthonormal Hadamard rotation by a butterfly.
    Argument (many roundings): log2(dim) additions on the way to each value, all of which the remaining levels spread
    evenly over the row; then one product."""
    return DEVIATIONS * u * math.sqrt((math.log2(dim) + 1) / 3) * row_size


def relative_error(found: Tensor, expected: Tensor) -> float:
    """`compare.relative_error`, for results without NaN and infinities: those fail even where they are expected."""
    finite = found.double().isfinite().all() and expected.double().isfinite().all()
    return compare.relative_error(found, expected) if finite else math.inf


def relative(error: Tensor, expected: Tensor) -> float:
    """Errors per element as one relative error in the 2-norm, for comparisons with `relative_error`."""
    return float(error.norm() / expected.double().norm().clamp_min(1e-300))


def agree(found: Tensor, expected: Tensor, error: Tensor | float, dtype: torch.dtype | None = None) -> None:
    """Assert that each value lies within its error of the expected one, and one rounding more if the result has been
    rounded to a 16-bit dtype. NaN fails, infinities must be the same."""
    left, right = found.detach().cpu().double(), expected.detach().cpu().double()
    assert left.shape == right.shape, f"found {list(left.shape)}, expected {list(right.shape)}"
    allowed = torch.as_tensor(error, dtype=torch.float64).expand(right.shape)
    if dtype is not None:
        allowed = allowed + rounded(right.abs() + allowed, dtype)
    wrong = ~(((left - right).abs() <= allowed) | (left == right))
    if wrong.any():
        where = compare.first_mismatch(torch.where(wrong, left, 0.0), torch.where(wrong, right, 0.0))
        worst = float(((left - right).abs() / allowed).nan_to_num(torch.inf).max())
        raise AssertionError(f"{where}, {worst:.3g} times what the arithmetic allows at worst")


def _sum_variance(squares: Tensor, total: Tensor, count: int, u: float, roundings: float) -> Tensor:
    return u**2 / 3 * ((count / 2 + roundings) * squares + (count / 3 + 1) * total.square())


def _walk(variance: Tensor) -> Tensor:
    return DEVIATIONS * variance.sqrt()
