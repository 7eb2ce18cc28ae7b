"""RMSNorm and rotation of heads and rows, in plain torch."""

import torch
from torch import Tensor

from tamis.cache.codec import write_rows
from tamis.cache.paged import PagedCache
from tamis.model.rope import hadamard, rms_norm, rotate
from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads, WriteRotated


def norm_rows(call: NormRows) -> Tensor:
    """Rows [T, N]; see `tamis.ops.norm_rows`."""
    return rms_norm(call.x.float(), call.weight.float(), call.eps).to(call.x.dtype).contiguous()


def rotate_heads(call: RotateHeads) -> Tensor:
    """Heads [T, H, D]; see `tamis.ops.rotate_heads`."""
    x = call.x.float() if call.eps is None else rms_norm(call.x.float(), None, call.eps)
    return rotate_tail(x, call.positions.unsqueeze(1), call.cos_sin, call.inverse).to(call.x.dtype)


def rotate_and_write(call: RotateAndWrite) -> tuple[Tensor, Tensor]:
    """Write rows to the cache; return queries [T, H, D] and index queries. See `tamis.ops.rotate_and_write`."""
    count, positions, cos_sin = len(call.slots), call.positions, call.cos_sin
    rows = rms_norm(call.kv[:count].float(), call.norm_weight.float(), call.eps)
    insert(rotate_tail(rows, positions[:count], cos_sin), call.cache, call.slots)
    q = rotate_heads(RotateHeads(call.q, positions, cos_sin, call.eps if call.norm_q else None, False, call.backend))
    if call.index_q is None:
        return q, q.new_empty(0, dtype=q.dtype)
    index_q = rotate_heads(RotateHeads(call.index_q, positions, cos_sin, None, False, call.backend))
    return q, hadamard(index_q).to(index_q.dtype) if call.index_hadamard else index_q


def write_rotated(call: WriteRotated) -> None:
    """Rotate and write rows; see `tamis.ops.write_rotated`."""
    count, weight = len(call.slots), call.norm_weight
    rows, positions = call.rows[:count].float(), call.positions[:count].long()
    rows = rows if weight is None else rms_norm(rows, weight.float(), call.eps)
    first = torch.where(positions >= 0, positions // call.span * call.span, -1)
    insert(rotate_tail(rows, first, call.cos_sin), call.cache, call.slots, call.hadamard)


def rotate_tail(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool = False) -> Tensor:
    """float32 rows with their last columns rotated; rows with a negative position are unchanged."""
    rotary = cos_sin.shape[1]
    front, tail = x.split([x.shape[-1] - rotary, rotary], dim=-1)
    known = positions.long().clamp(-1, len(cos_sin) - 1)
    rotated = rotate(tail, cos_sin[known.clamp_min(0)], interleaved=True, inverse=inverse)
    return torch.cat((front, torch.where((known >= 0).unsqueeze(-1), rotated, tail)), dim=-1)


def insert(rows: Tensor, cache: PagedCache, slots: Tensor, with_hadamard: bool = False) -> None:
    """Round float32 rows once, to bf16 before FP8, and write them.

    With `with_hadamard`, the rounded rows are multiplied by the Hadamard matrix and rounded again.
    """
    stored = torch.bfloat16 if cache.layout.quantised else cache.layout.element
    rounded = rows.to(stored)
    write_rows(hadamard(rounded).to(stored) if with_hadamard else rounded, cache, slots)
