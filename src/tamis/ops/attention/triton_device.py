"""Portable sparse attention in Triton: device functions that both kernels call outside their products.

Both kernels run one program per query token, block of heads and split. Products run in bf16 (in float32 for float32
queries or rows, and for 16-bit formats that bf16 cannot hold); softmax and sums run in float32. bf16 has float32's
range, so that no scale of a cache can overflow or flush to zero.
"""

import triton
import triton.language as tl

from tamis.ops.rows.triton_rows import decode_e4m3, load_wide

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_columns(slots, column_stride, column, end):
    """The slots or positions that one token selected in these columns, -1 past the end."""
    return tl.load(slots + column * column_stride, mask=column < end, other=-1)


@triton.jit
def to_slots(found, block_table, table_row, table_width, rows, PAGE_SIZE: tl.constexpr):
    """The slots of selected columns, -1 for columns that do not count. With a block table, `found` are positions."""
    slot = found
    if block_table is not None:
        page = found // PAGE_SIZE
        known = (found >= 0) & (page < table_width)
        page_id = tl.load(block_table + table_row + page, mask=known, other=-1)
        # The comparison precedes the multiplication, so that a garbage page id cannot wrap around into a valid slot.
        known &= (page_id >= 0) & (page_id <= rows // PAGE_SIZE)
        slot = tl.where(known, page_id * PAGE_SIZE + found % PAGE_SIZE, -1)
    return tl.where(slot < rows, slot, -1)


@triton.jit
def find_span(token, split, lengths, columns, split_columns, request_ids, requests, table_stride):
    """The columns begin..end of this split, and the offset of the token's row of the block table."""
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
    gets it untouched, so that the load can be pipelined into shared memory."""
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
    """A float32 number in the compute dtype, and the rounding error in the same dtype."""
    high = wide.to(COMPUTE)
    return high, (wide - high.to(tl.float32)).to(COMPUTE)


@triton.jit
def dot(a, b, acc, COMPUTE: tl.constexpr):
    """acc + a @ b; float32 operands are multiplied as such and not in tf32."""
    if COMPUTE == tl.float32:  # noqa: SIM300 (a constexpr knows how to compare itself, a dtype does not)
        product = tl.dot(a, b, acc=acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc=acc)
    return product


@triton.jit
def dot_wide(x, y, acc, TERMS: tl.constexpr, COMPUTE: tl.constexpr):
    """acc + x @ y for float32 x, rounded to the compute dtype; with two TERMS the rounding error is multiplied too."""
    high, rest = round_in_two(x, COMPUTE)
    acc = dot(high, y, acc, COMPUTE)
    if TERMS == 2:
        acc = dot(rest, y, acc, COMPUTE)
    return acc


@triton.jit
def online_softmax(logits, valid, running_max, total):
    """One step of the online softmax to base 2.

    Returns the weights [H, N], the factor [H] that rescales earlier accumulators, the new running maximum [H] and the
    new sum of weights [H].
    """
    logits = tl.where(valid[None, :], logits, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(logits, 1))
    # While nothing is valid, 0 is subtracted instead of -inf: the weights are then exp2(-inf) = 0 and not NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(running_max - base)
    weights = tl.exp2(logits - base[:, None])
    return weights, rescale, new_max, total * rescale + tl.sum(weights, 1)


@triton.jit
def finish_heads(running_max, total, sink, head, here, lse, max_logits, offset):
    """Store natural-log lse and largest logit of each head; return the factor that turns its sums into an output."""
    empty = total == 0
    inverse = 1.0 / tl.where(empty, 1.0, total)
    log_total = (running_max + tl.log2(tl.where(empty, 1.0, total))) * _LN_2
    tl.store(lse + offset, tl.where(empty, float("-inf"), log_total), mask=here)
    tl.store(max_logits + offset, tl.where(empty, float("-inf"), running_max * _LN_2), mask=here)
    if sink is not None:
        logit = tl.load(sink + head, mask=here, other=0.0)
        inverse *= 1.0 / (1.0 + tl.exp(logit - tl.where(empty, 0.0, log_total)))
    return inverse
