"""The Triton kernels of the FP8 output projection against the reference."""

import pytest
import torch

from tamis.model.rope import Rope
from tamis.ops import quantise_blocks
from tamis.ops.output import reference
from tamis.ops.output.operations import LowerGroups, RotateToFp8
from tamis.ops.output.triton_kernels import lower_groups, lower_groups_kernel, rotate_to_fp8
from tamis.ops.rows.triton_rows import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
POSITIONS = torch.tensor([0, 39, -1, 17, 8, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "rotary", "tile"), [(3, 512, 64, 128), (2, 96, 6, 32), (1, 64, 64, 64)])
def test_heads_to_fp8(dtype: torch.dtype, heads: int, width: int, rotary: int, tile: int, device: torch.device) -> None:
    """Exponents are the reference's; a value may round the other way where the rotations differ in their last bit."""
    x = (torch.randn(heads, 6, width) * torch.logspace(-6, 3, width)).to(dtype).transpose(0, 1)
    x[1, 0, :tile] = 0.0
    table = Rope(rotary).cos_sin_table(40)
    for inverse in (True, False):
        expected = reference.rotate_to_fp8(RotateToFp8(x, POSITIONS, table, tile, inverse, "reference"))
        moved = x.transpose(0, 1).to(device).transpose(0, 1)
        call = RotateToFp8(moved, POSITIONS.to(device), table.to(device), tile, inverse, "triton")
        values, scales = (t.cpu() for t in rotate_to_fp8(call))
        assert torch.equal(scales, expected[1])
        found, others = values.float(), expected[0].float()
        assert torch.equal(found[..., : width - rotary], others[..., : width - rotary])
        assert ((found - others).abs() <= others.abs() / 8 + 2**-9).all()
        assert (found != others).float().mean() < 1e-3


@pytest.mark.parametrize(("tokens", "rank", "width", "tile"), [(1, 3, 64, 32), (20, 70, 256, 128), (70, 130, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_are_lowered(
    tokens: int, rank: int, width: int, tile: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(tokens, 3, width).to(torch.float8_e4m3fn)
    scales = torch.randint(110, 130, (tokens, 3, width // tile)).byte()
    weight = quantise_blocks(torch.randn(3, rank, width), tile=tile)
    expected = reference.lower_groups(LowerGroups(x, scales, *weight, torch.float32, "reference"))
    moved = [t.to(device) for t in (x, scales, *weight)]
    found = lower_groups(LowerGroups(*moved, dtype, "triton")).cpu()
    assert found.dtype == dtype
    bound = 4e-3 if dtype == torch.bfloat16 else 1e-5 if interpreted(lower_groups_kernel) else 1e-3
    assert ((found.float() - expected).norm(dim=-1) <= bound * expected.norm(dim=-1)).all()
    empty = LowerGroups(moved[0][:0], moved[1][:0], *moved[2:], dtype, "triton")
    assert lower_groups(empty).shape == (0, 3, rank)
