"""Attention's output in FP8: rotated back, quantised, lowered group by group."""

import pytest
import torch
from ops.rotate.test_rotate import LENGTH, ROTARY, turned
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.layout import v4_fp8
from tamis.lab.testing import oracle
from tamis.ops import lower_groups, quantise_blocks, rotate_to_fp8

E4M3 = torch.float8_e4m3fn


def wide(values: Tensor, scales: Tensor) -> Tensor:
    tiles = values.double().unflatten(-1, (scales.shape[-1], -1))
    return (tiles * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def cosine_gap(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float(1 - 2 * (found * expected).sum() / (found.square().sum() + expected.square().sum()))


@pytest.mark.parametrize("tokens", [1, 7, 32, 128, 1024])
def test_the_published_criteria(tokens: int) -> None:
    """64 heads in 8 groups: quantised after the rotation within 1e-4 of quantising the exact rotation, the projection
    within 1e-2 of the exact one, and what is not rotated untouched by the rotation."""
    heads, groups, rank = 64, 8, 16
    x = torch.randn(tokens, heads, 512).bfloat16()
    positions, table = torch.randint(0, LENGTH, (tokens,)), ROTARY.cos_sin_table(LENGTH)
    values, scales = rotate_to_fp8(x, positions, table)
    assert (values.dtype, values.shape) == (E4M3, x.shape)
    assert (scales.dtype, scales.shape) == (torch.uint8, (tokens, heads, 4))
    exact = turned(x[:8], positions[:8].tolist(), inverse=True)
    codes, stored, _ = oracle.encode(exact.float().flatten(0, 1), v4_fp8(latent=512, rope=0, tile=128, rounding="none"))
    oracle_values = codes.view(E4M3).view(-1, heads, 512), stored[:, :4].view(-1, heads, 4)
    assert cosine_gap(wide(values[:8], scales[:8]), wide(*oracle_values)) < 1e-4
    assert cosine_gap(wide(values[:8], scales[:8]), exact) < 1e-3
    plain = rotate_to_fp8(x, torch.full_like(positions, -1), table)
    assert torch.equal(values.view(torch.uint8)[..., :384], plain.values.view(torch.uint8)[..., :384])
    assert torch.equal(scales[..., :3], plain.scales[..., :3])
    assert not torch.equal(values.view(torch.uint8)[..., 448:], plain.values.view(torch.uint8)[..., 448:])
    weight = torch.randn(groups, rank, heads // groups * 512) / 64
    by_group = (part.flatten(1).unflatten(1, (groups, -1)) for part in (values, scales))
    lowered = lower_groups(*by_group, *quantise_blocks(weight))
    assert (lowered.dtype, lowered.shape) == (torch.bfloat16, (tokens, groups, rank))
    grouped = exact.flatten(1).unflatten(1, (groups, -1))
    assert cosine_gap(lowered[:8], torch.einsum("tgk,gok->tgo", grouped, weight.double())) < 1e-2


def test_literal_bytes() -> None:
    x = torch.zeros(1, 2, 64)
    x[0, 0, :3] = torch.tensor([448.0, -1.0, 0.5])
    x[0, 0, 32] = 3.0
    x[0, 1, 40] = 1e-12
    values, scales = rotate_to_fp8(x, torch.tensor([0]), torch.tensor([[1.0, 0.0]]), tile=32)
    assert values.view(torch.uint8)[0, 0, :3].tolist() == [0x7E, 0xB8, 0x30]
    assert values.view(torch.uint8)[0, 0, 32] == 0x7C  # 384 under 2**-7
    floor = 127 - 42  # the next power of two above 1e-10 / 448
    assert scales[0].tolist() == [[127, 120], [floor, floor]]


@pytest.mark.parametrize(("rank", "tile"), [(3, 32), (40, 32), (130, 64)])
def test_groups_and_blocks_of_any_size(rank: int, tile: int) -> None:
    """Against the sum in float64 of exactly what is stored."""
    weight = torch.randn(3, rank, 192) * torch.logspace(-3, 3, 192)
    codes, scales = quantise_blocks(weight, tile=tile)
    assert scales.shape == (3, ceil_div(rank, tile), 192 // tile)
    assert (scales == torch.exp2(scales.log2().round())).all()
    rows = torch.arange(rank) // tile
    stored = codes.double() * scales.double()[:, rows].repeat_interleave(tile, dim=2)
    assert (stored - weight).norm() / weight.norm() < 4e-2
    x, exponents = torch.randn(5, 3, 192).to(E4M3), torch.randint(120, 130, (5, 3, 192 // tile)).byte()
    expected = torch.einsum("tgk,gok->tgo", wide(x, exponents), stored)
    found = lower_groups(x, exponents, codes, scales, dtype=torch.float32)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert lower_groups(x[:0], exponents[:0], codes, scales).shape == (0, 3, rank)


def test_what_does_not_fit_is_refused() -> None:
    x, positions, table = torch.zeros(1, 1, 96), torch.zeros(1, dtype=torch.int32), ROTARY.cos_sin_table(4)
    for tile in (16, 48, 64):
        with pytest.raises(ValueError, match=r"^tile must be a power of two from 32 on that divides 96"):
            rotate_to_fp8(x, positions, table, tile=tile)
    codes, scales = quantise_blocks(torch.zeros(2, 4, 64), tile=32)
    given = torch.zeros(1, 2, 64).to(E4M3), torch.zeros(1, 2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^weight_scales must be of shape \[G=2, M=1, N=2\]"):
        lower_groups(*given, codes, scales[:, :, :1])
    with pytest.raises(TypeError, match=r"^weight must be "):
        lower_groups(*given, codes.float(), scales)
