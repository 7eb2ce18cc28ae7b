"""Pooling spans of tokens into entries, in plain torch: the definition that kernels are tested against."""

import torch
from torch import Tensor

from tamis.cache.codec import fetch_field, write_rows
from tamis.cache.paged import PagedCache
from tamis.model.rope import rms_norm
from tamis.ops.rotate.reference import insert, rotate_tail

_WORKING_BYTES = 32 * 2**20
"""State rows held at once."""


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
) -> None:
    """State rows of all tokens, then the entries that some of them complete; see `tamis.ops.compress_kv`."""
    ratio = bias.shape[0]
    position = positions.long()
    position = torch.where(position < 2**31, position, -1)  # no request is that long
    known = torch.where(position >= 0, state_slots.long(), -1)
    biased = scores.float() + bias.float()[position % ratio]
    write_rows(torch.cat((values.float(), biased), dim=1), state, known)
    ends = (position >= 0) & ((position + 1) % ratio == 0) & (slots >= 0) & (slots < cache.rows)
    tokens = ends.nonzero().squeeze(1)
    span = ratio * (values.shape[1] // cache.layout.width)
    step = max(1, _WORKING_BYTES // (span * state.layout.row_bytes))
    for part in tokens.split(step):
        found = span_slots(state, position[part], request_ids[part], block_table, span)
        pooled = pool_rows(state, found, cache.layout.width)
        entries = rms_norm(pooled, norm_weight.float(), eps)
        insert(rotate_tail(entries, position[part] + 1 - ratio, cos_sin), cache, slots[part], hadamard)


def span_slots(state: PagedCache, last: Tensor, request_ids: Tensor, block_table: Tensor, span: int) -> Tensor:
    """State slots [N, span] of the tokens up to and including `last`; -1 before a request's start and where its table
    has no page."""
    position = last.unsqueeze(1) - torch.arange(span - 1, -1, -1, dtype=torch.int64, device=last.device)
    page = position // state.page_size
    request = request_ids.long().unsqueeze(1)
    requests, width = block_table.shape
    inside = (position >= 0) & (page < width) & (request >= 0) & (request < requests)
    page_id = block_table[request.clamp(0, requests - 1), page.clamp(0, width - 1)].long()
    inside &= (page_id >= 0) & (page_id < state.pages)
    return torch.where(inside, page_id * state.page_size + position % state.page_size, -1)


def pool_rows(state: PagedCache, slots: Tensor, width: int) -> Tensor:
    """Entries [N, width] of spans [N, S] of state rows, by a softmax per channel; slots of -1 take no part."""
    absent = (slots < 0).unsqueeze(2)
    rows = fetch_field(state, state.layout.values, slots.clamp_min(0).flatten())
    values, scores = rows.view(*slots.shape, state.layout.width).chunk(2, dim=2)
    if values.shape[2] > width:
        # The earlier half of the tokens takes part with its first channels, the later half with its second.
        half = slots.shape[1] // 2
        values, scores = (
            torch.cat((part[:, :half, :width], part[:, half:, width:]), dim=1) for part in (values, scores)
        )
    # Rows that take no part may hold anything, and 0 * NaN would survive.
    weights = scores.masked_fill(absent, -torch.inf).softmax(1).masked_fill(absent, 0.0)
    return (weights * values.masked_fill(absent, 0.0)).sum(1)
