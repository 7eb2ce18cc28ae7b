"""The bounds that other tests use: float32 stays within them in any order of sums, and small mistakes do not."""

import math
from collections.abc import Callable

import bounds
import pytest
import torch
from attention_calls import combine_call
from torch import Tensor

from tamis.lab.testing.oracle import hadamard_matrix
from tamis.model.rope import Rope, hadamard, rms_norm, rotate
from tamis.ops.combine import reference as combine_reference

SCALE = 0.07


def in_order(terms: Tensor) -> Tensor:
    """Sums of the last axis in float32, one term after the other: the most roundings that any order has."""
    total = torch.zeros(terms.shape[:-1])
    for term in terms.float().unbind(-1):
        total = total + term
    return total


def attend32(q: Tensor, rows: Tensor, *, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    """Output and lse of heads [H, D] in float32, all sums one term after the other."""
    logits = in_order(q.unsqueeze(1) * rows) * scale
    weights = torch.exp(logits - logits.amax(1, keepdim=True))
    total = in_order(weights)
    out = in_order(weights.unsqueeze(1) * rows[:, :512].T) / total.unsqueeze(1)
    return out, logits.amax(1) + total.log()


def refused(found: Tensor, expected: Tensor, error: Tensor) -> bool:
    try:
        bounds.agree(found, expected, error)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("rows", "scale"), [(1, SCALE), (7, SCALE), (40, SCALE), (40, 1.0), (300, SCALE)])
def test_attention_in_float32_is_within_its_bound(rows: int, scale: float) -> None:
    q, kv = torch.randn(4, 576), torch.randn(rows, 576)
    exact = bounds.attention(q, kv, scale=scale, value_dim=512)
    for order in (torch.arange(rows), torch.arange(rows - 1, -1, -1), kv[:, 0].argsort()):
        out, lse = attend32(q, kv[order], scale=scale)
        bounds.agree(out, exact.out, exact.out_error)
        bounds.agree(lse, exact.lse, exact.lse_error)
    # Not by being wide: the whole bound is some times what rounding does, and hundreds of times less than bf16's.
    assert bounds.relative(exact.out_error, exact.out) < 1e-4


def off_by_one(q: Tensor, kv: Tensor) -> Tensor:
    return attend32(q, kv.roll(1, 1))[0]


MISTAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a column dropped": lambda q, kv: attend32(q, kv[:-1])[0],
    "a column twice": lambda q, kv: attend32(q, torch.cat((kv, kv[:1])))[0],
    "a row too far": lambda q, kv: attend32(q, torch.cat((kv[:-1], torch.randn(1, 576))))[0],
    "scale off by 1%": lambda q, kv: attend32(q, kv, scale=SCALE * 1.01)[0],
    "scale off by 0.1%": lambda q, kv: attend32(q, kv, scale=SCALE * 1.001)[0],
    "output off by 0.1%": lambda q, kv: attend32(q, kv)[0] * 1.001,
    "rope columns left out": lambda q, kv: attend32(q * (torch.arange(576) < 512), kv)[0],
    "columns off by one": off_by_one,
    "queries in bf16": lambda q, kv: attend32(q.bfloat16().float(), kv)[0],
    "rows in bf16": lambda q, kv: attend32(q, kv.bfloat16().float())[0],
    "rows in fp16": lambda q, kv: attend32(q, kv.half().float())[0],
    "heads swapped": lambda q, kv: attend32(q.flip(0), kv)[0],
    "one value NaN": lambda q, kv: attend32(q, kv)[0].index_fill(1, torch.tensor([3]), math.nan),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("rows", [7, 128])
def test_mistakes_in_attention_are_not(mistake: str, rows: int) -> None:
    q, kv = torch.randn(4, 576), torch.randn(rows, 576)
    exact = bounds.attention(q, kv, scale=SCALE, value_dim=512)
    assert refused(MISTAKES[mistake](q, kv), exact.out, exact.out_error)


def merge(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    merged = torch.empty(out.shape[1:])
    return merged, combine_reference.combine_parts(combine_call(out, lse, sink, merged))


@pytest.mark.parametrize("sink", [None, torch.tensor([-torch.inf, 0.0, 3.0, torch.inf])])
def test_merged_parts(sink: Tensor | None) -> None:
    q, kv = torch.randn(4, 576), torch.randn(60, 576)
    exact = bounds.attention(q, kv, scale=SCALE, value_dim=512, sink=sink, parts=3)
    parts = [attend32(q, part) for part in kv.split((1, 20, 39))]
    out, lse = (torch.stack(part).unsqueeze(1) for part in zip(*parts, strict=True))
    merged, total = merge(out, lse, sink)
    bounds.agree(merged[0], exact.out, exact.out_error)
    bounds.agree(total[0], exact.lse, exact.lse_error)
    off, _ = merge(out, lse + torch.tensor([1e-3, 0, 0]).view(3, 1, 1), sink)
    assert refused(off[0], exact.out, exact.out_error)
    assert refused(merge(out[:2], lse[:2], sink)[0][0], exact.out, exact.out_error)


def test_bf16_rows_have_room_for_bf16_and_no_more() -> None:
    q, kv = torch.randn(4, 576), torch.randn(60, 576)
    exact = bounds.attention(q, kv, scale=SCALE, value_dim=512, row_unit=bounds.unit(torch.bfloat16))
    bounds.agree(attend32(q, kv.bfloat16().float())[0], exact.out, exact.out_error)
    assert refused(attend32(q, kv.to(torch.float8_e4m3fn).float())[0], exact.out, exact.out_error)
    assert refused(attend32(q, kv[1:])[0], exact.out, exact.out_error)


@pytest.mark.parametrize("terms", [1, 2, 24, 512, 4096])
def test_sums_and_products(terms: int) -> None:
    left, right = torch.randn(5, terms), torch.randn(terms, 6)
    exact = left.double() @ right.double()
    found = in_order(left.unsqueeze(1) * right.T)
    error = bounds.product(left.double(), right.double())
    bounds.agree(found, exact, error)
    bounds.agree(left @ right, exact, error)
    assert refused(found * 1.001, exact, error)
    assert refused(left.bfloat16().float() @ right, exact, error)
    assert refused(found.roll(1, 0), exact, error)
    weights = left.exp()
    bounds.agree(in_order(weights), weights.double().sum(1), bounds.summed(weights.double(), roundings=0))


def test_norms_rotations_and_hadamard() -> None:
    x, weight = torch.randn(50, 512) * 3, torch.rand(512) + 0.5
    exact = x.double() / x.double().square().mean(1, keepdim=True).sqrt() * weight.double()
    size = (in_order(x.square()) / 512).sqrt().unsqueeze(1)
    for found in (rms_norm(x, weight, 0.0), x / size * weight):
        bounds.agree(found, exact, bounds.rms_norm(exact))
        assert refused(found * 1.0001, exact, bounds.rms_norm(exact))
    centred = (x.double() - x.double().mean(1, keepdim=True)) / x.double().std(1, correction=0, keepdim=True)
    bounds.agree(torch.layer_norm(x, (512,), eps=0.0), centred, bounds.layer_norm(centred))
    assert refused(x / size, centred, bounds.layer_norm(centred))
    assert refused(torch.layer_norm(x, (512,), eps=1e-2), centred, bounds.layer_norm(centred))
    turned = x.double() @ hadamard_matrix(512)
    error = bounds.hadamard(x.double().square().mean(1, keepdim=True).sqrt(), 512)
    bounds.agree(hadamard(x), turned, error)
    assert refused(hadamard(x) * 1.0001, turned, error)
    rope = Rope(512, theta=1e4)
    angles = torch.arange(50).double().unsqueeze(1) * 1e4 ** (-torch.arange(256).double() / 256)
    pairs = torch.view_as_complex(x.double().view(50, 256, 2))
    exact = torch.view_as_real(torch.polar(torch.ones_like(angles), angles) * pairs).flatten(1)
    error = bounds.rotation(pairs.abs(), angles).repeat_interleave(2, 1)
    found = rotate(x, rope.cos_sin_table(50), interleaved=True)
    bounds.agree(found, exact, error)
    assert refused(rotate(x, rope.cos_sin_table(51)[1:], interleaved=True), exact, error)
    assert refused(rotate(x, rope.cos_sin_table(50).bfloat16(), interleaved=True), exact, error)


def test_rounding_to_a_dtype() -> None:
    x = torch.cat((torch.randn(1000, dtype=torch.float64), torch.tensor([0.0, 1e-8, 60000.0])))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        bounds.agree(x.to(dtype), x, 0.0, dtype)
        assert refused(x.to(dtype).double() * (1 + 3 * bounds.unit(dtype)), x, bounds.rounded(x, dtype))
    with pytest.raises(AssertionError, match="3 of 4 differ, first at"):
        bounds.agree(torch.tensor([1.0, math.nan, math.inf, 2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0]), 0.5)
    bounds.agree(torch.tensor([math.inf, -math.inf]), torch.tensor([math.inf, -math.inf]), 0.0)
