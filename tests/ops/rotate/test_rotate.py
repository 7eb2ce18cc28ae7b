"""Norm and rotation of heads and rows against the formulas in fp64."""

import bounds
import pytest
import torch
from bounds import relative_error
from torch import Tensor

from tamis import IndexRecipe, Layout, PagedCache
from tamis.cache.layout import named, plain_fp8, rows
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.model.rope import Rope
from tamis.ops import norm_rows, quantise_index_query, rotate_and_write, rotate_heads, write_kv

ROTARY = Rope(64, theta=160000.0, factor=16.0, original_length=65536)
LENGTH = 700
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def turned(x: Tensor, positions: list[int], *, inverse: bool = False, rotary: Rope = ROTARY) -> Tensor:
    """The rule for one token at a time, pair by pair."""
    x = x.double().clone()
    for token, position in enumerate(positions):
        for pair, frequency in enumerate(rotary.frequencies().double().tolist()):
            if position < 0:
                continue
            angle = torch.tensor(position * frequency, dtype=torch.float64) * (-1 if inverse else 1)
            at = x.shape[-1] - rotary.dim + 2 * pair
            even, odd = x[token, ..., at].clone(), x[token, ..., at + 1].clone()
            x[token, ..., at] = even * angle.cos() - odd * angle.sin()
            x[token, ..., at + 1] = odd * angle.cos() + even * angle.sin()
    return x


def turning_error(x: Tensor, positions: list[int], *, norm: bool = False, rotary: Rope = ROTARY) -> Tensor:
    """What `turned` allows to differ, and the norm before it if there is one."""
    x = x.double()
    error = bounds.rms_norm(x) if norm else torch.zeros_like(x)
    angles = torch.tensor(positions).double().clamp_min(0).unsqueeze(1) * rotary.frequencies().double()
    angles = angles.view(len(positions), *[1] * (x.dim() - 2), rotary.dim // 2)
    pairs = x[..., -rotary.dim :].unflatten(-1, (-1, 2))
    error[..., -rotary.dim :] *= 2  # each value of a pair has both values' errors
    error[..., -rotary.dim :] += bounds.rotation(pairs.norm(dim=-1), angles).repeat_interleave(2, -1)
    return error


def normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 64), (5, 3, 512), (2, 64, 128), (0, 4, 512)])
def test_heads(dtype: torch.dtype, tokens: int, heads: int, width: int) -> None:
    x = (torch.randn(heads, tokens, width) * 3).to(dtype).transpose(0, 1)
    positions = [0, 699, -1, 17, 128][:tokens]
    table, given = ROTARY.cos_sin_table(LENGTH), torch.tensor(positions, dtype=torch.int32)
    for eps in (None, 1e-6, 2.0):
        start = x if eps is None else normed(x, eps)
        for inverse in (False, True):
            found = rotate_heads(x, given, table, eps=eps, inverse=inverse)
            assert found.dtype == dtype
            assert found.shape == x.shape
            error = turning_error(start, positions, norm=eps is not None)
            bounds.agree(found, turned(start, positions, inverse=inverse), error, dtype)
    if tokens:
        back = rotate_heads(rotate_heads(x, given, table), given, table, inverse=True)
        # Two rotations by the same table, and two roundings to the dtype of pairs as long as these.
        pairs = x[..., -64:].double().unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
        rounding = 2.5 * bounds.rounded(pairs, dtype)
        bounds.agree(back[..., -64:], x[..., -64:], rounding + 2 * turning_error(x, [0] * tokens)[..., -64:])
        assert torch.equal(rotate_heads(x, given, table)[..., :-64], x[..., :-64])


@pytest.mark.parametrize(
    # Of FP8 each value is off by at most a sixteenth of itself, and evenly spread below that.
    ("layout", "bound"),
    [
        (named("v4-fp32"), 0.0),
        (named("v4-bf16"), bounds.unit(torch.bfloat16)),
        (named("v4-fp8"), 4e-2),
        (plain_fp8(latent=448, rope=64), 4e-2),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else None,
)
def test_queries_and_rows_in_one_call(layout: Layout, bound: float) -> None:
    cache = PagedCache(layout, 4, 5, scale=0.25 if layout.scale_mode == "tensor" else 1.0)
    q, kv, weight = torch.randn(6, 4, 512), torch.randn(6, 512) * 5, torch.rand(512) + 0.5
    positions, slots = [3, 4, 200, 0, -1, 9], torch.tensor([7, 8, -1, 19, -1])
    table = ROTARY.cos_sin_table(LENGTH)
    rest = {"positions": torch.tensor(positions), "cos_sin": table, "norm_weight": weight}
    found, absent = rotate_and_write(q, kv, cache, slots, **rest)
    assert absent is None
    index_q = torch.randn(6, 9, 128)
    again = rotate_and_write(q, kv, cache, slots, **rest, index_q=index_q)
    assert torch.equal(again.q, found)
    bounds.agree(again.index_q, turned(index_q, positions), turning_error(index_q, positions))
    bounds.agree(found, turned(normed(q), positions), turning_error(normed(q), positions, norm=True))
    expected = turned(normed(kv) * weight, positions)
    written = torch.tensor([0, 1, 3])
    error = turning_error(normed(kv) * weight, positions, norm=True)
    allowed = bound + bounds.relative(error[written], expected[written])
    assert relative_error(cache.read(slots[written]), expected[written]) < allowed
    # Nothing else was touched, and rows are rounded once, to bf16 before FP8.
    untouched = [slot for slot in range(20) if slot not in (7, 8, 19)]
    assert not cache.read(torch.tensor(untouched)).any()
    other = PagedCache(layout, 4, 5, scale=cache.scale)
    write_kv(expected[written].to(torch.bfloat16 if layout.quantised else layout.element), other, slots[written])
    gap = (other.read(slots[written]) - cache.read(slots[written])).abs()
    assert (gap > 1e-5).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_queries_turned_by_hadamard(dtype: torch.dtype) -> None:
    cache = PagedCache(named("v4-bf16"), 4, 5)
    q, kv, index_q = torch.randn(6, 1, 512).to(dtype), torch.randn(6, 512).to(dtype), torch.randn(6, 9, 128).to(dtype)
    positions, table = [3, 4, 200, 0, -1, 9], ROTARY.cos_sin_table(LENGTH)
    rest = {"positions": torch.tensor(positions), "cos_sin": table, "norm_weight": torch.ones(512), "index_q": index_q}
    found = rotate_and_write(q, kv, cache, torch.arange(6), **rest, index_hadamard=True).index_q
    assert found.dtype == dtype
    # Rounded after the rotation as well: an error of each value, which the Hadamard rotation spreads over its row.
    exact = turned(index_q, positions)
    size = exact.square().mean(-1, keepdim=True).sqrt()
    before = turning_error(index_q, positions) + bounds.rounded(exact, dtype)
    error = bounds.hadamard(size, 128) + 2 * before.square().mean(-1, keepdim=True).sqrt() * bounds.DEVIATIONS / 3**0.5
    bounds.agree(found, exact @ hadamard_matrix(128), error, dtype)
    if dtype == torch.bfloat16:
        # What the stage `index` would quantise is this, to the byte.
        recipe, weights = IndexRecipe.of_v4(64, hadamard=True), torch.randn(6, 9)
        here = quantise_index_query(index_q, weights, recipe, positions=torch.tensor(positions), cos_sin=table)
        later = quantise_index_query(found, weights, IndexRecipe(0))
        assert torch.equal(here[0].view(torch.uint8), later[0].view(torch.uint8))
        assert torch.equal(here[1], later[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_rows(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(70, 5) * 4).to(dtype).T, torch.randn(70)
    found = norm_rows(x, weight)
    assert found.dtype == dtype
    exact = normed(x) * weight.double()
    bounds.agree(found, exact, bounds.rms_norm(exact), dtype)
    assert norm_rows(x[:0], weight).shape == (0, 70)
    with pytest.raises(ValueError, match="weight must be of shape"):
        norm_rows(x, weight[:9])


def test_bad_input_is_refused() -> None:
    x, positions, table = torch.zeros(2, 3, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(5, 4)
    for change, message in (
        ({"positions": positions + 5}, "positions must be between .* make a longer cos_sin table"),
        ({"positions": positions[:1]}, "positions must be of shape"),
        ({"cos_sin": torch.zeros(5, 10)}, "cos_sin must be of an even width up to that of the rows"),
        ({"cos_sin": torch.zeros(5, 3)}, "cos_sin must be of an even width"),
        ({"x": x[0]}, "x must be of shape"),
        ({"eps": -1.0}, "eps must be finite and > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            rotate_heads(**({"x": x, "positions": positions, "cos_sin": table} | change))
    cache = PagedCache(rows(torch.float32, latent=4, rope=4), 2, 2)
    call = {"q": x, "kv": x[:, 0], "cache": cache, "slots": torch.tensor([1, 2])}
    rest = {"positions": positions, "cos_sin": table, "norm_weight": torch.ones(8)}
    for change, message in (
        ({"slots": torch.tensor([1, 2, 3])}, "slots must be at most 2 long"),
        ({"slots": torch.tensor([1, 4])}, "slots must be between .* the cache has 4 rows"),
        ({"norm_weight": torch.ones(7)}, "norm_weight must be of shape"),
        ({"kv": x}, "kv must be of shape"),
        ({"index_q": torch.zeros(1, 2, 8)}, "index_q must be of shape"),
        ({"index_q": torch.zeros(2, 2, 2)}, "cos_sin must be of an even width"),
        ({"index_q": torch.zeros(2, 2, 6), "index_hadamard": True}, "width must be a power of two"),
    ):
        with pytest.raises(ValueError, match=message):
            rotate_and_write(**(call | rest | change))
    assert not cache.storage.any()
