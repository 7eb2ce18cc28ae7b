"""Index queries and keys made ready by Triton, against the reference.

Without a LayerNorm every step is the reference's own, correctly rounded and in the same order: bytes and folded weights
are equal. A LayerNorm's sums have another order, so there a value near a rounding boundary may be one code off.
"""

from dataclasses import replace
from typing import Any

import bounds
import pytest
import torch
from torch import Tensor

from tamis import IndexRecipe, Layout, PagedCache
from tamis.cache.layout import index_fp8, index_mxfp4, rows
from tamis.model.rope import Rope
from tamis.ops.index import hopper, reference, triton_kernels
from tamis.ops.index.operations import QuantiseIndexQuery, WriteIndexKeys
from tamis.ops.index.rotation import rotate_rows
from tamis.ops.index.triton_prepare import insert_keys
from tamis.ops.rows.triton_rows import interpreted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
EXACT = replace(index_fp8(), scale_mode="exact")
RECIPES = [
    IndexRecipe(),
    IndexRecipe(rope_first=False),
    IndexRecipe(interleaved=True),
    IndexRecipe(interleaved=True, rope_first=False, hadamard=True),
    IndexRecipe(rope_dim=22, rope_first=False, hadamard=True),
    IndexRecipe(rope_dim=128),
    IndexRecipe(rope_dim=0, hadamard=True),
    IndexRecipe(rope_dim=0),
]


def where(recipe: IndexRecipe, tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """Positions, some of them not in the table, and the table; none without a rope."""
    if not recipe.rope_dim:
        return None, None
    positions = torch.randint(0, 40, (tokens,))
    positions[1::5], positions[2::7] = -1, 40
    # As YaRN scales them: a padded token that was rotated would show.
    return positions, Rope(recipe.rope_dim).cos_sin_table(40) * 1.25


def hostile(*shape: int) -> Tensor:
    """Magnitudes from far below the scale's floor to far above 448, zeros of both signs, NaN and infinities."""
    x = torch.randn(*shape) * torch.logspace(-7, 5, shape[0]).view(-1, *[1] * (len(shape) - 1))
    flat = x.flatten(0, -2)
    flat[3::9], flat[4::9, ::5], flat[5::9, 3], flat[6::9, ::7] = 0.0, -0.0, float("nan"), float("inf")
    return x


def on(device: torch.device, *values: Any) -> tuple[Any, ...]:
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in values)


def bits(x: Tensor) -> Tensor:
    """Numbers to compare bit for bit, but for a NaN's sign and payload."""
    x = x.cpu()
    if x.element_size() == 1:
        codes = x.view(torch.uint8)
        return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", [index_fp8(), index_fp8(rounding="none"), EXACT], ids=["bf16", "none", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_queries(recipe: IndexRecipe, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    q, weights = hostile(11, 3, 128).to(dtype), torch.randn(3, 11).to(dtype).T
    inputs = (q, weights, *where(recipe, 11), recipe, layout, 0.3)
    values, folded = triton_kernels.quantise_index_query(QuantiseIndexQuery(*on(device, *inputs), "triton"))
    expected, expected_folded = reference.quantise_index_query(QuantiseIndexQuery(*inputs, "reference"))
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, q.shape)
    assert torch.equal(bits(values), bits(expected))
    assert torch.equal(bits(folded), bits(expected_folded))


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 4), (5, 64, 100), (3, 2, 2048), (0, 4, 128), (4, 0, 8)])
def test_query_shapes_and_strides(tokens: int, heads: int, width: int, device: torch.device) -> None:
    recipe = IndexRecipe(rope_dim=4)
    table = torch.randn(40, 8)[:, ::2]
    for q in (torch.randn(heads, tokens, width).transpose(0, 1), torch.randn(tokens, width, heads).transpose(1, 2)):
        positions = torch.randint(-1, 40, (2 * tokens,), dtype=torch.int32)[::2]
        inputs = (q, torch.randn(tokens, heads), positions, table, recipe, index_fp8(dim=width), 2.0)
        values, folded = triton_kernels.quantise_index_query(QuantiseIndexQuery(*on(device, *inputs), "triton"))
        expected, expected_folded = reference.quantise_index_query(QuantiseIndexQuery(*inputs, "reference"))
        assert torch.equal(bits(values), bits(expected))
        assert torch.equal(bits(folded), bits(expected_folded))
        assert values.is_contiguous()


KEY_LAYOUTS = {
    "index-fp8": index_fp8(),
    "unrounded": index_fp8(rounding="none"),
    "index-mxfp4": index_mxfp4(),
    "exact": EXACT,
    "bf16": rows(torch.bfloat16, latent=128, rope=0),
    "fp16": rows(torch.float16, latent=128, rope=0),
    "fp32": rows(torch.float32, latent=128, rope=0),
}
SLOTS = torch.tensor([7, -1, 14, 10**9, 0, 3, 21, -(2**40), 9, 20, 1])


def cache_pair(layout: Layout, device: torch.device) -> tuple[PagedCache, PagedCache]:
    """The same pages, with other bytes between them, on the host and where kernels run."""
    dtype = torch.uint8 if layout.quantised else layout.element
    block = torch.randint(0, 100, (5, 2 * 5, layout.row_elements)).to(dtype)
    moved = block.to(device)
    return tuple(PagedCache.wrap(b[:, 5:], layout) for b in (block.clone(), moved))


def written(cache: PagedCache) -> Tensor:
    """Everything around the pages as well."""
    block = cache.storage._base
    assert block is not None
    return bits(block) if block.dtype == torch.uint8 else block.cpu().float()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", KEY_LAYOUTS.values(), ids=KEY_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys(recipe: IndexRecipe, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
    keys, (positions, table) = hostile(11, 256).to(dtype)[:, 128:], where(recipe, 11)
    host, there = cache_pair(layout, device)
    rest = (None, None, 1e-6, positions, table, recipe)
    reference.write_index_keys(WriteIndexKeys(keys, host, SLOTS, *rest, "reference"))
    triton_kernels.write_index_keys(WriteIndexKeys(*on(device, keys, there, SLOTS, *rest), "triton"))
    torch.testing.assert_close(written(there), written(host), rtol=0, atol=0, equal_nan=True)


def stored(cache: PagedCache) -> tuple[Tensor, Tensor, Tensor]:
    """The values of all rows as integers that count codes and as numbers before their scale, and the scales."""
    every = torch.arange(cache.rows)
    page, row = every // cache.page_size, every % cache.page_size
    assert cache.layout.scales is not None
    codes, scales = (cache.field(f)[page, row].cpu() for f in (cache.layout.values, cache.layout.scales))
    counted = torch.where(codes < 128, codes.int(), 128 - codes.int())
    return counted, codes.view(torch.float8_e4m3fn).float(), scales.squeeze(1)


def norm_error(keys: Tensor, weight: Tensor) -> Tensor:
    """How far two LayerNorms of keys [N, D] may be apart after a rope scaled by 1.25, [N, 1]: a mean much larger than
    the deviation has a large error in units of it."""
    wide = keys.double()
    mean = wide.mean(1, keepdim=True)
    deviation = (wide.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    shift = bounds.summed(wide, roundings=0).unsqueeze(1) / keys.shape[1] + bounds.rounded(mean, torch.float32, 2)
    normed = bounds.layer_norm((wide - mean) / deviation).amax(1, keepdim=True)
    return 2 * (shift / deviation + normed) * weight.max() * 1.25 * 2**0.5


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rounding", ["bf16", "none"])
@pytest.mark.parametrize("biased", [False, True])
def test_normed_keys_are_at_most_one_code_off(
    recipe: IndexRecipe, rounding: str, biased: bool, device: torch.device
) -> None:
    """One code, and seldom: the sums of a norm are in another order. A Hadamard rotation spreads one value that was
    rounded to the other side over its row: codes of small numbers may then move further, the numbers hardly."""
    keys = torch.randn(64, 128) * torch.logspace(-3, 3, 64).unsqueeze(1) + torch.randn(64, 1)
    weight, bias = torch.rand(256)[::2] + 0.5, torch.randn(128).bfloat16() if biased else None
    host, there = (PagedCache(index_fp8(rounding=rounding), 13, 5, place) for place in ("cpu", device))
    slots = torch.randperm(65)[:64]
    rest = (slots, weight, bias, 1e-6, *where(recipe, 64), recipe)
    reference.write_index_keys(WriteIndexKeys(keys, host, *rest, "reference"))
    triton_kernels.write_index_keys(WriteIndexKeys(*on(device, keys, there, *rest), "triton"))
    (found, number, scale), (expected, expected_number, expected_scale) = stored(there), stored(host)
    alike = scale == expected_scale
    assert alike.float().mean() > 0.95, "a scale changes only where a maximum lies on a power of two"
    gap = (found - expected).abs()[alike]
    apart = (number - expected_number).abs()
    spread = apart[alike] < (1.0 if recipe.hadamard else 0.0)
    # What is left where a bias cancels a normed value may be smaller than the norm's own error, and lie several of its
    # small codes away. Codes two or more apart stand for numbers at least half their distance apart.
    noise = torch.zeros(65, 1, dtype=torch.float64).index_copy(0, slots, norm_error(keys, weight))
    tiny = (apart * scale.unsqueeze(1) <= 2 * noise)[alike]
    assert ((gap <= 1) | spread | tiny).all()
    assert (gap > 0).float().mean() < 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_normed_keys_in_float32(recipe: IndexRecipe, device: torch.device) -> None:
    keys, weight, bias = torch.randn(11, 128) * 3 + 1, torch.rand(128) + 0.5, torch.randn(128)
    host, there = (PagedCache(KEY_LAYOUTS["fp32"], 5, 5, place) for place in ("cpu", device))
    rest = (SLOTS, weight, bias, 1e-6, *where(recipe, 11), recipe)
    reference.write_index_keys(WriteIndexKeys(keys, host, *rest, "reference"))
    triton_kernels.write_index_keys(WriteIndexKeys(*on(device, keys, there, *rest), "triton"))
    error = float(norm_error(keys, weight).max())
    size = bounds.rounded(host.storage.abs().max(), torch.float32, 8)  # products and sums of the rope and the bias
    if recipe.hadamard:
        size += 2 * bounds.hadamard(host.storage.double().square().mean(-1).max().sqrt(), 128)
    bounds.agree(there.storage, host.storage, error + float(size))
    assert float(error + size) < 1e-4  # bf16 would be off by more


@pytest.mark.parametrize("width", [4, 12, 100, 1028])
def test_key_widths_and_strides(width: int, device: torch.device) -> None:
    keys, recipe = torch.randn(width, 9).T, IndexRecipe(rope_dim=4, rope_first=False)
    host, there = cache_pair(index_fp8(dim=width), device)
    rest = (SLOTS[:9].clamp(-1, 99).int(), None, None, 1e-6, *where(recipe, 9), recipe)
    reference.write_index_keys(WriteIndexKeys(keys, host, *rest, "reference"))
    triton_kernels.write_index_keys(WriteIndexKeys(*on(device, keys, there, *rest), "triton"))
    assert torch.equal(written(there), written(host))
    before = written(there)
    empty = (keys[:0], there, SLOTS[:0], *rest[1:4], None, None, recipe)
    triton_kernels.write_index_keys(WriteIndexKeys(*on(device, *empty), "triton"))
    assert torch.equal(written(there), before)


def test_rows_of_odd_widths(device: torch.device) -> None:
    """Pairs of neighbours that begin at an odd column are left to the reference."""
    cache = PagedCache(rows(torch.float32, latent=9, rope=0), 1, 4, device)
    odd = IndexRecipe(rope_dim=4, interleaved=True, rope_first=False)
    keys, positions, table = on(device, torch.randn(2, 9), torch.tensor([3, 1]), Rope(4).cos_sin_table(8))
    rest = (torch.arange(2, device=device), None, None, 1e-6, positions, table)
    with pytest.raises(ValueError, match=r"recipe must be with pairs from an even column on .* backend='reference'"):
        triton_kernels.check_write_index_keys(WriteIndexKeys(keys, cache, *rest, odd, "triton"))
    for recipe in (replace(odd, interleaved=False), replace(odd, rope_first=True)):
        triton_kernels.write_index_keys(WriteIndexKeys(keys, cache, *rest, recipe, "triton"))
        expected = rotate_rows(*on(torch.device("cpu"), keys, positions, table), recipe, "none")
        assert torch.equal(cache.read(rest[0]).cpu(), expected)


def test_both_gpu_backends_offer_them() -> None:
    assert hopper.write_index_keys is triton_kernels.write_index_keys
    assert hopper.quantise_index_query is triton_kernels.quantise_index_query
    assert hopper.check_write_index_keys is triton_kernels.check_write_index_keys


def test_the_kernel_runs_where_it_should(device: torch.device) -> None:
    assert interpreted(insert_keys) == (device.type == "cpu")
