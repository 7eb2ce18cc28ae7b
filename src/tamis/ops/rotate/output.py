"""Attention's output in FP8: heads rotated back and quantised, and the grouped projection that takes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import E4M3_MAX, OUTPUT_SCALE_FLOOR
from tamis.ops import old_library as library
from tamis.ops.rotate import check_positions, registered


class Fp8Heads(NamedTuple):
    """Heads in e4m3 under one power of two per tile."""

    values: Tensor
    """e4m3 [T, H, D]"""
    scales: Tensor
    """uint8 [T, H, D / tile], exponents: 2 ** (byte - 127)"""


def rotate_to_fp8(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    tile: int = 128,
    inverse: bool = True,
    backend: str = "auto",
) -> Fp8Heads:
    """`rotate_heads` in float32, rounded once, to e4m3.

    Args:
        x: [T, H, D] in bf16, fp16 or fp32.
        positions: integer [T], absolute; padding (negative) is not rotated.
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`; R columns are rotated.
        tile: how many columns share a scale: a power of two from 32 on that divides D.
        inverse: rotate back, as an output must be.
        backend: a name from `tamis backends`, or "auto".
    """
    checks.flag("inverse", inverse)
    check_rotate_to_fp8(x, positions, cos_sin, tile, backend)
    return Fp8Heads(*registered.rotate_to_fp8(x, positions, cos_sin, tile, inverse, backend))


def check_rotate_to_fp8(x: Tensor, positions: Tensor, cos_sin: Tensor, tile: int, backend: str) -> None:
    """Refuse what `rotate_to_fp8` refuses."""
    sizes = checks.tensor("x", x, "T H D", checks.FLOATS)
    check_positions(positions, cos_sin, sizes["T"], sizes["D"], x.device)
    check_tile(tile, sizes["D"])
    library.check_stage("rotate", backend, x.device, x=x, cos_sin=cos_sin)


def lower_groups(
    x: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """The first half of a grouped low-rank projection: [T, G, O], each group of x times the weight of that group.

    Products of e4m3 numbers are summed in float32 (within a tile as the device's FP8 product sums) and rounded once.

    Args:
        x: e4m3 [T, G, K]: heads from `rotate_to_fp8`, those of one group side by side.
        scales: uint8 [T, G, K / tile], exponents.
        weight: e4m3 [G, O, K].
        weight_scales: float32 [G, O / tile (rounded up), K / tile], of square blocks.
        dtype: of the result.
        backend: a name from `tamis backends`, or "auto".
    """
    check_lower_groups(x, scales, weight, weight_scales, dtype, backend)
    return registered.lower_groups(x, scales, weight, weight_scales, dtype, backend)


def check_lower_groups(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype, backend: str
) -> None:
    """Refuse what `lower_groups` refuses."""
    e4m3 = (torch.float8_e4m3fn,)
    device = checks.same_device(x=x, scales=scales, weight=weight, weight_scales=weight_scales)
    sizes = checks.tensor("weight", weight, "G O K", e4m3)
    groups, width = sizes["G"], sizes["K"]
    total = checks.tensor("x", x, "T G K", e4m3, G=groups, K=width, remedy="as the weight has groups")["T"]
    tiles = checks.tensor("scales", scales, "T G N", (torch.uint8,), T=total, G=groups)["N"]
    check_block_scales(weight_scales, sizes["O"], groups, width, tiles)
    checks.option("dtype", dtype, checks.FLOATS)
    library.check_stage("rotate", backend, device, weight_scales=weight_scales)


def check_block_scales(
    weight_scales: Tensor, rows: int, groups: int, width: int, tiles: int, name: str = "weight_scales"
) -> int:
    """Refuse scales that do not fit a weight [groups, rows, width] in so many tiles a row; the width of a tile."""
    tile = width // max(1, tiles)
    check_tile(tile, width, f"{name}: tile")
    expected = {"G": groups, "M": ceil_div(rows, tile), "N": tiles}
    checks.tensor(name, weight_scales, "G M N", (torch.float32,), **expected)  # type: ignore[arg-type]
    return tile


def quantise_blocks(weight: Tensor, *, tile: int = 128) -> tuple[Tensor, Tensor]:
    """e4m3 [G, O, K] and the float32 powers of two [G, O / tile (rounded up), K / tile] of its square blocks."""
    sizes = checks.tensor("weight", weight, "G O K", checks.FLOATS)
    check_tile(tile, sizes["K"])
    rows = ceil_div(sizes["O"], tile)
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, rows * tile - sizes["O"]))
    blocks = padded.unflatten(2, (-1, tile)).unflatten(1, (rows, tile))
    smallest = (blocks.abs().amax((2, 4)) / E4M3_MAX).clamp_min(OUTPUT_SCALE_FLOOR)
    mantissa, exponent = torch.frexp(smallest)
    scales = torch.ldexp(torch.ones_like(smallest), exponent - (mantissa == 0.5).to(exponent.dtype))
    codes = (blocks / scales[:, :, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).flatten(3).flatten(1, 2)[:, : sizes["O"]].contiguous().view(codes.dtype), scales


def check_tile(tile: int, width: int, name: str = "tile") -> None:
    """Refuse tiles that no kernel quantises, or that do not divide rows of this width."""
    checks.integer(name, tile, low=1)
    if tile < 32 or tile & (tile - 1) or width % tile:
        raise checks.refuse(name, f"a power of two from 32 on that divides {width}", tile, "128 is customary")
