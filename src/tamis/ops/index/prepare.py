"""Index queries and index keys made ready for scoring: norm, rope, Hadamard rotation, FP8."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from tamis import checks
from tamis.cache import PagedCache
from tamis.layout import Rounding, index_fp8
from tamis.ops.write import write_kv
from tamis.ops.write.reference import encode_rows
from tamis.recipe import IndexRecipe
from tamis.rope import rotate


def rotate_index(
    x: Tensor, recipe: IndexRecipe, *, positions: Tensor | None = None, cos_sin: Tensor | None = None
) -> Tensor:
    """Index queries [T, H, D] or keys [T, D] after rope and Hadamard rotation, in float32, for unquantised scoring.

    Args:
        x: the projection's output, keys after their norm.
        recipe: what to do to it.
        positions: integer [T], absolute; without them x is taken as rotated by the rope already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.rope.Rope.cos_sin_table`; goes with `positions`.
    """
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS or x.dim() not in (2, 3):
        raise checks.refuse_type(
            "x", "a bfloat16, float16 or float32 tensor [T, H, D] or [T, D]", checks.describe(x), "convert it"
        )
    table = _rows_of_table(positions, cos_sin, x.shape[0], recipe, x.device)
    if table is not None and x.dim() == 3:
        table = table.unsqueeze(1)
    return _prepare(x, table, recipe, "none").float()


def quantise_index_query(
    q: Tensor,
    weights: Tensor,
    recipe: IndexRecipe,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    scale: float | None = None,
    rounding: Rounding = "bf16",
    scale_mode: Literal["pow2", "exact"] = "pow2",
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D] and float32 weights [T, H] with `scale` and the scale of each query folded in.

    Each head of each token has one scale, from its largest magnitude (at least 1e-4) over 448: the next power of two
    above it, or exactly it. Everything is computed in float32 and rounded where `rounding` says.

    Args:
        q: [T, H, D], the projection's output.
        weights: [T, H], the head weights' projection.
        recipe: what to do to q; the same as for the keys it will meet.
        positions: integer [T], absolute; without them q is taken as rotated already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.rope.Rope.cos_sin_table`; goes with `positions`.
        scale: the constant factor of all weights, (H * D) ** -0.5 if not given.
        rounding: "bf16" rounds before quantisation (after the rope, and again after the Hadamard rotation), as most
            implementations do; "none" keeps float32, as fused kernels do.
        scale_mode: "pow2" or "exact".
    """
    sizes = checks.tensor("q", q, "T H D", checks.FLOATS)
    checks.tensor("weights", weights, "T H", checks.FLOATS, T=sizes["T"], H=sizes["H"], device=q.device)
    checks.option("scale_mode", scale_mode, ("pow2", "exact"))
    heads, dim = sizes["H"], sizes["D"]
    layout = replace(index_fp8(dim=dim, rounding=rounding), scale_mode=scale_mode)
    constant = (heads * dim) ** -0.5 if scale is None else checks.positive_number("scale", scale)
    table = _rows_of_table(positions, cos_sin, sizes["T"], recipe, q.device)
    turned = _prepare(q, None if table is None else table.unsqueeze(1), recipe, rounding)
    values, scales, _ = encode_rows(turned.reshape(-1, dim), layout)
    assert scales is not None
    folded = weights.float() * constant * scales.view(sizes["T"], heads)
    return values.view(torch.float8_e4m3fn).view(q.shape), folded


def write_index_keys(
    keys: Tensor,
    cache: PagedCache,
    slots: Tensor,
    recipe: IndexRecipe | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_eps: float = 1e-6,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """LayerNorm, rotate and quantise index keys and insert them at their slots.

    Everything before the bytes is computed in float32. Where and how often it is rounded is the layout's `rounding`:
    `index_fp8(rounding="bf16")` rounds after the rope (and again after a Hadamard rotation), "none" does not.

    Args:
        keys: [T, D], the projection's output.
        cache: index keys, `index-fp8` or unquantised rows of width D.
        slots: int32 or int64 [T'], as in `write_kv`: negative slots and rows past T' are skipped.
        recipe: what to do to the keys; the cache's own if it records one, and then no other.
        norm_weight: [D] of the LayerNorm; without it keys are taken as normalised already.
        norm_bias: [D], with `norm_weight` only.
        norm_eps: of the LayerNorm.
        positions: integer [T], absolute; without them keys are taken as rotated already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.rope.Rope.cos_sin_table`; goes with `positions`.
        backend: a name from `tamis backends`, or "auto".
    """
    dim, device = cache.layout.width, cache.device
    remedy = f"keys of {cache!r}"
    total = checks.tensor("keys", keys, "T D", checks.FLOATS, D=dim, device=device, remedy=remedy)["T"]
    recipe = agreed_recipe("recipe", recipe, cache)
    table = _rows_of_table(positions, cos_sin, total, recipe, device)
    if norm_weight is not None:
        checks.tensor("norm_weight", norm_weight, "D", checks.FLOATS, D=dim, device=device)
        if norm_bias is not None:
            checks.tensor("norm_bias", norm_bias, "D", checks.FLOATS, D=dim, device=device)
        bias = None if norm_bias is None else norm_bias.float()
        keys = layer_norm(keys.float(), (dim,), norm_weight.float(), bias, norm_eps)
    elif norm_bias is not None:
        raise checks.refuse("norm_bias", "given with norm_weight only", "a bias alone", "pass the weight too")
    write_kv(_prepare(keys, table, recipe, cache.layout.rounding), cache, slots, backend=backend)


def agreed_recipe(name: str, recipe: IndexRecipe | None, cache: PagedCache) -> IndexRecipe:
    """The one recipe of a cache and of what meets it; refused where they differ, or where nobody says."""
    if recipe is not None and cache.recipe is not None and recipe != cache.recipe:
        raise checks.refuse(name, f"that of the cache, {cache.recipe}", recipe, "prepare queries and keys alike")
    agreed = recipe if recipe is not None else cache.recipe
    if agreed is None:
        raise checks.refuse(name, "given, or recorded with the cache", None, "make the cache with recipe=IndexRecipe()")
    return agreed


def hadamard(x: Tensor) -> Tensor:
    """x times the orthonormal Hadamard matrix over its last axis (a power of two wide), in float32."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise checks.refuse("width", "a power of two for a Hadamard rotation", dim, "use a recipe without it")
    turned = x.float()
    span = 1
    while span < dim:
        pairs = turned.unflatten(-1, (-1, 2, span))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        turned = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        span *= 2
    return turned.mul(dim**-0.5)


def _prepare(x: Tensor, cos_sin: Tensor | None, recipe: IndexRecipe, rounding: Rounding) -> Tensor:
    """Rope and Hadamard rotation in float32."""
    width, rope = x.shape[-1], recipe.rope_dim
    if cos_sin is not None and rope:
        if rope > width:
            raise checks.refuse("recipe.rope_dim", f"at most {width}, the width", rope, "use the model's recipe")
        start = 0 if recipe.rope_first else width - rope
        turned = rotate(x[..., start : start + rope].float(), cos_sin, interleaved=recipe.interleaved)
        x = torch.cat((x[..., :start].float(), turned, x[..., start + rope :].float()), dim=-1)
    if not recipe.hadamard:
        return x
    return hadamard(x.bfloat16() if rounding == "bf16" else x)


def _rows_of_table(
    positions: Tensor | None, cos_sin: Tensor | None, total: int, recipe: IndexRecipe, device: torch.device
) -> Tensor | None:
    """Cosines and sines [T, rope_dim] of each token, or None where nothing is to be rotated."""
    if (positions is None) != (cos_sin is None):
        received = "cos_sin" if positions is None else "positions"
        raise checks.refuse("positions and cos_sin", "given together", f"only {received}", "pass both, or none")
    if positions is None or cos_sin is None:
        return None
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=device)
    table = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=recipe.rope_dim, device=device)
    # Padded tokens have position -1 and no slot; what they are rotated by does not matter.
    checks.values_between("positions", positions, -1, table["P"] - 1, "make a longer cos_sin table")
    return cos_sin[positions.long().clamp_min(0)]
