"""Sparse attention over selected rows, in plain torch."""

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div, float32_products
from tamis.cache.codec import decode_rows
from tamis.cache.selection import Selection
from tamis.ops.attention.operations import Attend, AttendSlots, accumulator
from tamis.ops.combine import reference as combine
from tamis.ops.combine.operations import CombineParts
from tamis.ops.translate.operations import TranslatePositions
from tamis.ops.translate.reference import translate_positions

_WORKING_BYTES = 32 * 2**20
"""Dequantised rows held at once: small enough to stay in the last-level cache, large enough for full matrix speed."""


def attend(call: Attend) -> tuple[Tensor, Tensor]:
    """Write the merged output; return lse and max_logits in their form."""
    parts, lses, max_logits = attend_slots(call.in_splits())
    lse = combine.combine_parts(CombineParts(parts, lses, call.sink, call.out, call.backend))
    return call.lse_form.arrange(lse, max_logits.amax(0))


def attend_slots(call: AttendSlots) -> tuple[Tensor, Tensor, Tensor]:
    """Partial outputs [S, T, H, V], natural-log lse [S, T, H] and max_logits [S, T, H]."""
    q, selections, factor, value_dim, splits = call.q, call.selections, call.factor, call.value_dim, call.splits or 1
    dtype = accumulator(q)
    wide = dtype if dtype == torch.float64 else float32_products(q.device)
    tokens, heads, width = q.shape
    columns = sum(s.slots.shape[1] for s in selections)
    out = torch.zeros(splits, tokens, heads, value_dim, dtype=dtype, device=q.device)
    lse = torch.full((splits, tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    max_logits = torch.full_like(lse, -torch.inf)
    step = max(1, _WORKING_BYTES // max(1, columns * width * wide.itemsize))
    per_split = ceil_div(columns, splits)
    # Trimming saves time where short contexts leave most of a wide selection empty. On a device it would wait for the
    # values. With a given number of splits, a row's bits must not depend on the others' lengths.
    trim = call.splits is None and q.device.type == "cpu"
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        pairs = [selected_rows(s, start, end, wide, trim=trim) for s in selections]
        keys = pairs[0][0] if len(pairs) == 1 else torch.cat([p[0] for p in pairs], dim=1)
        valid = torch.cat([p[1] for p in pairs], dim=1)
        logits = torch.bmm(q[start:end].to(wide), keys.transpose(1, 2)) * factor
        logits.masked_fill_(~valid.unsqueeze(1), -torch.inf)
        for split in range(splits):
            span = slice(split * per_split, min((split + 1) * per_split, columns))
            part = logits[..., span]
            if part.shape[-1] == 0:
                continue
            largest = part.amax(-1)
            # An empty row has a maximum of -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
            weights = torch.exp(part - largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(-1))
            total = weights.sum(-1)
            values = torch.bmm(weights, keys[:, span, :value_dim])
            out[split, start:end] = values / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
            lse[split, start:end] = torch.where(total > 0, largest + total.log(), largest)
            max_logits[split, start:end] = largest
    return out, lse, max_logits


def selected_rows(
    selection: Selection, start: int, end: int, dtype: torch.dtype, *, trim: bool
) -> tuple[Tensor, Tensor]:
    """Dequantised rows [t, K, width] of query tokens start..end and which of them count [t, K].

    With `trim`, columns past the last one that any of these tokens uses are left out.
    """
    cache, slots = selection.cache, selection.slots[start:end]
    if selection.request_ids is not None and selection.block_table is not None:
        ids, table, size = selection.request_ids[start:end], selection.block_table, cache.page_size
        call = TranslatePositions(slots, ids, table, size, size, None, None, (1, 0, 1), False, "reference")
        slots, _ = translate_positions(call)
    valid = (slots >= 0) & (slots < cache.rows)
    if selection.lengths is not None:
        columns = torch.arange(slots.shape[1], dtype=torch.int64, device=slots.device)
        valid &= columns < selection.lengths[start:end].unsqueeze(1)
    if trim:
        used = valid.any(0).nonzero()
        last = int(used[-1]) + 1 if len(used) else 0
        slots, valid = slots[:, :last], valid[:, :last]
    rows = decode_rows(cache, torch.where(valid, slots, 0).long().reshape(-1)).to(dtype)
    rows = rows.view(*slots.shape, cache.layout.width)
    # Masked columns read row 0, which may hold NaN, and 0 * NaN would make the whole sum NaN.
    return rows.masked_fill_(~valid.unsqueeze(-1), 0.0), valid
