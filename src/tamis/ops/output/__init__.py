"""Stage `output`: quantises attention's output to FP8 and runs the first half of the grouped output projection."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.fields import E4M3_MAX, OUTPUT_SCALE_FLOOR
from tamis.ops.output import operations
from tamis.ops.output.operations import LowerGroups, RotateToFp8
from tamis.ops.rotate import check_positions


class Fp8Heads(NamedTuple):
    """Heads in e4m3, with one power of two per tile as its scale."""

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
    """Rotate heads as `rotate_heads` does, in float32, and round once, to e4m3.

    Args:
        x: [T, H, D] in bf16, fp16 or fp32.
        positions: integer [T], absolute; heads of padding (a negative position) are not rotated.
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`; the last R columns are rotated.
        tile: how many columns share a scale: a power of two from 32 on that divides D.
        inverse: rotate by the negative angle, as attention's output must be.
        backend: a name from `tamis backends`, or "auto".
    """
    call = RotateToFp8(x, positions, cos_sin, tile, inverse, backend)
    check_rotate_to_fp8(call)
    return Fp8Heads(*operations.rotate_to_fp8(call))


def check_rotate_to_fp8(call: RotateToFp8) -> None:
    """Refuse what `rotate_to_fp8` refuses."""
    checks.flag("inverse", call.inverse)
    sizes = checks.tensor("x", call.x, "T H D", checks.FLOATS)
    check_positions(call.positions, call.cos_sin, sizes["T"], sizes["D"], call.x.device)
    check_tile(call.tile, sizes["D"])
    operations.rotate_to_fp8.check(call)


def lower_groups(
    x: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """The first half of a grouped low-rank projection, [T, G, O]: each group of x times that group's weight.

    Products of e4m3 numbers are accumulated in float32 (within a tile as the device's FP8 GEMM accumulates) and rounded
    once.

    Args:
        x: e4m3 [T, G, K]: heads from `rotate_to_fp8`, those of one group side by side.
        scales: uint8 [T, G, K / tile], exponents.
        weight: e4m3 [G, O, K].
        weight_scales: float32 [G, O / tile (rounded up), K / tile], of square blocks.
        dtype: the dtype of the result.
        backend: a name from `tamis backends`, or "auto".
    """
    call = LowerGroups(x, scales, weight, weight_scales, dtype, backend)
    check_lower_groups(call)
    return operations.lower_groups(call)


def check_lower_groups(call: LowerGroups) -> None:
    """Refuse what `lower_groups` refuses."""
    e4m3 = (torch.float8_e4m3fn,)
    checks.same_device(x=call.x, scales=call.scales, weight=call.weight, weight_scales=call.weight_scales)
    sizes = checks.tensor("weight", call.weight, "G O K", e4m3)
    groups, width = sizes["G"], sizes["K"]
    total = checks.tensor(
        "x", call.x, "T G K", e4m3, G=groups, K=width, remedy="it has the groups and the width of the weight"
    )["T"]
    tiles = checks.tensor("scales", call.scales, "T G N", (torch.uint8,), T=total, G=groups)["N"]
    check_block_scales(call.weight_scales, sizes["O"], groups, width, tiles)
    checks.option("dtype", call.dtype, checks.FLOATS)
    operations.lower_groups.check(call)


def check_block_scales(
    weight_scales: Tensor, rows: int, groups: int, width: int, tiles: int, name: str = "weight_scales"
) -> int:
    """Refuse scales that do not fit a weight [groups, rows, width] in `tiles` tiles per row; return a tile's width."""
    tile = width // max(1, tiles)
    check_tile(tile, width, f"{name}: tile")
    expected = {"G": groups, "M": ceil_div(rows, tile), "N": tiles}
    checks.tensor(name, weight_scales, "G M N", (torch.float32,), **expected)  # type: ignore[arg-type]
    return tile


def quantise_blocks(weight: Tensor, *, tile: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise a weight [G, O, K] to e4m3 in square blocks, each with a power of two as its scale.

    Returns:
        The e4m3 weight [G, O, K] and its float32 scales [G, O / tile (rounded up), K / tile].
    """
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
