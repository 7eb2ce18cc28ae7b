"""The indexer's sparse loss and its gradients in Triton: one program per token, two passes over its columns.

The first pass sums up the softmax of the scores and the loss. The second computes the scores again, the gradients of
the token's query and weights, and what the token adds to the gradient of each of its keys. The loss is a scalar, so its
gradients are computed with it, for an upstream gradient of one.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.cache.selection import Rows
from tamis.ops.attention.triton_backward import load_block
from tamis.ops.attention.triton_device import dot, dot_wide, load_columns
from tamis.ops.attention.triton_gradients import contiguous_columns, counted
from tamis.ops.index.loss_operations import IndexLoss
from tamis.ops.rows.triton_rows import interpreted, launching_on, load_wide, store_rounded
from tamis.ops.rows.triton_sums import RowSums

MAX_HEADS, MAX_DIM, MAX_NUMBERS = 128, 256, 16384
"""The most heads, the widest heads and the most numbers of a query that a program holds."""
PAIR_BYTES = 512 << 20
"""Memory for the contributions of some tokens in the deterministic mode."""


@triton.jit
def score_columns(query, factor, keys, COMPUTE: tl.constexpr):
    """Products [H, N] of a query's heads and some keys, and the scores [N]."""
    y = dot(query, tl.trans(keys), None, COMPUTE)
    return y, tl.sum(tl.maximum(y, 0.0) * factor[:, None], 0)


@triton.jit
def index_loss_kernel(
    q, q_token_stride, q_head_stride, keys, key_stride, weights, weights_token_stride, weights_head_stride,
    slots, slots_token_stride, slots_column_stride, target, target_stride, token_weights, losses, dq, dweights, dkeys,
    count, heads, columns, first_token,
    GRADIENTS: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr, TERMS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One token's loss and gradients. With PAIRS, gradients of keys are stored, [tokens, columns, DIM] from
    `first_token` on; otherwise added to `dkeys` atomically."""
    place = tl.program_id(0)
    token = (first_token + place).to(tl.int64)
    head, lane, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    here = head < heads
    query = load_block(
        q + token * q_token_stride + head.to(tl.int64) * q_head_stride, dim, here, DIM, COMPUTE, INTERPRETED
    )
    factor = load_wide(weights + token * weights_token_stride + head * weights_head_stride, here)
    slots += token * slots_token_stride
    target += token * target_stride
    # Every lane sums up its own columns; the lanes are joined once, at the end.
    lane_max, lane_total = tl.full([BLOCK_N], float("-inf"), tl.float32), tl.zeros([BLOCK_N], tl.float32)
    lane_mass, lane_loss = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for first in tl.range(0, columns, BLOCK_N, num_stages=1):
        slot = load_columns(slots, slots_column_stride, first + lane, columns)
        valid = (slot >= 0) & (slot < count)
        row = keys + tl.where(valid, slot, 0).to(tl.int64) * key_stride
        _, score = score_columns(query, factor, load_block(row, dim, valid, DIM, COMPUTE, INTERPRETED), COMPUTE)
        wanted = tl.load(target + first + lane, mask=valid, other=0.0)
        lane_mass += wanted
        lane_loss += tl.where(wanted > 0.0, wanted * (tl.log(tl.where(wanted > 0.0, wanted, 1.0)) - score), 0.0)
        score = tl.where(valid, score, float("-inf"))
        new_max = tl.maximum(lane_max, score)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_total = lane_total * tl.exp(lane_max - base) + tl.exp(score - base)
        lane_max = new_max
    mass, largest = tl.sum(lane_mass, 0), tl.max(lane_max, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(lane_total * tl.exp(lane_max - base), 0)
    # Without a valid column, or without a target, there is no loss.
    lse = base + tl.log(tl.where(total > 0.0, total, 1.0))
    unit = 1.0
    if token_weights is not None:
        unit = tl.load(token_weights + token)
    tl.store(losses + token, unit * (tl.sum(lane_loss, 0) + mass * lse))
    if GRADIENTS:
        dq_acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        dw_acc = tl.zeros([BLOCK_H], tl.float32)
        for first in tl.range(0, columns, BLOCK_N, num_stages=1):
            slot = load_columns(slots, slots_column_stride, first + lane, columns)
            valid = (slot >= 0) & (slot < count)
            known = tl.where(valid, slot, 0).to(tl.int64)
            found = load_block(keys + known * key_stride, dim, valid, DIM, COMPUTE, INTERPRETED)
            y, score = score_columns(query, factor, found, COMPUTE)
            wanted = tl.load(target + first + lane, mask=valid, other=0.0)
            slope = tl.where(valid, (mass * tl.exp(score - lse) - wanted) * unit, 0.0)
            dw_acc += tl.sum(tl.maximum(y, 0.0) * slope[None, :], 1)
            dy = tl.where(y > 0.0, factor[:, None] * slope[None, :], 0.0)
            dq_acc = dot_wide(dy, found, dq_acc, TERMS, COMPUTE)
            pair = dot_wide(tl.trans(dy), query, tl.zeros([BLOCK_N, BLOCK_D], tl.float32), TERMS, COMPUTE)
            mask = valid[:, None] & (dim < DIM)[None, :]
            if PAIRS:
                at = (place.to(tl.int64) * columns + first + lane) * DIM
                tl.store(dkeys + at[:, None] + dim[None, :], pair, mask=mask)
            else:
                tl.atomic_add(dkeys + (known * DIM)[:, None] + dim[None, :], pair, mask=mask, sem="relaxed")
        at = (token * heads + head) * DIM
        mask = here[:, None] & (dim < DIM)[None, :]
        store_rounded(dq + at[:, None] + dim[None, :], dq_acc, mask, not INTERPRETED)
        store_rounded(dweights + token * heads + head, dw_acc, here, not INTERPRETED)


def index_loss(call: IndexLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `gradients.index_loss`."""
    inputs = (call.index_q, call.index_keys, call.weights)
    tokens, columns = call.slots.shape
    device = call.index_q.device
    losses = torch.zeros(tokens, dtype=torch.float32, device=device)
    dq, dk, dw = (torch.zeros(x.shape if call.gradients else 0, dtype=x.dtype, device=device) for x in inputs)
    if tokens == 0 or columns == 0 or len(call.index_keys) == 0:
        return losses.sum(), dq, dk, dw
    if not call.gradients or not call.deterministic:
        summed = torch.zeros(call.index_keys.shape if call.gradients else 0, dtype=torch.float32, device=device)
        _launch(call, losses, dq, dw, summed, 0, tokens, pairs=False)
        return losses.sum(), dq, summed.to(dk.dtype), dw
    width = call.index_keys.shape[1]
    step = max(1, PAIR_BYTES // (4 * columns * width))
    pairs = torch.empty(min(step, tokens) * columns, width, dtype=torch.float32, device=device)
    slots = torch.where(counted(Rows(call.index_keys, call.slots)), call.slots, len(call.index_keys))
    sums = RowSums(call.index_keys)
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        _launch(call, losses, dq, dw, pairs, start, end, pairs=True)
        sums.add(slots[start:end].flatten(), pairs[: (end - start) * columns])
    return losses.sum(), dq, sums.result().to(dk.dtype), dw


def check_index_loss(call: IndexLoss) -> None:
    """Refuse what the kernel cannot do."""
    remedy = "pass backend='reference'"
    if torch.float64 in (call.index_q.dtype, call.weights.dtype):
        raise checks.refuse_type("index_q", "at most float32 for the triton backend", "float64", remedy)
    _, heads, dim = call.index_q.shape
    numbers = max(16, triton.next_power_of_2(heads)) * max(16, triton.next_power_of_2(dim))
    if heads > MAX_HEADS or dim > MAX_DIM or numbers > MAX_NUMBERS:
        expected = f"at most {MAX_HEADS} heads of {MAX_DIM} and {MAX_NUMBERS} numbers in all for the triton backend"
        raise checks.refuse("index_q", expected, list(call.index_q.shape), remedy)


def _launch(
    call: IndexLoss, losses: Tensor, dq: Tensor, dw: Tensor, dkeys: Tensor, start: int, end: int, *, pairs: bool
) -> None:
    arguments, options = loss_arguments(call, losses, dq, dw, dkeys, start, pairs=pairs)
    with launching_on(losses.device):
        index_loss_kernel[(end - start,)](**arguments, **options)


def loss_arguments(
    call: IndexLoss, losses: Tensor, dq: Tensor, dw: Tensor, dkeys: Tensor, first_token: int, *, pairs: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of `index_loss_kernel`."""
    q, keys = (contiguous_columns(x.detach()) for x in (call.index_q, call.index_keys))
    target = contiguous_columns(call.target)
    _, heads, dim = q.shape
    on_host = interpreted(index_loss_kernel)
    half = q.dtype == torch.bfloat16 and not on_host
    block_h, block_d = max(16, triton.next_power_of_2(heads)), max(16, triton.next_power_of_2(dim))
    arguments = {
        "q": q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "keys": keys,
        "key_stride": keys.stride(0),
        "weights": call.weights,
        "weights_token_stride": call.weights.stride(0),
        "weights_head_stride": call.weights.stride(1),
        "slots": call.slots,
        "slots_token_stride": call.slots.stride(0),
        "slots_column_stride": call.slots.stride(1),
        "target": target,
        "target_stride": target.stride(0),
        "token_weights": None if call.token_weights is None else call.token_weights.contiguous(),
        "losses": losses,
        "dq": dq,
        "dweights": dw,
        "dkeys": dkeys,
        "count": len(keys),
        "heads": heads,
        "columns": call.slots.shape[1],
        "first_token": first_token,
        "GRADIENTS": call.gradients,
        "PAIRS": pairs,
        "COMPUTE": tl.bfloat16 if half else tl.float32,
        # Two terms: a single one would leave an error of 2**-9 in the gradients.
        "TERMS": 2 if half else 1,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_H": block_h,
        "BLOCK_N": 32 if half else 16,
        "INTERPRETED": on_host,
    }
    return arguments, {"num_warps": 8 if block_h * block_d > 4096 else 4, "num_stages": 1}
