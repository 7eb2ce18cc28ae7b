"""Index queries and keys before scoring: hand-computed bytes, rope and Hadamard written once more, recipes."""

import math
import struct

import pytest
import torch
from byte_formats import bf16_bits, e4m3, e4m3_value, f32

from tamis import IndexRecipe, LayerSpec, PagedCache
from tamis.cache.layout import index_fp8, plain_fp8, rows
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.model.rope import Rope, hadamard
from tamis.ops import index_scores, quantise_index_query, rotate_index, write_index_keys, write_kv

PLAIN = IndexRecipe(rope_dim=0)


def bf16(x: float) -> float:
    return struct.unpack("<f", struct.pack("<I", bf16_bits(x) << 16))[0]


def quantised(values: list[float], mode: str = "pow2") -> tuple[list[int], float]:
    """Bytes and scale of one row of float32 numbers, by the definition."""
    smallest = f32(max(max(abs(v) for v in values), 1e-4) / 448)
    scale = 2.0 ** math.ceil(math.log2(smallest)) if mode == "pow2" else smallest
    return [e4m3(f32(v / scale)) for v in values], scale


def turned(x: torch.Tensor, angles: torch.Tensor, recipe: IndexRecipe) -> torch.Tensor:
    """Rope pair by pair, in float64."""
    out = x.double().clone()
    half = recipe.rope_dim // 2
    start = 0 if recipe.rope_first else x.shape[-1] - recipe.rope_dim
    for pair in range(half):
        first = start + (2 * pair if recipe.interleaved else pair)
        second = start + (2 * pair + 1 if recipe.interleaved else pair + half)
        cos, sin = angles[..., pair].double(), angles[..., half + pair].double()
        out[..., first] = x[..., first].double() * cos - x[..., second].double() * sin
        out[..., second] = x[..., second].double() * cos + x[..., first].double() * sin
    return out


def test_a_literal_query() -> None:
    q = torch.zeros(1, 2, 4)
    q[0, 0] = torch.tensor([448.0, -224.0, 1.0, 0.5])
    q[0, 1] = torch.tensor([3.0, -7.5, 0.0, 1e-9])
    found, weights = quantise_index_query(q, torch.tensor([[2.0, -4.0]]), PLAIN, scale=0.5)
    assert found.dtype == torch.float8_e4m3fn
    # 7.5 / 448 lies between 2**-6 and 2**-5, so the scale is 2**-5, and 7.5 becomes 240.
    assert found.view(torch.uint8).tolist() == [[[0x7E, 0xF6, 0x38, 0x30], [0x6C, 0xF7, 0x00, 0x00]]]
    assert weights.tolist() == [[2.0 * 0.5 * 1.0, -4.0 * 0.5 * 2.0**-5]]


@pytest.mark.parametrize("mode", ["pow2", "exact"])
@pytest.mark.parametrize("rounding", ["bf16", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_query_bytes_and_folded_weights(mode: str, rounding: str, dtype: torch.dtype) -> None:
    q = (torch.randn(5, 3, 128) * torch.logspace(-7, 3, 5).view(5, 1, 1)).to(dtype)
    weights = torch.randn(5, 3)
    found, folded = quantise_index_query(q, weights, PLAIN, rounding=rounding, scale_mode=mode)
    constant = torch.tensor((3 * 128) ** -0.5, dtype=torch.float32)
    for t in range(5):
        for h in range(3):
            row = [bf16(v) if rounding == "bf16" else v for v in q[t, h].float().tolist()]
            expected, scale = quantised(row, mode)
            assert found[t, h].view(torch.uint8).tolist() == expected
            assert folded[t, h] == weights[t, h] * constant * torch.tensor(scale, dtype=torch.float32)


@pytest.mark.parametrize("largest", [0.0, 1e-30, 9.9e-5, 1e-4])
def test_small_queries_have_the_smallest_scale(largest: float) -> None:
    found, folded = quantise_index_query(torch.full((1, 1, 8), largest), torch.ones(1, 1), PLAIN, scale=1.0)
    assert folded.item() == 2.0**-22, "1e-4 / 448, and the power of two above"
    assert found.float().isfinite().all()


def test_scores_of_folded_queries_are_those_of_the_formula() -> None:
    cache = PagedCache("index-fp8", 3, 16)
    keys = torch.randn(40, 128)
    write_index_keys(keys, cache, torch.arange(40), PLAIN)
    q, weights = torch.randn(2, 8, 128), torch.randn(2, 8)
    q8, folded = quantise_index_query(q, weights, PLAIN)
    table = torch.arange(3, dtype=torch.int32).unsqueeze(0)
    ids, lengths = torch.zeros(2, dtype=torch.int32), torch.tensor([40, 40], dtype=torch.int32)
    found = index_scores(q8, folded, cache, ids, table, lengths)[:, :40].double()
    exact = torch.einsum("th,thj->tj", weights.double() * (8 * 128) ** -0.5, torch.relu(q.double() @ keys.double().T))
    assert (found - exact).norm() / exact.norm() < 0.05
    stored = torch.tensor([[e4m3_value(b) for b in row] for row in q8.view(torch.uint8).flatten(0, 1).tolist()])
    logits = torch.relu(stored.view(2, 8, 128).double() @ cache.read(torch.arange(40)).double().T)
    torch.testing.assert_close(found, torch.einsum("th,thj->tj", folded.double(), logits), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dim", [1, 2, 8, 128])
def test_hadamard_is_the_orthonormal_matrix(dim: int) -> None:
    x = torch.randn(3, 2, dim)
    torch.testing.assert_close(hadamard(x).double(), x.double() @ hadamard_matrix(dim), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-6)


RECIPES = [
    IndexRecipe(rope_dim=16),
    IndexRecipe(rope_dim=16, interleaved=True),
    IndexRecipe(rope_dim=16, interleaved=True, rope_first=False),
    IndexRecipe(rope_dim=32, rope_first=False),
    IndexRecipe(rope_dim=16, hadamard=True),
    IndexRecipe(rope_dim=0, hadamard=True),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_keys_are_normed_rotated_and_written(recipe: IndexRecipe) -> None:
    """Through float32 rows, where nothing is rounded on the way."""
    cache = PagedCache(rows(torch.float32, latent=32, rope=0), 4, 4, recipe=recipe)
    keys = torch.randn(6, 32) * 3 + 1
    weight, bias = torch.rand(32) + 0.5, torch.randn(32)
    positions, slots = torch.tensor([3, 90, 0, 7, 8, 9]), torch.tensor([5, -1, 2, 9, 14])
    table = Rope(recipe.rope_dim or 2).cos_sin_table(100)[:, : recipe.rope_dim].contiguous()
    write_index_keys(keys, cache, slots, norm_weight=weight, norm_bias=bias, positions=positions, cos_sin=table)
    wide = keys.double()
    spread = ((wide - wide.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True)
    normed = (wide - wide.mean(1, keepdim=True)) / (spread + 1e-6).sqrt() * weight.double() + bias.double()
    expected = turned(normed, table[positions], recipe)
    expected = expected @ hadamard_matrix(32) if recipe.hadamard else expected
    kept = torch.tensor([0, 2, 3, 4])
    found = cache.read(slots[kept]).double()
    torch.testing.assert_close(found, expected[kept], rtol=1e-5, atol=1e-5)
    untouched = [s for s in range(16) if s not in slots.tolist()]
    assert (cache.read(torch.tensor(untouched)) == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_queries_meet_keys_of_the_same_recipe(recipe: IndexRecipe) -> None:
    """A dot product after rope depends on the distance alone, and Hadamard changes nothing but the rounding."""
    table = Rope(recipe.rope_dim or 2).cos_sin_table(100)[:, : recipe.rope_dim].contiguous()
    key, q = torch.randn(1, 32).expand(2, 32), torch.randn(1, 1, 32).expand(2, 1, 32)
    cache = PagedCache(index_fp8(dim=32, rounding="none"), 1, 2, recipe=recipe)
    write_index_keys(key, cache, torch.arange(2), positions=torch.tensor([3, 40]), cos_sin=table)
    q8, folded = quantise_index_query(
        q, torch.ones(2, 1), recipe, positions=torch.tensor([13, 50]), cos_sin=table, rounding="none"
    )
    dot = (q8.float().squeeze(1) * folded * cache.read(torch.arange(2))).sum(1) * 32**0.5
    moved = turned(torch.stack((q[0, 0], key[0])), table[torch.tensor([13, 3])], recipe)
    exact = moved[0] @ moved[1]
    bound = 0.07 * float(q[0, 0].norm() * key[0].norm())
    assert (dot.double() - exact).abs().max() < bound


@pytest.mark.parametrize("recipe", RECIPES)
def test_unquantised_queries_and_keys(recipe: IndexRecipe) -> None:
    positions = torch.tensor([3, 90, 0])
    table = Rope(recipe.rope_dim or 2).cos_sin_table(100)[:, : recipe.rope_dim].contiguous()
    q = torch.randn(3, 2, 32)
    found = rotate_index(q.bfloat16(), recipe, positions=positions, cos_sin=table)
    assert found.dtype == torch.float32
    expected = turned(q.bfloat16(), table[positions].unsqueeze(1), recipe)
    expected = expected @ hadamard_matrix(32) if recipe.hadamard else expected
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    keys = rotate_index(q[:, 0].bfloat16(), recipe, positions=positions, cos_sin=table)
    assert torch.equal(keys, found[:, 0])
    with pytest.raises(TypeError, match="x must be a bfloat16, float16 or float32 tensor"):
        rotate_index(q[0, 0], recipe)


@pytest.mark.parametrize("rounding", ["bf16", "none"])
@pytest.mark.parametrize("turn", [False, True])
def test_key_bytes(rounding: str, turn: bool) -> None:
    recipe = IndexRecipe(rope_dim=0, hadamard=turn)
    keys = torch.randn(3, 8)
    cache = PagedCache(index_fp8(dim=8, rounding=rounding), 2, 4)
    write_index_keys(keys, cache, torch.tensor([6, 0, 1]), recipe)
    page = cache.storage.flatten(1)
    for row, slot in enumerate((6, 0, 1)):
        ready = keys[row]
        if turn:
            ready = ready.bfloat16().float() if rounding == "bf16" else ready
            ready = hadamard(ready)
        wanted, scale = quantised([bf16(v) if rounding == "bf16" else v for v in ready.tolist()])
        raw = bytes(page[slot // 4].tolist())
        at = slot % 4
        assert list(raw[at * 8 : at * 8 + 8]) == wanted
        assert raw[32 + 4 * at : 36 + 4 * at] == struct.pack("<f", scale), "scales follow all values of the page"


def test_keys_that_are_ready_are_written_as_they_are() -> None:
    keys = torch.randn(5, 128)
    found, expected = PagedCache("index-fp8", 1, 8), PagedCache("index-fp8", 1, 8)
    write_index_keys(keys, found, torch.arange(5), IndexRecipe())
    write_kv(keys, expected, torch.arange(5))
    assert torch.equal(found.storage, expected.storage)


def test_padded_tokens_have_position_minus_one() -> None:
    cache = PagedCache("index-fp8", 1, 8, recipe=IndexRecipe())
    table = Rope(64).cos_sin_table(10)
    keys, slots = torch.randn(3, 128), torch.tensor([0, 1, -1])
    write_index_keys(keys, cache, slots, positions=torch.tensor([4, 5, -1]), cos_sin=table)
    assert (cache.storage.flatten()[:256] != 0).any()
    assert (cache.storage.flatten()[256:1024] == 0).all()


def test_padded_tokens_are_not_rotated() -> None:
    """Not even by the first row of a table, which YaRN may scale."""
    q, table = torch.randn(2, 3, 128), Rope(64).cos_sin_table(10) * 1.25
    where = {"positions": torch.tensor([-1, 0]), "cos_sin": table}
    found = rotate_index(q, IndexRecipe(), **where)
    assert torch.equal(found[0], q[0])
    assert torch.equal(found[1, :, :64], q[1, :, :64] * 1.25)


def test_a_cache_keeps_its_recipe_and_refuses_others() -> None:
    recipe = IndexRecipe(interleaved=True)
    cache = PagedCache("index-fp8", 1, 8, recipe=recipe)
    assert cache.recipe == recipe
    assert PagedCache.wrap(cache.storage, "index-fp8", recipe=recipe).with_scale(1.0).recipe == recipe
    assert PagedCache("index-fp8", 1, 8).recipe is None
    keys, slots = torch.randn(2, 128), torch.arange(2)
    write_index_keys(keys, cache, slots, IndexRecipe(interleaved=True))
    before = cache.storage.clone()
    with pytest.raises(ValueError, match=r"recipe must be that of the cache, IndexRecipe\(.*interleaved=True"):
        write_index_keys(keys, cache, slots, IndexRecipe())
    with pytest.raises(ValueError, match="recipe must be given, or recorded with the cache"):
        write_index_keys(keys, PagedCache("index-fp8", 1, 8), slots)
    assert torch.equal(cache.storage, before)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"keys": torch.randn(2, 9)}, ValueError, "keys must be of shape .*D=8"),
        ({"norm_bias": torch.zeros(8)}, ValueError, "norm_bias must be given with norm_weight only"),
        ({"norm_weight": torch.zeros(9)}, ValueError, "norm_weight must be of shape"),
        ({"positions": torch.tensor([0, 1])}, ValueError, "given together, got only positions"),
        ({"cos_sin": torch.zeros(4, 4)}, ValueError, "given together, got only cos_sin"),
        ({"positions": torch.tensor([0, 9]), "cos_sin": torch.zeros(4, 4)}, ValueError, "make a longer cos_sin table"),
        ({"positions": torch.tensor([0, 1]), "cos_sin": torch.zeros(4, 8)}, ValueError, "cos_sin must be of shape"),
        ({"slots": torch.tensor([0, 99])}, ValueError, "slots must be between"),
        ({"slots": torch.tensor([0, 1, 2])}, ValueError, "slots must be at most 2 long, one per row of keys"),
        (
            {"cache": PagedCache(plain_fp8(latent=8, rope=0), 1, 4)},
            ValueError,
            "cache must be index-fp8, index-mxfp4 or unquantised",
        ),
        ({"norm_weight": torch.ones(8), "norm_eps": 0.0}, ValueError, "norm_eps must be finite and > 0"),
        ({"norm_weight": torch.ones(8).requires_grad_()}, ValueError, "norm_weight must be without gradient"),
        (
            {"recipe": IndexRecipe(12), "positions": torch.tensor([0, 1]), "cos_sin": torch.zeros(4, 12)},
            ValueError,
            "recipe.rope_dim must be at most 8",
        ),
    ],
)
@pytest.mark.own_settings("refuses a gradient, which inference mode has none of", without=("inference",))
def test_bad_keys_are_refused_and_nothing_is_written(fields, kind, message) -> None:
    cache = PagedCache(index_fp8(dim=8), 1, 4)
    arguments = {"keys": torch.randn(2, 8), "cache": cache, "slots": torch.arange(2), "recipe": IndexRecipe(4)}
    with pytest.raises(kind, match=message):
        write_index_keys(**(arguments | fields))
    assert (cache.storage == 0).all()


def test_bad_queries_are_refused() -> None:
    q, weights = torch.randn(2, 3, 8), torch.randn(2, 3)
    cases = [
        ((q, weights[:1], PLAIN), {}, ValueError, "weights must be of shape"),
        ((q.double(), weights, PLAIN), {}, TypeError, "q must be bfloat16"),
        ((q, weights, PLAIN), {"scale": 0.0}, ValueError, "scale must be finite and > 0"),
        ((q, weights, PLAIN), {"rounding": "fp16"}, ValueError, "rounding must be one of"),
        ((q, weights, PLAIN), {"scale_mode": "tensor"}, ValueError, "scale_mode must be one of"),
        ((torch.randn(2, 3, 12), weights, IndexRecipe(4, hadamard=True)), {}, ValueError, "a power of two"),
    ]
    for arguments, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            quantise_index_query(*arguments, **options)


def test_recipes_of_models() -> None:
    v32 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v32"}
    assert IndexRecipe.from_hf(v32) == IndexRecipe()
    assert IndexRecipe.from_hf(v32 | {"indexer_rope_interleave": True}).interleaved
    assert IndexRecipe.from_hf(v32 | {"model_type": "glm_moe_dsa"}).interleaved
    assert not IndexRecipe.from_hf(v32 | {"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}).interleaved
    assert IndexRecipe.from_hf(v32 | {"model_type": "hy_v4"}) == IndexRecipe(64, rope_first=False)
    adjacent = IndexRecipe.from_hf(v32 | {"model_type": "hy_v4", "indexer_rope_interleave": True})
    assert adjacent == IndexRecipe(64, interleaved=True, rope_first=False)
    mistral = {"text_config": v32 | {"model_type": "mistral_large4_text", "index_topk": 8}}
    assert IndexRecipe.from_hf(mistral) == IndexRecipe(64, interleaved=True)
    assert IndexRecipe.from_hf(mistral, 3) == IndexRecipe(0, interleaved=True)
    v4 = IndexRecipe.from_hf({"head_dim": 512, "qk_rope_head_dim": 64}, hadamard=True)
    assert v4 == IndexRecipe(64, interleaved=True, rope_first=False, hadamard=True)
    with pytest.raises(ValueError, match="this model has no indexer"):
        IndexRecipe.from_hf({"model_type": "llama"})
    with pytest.raises(ValueError, match="rope_dim must be even"):
        IndexRecipe(63)


def test_layers_that_share_are_known_from_a_list() -> None:
    fields = {
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "index_topk": 8,
        "indexer_types": ["full", "shared", "full"],
    }
    assert [LayerSpec.from_hf(fields, layer).reuse_topk for layer in range(4)] == [False, True, False, False]
    with pytest.raises(ValueError, match=r"indexer_types\[1\] must be one of 'full', 'shared'"):
        LayerSpec.from_hf(fields | {"indexer_types": ["full", "other", "full"]}, 1)
