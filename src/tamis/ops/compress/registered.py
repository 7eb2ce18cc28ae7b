"""The function of this stage as a torch op; see `tamis.ops.library`."""

from typing import Any

from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.old_library import CACHE, ask_kernels, op, stage_module


def _compress_kv(values: Tensor, scores: Tensor, state: PagedCache, cache: PagedCache, *rest: Any) -> None:
    ask_kernels(stage_module("compress", rest[-1], values.device, values=values, scores=scores), "check_rows", cache)


@op(
    "compress_kv(Tensor values, Tensor scores, "
    "Tensor(a!) state_storage, str state_layout, float state_scale, Tensor? state_scale_tensor, "
    f"Tensor(b!) storage, {CACHE}, Tensor positions, Tensor state_slots, Tensor request_ids, Tensor block_table, "
    "Tensor slots, Tensor bias, Tensor norm_weight, Tensor cos_sin, float eps, bool hadamard, str backend) -> ()",
    _compress_kv,
)
def compress_kv(
    values: Tensor,
    scores: Tensor,
    state: PagedCache,
    cache: PagedCache,
    positions: Tensor,
    state_slots: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    eps: float,
    hadamard: bool,
    backend: str,
) -> None:
    """State rows of tokens, and the entries that some of them complete."""
    stage = stage_module("compress", backend, cache.device, values=values, scores=scores)
    pages = (positions, state_slots, request_ids, block_table, slots)
    stage.compress_kv(values, scores, state, cache, *pages, bias, norm_weight, cos_sin, eps, hadamard)
