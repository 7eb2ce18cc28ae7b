"""Portable sparse attention in Triton: what its kernels share at the edges of their loops.

Both run one program per query token, block of heads and split of columns. Products run on bf16 (float32 for float32
queries or rows, and for 16-bit formats that bf16 cannot hold), softmax and sums in float32; bf16 has float32's range,
so no scale of a cache can overflow or flush.
"""

import triton
import triton.language as tl

from tamis.ops.rows.triton_rows import decode_e4m3, load_wide


@triton.jit
def load_columns(slots, column_stride, column, end):
    """What one token selected in these columns, -1 past the end."""
    return tl.load(slots + column * column_stride, mask=column < end, other=-1)


@triton.jit
def to_slots(found, block_table, table_row, table_width, rows, PAGE_SIZE: tl.constexpr):
    """The slots of what was found, -1 where one does not count. With a block table these are positions."""
    slot = found
    if block_table is not None:
        page = found // PAGE_SIZE
        known = (found >= 0) & (page < table_width)
        page_id = tl.load(block_table + table_row + page, mask=known, other=-1)
        # Compared before the multiplication: a garbage page id must not wrap around into a valid slot.
        known &= (page_id >= 0) & (page_id <= rows // PAGE_SIZE)
        slot = tl.where(known, page_id * PAGE_SIZE + found % PAGE_SIZE, -1)
    return tl.where(slot < rows, slot, -1)


@triton.jit
def find_span(token, split, lengths, columns, split_columns, request_ids, requests, table_stride):
    """The columns begin..end of this split, and where the token's row of the block table starts."""
    end = columns
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + token))
    begin = split * split_columns
    end = tl.minimum(begin + split_columns, end)
    table_row = token * 0
    if request_ids is not None:
        request = tl.load(request_ids + token).to(tl.int64)
        listed = (request >= 0) & (request < requests)
        end = tl.where(listed, end, begin)
        table_row = tl.where(listed, request, 0) * table_stride
    return begin, end, table_row


@triton.jit
def load_floats(at, mask, INTERPRETED: tl.constexpr):
    """Numbers as they are stored. The interpreter gets bf16 as float32, since it cannot compute with bf16; a device
    gets it untouched, so that the load can run ahead into shared memory."""
    if INTERPRETED:
        found = load_wide(at, mask)
    else:
        found = tl.load(at, mask=mask, other=0.0)
    return found


@triton.jit
def load_query(at, mask, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values of a query of any dtype; e4m3 arrives as bytes."""
    if at.dtype.element_ty == tl.uint8:
        wide = decode_e4m3(tl.load(at, mask=mask, other=0), NATIVE).to(tl.float32)
    else:
        wide = load_floats(at, mask, INTERPRETED).to(tl.float32)
    return wide


@triton.jit
def round_in_two(wide, COMPUTE: tl.constexpr):
    """A float32 number in the compute dtype, and what the rounding left over."""
    high = wide.to(COMPUTE)
    return high, (wide - high.to(tl.float32)).to(COMPUTE)


@triton.jit
def dot(a, b, acc, COMPUTE: tl.constexpr):
    """acc + a @ b, in float32 without the shortcuts of tf32 if that is the compute dtype."""
    if COMPUTE == tl.float32:  # noqa: SIM300 (a constexpr knows how to compare itself, a dtype does not)
        product = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc=acc)
    return product


@triton.jit
def dot_wide(x, y, acc, PARTS: tl.constexpr, COMPUTE: tl.constexpr):
    """acc + x @ y for float32 x: x is rounded to the compute dtype, and with PARTS 2 the rest multiplied as well."""
    high, rest = round_in_two(x, COMPUTE)
    acc = dot(high, y, acc, COMPUTE)
    if PARTS == 2:
        acc = dot(rest, y, acc, COMPUTE)
    return acc


@triton.jit
def next_weights(logits, valid, peak, total):
    """One step of a running softmax to base 2: weights [H, N], the factor that shrinks what was summed before, and the
    new peak and total."""
    logits = tl.where(valid[None, :], logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, 1))
    # While nothing is valid, subtract 0 instead of -inf: the weights are then exp2(-inf) = 0 and not NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(logits - base[:, None])
    return weights, shrink, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def finish_heads(peak, total, sink, head, here, lse, max_logits, place):
    """Store natural-log lse and largest logit of each head; return the factor that makes its sums an output."""
    empty = total == 0
    inverse = 1.0 / tl.where(empty, 1.0, total)
    log_total = (peak + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
    tl.store(lse + place, tl.where(empty, float("-inf"), log_total), mask=here)
    tl.store(max_logits + place, tl.where(empty, float("-inf"), peak * 0.6931471805599453), mask=here)
    if sink is not None:
        logit = tl.load(sink + head, mask=here, other=0.0)
        inverse *= 1.0 / (1.0 + tl.exp(logit - tl.where(empty, 0.0, log_total)))
    return inverse
