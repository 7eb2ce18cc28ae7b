"""Fake quantisation: the numbers of a cache, the gradient of the rotations."""

import pytest
import torch
from torch import Tensor
from training import WITH_GRADIENTS, normal, relative

from tamis import IndexRecipe, PagedCache
from tamis.cache.layout import named
from tamis.model.rope import Rope
from tamis.ops import pack_index_query, quantise_index_query, unpack_index_query, write_index_keys, write_kv
from tamis.train import fake_quantise

DIM = 64
RECIPES = {
    "none": None,
    "v32": IndexRecipe(rope_dim=16),
    "v4": IndexRecipe.of_v4(16, hadamard=True),
    "hadamard": IndexRecipe(rope_dim=0, hadamard=True),
}


def rotations(recipe: IndexRecipe | None, tokens: int) -> dict[str, Tensor]:
    if recipe is None or not recipe.rope_dim:
        return {}
    positions = torch.arange(tokens) * 3 - 1  # the first is padding
    return {"positions": positions, "cos_sin": Rope(recipe.rope_dim, factor=2.0, mscale=1.0).cos_sin_table(40)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["index-fp8", "index-mxfp4"])
def test_index_keys_and_queries_have_the_numbers_of_inference(layout: str, recipe: str) -> None:
    made, turned = RECIPES[recipe] or IndexRecipe(rope_dim=0), rotations(RECIPES[recipe], 9)
    keys, q, weights = (normal(*shape, dtype=torch.bfloat16) for shape in ((9, DIM), (9, 3, DIM), (9, 3)))
    cache = PagedCache(named(layout, dim=DIM), 3, 4)
    write_index_keys(keys, cache, torch.arange(9), made, **turned)
    found = fake_quantise(keys, layout, RECIPES[recipe], **turned)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), cache.read(torch.arange(9)).float())
    if layout == "index-fp8":
        values, folded = quantise_index_query(q, weights, made, **turned, scale=1.0)
        scales = folded / weights.float()
        expected = values.float() * scales.unsqueeze(2)
    else:
        packed = pack_index_query(q, weights, made, **turned)
        expected = unpack_index_query(packed.values, packed.scales).float()
    assert torch.equal(fake_quantise(q, layout, RECIPES[recipe], **turned).float(), expected)


@WITH_GRADIENTS
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16", "plain-fp8"])
def test_rows_have_the_numbers_of_a_cache(layout: str) -> None:
    made = named(layout)
    x = normal(5, made.width, dtype=torch.float32)
    scale = 0.25 if layout == "plain-fp8" else 1.0
    cache = PagedCache(made, 2, 4, scale=scale)
    write_kv(x, cache, torch.arange(5))
    found = fake_quantise(x.requires_grad_(), layout, scale=scale)
    assert torch.equal(found, cache.read(torch.arange(5)))
    upstream = torch.randn_like(found)
    assert torch.equal(torch.autograd.grad(found, x, upstream)[0], upstream)


@WITH_GRADIENTS
@pytest.mark.parametrize("heads", [0, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_goes_through_the_transposed_rotations(recipe: str, heads: int) -> None:
    """The rotations' matrices come from unquantised rows: column i is what becomes of the i-th unit vector."""
    turned, tokens = rotations(RECIPES[recipe], 4), 4
    exact = named("v32-fp32", latent=DIM, rope=0)
    units = torch.eye(DIM).unsqueeze(1).expand(DIM, tokens, DIM)
    images = torch.stack([fake_quantise(unit, exact, RECIPES[recipe], **turned) for unit in units], dim=2)
    shape = (tokens, heads, DIM) if heads else (tokens, DIM)
    x, upstream = torch.randn(shape).requires_grad_(), torch.randn(shape)
    with torch.no_grad():
        x[0, ..., 0] = 1e6  # saturates, or scales all others to zero
    found = fake_quantise(x, "index-fp8", RECIPES[recipe], **turned)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    expected = torch.einsum("toi,t...o->t...i", images.double(), upstream.double())
    # Six levels of a butterfly and a rotation, each one rounding to float32 (2**-24) of numbers of this size.
    assert relative(gradient, expected) < 16 * 2.0**-24 * DIM**0.5


def test_half_precision_and_float64() -> None:
    x = normal(3, DIM)
    wide, narrow = fake_quantise(x, "index-fp8"), fake_quantise(x.float(), "index-fp8")
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    assert torch.equal(wide, narrow.double())
    assert fake_quantise(x[:0], "index-fp8").shape == (0, DIM)


def test_wrong_arguments_are_refused_by_name() -> None:
    x = normal(3, DIM)
    with pytest.raises(ValueError, match=r"layout must be 64 wide like the numbers, got v32-fp8, 576 wide"):
        fake_quantise(x, "v32-fp8")
    with pytest.raises(TypeError, match="x must be a float tensor"):
        fake_quantise(x[0], "index-fp8")
    with pytest.raises(ValueError, match="positions and cos_sin must be given together"):
        fake_quantise(x, "index-fp8", IndexRecipe(), positions=torch.arange(3))
