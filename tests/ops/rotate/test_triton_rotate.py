"""The Triton norm and rotation against the reference, and rows it inserts."""

import pytest
import torch
from torch import Tensor

from tamis import Layout, PagedCache
from tamis.cache.layout import named, plain_fp8, rows, v4_fp8, v32_fp8
from tamis.model.rope import Rope
from tamis.ops.rotate import reference
from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads
from tamis.ops.rotate.triton_kernels import norm_rows, rotate_and_write, rotate_heads, rotate_heads_kernel
from tamis.ops.rows.triton_rows import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
ULP = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
POSITIONS = torch.tensor([0, 39, -1, 17, 8, 5])


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within one unit in the last place, and mostly equal."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    gap = (found.cpu().float() - expected.float()).abs()
    assert (gap <= ULP[dtype] * expected.float().abs() + 1e-6).all()
    if dtype != torch.float32:
        assert (gap > 0).float().mean() < 0.02


def heads_call(
    x: Tensor, positions: Tensor, table: Tensor, eps: float | None = None, inverse: bool = False
) -> RotateHeads:
    return RotateHeads(x, positions, table, eps, inverse, "auto")


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize(("tokens", "heads", "width", "rotary"), [(6, 2, 512, 64), (1, 5, 100, 6), (4, 1, 8, 8)])
def test_heads(dtype: torch.dtype, tokens: int, heads: int, width: int, rotary: int, device: torch.device) -> None:
    x = (torch.randn(heads, tokens, width) * 3).to(dtype).transpose(0, 1)
    table = Rope(rotary).cos_sin_table(40)
    for positions in (POSITIONS[:tokens], POSITIONS[:tokens].int()):
        for eps, inverse in ((None, False), (1e-6, False), (None, True), (0.5, True)):
            expected = reference.rotate_heads(heads_call(x, positions, table, eps, inverse))
            moved = x.transpose(0, 1).to(device).transpose(0, 1)
            found = rotate_heads(heads_call(moved, positions.to(device), table.to(device), eps, inverse))
            close(found, expected, dtype)
    strided = torch.randn(tokens, width, heads).to(dtype).transpose(1, 2)
    expected = reference.rotate_heads(heads_call(strided, POSITIONS[:tokens], table))
    found = rotate_heads(heads_call(strided.to(device), POSITIONS[:tokens].to(device), table.to(device)))
    close(found, expected, dtype)
    assert rotate_heads(heads_call(x[:0].to(device), POSITIONS[:0].to(device), table.to(device))).shape[0] == 0


def test_positions_past_the_table_are_not_rotated(device: torch.device) -> None:
    """Positions on a device are not checked, so kernels must not read past the table."""
    x = torch.randn(3, 1, 16, device=device)
    far = torch.tensor([40, 10**9, -(2**62)], device=device)
    assert torch.equal(rotate_heads(heads_call(x, far, Rope(8).cos_sin_table(40).to(device))), x)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("width", [1, 100, 1536])
def test_norm_of_rows(dtype: torch.dtype, width: int, device: torch.device) -> None:
    weight = torch.randn(width)
    for x in (torch.randn(3, 2 * width).to(dtype)[:, width:], torch.randn(width, 3).to(dtype).T):
        expected = reference.norm_rows(NormRows(x, weight, 1e-6, "reference"))
        close(norm_rows(NormRows(x.to(device), weight.to(device), 1e-6, "triton")), expected, dtype)


LAYOUTS: list[Layout] = [
    named("v4-bf16"),
    named("v4-fp32"),
    named("v4-fp8"),
    plain_fp8(latent=448, rope=64),
    v4_fp8(latent=24, rope=8, tile=8),
    v32_fp8(latent=32, rope=8, tile=16, scale_mode="exact"),
    rows(torch.float16, latent=20, rope=6),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_inserted_beside_the_queries(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    width, rotary = layout.width, min(64, layout.rope)
    q, table = torch.randn(6, 3, width).to(dtype), Rope(rotary).cos_sin_table(40)
    kv, weight = (torch.randn(6, 2 * width) * 4).to(dtype)[:, width:], torch.rand(width) + 0.5
    slots = torch.tensor([7, -1, 14, 10**9, 0])
    scale = 0.25 if layout.scale_mode == "tensor" else 1.0
    host, there = PagedCache(layout, 3, 5, scale=scale), PagedCache(layout, 3, 5, device, scale=scale)
    index_q = None if dtype == torch.float32 else torch.randn(2, 6, 70).half().transpose(0, 1)
    rest = (slots, POSITIONS, table, weight)
    expected = reference.rotate_and_write(RotateAndWrite(q, kv, host, *rest, 1e-6, index_q, False, True, "reference"))
    moved = (t.to(device) for t in rest)
    moved_index = None if index_q is None else index_q.to(device)
    call = RotateAndWrite(q.to(device), kv.to(device), there, *moved, 1e-6, moved_index, False, True, "triton")
    found = rotate_and_write(call)
    close(found[0], expected[0], dtype)
    if index_q is None:
        assert found[1].shape == expected[1].shape == (0,)
    else:
        close(found[1], expected[1], torch.float16)
    every = torch.arange(15)
    gap = (there.read(every.to(device)).cpu() - host.read(every)).abs()
    written = host.read(every)
    assert (gap <= (2**-3 if layout.quantised else 2**-7) * written.abs() + 1e-3).all()
    # A sum that lies on a rounding boundary may fall to the other side.
    assert (gap > 1e-5 * written.abs().max()).float().mean() < 0.01
    assert there.read(every.to(device)).any(1).tolist() == [slot in (7, 14, 0) for slot in range(15)]


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("width", [8, 128])
def test_index_queries_turned_by_hadamard(dtype: torch.dtype, width: int, device: torch.device) -> None:
    layout, table = v4_fp8(latent=24, rope=8, tile=8), Rope(8).cos_sin_table(40)
    q, kv, index_q = torch.randn(6, 1, 32), torch.randn(6, 32), torch.randn(6, 3, width).to(dtype)
    rest = (torch.arange(6), POSITIONS, table, torch.ones(32))
    call = RotateAndWrite(q, kv, PagedCache(layout, 2, 5), *rest, 1e-6, index_q, True, True, "reference")
    _, expected = reference.rotate_and_write(call)
    there = PagedCache(layout, 2, 5, device), *(t.to(device) for t in rest)
    call = RotateAndWrite(q.to(device), kv.to(device), *there, 1e-6, index_q.to(device), True, True, "triton")
    _, found = rotate_and_write(call)
    gap = (found.cpu().float() - expected.float()).abs()
    # A value that the first rounding moved moves every column of its head by a little.
    assert (gap <= ULP[dtype] * expected.float().abs().amax(2, keepdim=True) + 1e-6).all()
    if dtype != torch.float32:
        assert (gap > 0).float().mean() < 0.02


def test_the_kernel_runs_where_it_should(device: torch.device) -> None:
    assert interpreted(rotate_heads_kernel) == (device.type == "cpu")
