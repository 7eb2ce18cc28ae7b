"""Rows that are rotated at the start of their span and written: against float64, and kernel against reference."""

import pytest
import torch
from bounds import relative_error
from seeds import seeded
from torch import Tensor

from tamis import IndexRecipe, PagedCache
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, named, rows, v4_fp8
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.model.rope import Rope
from tamis.ops import rotate_heads, write_rotated
from tamis.ops.rotate import reference, triton_kernels
from tamis.ops.rotate.operations import RotateAndWrite, WriteRotated

POSITIONS = torch.tensor([0, 1, 6, 7, -1, 39])
SLOTS = torch.tensor([7, -1, 14, 3, 9, 0])
LAYOUTS: list[Layout] = [
    named("v4-fp8"),
    v4_fp8(latent=24, rope=8, tile=8),
    rows(torch.bfloat16, latent=20, rope=6),
    index_fp8(dim=32),
    index_mxfp4(dim=32),
]


def given(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = seeded(9)
    return (torch.randn(6, 2 * width, generator=generator) * 3).to(dtype)[:, width:], torch.rand(width) + 0.5


@pytest.mark.parametrize("span", [1, 2, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_rows_in_float64(span: int, normed: bool) -> None:
    """Every written row is the input, normalised, and rotated pair by pair at the first position of its span."""
    cache = PagedCache(rows(torch.float32, latent=16, rope=8), 3, 5)
    (given_rows, weight), table = given(24, torch.float32), Rope(8).cos_sin_table(40)
    norm = weight if normed else None
    write_rotated(given_rows, cache, SLOTS, positions=POSITIONS, cos_sin=table, norm_weight=norm, span=span)
    wide, angles = given_rows.double(), table.double()
    if normed:
        wide = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for row, (position, slot) in enumerate(zip(POSITIONS.tolist(), SLOTS.tolist(), strict=True)):
        if slot < 0:
            continue
        expected = wide[row].clone()
        if position >= 0:
            first = position - position % span
            for pair in range(4):
                cos, sin = angles[first, pair], angles[first, 4 + pair]
                even, odd = wide[row, 16 + 2 * pair], wide[row, 17 + 2 * pair]
                expected[16 + 2 * pair], expected[17 + 2 * pair] = even * cos - odd * sin, odd * cos + even * sin
        assert relative_error(cache.read(torch.tensor([slot]))[0], expected) < 2.0**-20
    assert cache.read(torch.arange(15)).any(1).nonzero().squeeze(1).tolist() == [0, 3, 7, 9, 14]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_writes_what_the_reference_writes(layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    keys = layout.rope == 0
    host, there = PagedCache(layout, 3, 5), PagedCache(layout, 3, 5, device)
    (given_rows, weight), table = given(layout.width, dtype), Rope(6).cos_sin_table(40)
    rest = (SLOTS[:5], POSITIONS, table, weight if keys else None)
    numbers = (1e-6, 2, layout.packed)
    reference.write_rotated(WriteRotated(given_rows, host, *rest, *numbers, "reference"))
    moved = (None if t is None else t.to(device) for t in rest)
    triton_kernels.write_rotated(WriteRotated(given_rows.to(device), there, *moved, *numbers, "triton"))
    every = torch.arange(15)
    written, found = host.read(every), there.read(every.to(device)).cpu()
    assert found.any(1).nonzero().squeeze(1).tolist() == [3, 7, 9, 14]
    # A sum that lies on a rounding boundary may fall to the other side: by one code of the format.
    gap = (found - written).abs()
    assert (gap <= (0.5 if layout.packed else 2**-3 if layout.quantised else 2**-7) * written.abs().amax(1, True)).all()
    assert (gap > 1e-5 * written.abs().max()).float().mean() < 0.02


def test_keys_turned_by_hadamard() -> None:
    recipe = IndexRecipe.of_v4(8, hadamard=True)
    cache = PagedCache(rows(torch.float32, latent=32, rope=0), 3, 5, recipe=recipe)
    (given_rows, _), table = given(32, torch.float32), Rope(8).cos_sin_table(40)
    write_rotated(given_rows, cache, SLOTS, positions=POSITIONS, cos_sin=table)
    plain = rotate_heads(given_rows.unsqueeze(1), POSITIONS, table).squeeze(1).double()
    expected = plain @ hadamard_matrix(32).double()
    kept = SLOTS >= 0
    assert relative_error(cache.read(SLOTS[kept]), expected[kept]) < 2.0**-20


def test_queries_that_are_not_normalised(device: torch.device) -> None:
    """`norm_q=False` leaves the queries' length as it was, in kernel and reference."""
    layout, generator = v4_fp8(latent=24, rope=8, tile=8), seeded(4)
    q, kv = torch.randn(6, 3, 32, generator=generator), torch.randn(6, 32, generator=generator)
    table = Rope(8).cos_sin_table(40)
    rest = (SLOTS, POSITIONS, table, torch.ones(32))
    call = RotateAndWrite(q, kv, PagedCache(layout, 3, 5), *rest, 1e-6, None, False, False, "reference")
    expected = reference.rotate_and_write(call)[0]
    assert torch.equal(expected, rotate_heads(q, POSITIONS, table))
    there = (PagedCache(layout, 3, 5, device), *(t.to(device) for t in rest))
    call = RotateAndWrite(q.to(device), kv.to(device), *there, 1e-6, None, False, False, "triton")
    torch.testing.assert_close(triton_kernels.rotate_and_write(call)[0].cpu(), expected, rtol=2**-20, atol=2**-20)


def test_refusals_leave_the_cache_as_it_was() -> None:
    cache = PagedCache(rows(torch.float32, latent=16, rope=8), 3, 5)
    (given_rows, _), table = given(24, torch.float32), Rope(8).cos_sin_table(40)
    right = {"positions": POSITIONS, "cos_sin": table}
    for slots, change, message in (
        (SLOTS, {"span": 0}, "span must be >= 1"),
        (SLOTS, {"eps": -1.0}, "eps"),
        (SLOTS, {"norm_weight": torch.ones(3)}, "norm_weight"),
        (torch.tensor([15]), {}, "slots"),
        (SLOTS, {"positions": torch.tensor([1])}, "positions"),
        (SLOTS, {"positions": torch.full((6,), 40)}, "longer cos_sin table"),
    ):
        with pytest.raises(ValueError, match=message):
            write_rotated(given_rows, cache, slots, **(right | change))
    wrong = PagedCache(cache.layout, 3, 5, recipe=IndexRecipe())
    with pytest.raises(ValueError, match=r"cache\.recipe"):
        write_rotated(given_rows, wrong, SLOTS, **right)
    assert not cache.storage.any()
