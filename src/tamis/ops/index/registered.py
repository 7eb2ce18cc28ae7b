"""How queries and keys are made ready, as torch ops; see `tamis.ops.library`. A recipe travels as its fields."""

from typing import Any

import torch
from torch import Tensor

from tamis.cache import PagedCache
from tamis.layout import from_key
from tamis.ops.library import CACHE, op, stage_module
from tamis.recipe import IndexRecipe

_RECIPE = "int rope_dim, bool interleaved, bool rope_first, bool hadamard"


def _quantise_index_query(q: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    stage_module("index", rest[-1], q.device, q=q, weights=weights)
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), q.new_empty(weights.shape, dtype=torch.float32)


@op(
    f"quantise_index_query(Tensor q, Tensor weights, Tensor? positions, Tensor? cos_sin, {_RECIPE}, str layout, "
    "float scale, str backend) -> (Tensor, Tensor)",
    _quantise_index_query,
)
def quantise_index_query(
    q: Tensor,
    weights: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    rope_dim: int,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    layout: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D], encoded like rows of a layout (its key), and float32 weights [T, H]."""
    stage = stage_module("index", backend, q.device, q=q, weights=weights)
    recipe = IndexRecipe(rope_dim, interleaved, rope_first, hadamard)
    values, folded = stage.quantise_index_query(q, weights, positions, cos_sin, recipe, from_key(layout), scale)
    return values.contiguous(), folded.contiguous()


def _write_index_keys(keys: Tensor, cache: PagedCache, slots: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> None:
    stage_module("index", rest[-1], keys.device, keys=keys, norm_weight=weight, norm_bias=bias)


@op(
    f"write_index_keys(Tensor keys, Tensor(a!) storage, {CACHE}, Tensor slots, Tensor? norm_weight, "
    f"Tensor? norm_bias, float norm_eps, Tensor? positions, Tensor? cos_sin, {_RECIPE}, str backend) -> ()",
    _write_index_keys,
)
def write_index_keys(
    keys: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    rope_dim: int,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    backend: str,
) -> None:
    """Keys [T, D] into the cache."""
    stage = stage_module("index", backend, keys.device, keys=keys, norm_weight=norm_weight, norm_bias=norm_bias)
    recipe = IndexRecipe(rope_dim, interleaved, rope_first, hadamard)
    norm = (norm_weight, norm_bias, norm_eps)
    stage.write_index_keys(keys, cache, slots, *norm, positions, cos_sin, recipe)
