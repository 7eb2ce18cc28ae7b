"""The functions of this stage as torch ops; see `tamis.ops.library`."""

from typing import Any

from torch import Tensor

from tamis.cache import PagedCache
from tamis.ops.library import CACHE, op, stage_module


def _rotate_heads(x: Tensor, *rest: Any) -> Tensor:
    stage_module("rotate", rest[-1], x.device, x=x)
    return x.new_empty(x.shape)


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


def _rotate_and_write(q: Tensor, kv: Tensor, *rest: Any) -> Tensor:
    stage_module("rotate", rest[-1], q.device, q=q, kv=kv)
    return q.new_empty(q.shape)


@op(
    f"rotate_and_write(Tensor q, Tensor kv, Tensor(a!) storage, {CACHE}, Tensor slots, Tensor positions, "
    "Tensor cos_sin, Tensor norm_weight, float eps, str backend) -> Tensor",
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
    backend: str,
) -> Tensor:
    """Rows into the cache; the queries."""
    stage = stage_module("rotate", backend, q.device, q=q, kv=kv)
    turned: Tensor = stage.rotate_and_write(q, kv, cache, slots, positions, cos_sin, norm_weight, eps)
    return turned.contiguous()
