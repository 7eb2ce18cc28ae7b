"""Stage `index` in plain torch: the definition that kernels are tested against.

A score's bits depend on its token and its key alone. The products run token by token over blocks of keys of one fixed
shape, in float64, and are rounded once. A matrix product over the whole batch would choose its order of summation by
the size of the batch.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from tamis.arithmetic import ceil_div, round_up
from tamis.cache.codec import decode_e2m1, encode_rows, fetch_field, write_rows
from tamis.cache.paged import PagedCache
from tamis.cache.slots import slots_of
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.operations import (
    IndexScores,
    IndexTopk,
    QuantiseIndexQuery,
    RaggedScores,
    TopkPositions,
    WriteIndexKeys,
)
from tamis.ops.index.rotation import rotate_rows

KEY_BLOCK = 1024
"""Keys per product."""
LOGIT_BYTES = 4 << 20
"""Memory for the logits of some tokens and one block of keys, before the sum over heads."""
BYTES_PER_SCORE = 40
"""Memory for selecting from one score, at worst: the score, a cleaned copy, and a stable sort with 64-bit indices."""


def quantise_index_query(call: QuantiseIndexQuery) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D] and float32 weights [T, H]; see `tamis.ops.quantise_index_query`."""
    q, weights = call.q, call.weights
    rotated = rotate_rows(q, call.positions, call.cos_sin, call.recipe, call.layout.rounding)
    values, scales, _ = encode_rows(rotated.reshape(-1, q.shape[2]), call.layout)
    assert scales is not None
    return values.view(torch.float8_e4m3fn).view(q.shape), weights.float() * call.scale * scales.view(weights.shape)


def write_index_keys(call: WriteIndexKeys) -> None:
    """Insert keys; see `tamis.ops.write_index_keys`."""
    count = len(call.slots)
    keys, positions = call.keys[:count], None if call.positions is None else call.positions[:count]
    if call.norm_weight is not None:
        bias = None if call.norm_bias is None else call.norm_bias.float()
        keys = layer_norm(keys.float(), keys.shape[1:], call.norm_weight.float(), bias, call.norm_eps)
    rotated = rotate_rows(keys, positions, call.cos_sin, call.recipe, call.cache.layout.rounding)
    write_rows(rotated, call.cache, call.slots)


def index_scores(call: IndexScores) -> None:
    """Fill `call.out`; see `tamis.ops.index_scores`."""
    cache, block_table, out = call.cache, call.block_table, call.out
    out.fill_(-torch.inf)
    visible = call.lengths.long().clamp(0, min(out.shape[1], block_table.shape[1] * cache.page_size))
    for request in call.request_ids.unique().tolist():
        if not 0 <= request < len(block_table):
            continue
        tokens = (call.request_ids == request).nonzero().squeeze(1)
        context = int(visible[tokens].max())
        table = block_table[request : request + 1]

        def read(first: int, table: Tensor = table) -> _KeyBlock:
            return _cached_keys(cache, table, first)

        _score_tokens(call, tokens, torch.zeros_like(visible), visible, context, read)


def ragged_scores(call: RaggedScores) -> None:
    """Fill `call.out`; see `tamis.ops.ragged_scores`."""
    keys, key_scales, total = call.keys, call.key_scales, call.keys.shape[0]
    call.out.fill_(-torch.inf)

    def read(first: int) -> _KeyBlock:
        row = torch.arange(first, first + KEY_BLOCK, dtype=torch.int64, device=keys.device)
        known = row.clamp_max(total - 1)
        if keys.dtype == torch.uint8 and key_scales is not None:
            return _KeyBlock(decode_e2m1(keys[known], key_scales[known]), None, row < total)
        return _KeyBlock(_rows(keys, known), None if key_scales is None else key_scales[known], row < total)

    tokens = torch.arange(call.q.shape[0], dtype=torch.int64, device=call.q.device)
    _score_tokens(call, tokens, call.starts.long().clamp_min(0), call.ends.long().clamp_max(total), total, read)


def topk_positions(call: TopkPositions) -> Tensor:
    """Positions, or slots if there is a block table, int32 [T, k]; see `tamis.ops.topk_positions`."""
    scores, k = call.scores, call.k
    total, width = scores.shape
    result = torch.full((total, k), -1, dtype=torch.int32, device=scores.device)
    if scores.numel() == 0:
        return result
    hidden = torch.arange(width, dtype=torch.int64, device=scores.device) >= call.lengths.unsqueeze(1)
    hidden |= scores.isnan()
    # Adding 0.0 makes -0.0 positive: some sorts tell the two apart.
    cleaned = (scores + 0.0).masked_fill_(hidden, -torch.inf)
    best, order = cleaned.sort(dim=1, descending=True, stable=True)
    count = min(k, width)
    # Columns that are not selected become `width`, so that the second sort puts them last.
    chosen = order[:, :count].masked_fill(best[:, :count] == -torch.inf, width).sort(dim=1).values
    result[:, :count] = chosen.masked_fill_(chosen == width, -1).int()
    if call.request_ids is None or call.block_table is None or call.page_size is None:
        return result
    return slots_of(result, call.request_ids, call.block_table, call.page_size).int()


def index_topk(call: IndexTopk) -> None:
    """Fill `call.out`, for as many tokens at a time as the workspace holds scores of."""
    for _, chunk, scores in _scored(call):
        chunk.out[:] = _best(scores, chunk.lengths, call.k)
        chunk.keep_scores(scores)


def index_topk_and_blocks(call: IndexTopkAndBlocks) -> None:
    """Fill `call.out` and `call.blocks`; see `tamis.ops.index_topk_and_blocks`."""
    for some, chunk, scores in _scored(call.topk):
        chunk.out[:] = _best(scores, chunk.lengths, call.k)
        call.blocks[some] = best_blocks(scores, chunk.lengths, call.blocks.shape[1], call.block_size)


def best_blocks(scores: Tensor, lengths: Tensor, count: int, size: int) -> Tensor:
    """The best blocks int32 [T, count] of positions with scores [T, S], of which a token sees the first `lengths`."""
    total, width = scores.shape
    blocks = ceil_div(width, size)
    column = torch.arange(blocks * size, dtype=torch.int64, device=scores.device)
    visible = lengths.long().clamp(0, width).unsqueeze(1)
    padded = torch.full((total, blocks * size), -torch.inf, dtype=torch.float32, device=scores.device)
    padded[:, :width] = scores.masked_fill(scores.isnan(), -torch.inf)
    best = padded.masked_fill_(column >= visible, -torch.inf).view(total, blocks, size)
    best = best.amax(2) if blocks else best.new_empty(total, 0, dtype=torch.float32)
    # The block of the newest position, which is selected whatever it scores; -1 for a token that sees nothing.
    newest = torch.where(visible > 0, (visible - 1) // size, -1)
    best = best.masked_fill(column[:blocks] == newest, torch.inf)
    return _best(best, torch.full_like(lengths, blocks), count)


def index_topk_within(call: IndexTopkWithin) -> None:
    """Fill `call.out`; see `tamis.ops.index_topk_within`."""
    for some, chunk, scores in _scored(call.topk):
        width, rows = scores.shape[1], len(scores)
        allowed = torch.zeros(rows, ceil_div(width, call.block_size) + 1, dtype=torch.bool, device=scores.device)
        # Blocks that there are not, and -1, mark the last column, which no position has.
        last = allowed.shape[1] - 1
        blocks = call.candidates[some].long()
        allowed.scatter_(1, torch.where((blocks >= 0) & (blocks < last), blocks, last), value=True)
        within = allowed[:, :last].repeat_interleave(call.block_size, dim=1)[:, :width]
        chunk.out[:] = _best(scores.masked_fill(~within, -torch.inf), chunk.lengths, call.k)


def _scored(call: IndexTopk) -> Iterator[tuple[slice, IndexTopk, Tensor]]:
    """Scores [t, width] of as many tokens at a time as the workspace holds, with the part of the call for them."""
    q = call.q
    if q.shape[0] == 0:
        return
    width = min(call.block_table.shape[1] * call.cache.page_size, max(0, int(call.lengths.max())))
    tokens = max(1, call.workspace_bytes // max(1, BYTES_PER_SCORE * width))
    scores = torch.empty(min(tokens, q.shape[0]), width, dtype=torch.float32, device=q.device)
    for some, chunk in call.chunks(tokens):
        out = scores[: len(chunk.lengths)]
        index_scores(chunk.scoring(out))
        yield some, chunk, out


def _best(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    return topk_positions(TopkPositions(scores, lengths, k, None, None, None, "reference"))


class _KeyBlock(NamedTuple):
    """Consecutive keys."""

    keys: Tensor
    """[KEY_BLOCK, D]"""
    scales: Tensor | None
    """float32 [KEY_BLOCK]; None if all are 1, or multiplied into the keys."""
    present: Tensor
    """bool [KEY_BLOCK]; keys that are not present are not scored."""


def _score_tokens(
    call: IndexScores | RaggedScores,
    tokens: Tensor,
    starts: Tensor,
    ends: Tensor,
    context: int,
    read: Callable[[int], _KeyBlock],
) -> None:
    """Fill the rows of some tokens between their bounds, reading each block of keys once for all of them.

    Args:
        call: queries, weights and result.
        tokens: int64 [t], which tokens.
        starts: int64 [T], the first key that each token of the batch sees.
        ends: int64 [T], one past the last.
        context: how many keys there are.
        read: the block of keys from a position on.
    """
    q, weights, out = call.q, call.weights, call.out
    together = max(1, LOGIT_BYTES // (8 * KEY_BLOCK * max(1, q.shape[1])))
    column = torch.arange(KEY_BLOCK, dtype=torch.int64, device=q.device)
    for first in range(0, context, KEY_BLOCK):
        block = read(first)
        keys = block.keys.double().T.contiguous()
        low, high = (starts[tokens] - first).unsqueeze(1), (ends[tokens] - first).unsqueeze(1)
        sees = ((low < KEY_BLOCK) & (high > 0) & (low < high)).squeeze(1).nonzero().squeeze(1)
        for some in sees.split(together):
            queries = _aligned(_rows(q, tokens[some]).flatten(1)).unflatten(1, q.shape[1:])
            factors = _aligned(weights[tokens[some]])
            logits = torch.empty(len(some), q.shape[1], KEY_BLOCK, dtype=torch.float64, device=q.device)
            scores = torch.empty(len(some), KEY_BLOCK, dtype=torch.float64, device=q.device)
            for token in range(len(some)):
                torch.mm(queries[token], keys, out=logits[token])
            logits.relu_()
            for token in range(len(some)):
                torch.mv(logits[token].T, factors[token], out=scores[token])
            scores = scores if block.scales is None else scores * block.scales
            inside = block.present & (column >= low[some]) & (column < high[some])
            width = min(KEY_BLOCK, out.shape[1] - first)
            found = torch.where(inside, scores.float(), -torch.inf)
            out[tokens[some], first : first + width] = found[:, :width]


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """values[chosen]. Not every device can index FP8 tensors, but all can index bytes."""
    if values.element_size() > 1:
        return values[chosen]
    return values.view(torch.uint8)[chosen].view(values.dtype)


def _aligned(rows: Tensor) -> Tensor:
    """float64 rows [T, n] that all start on 64 bytes: with another alignment a product may sum in another order."""
    count = rows.shape[1]
    wide = torch.empty(len(rows), round_up(count, 8), dtype=torch.float64, device=rows.device)
    wide[:, :count] = rows
    return wide[:, :count]


def _cached_keys(cache: PagedCache, table: Tensor, first: int) -> _KeyBlock:
    """One request's keys from position `first` on."""
    positions = torch.arange(first, first + KEY_BLOCK, dtype=torch.int64, device=table.device).unsqueeze(0)
    request = torch.zeros(1, dtype=torch.int64, device=table.device)
    slots = slots_of(positions, request, table, cache.page_size, cache.pages)[0]
    known, present = slots.clamp_min(0), slots >= 0
    values = fetch_field(cache, cache.layout.values, known)
    if cache.layout.scales is None:
        return _KeyBlock(values, None, present)
    scales = fetch_field(cache, cache.layout.scales, known)
    if cache.layout.packed:
        return _KeyBlock(decode_e2m1(values, scales), None, present)
    return _KeyBlock(values.view(torch.float8_e4m3fn), scales.squeeze(1), present)
