"""Prepares index queries and index keys for scoring: LayerNorm, rope, Hadamard rotation, FP8."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.fields import Rounding
from tamis.cache.layout import index_fp8
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.ops.index import check_layout, operations
from tamis.ops.index.operations import QuantiseIndexQuery, WriteIndexKeys
from tamis.ops.index.rotation import rotate_rows
from tamis.ops.write import check_slots


def rotate_index(
    x: Tensor, recipe: IndexRecipe, *, positions: Tensor | None = None, cos_sin: Tensor | None = None
) -> Tensor:
    """Index queries [T, H, D] or keys [T, D] after rope and Hadamard rotation, in float32, for unquantised scoring.

    This runs in plain torch on every device: no backend has a kernel for it.

    Args:
        x: the projection's output, keys after their norm.
        recipe: which rotations to apply.
        positions: integer [T], absolute; without them x is taken as rotated by the rope already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.model.rope.Rope.cos_sin_table`; goes with `positions`.
    """
    dense = isinstance(x, Tensor) and x.dtype in checks.FLOATS and x.layout is torch.strided
    if not dense or x.dim() not in (2, 3):
        raise checks.refuse_type(
            "x", "a bfloat16, float16 or float32 tensor [T, H, D] or [T, D]", checks.describe(x), "convert it"
        )
    check_rotations(recipe, positions, cos_sin, x.shape[0], x.shape[-1], x.device)
    return rotate_rows(x, positions, cos_sin, recipe, "none").float()


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D] and float32 weights [T, H] with `scale` and the scale of each query folded in.

    Each head of each token has one scale: its largest magnitude (at least 1e-4) over 448, rounded up to a power of two
    unless `scale_mode` is "exact". Everything is computed in float32 and rounded where `rounding` says.

    Args:
        q: [T, H, D], the projection's output.
        weights: [T, H], the head weights' projection.
        recipe: which rotations to apply to q; the same as for the keys it will be compared with.
        positions: integer [T], absolute, -1 for padding; without them q is taken as rotated already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.model.rope.Rope.cos_sin_table`; goes with `positions`.
        scale: the constant factor of all weights, (H * D) ** -0.5 if not given.
        rounding: "bf16" rounds before quantisation (after the rope, and again after the Hadamard rotation), as most
            implementations do; "none" keeps float32, as fused kernels do.
        scale_mode: "pow2" or "exact".
        backend: a name from `tamis backends`, or "auto".
    """
    sizes = checks.tensor("q", q, "T H D", checks.FLOATS)
    checks.option("scale_mode", scale_mode, ("pow2", "exact"))
    constant = factor_of_weights(q, scale, multiple=4)
    layout = replace(index_fp8(dim=sizes["D"], rounding=rounding), scale_mode=scale_mode)
    call = QuantiseIndexQuery(q, weights, positions, cos_sin, recipe, layout, constant, backend)
    check_quantise_index_query(call)
    return operations.quantise_index_query(call)


def factor_of_weights(q: Tensor, scale: float | None, *, multiple: int) -> float:
    """The constant factor of the weights of queries [T, H, D], `scale` if given; D must be a multiple of `multiple`."""
    _, heads, dim = q.shape
    if heads == 0 or dim == 0 or dim % multiple:
        expected = f"of at least one head, a multiple of {multiple} wide"
        raise checks.refuse("q", expected, list(q.shape), "index keys have such a width")
    return (heads * dim) ** -0.5 if scale is None else checks.positive_number("scale", scale)


def check_quantise_index_query(call: QuantiseIndexQuery) -> None:
    """Refuse what `quantise_index_query` refuses, except for q, whose width has been checked with the layout."""
    tokens, heads, dim = call.q.shape
    device = call.q.device
    checks.tensor("weights", call.weights, "T H", checks.FLOATS, T=tokens, H=heads, device=device)
    check_rotations(call.recipe, call.positions, call.cos_sin, tokens, dim, device)
    operations.quantise_index_query.check(call)


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

    Everything before the bytes is computed in float32. The layout's `rounding` says where it is rounded on the way:
    `index_fp8(rounding="bf16")` rounds after the rope (and again after a Hadamard rotation), "none" does not.

    Args:
        keys: [T, D], the projection's output.
        cache: index keys, `index-fp8`, `index-mxfp4` or unquantised rows of width D.
        slots: int32 or int64 [T'], as in `write_kv`: negative slots and rows past T' are skipped.
        recipe: which rotations to apply to the keys. If the cache records a recipe, that one is the default and no
            other is accepted.
        norm_weight: [D] of the LayerNorm; without it keys are taken as normalised already.
        norm_bias: [D], with `norm_weight` only.
        norm_eps: epsilon of the LayerNorm.
        positions: integer [T], absolute, -1 for padding; without them keys are taken as rotated already.
        cos_sin: float32 [max_positions, rope_dim] from `tamis.model.rope.Rope.cos_sin_table`; goes with `positions`.
        backend: a name from `tamis backends`, or "auto".
    """
    check_layout(cache)
    recipe = resolve_recipe("recipe", recipe, cache)
    call = WriteIndexKeys(keys, cache, slots, norm_weight, norm_bias, norm_eps, positions, cos_sin, recipe, backend)
    check_write_index_keys(call)
    operations.write_index_keys(call)


def check_write_index_keys(call: WriteIndexKeys) -> None:
    """Refuse what `write_index_keys` refuses, except for the cache's layout, which `check_layout` checks."""
    keys, cache, weight, bias = call.keys, call.cache, call.norm_weight, call.norm_bias
    dim, device = cache.layout.width, cache.device
    total = checks.tensor(
        "keys", keys, "T D", checks.FLOATS, D=dim, device=device, remedy=lambda: f"the keys go to {cache!r}"
    )["T"]
    check_slots(call.slots, cache, "keys", total)
    check_rotations(call.recipe, call.positions, call.cos_sin, total, dim, device)
    checks.positive_number("norm_eps", call.norm_eps)
    if weight is not None:
        checks.tensor("norm_weight", weight, "D", checks.FLOATS, D=dim, device=device)
        if bias is not None:
            checks.tensor("norm_bias", bias, "D", checks.FLOATS, D=dim, device=device)
    elif bias is not None:
        raise checks.refuse("norm_bias", "given with norm_weight only", "a bias alone", "pass the weight too")
    checks.changeable("cache", cache.storage)
    operations.write_index_keys.check(call)


def resolve_recipe(name: str, recipe: IndexRecipe | None, cache: PagedCache) -> IndexRecipe:
    """Resolve the recipe from the argument and the cache; raise if they differ or neither gives one."""
    if recipe is not None:
        checks.instance(name, recipe, IndexRecipe)
    if recipe is not None and cache.recipe is not None and recipe != cache.recipe:
        raise checks.refuse(name, f"that of the cache, {cache.recipe}", recipe, "prepare queries and keys alike")
    resolved = recipe if recipe is not None else cache.recipe
    if resolved is None:
        raise checks.refuse(name, "given, or recorded with the cache", None, "make the cache with recipe=IndexRecipe()")
    return resolved


def check_rotations(
    recipe: IndexRecipe,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    total: int,
    width: int,
    device: torch.device,
) -> None:
    """Refuse rotations that do not fit rows of this number and width, and positions without a table or the reverse."""
    checks.instance("recipe", recipe, IndexRecipe)
    recipe.check_width(width, "recipe: width")
    if (positions is None) != (cos_sin is None):
        received = "cos_sin" if positions is None else "positions"
        raise checks.refuse("positions and cos_sin", "given together", f"only {received}", "pass both, or none")
    if positions is None or cos_sin is None:
        return
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=device)
    table = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=recipe.rope_dim, device=device)
    # Padded tokens have position -1 and no slot; they are not rotated.
    checks.values_between("positions", positions, -1, table["P"] - 1, "make a longer cos_sin table")
    checks.finite_rows("cos_sin", cos_sin, positions)
    if recipe.rope_dim > width:
        expected = f"at most {width}, the width"
        raise checks.refuse("recipe.rope_dim", expected, recipe.rope_dim, "use the model's recipe")
