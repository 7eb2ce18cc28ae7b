"""The indexer as torch ops; see `tamis.ops.library`. A recipe travels as its fields."""

from typing import Any

import torch
from torch import Tensor

from tamis.cache.layout import from_key
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.ops.old_library import CACHE, ask_kernels, op, stage_module

_RECIPE = "int rope_dim, bool interleaved, bool rope_first, bool hadamard"


def _quantise_index_query(q: Tensor, weights: Tensor, positions: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _, *fields, _, _, backend = rest
    stage = stage_module("index", backend, q.device, q=q, weights=weights)
    ask_kernels(stage, "check_recipe", IndexRecipe(*fields), q.shape[2], positions is not None)
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
    _, positions, _, *fields, backend = rest
    stage = stage_module("index", backend, keys.device, keys=keys, norm_weight=weight, norm_bias=bias)
    ask_kernels(stage, "check_recipe", IndexRecipe(*fields), keys.shape[1], positions is not None)


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


_PAGED_KEYS = f"Tensor storage, {CACHE}, Tensor request_ids, Tensor block_table, Tensor lengths"


def _index_scores(q: Tensor, weights: Tensor, *rest: Any) -> None:
    ask_kernels(stage_module("index", rest[-1], q.device, q=q, weights=weights), "check_scores", q)


@op(f"index_scores(Tensor q, Tensor weights, {_PAGED_KEYS}, Tensor(a!) out, str backend) -> ()", _index_scores)
def index_scores(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    out: Tensor,
    backend: str,
) -> None:
    """Scores of cached keys into every element of `out`, float32 [T, width]."""
    stage = stage_module("index", backend, q.device, q=q, weights=weights)
    stage.index_scores(q, weights, cache, request_ids, block_table, lengths, out)


def _ragged_scores(q: Tensor, weights: Tensor, keys: Tensor, *rest: Any) -> None:
    ask_kernels(stage_module("index", rest[-1], q.device, q=q, weights=weights, keys=keys), "check_scores", q)


@op(
    "ragged_scores(Tensor q, Tensor weights, Tensor keys, Tensor? key_scales, Tensor starts, Tensor ends, "
    "Tensor(a!) out, str backend) -> ()",
    _ragged_scores,
)
def ragged_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    backend: str,
) -> None:
    """Scores of gathered keys into every element of `out`, float32 [T, N]."""
    stage = stage_module("index", backend, q.device, q=q, weights=weights, keys=keys)
    stage.ragged_scores(q, weights, keys, key_scales, starts, ends, out)


def _topk_positions(scores: Tensor, lengths: Tensor, k: int, *rest: Any) -> Tensor:
    stage_module("index", rest[-1], scores.device, scores=scores)
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


@op(
    "topk_positions(Tensor scores, Tensor lengths, SymInt k, Tensor? request_ids, Tensor? block_table, "
    "SymInt page_size, str backend) -> Tensor",
    _topk_positions,
)
def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None,
    block_table: Tensor | None,
    page_size: int,
    backend: str,
) -> Tensor:
    """Positions int32 [T, k]; slots where there is a block table."""
    stage = stage_module("index", backend, scores.device, scores=scores)
    positions: Tensor = stage.topk_positions(scores, lengths, k, request_ids, block_table, page_size)
    return positions.contiguous()


def _index_topk(q: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    *_, k, _, backend = rest
    ask_kernels(stage_module("index", backend, q.device, q=q, weights=weights), "check_scores", q)
    return q.new_empty((q.shape[0], k), dtype=torch.int32)


@op(
    f"index_topk(Tensor q, Tensor weights, {_PAGED_KEYS}, SymInt k, SymInt workspace_bytes, str backend) -> Tensor",
    _index_topk,
)
def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    workspace_bytes: int,
    backend: str,
) -> Tensor:
    """Positions int32 [T, k]."""
    stage = stage_module("index", backend, q.device, q=q, weights=weights)
    positions: Tensor = stage.index_topk(q, weights, cache, request_ids, block_table, lengths, k, workspace_bytes)
    return positions.contiguous()
