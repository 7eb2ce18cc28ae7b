"""Index queries in MXFP4."""

import pytest
import torch

from tamis import IndexRecipe, PagedCache
from tamis.model.rope import Rope
from tamis.ops import index_scores, pack_index_query, rotate_index, unpack_index_query, write_index_keys

RECIPE = IndexRecipe(64, interleaved=True, rope_first=False)


def test_literal_bytes_and_unfolded_scales() -> None:
    q = torch.zeros(1, 2, 64)
    q[0, 0, :4] = torch.tensor([6.0, -1.5, 0.25, 5.0])
    q[0, 1, 32:34] = torch.tensor([48.0, -1.0])
    packed = pack_index_query(q, torch.tensor([[2.0, 4.0]]), RECIPE, scale=0.5)
    assert packed.values.shape == (1, 2, 32)
    assert packed.values[0, 0, :2].tolist() == [0xB7, 0x60]
    assert packed.values[0, 1, 16] == 0x87  # -1 over 8 rounds to -0
    assert packed.scales.tolist() == [[[127, 1], [1, 130]]]
    assert packed.weights.tolist() == [[1.0, 2.0]]
    wide = unpack_index_query(packed.values, packed.scales)
    assert wide.dtype == torch.bfloat16
    assert wide[0, 0, :4].tolist() == [6.0, -1.5, 0.0, 4.0]
    assert wide[0, 1, 32:34].tolist() == [48.0, 0.0]


@pytest.mark.parametrize("hadamard", [False, True])
def test_queries_are_quantised_like_keys(hadamard: bool) -> None:
    recipe = IndexRecipe(64, interleaved=True, rope_first=False, hadamard=hadamard)
    q, positions, table = torch.randn(7, 3, 128), torch.arange(7) * 5, Rope(64).cos_sin_table(40)
    packed = pack_index_query(q, torch.ones(7, 3), recipe, positions=positions, cos_sin=table, rounding="none")
    wide = unpack_index_query(packed.values, packed.scales).float()
    exact = rotate_index(q, recipe, positions=positions, cos_sin=table)
    assert 0.05 < (wide - exact).norm() / exact.norm() < 0.15
    cache = PagedCache("index-mxfp4", 1, 7, recipe=recipe)
    write_index_keys(q[:, 1], cache, torch.arange(7), positions=positions, cos_sin=table)
    stored = cache.read(torch.arange(7))
    assert (stored != wide[:, 1]).float().mean() < 0.02  # the cache rounds to bf16 on the way
    again = pack_index_query(wide, torch.ones(7, 3), RECIPE)
    assert torch.equal(unpack_index_query(again.values, again.scales).float(), wide)


def test_scores_of_packed_queries_and_keys_against_float64() -> None:
    cache = PagedCache("index-mxfp4", 3, 16, recipe=RECIPE)
    positions, table = torch.arange(40), Rope(64).cos_sin_table(40)
    write_index_keys(torch.randn(40, 128), cache, torch.arange(40), positions=positions, cos_sin=table)
    packed = pack_index_query(
        torch.randn(2, 8, 128), torch.randn(2, 8), RECIPE, positions=positions[-2:], cos_sin=table
    )
    q = unpack_index_query(packed.values, packed.scales)
    ids, pages = torch.zeros(2, dtype=torch.int32), torch.arange(3, dtype=torch.int32).unsqueeze(0)
    lengths = torch.tensor([39, 40], dtype=torch.int32)
    found = index_scores(q, packed.weights, cache, ids, pages, lengths)
    keys = cache.read(torch.arange(40)).double()
    for token, length in enumerate(lengths.tolist()):
        expected = packed.weights[token].double() @ torch.relu(q[token].double() @ keys[:length].T)
        assert torch.allclose(found[token, :length].double(), expected, rtol=1e-6, atol=1e-6)
        assert (found[token, length:] == -torch.inf).all()


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^q must be of at least one head, a multiple of 32 wide"):
        pack_index_query(torch.zeros(1, 1, 48), torch.zeros(1, 1), IndexRecipe(16))
    with pytest.raises(ValueError, match=r"^scales must be of shape \[T=1, H=2, G=4\]"):
        unpack_index_query(torch.zeros(1, 2, 64, dtype=torch.uint8), torch.zeros(1, 2, 3, dtype=torch.uint8))


def test_queries_of_no_tokens() -> None:
    packed = pack_index_query(torch.zeros(0, 2, 64), torch.zeros(0, 2), IndexRecipe(0))
    assert [list(part.shape) for part in packed] == [[0, 2, 32], [0, 2, 2], [0, 2]]
    assert list(unpack_index_query(packed.values, packed.scales).shape) == [0, 2, 64]
