"""Pools spans of tokens into entries, in plain torch: the definition that kernels are tested against."""

import torch
from torch import Tensor

from tamis.cache.codec import fetch_field, write_rows
from tamis.cache.paged import PagedCache
from tamis.cache.slots import slots_of
from tamis.model.rope import rms_norm
from tamis.ops.compress.operations import CompressKv, PoolKv
from tamis.ops.rotate.reference import insert, rotate_tail

_WORKING_BYTES = 32 * 2**20
"""How many bytes of state rows are read at once."""


def compress_kv(call: CompressKv) -> None:
    """Write the state rows of all tokens, then the entries that some complete; see `tamis.ops.compress_kv`."""
    state, cache, slots, ratio = call.state, call.cache, call.slots, call.bias.shape[0]
    position = _positions(call.positions)
    known = torch.where(position >= 0, call.state_slots.long(), -1)
    biased = call.scores.float() + call.bias.float()[position % ratio]
    write_rows(torch.cat((call.values.float(), biased), dim=1), state, known)
    ends = (position >= 0) & ((position + 1) % ratio == 0) & (slots >= 0) & (slots < cache.rows)
    tokens = ends.nonzero().squeeze(1)
    span = ratio * (call.values.shape[1] // cache.layout.width)
    step = max(1, _WORKING_BYTES // (span * state.layout.row_bytes))
    for part in tokens.split(step):
        found = span_slots(state, position[part], call.request_ids[part], call.block_table, span)
        pooled = pool_rows(state, found, cache.layout.width)
        entries = pooled if call.norm_weight is None else rms_norm(pooled, call.norm_weight.float(), call.eps)
        if call.cos_sin is not None:
            entries = rotate_tail(entries, position[part] + 1 - ratio, call.cos_sin)
        insert(entries, cache, slots[part], call.hadamard)


def pool_kv(call: PoolKv) -> Tensor:
    """Write the state rows of all tokens; latents [T, D] of the spans that some end. See `tamis.ops.pool_kv`."""
    state, width = call.state, call.values.shape[1]
    position = _positions(call.positions)
    known = torch.where(position >= 0, call.state_slots.long(), -1)
    write_rows(torch.cat((call.values.float(), call.scores.float()), dim=1), state, known)
    latents = torch.zeros(call.values.shape, dtype=call.dtype, device=call.values.device)
    tokens = ((position >= 0) & ((position + 1) % call.ratio == 0)).nonzero().squeeze(1)
    for part in tokens.split(max(1, _WORKING_BYTES // (call.ratio * state.layout.row_bytes))):
        found = span_slots(state, position[part], call.request_ids[part], call.block_table, call.ratio)
        pooled = pool_rows(state, found, width)
        latents[part] = rms_norm(pooled, call.norm_weight.float(), call.eps).to(call.dtype)
    return latents


def _positions(positions: Tensor) -> Tensor:
    """int64 positions, with -1 for those past 32 bits: no request is that long."""
    position = positions.long()
    return torch.where(position < 2**31, position, -1)


def span_slots(state: PagedCache, last: Tensor, request_ids: Tensor, block_table: Tensor, span: int) -> Tensor:
    """State slots [N, span] of the tokens up to and including position `last`.

    A slot is -1 before the request's start and where its block table has no page.
    """
    position = last.unsqueeze(1) - torch.arange(span - 1, -1, -1, dtype=torch.int64, device=last.device)
    return slots_of(position, request_ids, block_table, state.page_size, state.pages)


def pool_rows(state: PagedCache, slots: Tensor, width: int) -> Tensor:
    """Entries [N, width] from spans [N, S] of state rows, by a softmax per channel; slots of -1 take no part."""
    absent = (slots < 0).unsqueeze(2)
    rows = fetch_field(state, state.layout.values, slots.clamp_min(0).flatten())
    values, scores = rows.view(*slots.shape, state.layout.width).chunk(2, dim=2)
    if values.shape[2] > width:
        # Spans overlap: the earlier half of the tokens is pooled from its first channels, the later from its second.
        half = slots.shape[1] // 2
        values, scores = (
            torch.cat((part[:, :half, :width], part[:, half:, width:]), dim=1) for part in (values, scores)
        )
    # Absent rows may hold NaN, and 0 * NaN would make the whole sum NaN.
    weights = scores.masked_fill(absent, -torch.inf).softmax(1).masked_fill(absent, 0.0)
    return (weights * values.masked_fill(absent, 0.0)).sum(1)
