"""Attention, scores, selections, norms and rotations in float64, each with how far float32 arithmetic may be off.

Bounds are those of rounding analysis: a sum of n products in any order is off by at most n units of the sum of their
magnitudes, exp by a few units of its result times the error of its argument, and so on. `unit` is half the distance
of neighbouring float32 numbers relative to them, 2**-24, or that of what a device's kernels round products to.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from contract.calls import Wrong, require

UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-8,
}
"""Largest relative rounding error to each dtype; for an e4m3 query that of bf16, in which kernels multiply it."""


def close(name: str, found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Within the bound wherever the oracle is finite, and as infinite or NaN as the oracle elsewhere."""
    require(found.shape == expected.shape, f"{name} has shape {list(found.shape)}, not {list(expected.shape)}")
    found = found.detach().cpu().double()
    finite = expected.isfinite()
    bound = torch.where(bound.isnan(), torch.inf, bound)
    same = torch.where(finite, (found - expected).abs() <= bound, False)
    same |= bound == torch.inf
    same |= ~finite & ((found == expected) | (found.isnan() & expected.isnan()))
    if not bool(same.all()):
        at = tuple((~same).nonzero()[0].tolist())
        raise Wrong(
            f"{name}{list(at)} is {float(found[at])!r}, not {float(expected[at])!r} (bound {float(bound[at]):.3g})"
        )


def rounded(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding to a dtype may add to an error, subnormal numbers included."""
    smallest = {torch.float16: 2.0**-25, torch.float8_e4m3fn: 2.0**-10}.get(dtype, 2.0**-133)
    unit = {torch.float8_e4m3fn: 2.0**-4}.get(dtype, UNIT[dtype])
    return expected.abs().nan_to_num(0.0, 0.0) * unit + smallest


@dataclass
class Attention:
    """Results [T, H, ...] and their bounds."""

    out: Tensor
    lse: Tensor
    top: Tensor
    out_bound: Tensor
    lse_bound: Tensor
    skipped: Tensor | None = None
    """bool [T]: tokens whose query is infinite, of which nothing is promised."""


def attention(
    q: Tensor, rows: list[Tensor], *, scale: float, value_dim: int, sink: Tensor | None, unit: float
) -> Attention:
    """Each token over its rows, one softmax for all of them."""
    q = q.detach().cpu().double()
    tokens, heads, width = q.shape
    result = Attention(
        torch.zeros(tokens, heads, value_dim, dtype=torch.float64),
        *(torch.full((tokens, heads), -torch.inf, dtype=torch.float64) for _ in range(2)),
        torch.zeros(tokens, heads, value_dim, dtype=torch.float64),
        torch.zeros(tokens, heads, dtype=torch.float64),
        q.isinf().flatten(1).any(1),
    )
    for token, keys in enumerate(rows):
        if not len(keys):
            continue
        values = keys[:, :value_dim]
        logits = q[token] @ keys.T * scale
        result.lse[token] = torch.logsumexp(logits, 1)
        result.top[token] = logits.amax(1)
        result.out[token] = torch.softmax(logits, 1) @ values
        # Of a logit: the sum of products, the scale, the subtraction of the largest, and the argument of exp.
        size = q[token].abs() @ keys.abs().T * scale
        off = ((width + 8) * unit * size + 4 * unit * logits.abs()).amax(1).nan_to_num(0.0)
        relative = torch.expm1(2 * off) + (len(keys) + 16) * unit
        spread = torch.softmax(logits, 1) @ values.abs()
        result.out_bound[token] = relative.unsqueeze(1) * spread + len(keys) * 2.0**-126 * values.abs().amax()
        result.lse_bound[token] = off + (len(keys) + 16) * unit + 4 * unit * result.lse[token].abs()
        if sink is not None:
            logit = sink.detach().cpu().double()
            share = torch.sigmoid(result.lse[token] - logit).unsqueeze(1)
            share = torch.where((logit == -torch.inf).unsqueeze(1), 1.0, share)
            moved = result.lse_bound[token] + 4 * unit * (1 + logit.abs().nan_to_num(0.0, 0.0, 0.0))
            extra = torch.expm1(moved).unsqueeze(1) * result.out[token].abs()
            result.out_bound[token] = (result.out_bound[token] + extra) * share + 2.0**-126
            result.out[token] = result.out[token] * share
    return result


def check_attended(found: tuple[Tensor, Tensor, Tensor | None], expected: Attention, *, base: str = "e") -> None:
    """Output, lse and maxima as the oracle has them."""
    out, lse, top = found
    spoiled = ~expected.out.isfinite() | ~expected.lse.isfinite().unsqueeze(2) & (expected.lse != -torch.inf).unsqueeze(
        2
    )
    bound = expected.out_bound + rounded(expected.out, out.dtype)
    # A NaN that is selected shows somewhere in its row; where exactly depends on the order of sums.
    whole = spoiled.flatten(1).any(1)
    skipped = torch.zeros_like(whole) if expected.skipped is None else expected.skipped
    require(out.shape == expected.out.shape, f"out has shape {list(out.shape)}")
    if bool((whole & ~skipped).any()):
        bad = ~out.detach().cpu().double()[whole & ~skipped].isfinite()
        require(bad.flatten(1).any(1).all(), "a NaN in a selected row does not show")
    keep = ~whole & ~skipped
    close("out", out[keep.to(out.device)], expected.out[keep], bound[keep])
    divisor = 1.0 if base == "e" else math.log(2)
    close("lse", lse[keep.to(lse.device)], expected.lse[keep] / divisor, 2 * expected.lse_bound[keep] / divisor)
    if top is not None:
        close("max_logits", top[keep.to(top.device)], expected.top[keep], expected.lse_bound[keep])


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [N] of keys [N, D] for one token's heads [H, D] under weights [H], and the sum of all magnitudes."""
    q, weights = q.detach().cpu().double(), weights.detach().cpu().double()
    found = (weights.unsqueeze(1) * (q @ keys.T).relu()).sum(0)
    return found, (weights.abs().unsqueeze(1) * (q.abs() @ keys.abs().T)).sum(0)


def best(scores: list[float], count: int) -> list[int]:
    """Positions of the highest scores, the lowest positions among equal ones, ascending; never NaN or -inf."""
    known = [
        (-score, position) for position, score in enumerate(scores) if not math.isnan(score) and score != -math.inf
    ]
    return sorted(position for _, position in sorted(known, key=lambda pair: (pair[0] + 0.0, pair[1]))[:count])


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.detach().cpu().double()
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.detach().cpu().double()


def rotated(x: Tensor, angles: Tensor, *, interleaved: bool, inverse: bool = False) -> Tensor:
    """Rows [..., R] turned by cosines and sines [..., R], pair by pair."""
    half = x.shape[-1] // 2
    found = x.clone()
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        cos, sin = angles[..., pair], angles[..., half + pair] * (-1 if inverse else 1)
        a, b = x[..., first], x[..., second]
        found[..., first] = a * cos - b * sin
        found[..., second] = b * cos + a * sin
    return found


def hadamard(x: Tensor) -> Tensor:
    """Times the orthonormal matrix of signs (-1) ** popcount(i & j)."""
    dim = x.shape[-1]
    number = torch.arange(dim)
    signs = torch.tensor([[(-1.0) ** bin(int(i & j)).count("1") for j in number] for i in number], dtype=torch.float64)
    return x @ (signs / dim**0.5)


def turn_tail(x: Tensor, positions: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """The last columns of rows [T, D] or heads [T, H, D] turned in adjacent pairs; negative positions are left."""
    table, rotary = cos_sin.detach().cpu().double(), cos_sin.shape[1]
    found = x.detach().cpu().double().clone()
    for token, position in enumerate(positions.tolist()):
        if position >= 0:
            tail = found[token, ..., -rotary:]
            found[token, ..., -rotary:] = rotated(
                tail, table[position].expand_as(tail), interleaved=True, inverse=inverse
            )
    return found
