"""What `tamis.lab.testing` compares with, its oracle and its cases."""

import math

import pytest
import torch

from tamis.cache.layout import named
from tamis.cache.selection import Selection
from tamis.lab.testing import attend_cases, cases, compare, oracle


def test_relative_error_and_first_mismatch() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, -math.inf]])
    found = expected.clone()
    assert compare.relative_error(found, expected) == 0
    assert compare.first_mismatch(found, expected) is None
    found[0, 1] = 4.5
    assert compare.relative_error(found, expected) == pytest.approx(0.1)
    assert compare.worst_row_error(found, expected) == pytest.approx(0.1)
    assert str(compare.first_mismatch(found, expected)) == "1 of 4 differ, first at [0, 1]: found 4.5, expected 4"
    assert compare.first_mismatch(found, expected, tolerance=0.5) is None
    found[0, 1] = math.nan
    assert compare.relative_error(found, expected) == math.inf
    assert compare.first_mismatch(found, expected, tolerance=1e9) is not None
    assert compare.relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    with pytest.raises(ValueError, match=r"found must be of shape \[2, 2\]"):
        compare.relative_error(torch.ones(2), expected)


def test_small_columns_cannot_hide_behind_large_ones() -> None:
    expected = torch.tensor([[1e4, 1e4, 1e-5, 1e-5]])
    found = torch.tensor([[1e4, 1e4, 0.0, 0.0]])
    assert compare.relative_error(found, expected) < 1e-8
    assert compare.worst_block_error(found, expected, 2) == pytest.approx(1.0)


def test_bits_are_more_than_values() -> None:
    zeros, minus = torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])
    assert compare.first_mismatch(zeros, minus) is None
    assert not compare.same_bits(zeros, minus)
    assert compare.same_bits(zeros, torch.zeros(3))
    assert not compare.same_bits(zeros, torch.zeros(3, dtype=torch.float64))
    mismatch = compare.first_differing_bits(zeros, minus)
    assert mismatch is not None
    assert (mismatch.count, mismatch.at) == (1, (1,))


def test_oracle_converts_to_e4m3_as_torch_does() -> None:
    grid = torch.from_numpy(oracle.e4m3_table()).float()
    middles = (grid[1:127] + grid[:126]) / 2
    special = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 464.0, 1e30])
    x = torch.cat((torch.randn(20000) * torch.logspace(-6, 4, 20000), grid, middles, -middles, special))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(torch.from_numpy(oracle.round_to_e4m3(x.numpy())), expected)


def test_cases_depend_on_their_names_alone() -> None:
    quick = {case.name: case for case in attend_cases.attend_cases(quick=True)}
    full = {case.name: case for case in attend_cases.attend_cases()}
    assert set(quick) - set(full) <= {name for name in quick if "tile maxima" in name or "splits" in name}
    for name in set(quick) & set(full):
        assert compare.same_bits(quick[name].q, full[name].q)
        for one, other in zip(quick[name].selections, full[name].selections, strict=True):
            assert torch.equal(one.slots, other.slots)
            assert compare.same_bits(one.cache.storage, other.cache.storage)
    assert {case.heads for case in full.values()} >= {1, 7, 16, 128}
    assert {cache.page_size for case in full.values() for cache in case.caches} >= {1, 2, 61, 64, 256}


def test_moving_a_cache_keeps_the_bytes_between_its_pages() -> None:
    draw = cases.Draw("move")
    layout = named("v4-fp8")
    cache = cases.garbage_cache(draw, layout, 3, 5, gap=8)
    moved = cases.to_device(Selection(cache, torch.zeros(1, 1, dtype=torch.int32)), torch.device("cpu")).cache
    assert moved.storage.data_ptr() != cache.storage.data_ptr()
    assert moved.page_stride == cache.page_stride > layout.page_bytes(5)
    size = 2 * cache.page_stride
    for at in (0, size - 1, size):
        one, other = (torch.as_strided(c.storage, (1,), (1,), at) for c in (cache, moved))
        assert torch.equal(one, other)
