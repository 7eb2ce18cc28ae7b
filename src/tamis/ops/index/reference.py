"""Index queries and keys made ready, scores and exact top-k, in plain torch: the definition that kernels are tested
against.

A score's bits depend on its token and its key alone. The products run token by token over blocks of keys of one fixed
shape, in float64, and are rounded once: a matrix product over the whole batch would choose its order of sums by the
batch's size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from tamis.arithmetic import ceil_div
from tamis.cache.codec import decode_e2m1, encode_rows, fetch_field, write_rows
from tamis.cache.layout import Layout, Rounding
from tamis.cache.paged import PagedCache
from tamis.cache.slots import slots_of
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import hadamard, rotate

KEY_BLOCK = 1024
"""Keys per product."""
LOGIT_BYTES = 4 << 20
"""What the products of a few tokens with one block of keys take before the heads are summed."""
BYTES_PER_SCORE = 40
"""What selecting from one score takes at worst: the score, a cleaned copy, and a stable sort with its 64-bit order."""


def quantise_index_query(
    q: Tensor,
    weights: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    recipe: IndexRecipe,
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, H, D], encoded like rows of `layout`, and float32 weights [T, H] with both scales folded in."""
    turned = prepare_rows(q, positions, cos_sin, recipe, layout.rounding)
    values, scales, _ = encode_rows(turned.reshape(-1, q.shape[2]), layout)
    assert scales is not None
    return values.view(torch.float8_e4m3fn).view(q.shape), weights.float() * scale * scales.view(weights.shape)


def write_index_keys(
    keys: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm_eps: float,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    recipe: IndexRecipe,
) -> None:
    """Keys [T, D] into the cache; see `tamis.ops.write_index_keys`."""
    if norm_weight is not None:
        bias = None if norm_bias is None else norm_bias.float()
        keys = layer_norm(keys.float(), keys.shape[1:], norm_weight.float(), bias, norm_eps)
    write_rows(prepare_rows(keys, positions, cos_sin, recipe, cache.layout.rounding), cache, slots)


def prepare_rows(
    x: Tensor, positions: Tensor | None, cos_sin: Tensor | None, recipe: IndexRecipe, rounding: Rounding
) -> Tensor:
    """Rows [T, D] or heads [T, H, D] after rope and Hadamard rotation in float32; a position that the table does not
    have is not rotated."""
    if positions is not None and cos_sin is not None:
        rope, width = recipe.rope_dim, x.shape[-1]
        start = 0 if recipe.rope_first else width - rope
        front, middle, back = x.float().split([start, rope, width - start - rope], dim=-1)
        position = positions.long().view(-1, *[1] * (x.dim() - 2))
        angles = cos_sin[position.clamp(0, len(cos_sin) - 1)]
        known = ((position >= 0) & (position < len(cos_sin))).unsqueeze(-1)
        turned = torch.where(known, rotate(middle, angles, interleaved=recipe.interleaved), middle)
        x = torch.cat((front, turned, back), dim=-1)
    if not recipe.hadamard:
        return x
    return hadamard(x.bfloat16() if rounding == "bf16" else x)


def index_scores(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    out: Tensor,
) -> None:
    """Fill `out`, float32 [T, width]; see `tamis.ops.index_scores`."""
    out.fill_(-torch.inf)
    visible = lengths.long().clamp(0, min(out.shape[1], block_table.shape[1] * cache.page_size))
    for request in request_ids.unique().tolist():
        if not 0 <= request < len(block_table):
            continue
        tokens = (request_ids == request).nonzero().squeeze(1)
        context = int(visible[tokens].max())
        table = block_table[request : request + 1]

        def block(first: int, table: Tensor = table) -> tuple[Tensor, Tensor | None, Tensor]:
            return _cached_keys(cache, table, first)

        _score_tokens(q, weights, tokens, torch.zeros_like(visible), visible, context, block, out)


def ragged_scores(
    q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None, starts: Tensor, ends: Tensor, out: Tensor
) -> None:
    """Fill `out`, float32 [T, N]; see `tamis.ops.ragged_scores`."""
    out.fill_(-torch.inf)
    total = keys.shape[0]

    def block(first: int) -> tuple[Tensor, Tensor | None, Tensor]:
        row = torch.arange(first, first + KEY_BLOCK, dtype=torch.int64, device=keys.device)
        known = row.clamp_max(total - 1)
        if keys.dtype == torch.uint8 and key_scales is not None:
            return decode_e2m1(keys[known], key_scales[known]), None, row < total
        return _rows(keys, known), None if key_scales is None else key_scales[known], row < total

    tokens = torch.arange(q.shape[0], dtype=torch.int64, device=q.device)
    _score_tokens(q, weights, tokens, starts.long().clamp_min(0), ends.long().clamp_max(total), total, block, out)


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None,
    block_table: Tensor | None,
    page_size: int,
) -> Tensor:
    """Positions, or slots where there is a block table, int32 [T, k]; see `tamis.ops.topk_positions`."""
    total, width = scores.shape
    result = torch.full((total, k), -1, dtype=torch.int32, device=scores.device)
    if scores.numel() == 0:
        return result
    hidden = torch.arange(width, dtype=torch.int64, device=scores.device) >= lengths.unsqueeze(1)
    hidden |= scores.isnan()
    # Adding 0.0 makes -0.0 positive: some sorts tell the two apart.
    cleaned = (scores + 0.0).masked_fill_(hidden, -torch.inf)
    best, order = cleaned.sort(dim=1, descending=True, stable=True)
    count = min(k, width)
    # Whatever is not selected moves behind every position.
    chosen = order[:, :count].masked_fill(best[:, :count] == -torch.inf, width).sort(dim=1).values
    result[:, :count] = chosen.masked_fill_(chosen == width, -1).int()
    return result if request_ids is None or block_table is None else _slots(result, request_ids, block_table, page_size)


def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    workspace_bytes: int,
) -> Tensor:
    """Positions int32 [T, k], as many tokens at a time as the workspace holds scores of."""
    result = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    if q.shape[0] == 0:
        return result
    width = min(block_table.shape[1] * cache.page_size, max(0, int(lengths.max())))
    step = max(1, workspace_bytes // max(1, BYTES_PER_SCORE * width))
    scores = torch.empty(min(step, q.shape[0]), width, dtype=torch.float32, device=q.device)
    for start in range(0, q.shape[0], step):
        some = slice(start, start + step)
        part = scores[: len(q[some])]
        index_scores(q[some], weights[some], cache, request_ids[some], block_table, lengths[some], part)
        result[some] = topk_positions(part, lengths[some], k, None, None, 0)
    return result


def _score_tokens(
    q: Tensor,
    weights: Tensor,
    tokens: Tensor,
    starts: Tensor,
    ends: Tensor,
    context: int,
    block: Callable[[int], tuple[Tensor, Tensor | None, Tensor]],
    out: Tensor,
) -> None:
    """Fill the rows of some tokens between their bounds, reading each block of keys once for all of them."""
    together = max(1, LOGIT_BYTES // (8 * KEY_BLOCK * max(1, q.shape[1])))
    column = torch.arange(KEY_BLOCK, dtype=torch.int64, device=q.device)
    for first in range(0, context, KEY_BLOCK):
        raw, scales, there = block(first)
        keys = raw.double().T.contiguous()
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
            scores = scores if scales is None else scores * scales
            inside = there & (column >= low[some]) & (column < high[some])
            width = min(KEY_BLOCK, out.shape[1] - first)
            found = torch.where(inside, scores.float(), -torch.inf)
            out[tokens[some], first : first + width] = found[:, :width]


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """values[chosen]. FP8 cannot be indexed on every device; its bytes can."""
    if values.element_size() > 1:
        return values[chosen]
    return values.view(torch.uint8)[chosen].view(values.dtype)


def _aligned(rows: Tensor) -> Tensor:
    """float64 rows [T, n] that all start on 64 bytes: from another start, a product may sum in another order."""
    count = rows.shape[1]
    wide = torch.empty(len(rows), ceil_div(count, 8) * 8, dtype=torch.float64, device=rows.device)
    wide[:, :count] = rows
    return wide[:, :count]


def _cached_keys(cache: PagedCache, table: Tensor, first: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """A block of one request's keys, their scales unless these are inside the product, and which of them there are."""
    positions = torch.arange(first, first + KEY_BLOCK, dtype=torch.int64, device=table.device).unsqueeze(0)
    request = torch.zeros(1, dtype=torch.int64, device=table.device)
    slots = slots_of(positions, request, table, cache.page_size, cache.pages)[0]
    known = slots.clamp_min(0)
    raw = fetch_field(cache, cache.layout.values, known)
    if cache.layout.scales is None:
        return raw, None, slots >= 0
    scales = fetch_field(cache, cache.layout.scales, known)
    if cache.layout.packed:
        return decode_e2m1(raw, scales), None, slots >= 0
    return raw.view(torch.float8_e4m3fn), scales.squeeze(1), slots >= 0


def _slots(positions: Tensor, request_ids: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Slots of positions in the same columns, -1 where there is no page."""
    request, width = request_ids.long(), block_table.shape[1]
    if block_table.numel() == 0:
        return torch.full_like(positions, -1)
    page = positions.long() // page_size
    there = (positions >= 0) & (page < width) & ((request >= 0) & (request < len(block_table))).unsqueeze(1)
    table = block_table[request.clamp(0, len(block_table) - 1)]
    page_id = table.gather(1, page.clamp(0, width - 1)).long()
    slots = page_id * page_size + positions % page_size
    return torch.where(there & (page_id >= 0) & (slots < 2**31), slots, -1).int()
