"""The functions of this stage as torch ops; see `tamis.ops.library`."""

from typing import Any

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.old_library import CACHE, ask_kernels, op, stage_module


def _norm_rows(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    stage_module("rotate", rest[-1], x.device, x=x, weight=weight)
    return x.new_empty(x.shape, dtype=x.dtype)


@op("norm_rows(Tensor x, Tensor weight, float eps, str backend) -> Tensor", _norm_rows)
def norm_rows(x: Tensor, weight: Tensor, eps: float, backend: str) -> Tensor:
    """Rows [T, N]."""
    normed: Tensor = stage_module("rotate", backend, x.device, x=x, weight=weight).norm_rows(x, weight, eps)
    return normed.contiguous()


def _rotate_heads(x: Tensor, *rest: Any) -> Tensor:
    stage_module("rotate", rest[-1], x.device, x=x)
    return x.new_empty(x.shape, dtype=x.dtype)


@op(
    "rotate_heads(Tensor x, Tensor positions, Tensor cos_sin, float? eps, bool inverse, str backend) -> Tensor",
    _rotate_heads,
)
def rotate_heads(
    x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, inverse: bool, backend: str
) -> Tensor:
    """Heads [T, H, D]."""
    stage = stage_module("rotate", backend, x.device, x=x)
    turned: Tensor = stage.rotate_heads(x, positions, cos_sin, eps, inverse)
    return turned.contiguous()


def _rotate_and_write(q: Tensor, kv: Tensor, cache: PagedCache, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, index_q, _, backend = rest
    ask_kernels(stage_module("rotate", backend, q.device, q=q, kv=kv, index_q=index_q), "check_rows", cache)
    shape, dtype = ((0,), q.dtype) if index_q is None else (index_q.shape, index_q.dtype)
    return q.new_empty(q.shape, dtype=q.dtype), q.new_empty(shape, dtype=dtype)


@op(
    f"rotate_and_write(Tensor q, Tensor kv, Tensor(a!) storage, {CACHE}, Tensor slots, Tensor positions, "
    "Tensor cos_sin, Tensor norm_weight, float eps, Tensor? index_q, bool index_hadamard, str backend) "
    "-> (Tensor, Tensor)",
    _rotate_and_write,
)
def rotate_and_write(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float,
    index_q: Tensor | None,
    index_hadamard: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Rows into the cache; the queries, and the indexer's, which are empty where there are none."""
    stage = stage_module("rotate", backend, q.device, q=q, kv=kv, index_q=index_q)
    rotation = (positions, cos_sin, norm_weight, eps)
    turned, index = stage.rotate_and_write(q, kv, cache, slots, *rotation, index_q, index_hadamard)
    return turned.contiguous(), q.new_empty((0,), dtype=q.dtype) if index is None else index.contiguous()


def _rotate_to_fp8(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, tile, _, backend = rest
    stage_module("rotate", backend, x.device, x=x)
    tokens, heads, width = x.shape
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return values, x.new_empty((tokens, heads, width // tile), dtype=torch.uint8)


@op(
    "rotate_to_fp8(Tensor x, Tensor positions, Tensor cos_sin, SymInt tile, bool inverse, str backend) "
    "-> (Tensor, Tensor)",
    _rotate_to_fp8,
)
def rotate_to_fp8(
    x: Tensor, positions: Tensor, cos_sin: Tensor, tile: int, inverse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Heads in e4m3 and the exponents of their tiles."""
    stage = stage_module("rotate", backend, x.device, x=x)
    values, scales = stage.rotate_to_fp8(x, positions, cos_sin, tile, inverse)
    return values.contiguous(), scales.contiguous()


def _lower_groups(x: Tensor, scales: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    *_, dtype, backend = rest
    stage_module("rotate", backend, x.device)
    return x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]), dtype=dtype)


@op(
    "lower_groups(Tensor x, Tensor scales, Tensor weight, Tensor weight_scales, ScalarType dtype, str backend) "
    "-> Tensor",
    _lower_groups,
)
def lower_groups(
    x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype, backend: str
) -> Tensor:
    """Lowered groups [T, G, O]."""
    stage = stage_module("rotate", backend, x.device)
    lowered: Tensor = stage.lower_groups(x, scales, weight, weight_scales, dtype)
    return lowered.contiguous()
