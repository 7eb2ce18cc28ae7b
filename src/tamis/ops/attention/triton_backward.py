"""Portable gradients of attention over rows in Triton: the kernels. `gradients` has the formulas.

Gradients of queries and of rows have separate kernels, which both compute the probabilities. A fused kernel would hold
queries, output gradients and the queries' gradient of all its heads (64 heads: 139 KB and 147 KB) beside the rows'
gradient, and spill; divided by heads, it would add to each row's gradient once per block of heads. Here one program
sums a pair's gradient over all heads before it leaves the chip.

Products run in bf16 for bf16 inputs, otherwise in float32; p and dz are rounded to bf16 as operands only, and all sums
are float32. Rows are divided into a leading part of a power of two and a tail, as in `triton_rowwise`.
"""

import triton
import triton.language as tl

from tamis.ops.attention.triton_device import dot, load_columns, load_floats
from tamis.ops.rows.triton_rows import load_wide, store_rounded

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def split_kernel(wide, out, rest, count, BLOCK: tl.constexpr):
    """Divide float32 numbers into what their dtype holds and what rounding cuts off."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(wide + at, mask=inside, other=0.0)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    tl.store(rest + at, (value - rounded.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def delta_kernel(
    out, rest, dout, dout_token_stride, dout_head_stride, dout_column_stride, delta, heads,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """delta of one token and head: the sum of the output times its gradient, with what rounding cut off the output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_V)
    inside = column < VALUE_DIM
    whole = load_wide(out + row * VALUE_DIM + column, inside)
    if rest is not None:
        whole += load_wide(rest + row * VALUE_DIM + column, inside)
    at = dout + row // heads * dout_token_stride + row % heads * dout_head_stride + column * dout_column_stride
    tl.store(delta + row, tl.sum(whole * load_wide(at, inside), 0))


@triton.jit
def load_block(at, column, known, WIDTH: tl.constexpr, COMPUTE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Numbers [n, BLOCK] of the compute dtype at these rows' addresses, zeros past the width and where not known."""
    mask = known[:, None] & (column < WIDTH)[None, :]
    return load_floats(at[:, None] + column[None, :], mask, INTERPRETED).to(COMPUTE)


@triton.jit
def head_factors(lse, delta, dlse, sink, offset, head, here):
    """Of each head: its lse to base 2 (0 for an empty row), the share that the sink leaves to the rows, and the summand
    of dz that no row changes."""
    natural = tl.load(lse + offset, mask=here, other=float("-inf"))
    empty = natural == float("-inf")
    base = tl.where(empty, 0.0, natural)
    share = tl.where(empty, 0.0, 1.0)
    if sink is not None:
        logit = tl.load(sink + head, mask=here, other=0.0)
        share = tl.where(empty, 0.0, 1.0 / (1.0 + tl.exp(logit - base)))
    constant = tl.zeros_like(base)
    if delta is not None:
        constant -= share * tl.load(delta + offset, mask=here, other=0.0)
    if dlse is not None:
        constant += tl.load(dlse + offset, mask=here, other=0.0)
    return base * _LOG2_E, share, tl.where(empty, 0.0, constant)


@triton.jit
def query_gradient_kernel(
    q, q_token_stride, q_head_stride, rows, row_stride, slots, slots_token_stride, slots_column_stride, lengths,
    dout, dout_token_stride, dout_head_stride, lse, delta, dlse, sink, dq, scale, count, heads, columns,
    COMPUTE: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    VALUE_DIM: tl.constexpr, HEAD_BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The queries' gradient of one token and BLOCK_H heads."""
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    here = head < heads
    latent, tail = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_T)
    LATENT_VALUES: tl.constexpr = min(VALUE_DIM, LATENT)
    TAIL_VALUES: tl.constexpr = VALUE_DIM - LATENT_VALUES
    query = q + token * q_token_stride + head.to(tl.int64) * q_head_stride
    q_latent = load_block(query, latent, here, LATENT, COMPUTE, INTERPRETED)
    acc = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    if TAIL > 0:
        q_tail = load_block(query + LATENT, tail, here, TAIL, COMPUTE, INTERPRETED)
        tail_acc = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
    if dout is not None:
        upstream = dout + token * dout_token_stride + head.to(tl.int64) * dout_head_stride
        do_latent = load_block(upstream, latent, here, LATENT_VALUES, COMPUTE, INTERPRETED)
        if TAIL_VALUES > 0:
            do_tail = load_block(upstream + LATENT, tail, here, TAIL_VALUES, COMPUTE, INTERPRETED)
    base, share, constant = head_factors(lse, delta, dlse, sink, token * heads + head, head, here)
    end = columns
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + token))
    slots += token * slots_token_stride
    lane = tl.arange(0, BLOCK_N)
    for first in tl.range(0, end, BLOCK_N, num_stages=1):
        slot = load_columns(slots, slots_column_stride, first + lane, end)
        valid = (slot >= 0) & (slot < count)
        row = rows + tl.where(valid, slot, 0).to(tl.int64) * row_stride
        keys = load_block(row, latent, valid, LATENT, COMPUTE, INTERPRETED)
        logits = dot(q_latent, tl.trans(keys), None, COMPUTE)
        if TAIL > 0:
            tail_keys = load_block(row + LATENT, tail, valid, TAIL, COMPUTE, INTERPRETED)
            logits = dot(q_tail, tl.trans(tail_keys), logits, COMPUTE)
        p = tl.exp2(logits * (scale * _LOG2_E) - base[:, None])
        slope = constant[:, None]
        if dout is not None:
            product = dot(do_latent, tl.trans(keys), None, COMPUTE)
            if TAIL_VALUES > 0:
                product = dot(do_tail, tl.trans(tail_keys), product, COMPUTE)
            slope = share[:, None] * product + slope
        dz = tl.where(valid[None, :], p * slope, 0.0).to(COMPUTE)
        acc = dot(dz, keys, acc, COMPUTE)
        if TAIL > 0:
            tail_acc = dot(dz, tail_keys, tail_acc, COMPUTE)
    target = dq + ((token * heads + head) * (LATENT + TAIL))[:, None]
    mask = here[:, None] & (latent < LATENT)[None, :]
    store_rounded(target + latent[None, :], acc * scale, mask, not INTERPRETED)
    if TAIL > 0:
        mask = here[:, None] & (tail < TAIL)[None, :]
        store_rounded(target + LATENT + tail[None, :], tail_acc * scale, mask, not INTERPRETED)


@triton.jit
def load_interleaved(
    at, column, known, is_query,
    QUERY: tl.constexpr, UPSTREAM: tl.constexpr, COMPUTE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Numbers [2 * heads, BLOCK]: a head's query, then its output gradient, then the next head's. Queries count up to
    column QUERY, output gradients up to UPSTREAM; zeros past that."""
    width = tl.where(is_query, QUERY, UPSTREAM)
    mask = known[:, None] & (column[None, :] < width[:, None])
    return load_floats(at[:, None] + column[None, :], mask, INTERPRETED).to(COMPUTE)


@triton.jit
def row_gradient_kernel(
    q, q_token_stride, q_head_stride, rows, row_stride, slots, slots_token_stride, slots_column_stride, lengths,
    dout, dout_token_stride, dout_head_stride, lse, delta, dlse, sink, drows, scale, count, heads, columns, first_token,
    PAIRS: tl.constexpr, COMPUTE: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr, VALUE_DIM: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The gradients that one token gives to BLOCK_N of its rows, summed over all heads.

    With PAIRS they are stored, [tokens, columns, width] from `first_token` on; otherwise added to `drows` atomically.

    Queries and output gradients are interleaved in one operand: one product with the rows gives logits and dO . row,
    and one product of dz and p with both gives the gradient. Two products into one accumulator would be laid out
    differently by the compiler, and the accumulator converted between them.
    """
    place = tl.program_id(0) // COLUMN_BLOCKS
    token = (first_token + place).to(tl.int64)
    column = (tl.program_id(0) % COLUMN_BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = columns
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + token))
    slot = load_columns(slots + token * slots_token_stride, slots_column_stride, column, end)
    valid = (slot >= 0) & (slot < count)
    if tl.max(valid.to(tl.int32), 0) > 0:
        latent, tail = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_T)
        LATENT_VALUES: tl.constexpr = min(VALUE_DIM, LATENT)
        TAIL_VALUES: tl.constexpr = VALUE_DIM - LATENT_VALUES
        known = tl.where(valid, slot, 0).to(tl.int64)
        row = rows + known * row_stride
        keys = load_block(row, latent, valid, LATENT, COMPUTE, INTERPRETED)
        acc = tl.zeros([BLOCK_N, BLOCK_L], tl.float32)
        if TAIL > 0:
            tail_keys = load_block(row + LATENT, tail, valid, TAIL, COMPUTE, INTERPRETED)
            tail_acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        both = tl.arange(0, 2 * BLOCK_H)
        is_query = both % 2 == 0
        for first in tl.range(0, heads, BLOCK_H, num_stages=1):
            of_both = (first + both // 2).to(tl.int64)
            wanted = of_both < heads
            at = q + token * q_token_stride + of_both * q_head_stride
            if dout is not None:
                upstream = dout + token * dout_token_stride + of_both * dout_head_stride
                at = tl.where(is_query, at, upstream)
            else:
                wanted = wanted & is_query
            tile = load_interleaved(at, latent, wanted, is_query, LATENT, LATENT_VALUES, COMPUTE, INTERPRETED)
            products = dot(keys, tl.trans(tile), None, COMPUTE)
            if TAIL > 0:
                tail_tile = load_interleaved(
                    at + LATENT, tail, wanted, is_query, TAIL, TAIL_VALUES, COMPUTE, INTERPRETED
                )
                products = dot(tail_keys, tl.trans(tail_tile), products, COMPUTE)
            logits, product = tl.split(tl.reshape(products, [BLOCK_N, BLOCK_H, 2]))
            head = first + tl.arange(0, BLOCK_H)
            here = head < heads
            base, share, constant = head_factors(lse, delta, dlse, sink, token * heads + head, head, here)
            # Heads past the last have no share. Skipped columns are not stored, and touch no other column's sums.
            p = tl.exp2(logits * (scale * _LOG2_E) - base[None, :])
            dz = p * (share[None, :] * product + constant[None, :]) * scale
            factors = tl.reshape(tl.join(dz, p * share[None, :]), [BLOCK_N, 2 * BLOCK_H]).to(COMPUTE)
            acc = dot(factors, tile, acc, COMPUTE)
            if TAIL > 0:
                tail_acc = dot(factors, tail_tile, tail_acc, COMPUTE)
        mask = valid[:, None] & (latent < LATENT)[None, :]
        tail_mask = valid[:, None] & (tail < TAIL)[None, :]
        if PAIRS:
            target = drows + ((place.to(tl.int64) * columns + column) * (LATENT + TAIL))[:, None]
            tl.store(target + latent[None, :], acc, mask=mask)
            if TAIL > 0:
                tl.store(target + LATENT + tail[None, :], tail_acc, mask=tail_mask)
        else:
            target = drows + (known * (LATENT + TAIL))[:, None]
            tl.atomic_add(target + latent[None, :], acc, mask=mask, sem="relaxed")
            if TAIL > 0:
                tl.atomic_add(target + LATENT + tail[None, :], tail_acc, mask=tail_mask, sem="relaxed")


@triton.jit
def target_kernel(
    q, q_token_stride, q_head_stride, rows, row_stride, slots, slots_token_stride, slots_column_stride, lengths, lse,
    sink, target, scale, count, heads, columns,
    COMPUTE: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attention's probabilities of BLOCK_N columns of one token, summed over all heads; 0 in skipped columns."""
    token = (tl.program_id(0) // COLUMN_BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % COLUMN_BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = columns
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + token))
    slot = load_columns(slots + token * slots_token_stride, slots_column_stride, column, end)
    valid = (slot >= 0) & (slot < count)
    total = tl.zeros([BLOCK_N], tl.float32)
    if tl.max(valid.to(tl.int32), 0) > 0:
        latent, tail = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_T)
        row = rows + tl.where(valid, slot, 0).to(tl.int64) * row_stride
        keys = load_block(row, latent, valid, LATENT, COMPUTE, INTERPRETED)
        if TAIL > 0:
            tail_keys = load_block(row + LATENT, tail, valid, TAIL, COMPUTE, INTERPRETED)
        for first in tl.range(0, heads, BLOCK_H, num_stages=1):
            head = first + tl.arange(0, BLOCK_H)
            here = head < heads
            query = q + token * q_token_stride + head.to(tl.int64) * q_head_stride
            q_latent = load_block(query, latent, here, LATENT, COMPUTE, INTERPRETED)
            logits = dot(keys, tl.trans(q_latent), None, COMPUTE)
            if TAIL > 0:
                q_tail = load_block(query + LATENT, tail, here, TAIL, COMPUTE, INTERPRETED)
                logits = dot(tail_keys, tl.trans(q_tail), logits, COMPUTE)
            base, share, _ = head_factors(lse, None, None, sink, token * heads + head, head, here)
            # exp(z - lse) times the sink's share is the probability under both. Heads past the last have no share.
            p = tl.exp2(logits * (scale * _LOG2_E) - base[None, :]) * share[None, :]
            total += tl.sum(p, 1)
    tl.store(target + token * columns + column, tl.where(valid, total, 0.0), mask=column < columns)
