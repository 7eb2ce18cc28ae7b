"""The stages in plain torch operations for exactly the shapes of the benchmarks, with few masks and no checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cache.fields import E4M3_MAX
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.lab.bench.index_sets import IndexSet, ScoreSet, TopkSet
from tamis.lab.bench.inputs import V4_PAGE, V4_RATIOS, AttendSet, GatherSet, InputSet, SelectSet, TranslateSet, WriteSet
from tamis.lab.bench.v4_inputs import CompressSet

WORKING_BYTES = {"cuda": 2**31, "cpu": 2**26}
"""Most bytes of dequantised rows held at once, since those of a whole prefill would not fit."""


def call_for(item: InputSet) -> Callable[[], Any]:
    """A call that does the same as the set's `run`; NotImplementedError for formats that have no baseline."""
    if isinstance(item, AttendSet):
        for selection in item.selections:
            _known(selection.cache.layout)
        return partial(attend, item)
    if isinstance(item, WriteSet):
        if item.cache.layout.scale_mode not in ("pow2", "none") or item.cache.layout.rounding != "none":
            raise NotImplementedError(f"no torch baseline for {item.cache.layout.name}")
        return partial(write, item, own_cache(item.cache))
    if isinstance(item, GatherSet):
        _known(item.cache.layout)
        if len(set(item.lengths.tolist())) > 1:
            raise NotImplementedError("no torch baseline for requests of different lengths")
        return partial(gather, item, torch.zeros_like(item.out))
    if isinstance(item, SelectSet):
        return partial(select_rows, item)
    if isinstance(item, CompressSet):
        raise NotImplementedError("no torch baseline for the small launches of a V4 layer")
    if isinstance(item, ScoreSet):
        _known(item.cache.layout)
        return partial(score, item)
    if isinstance(item, TopkSet):
        if bool((item.lengths < item.scores.shape[1]).any()):
            raise NotImplementedError("no torch baseline for rows of different lengths")
        return partial(select, item.scores, item.k)
    if isinstance(item, IndexSet):
        _known(item.scored.cache.layout)
        return lambda: select(score(item.scored), item.k)
    return partial(translate, item)


def own_cache(cache: PagedCache) -> PagedCache:
    """Another cache of the same kind, so that a peer does not overwrite the inputs of tamis."""
    return PagedCache(cache.layout, cache.pages, cache.page_size, cache.device, scale=cache.scale)


def _known(layout: Layout) -> None:
    if layout.scale_mode == "tensor" or layout.packed:
        raise NotImplementedError(f"no torch baseline for {layout.name}")


def rows(cache: PagedCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantised rows [N, width] of slots [N]."""
    layout = cache.layout
    page, row = slots // cache.page_size, slots % cache.page_size
    values: Tensor = cache.field(layout.values)[page, row]
    if layout.scales is None:
        return values.to(dtype)
    scales = cache.field(layout.scales)[page, row][:, : layout.latent // layout.tile]
    if layout.scale_mode == "exponent":
        scales = torch.exp2(scales.float() - 127)
    latent: Tensor = values.view(torch.float8_e4m3fn).to(dtype).view(len(slots), -1, layout.tile)
    latent = (latent * scales.to(dtype).unsqueeze(-1)).flatten(1)
    if layout.tail is None:
        return latent
    return torch.cat((latent, cache.field(layout.tail)[page, row].to(dtype)), dim=1)


def attend(item: AttendSet) -> Tensor:
    """Gather and dequantise rows, then two matrix products and a softmax, some tokens at a time."""
    # 16-bit matrix products are slow or missing on many CPUs.
    dtype = torch.bfloat16 if item.q.device.type == "cuda" else torch.float32
    tokens, _, width = item.q.shape
    columns = sum(s.slots.shape[1] for s in item.selections)
    step = max(1, WORKING_BYTES[item.q.device.type] // (columns * width * dtype.itemsize))
    parts = [_attend_some(item, slice(begin, begin + step), dtype) for begin in range(0, tokens, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_some(item: AttendSet, span: slice, dtype: torch.dtype) -> Tensor:
    keys = torch.cat([_selected(s, span, dtype) for s in item.selections], dim=1)
    absent = torch.cat([s.slots[span] < 0 for s in item.selections], dim=1)
    logits = torch.bmm(item.q[span].to(dtype), keys.transpose(1, 2)).float() * item.scale
    weights = torch.softmax(logits.masked_fill(absent.unsqueeze(1), -torch.inf), dim=-1).to(dtype)
    return torch.bmm(weights, keys[..., : item.value_dim]).to(item.q.dtype)


def _selected(selection: Selection, span: slice, dtype: torch.dtype) -> Tensor:
    slots = selection.slots[span].clamp_min(0)
    return rows(selection.cache, slots.flatten().long(), dtype).view(*slots.shape, -1)


def write(item: WriteSet, cache: PagedCache) -> PagedCache:
    """Quantise by the power-of-two scale of each tile, then one indexed store per field."""
    layout = cache.layout
    page, row = item.slots // cache.page_size, item.slots % cache.page_size
    if layout.scales is None or layout.tail is None:
        cache.field(layout.values)[page, row] = item.kv.to(layout.element)
        return cache
    tiles = item.kv[:, : layout.latent].float().unflatten(1, (-1, layout.tile))
    smallest = (tiles.abs().amax(-1) / E4M3_MAX).clamp_min(layout.scale_floor)
    scales = torch.exp2(torch.ceil(torch.log2(smallest)))
    codes = (tiles / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    cache.field(layout.values)[page, row] = codes.flatten(1).view(torch.uint8)
    cache.field(layout.scales)[page, row] = scales
    cache.field(layout.tail)[page, row] = item.kv[:, layout.latent :].to(layout.tail.dtype)
    return cache


def gather(item: GatherSet, out: Tensor) -> Tensor:
    """Compute the slots of all positions and read their rows. All requests must have the same length."""
    length = out.shape[0] // len(item.lengths)
    position = torch.arange(length, dtype=torch.int64, device=out.device)
    page = item.block_table.long()[:, : ceil_div(length, item.cache.page_size)].repeat_interleave(
        item.cache.page_size, 1
    )
    slots = page[:, :length] * item.cache.page_size + position % item.cache.page_size
    return out.copy_(rows(item.cache, slots.flatten(), torch.bfloat16))


def translate(item: TranslateSet) -> Tensor:
    """Look up each position's page with one gather from the block table."""
    positions = item.positions.long()
    page = item.block_table[item.request_ids.long()].gather(1, positions.clamp_min(0) // item.page_size)
    return torch.where(positions >= 0, page * item.page_size + positions % item.page_size, -1).int()


def select_rows(item: SelectSet) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute positions, look up their pages with a gather from each block table, and mask the rest."""
    position, request = item.positions.long().unsqueeze(1), item.request_ids.long()
    raw, pages = item.window_table[request], item.entry_table[request]
    column = torch.arange(item.windows.shape[1], dtype=torch.int64, device=position.device)
    seen = (position + 1 - len(column)).clamp_min(0) + column
    windows = torch.where(seen <= position, _slots(seen.clamp_max(position), raw, item.page_size), -1)
    number = torch.arange(item.every.shape[1], dtype=torch.int64, device=position.device)
    largest = V4_PAGE // V4_RATIOS[-1]
    held = number.clamp_max(pages.shape[1] * largest - 1).expand(len(position), -1)
    every = torch.where(number < (position + 1) // V4_RATIOS[-1], _slots(held, pages, largest), -1)
    first, second = (
        torch.where((position + 1) % ratio == 0, _slots(position // ratio, pages, V4_PAGE // ratio), -1)[:, 0]
        for ratio in V4_RATIOS
    )
    return windows.int(), every.int(), first.long(), second.long()


def _slots(positions: Tensor, table: Tensor, page_size: int) -> Tensor:
    return table.gather(1, positions // page_size) * page_size + positions % page_size


def score(item: ScoreSet) -> Tensor:
    """Read a request's keys once, then one product and a weighted sum over heads, some tokens at a time."""
    dtype = torch.bfloat16 if item.q.device.type == "cuda" else torch.float32
    scores = torch.full((len(item.q), item.width), -torch.inf, dtype=torch.float32, device=item.q.device)
    for tokens, slots in item.request_keys:
        keys = rows(item.cache, slots, dtype)
        step = max(1, WORKING_BYTES[item.q.device.type] // (len(keys) * item.q.shape[1] * 8))
        for begin in range(tokens.start, tokens.stop, step):
            some = slice(begin, min(begin + step, tokens.stop))
            logits = torch.relu_(item.q[some].to(dtype) @ keys.T).float()
            scores[some, : len(keys)] = torch.einsum("th,ths->ts", item.weights[some], logits)
            if tokens.stop - tokens.start > 1:
                column = torch.arange(item.width, dtype=torch.int32, device=scores.device)
                scores[some].masked_fill_(column >= item.lengths[some].unsqueeze(1), -torch.inf)
    return scores


def select(scores: Tensor, k: int) -> Tensor:
    """The positions from `torch.topk`, -1 where a row has fewer scores above -inf."""
    best = scores.topk(min(k, scores.shape[1]), dim=1, sorted=False)
    return torch.where(best.values > -torch.inf, best.indices, -1).int()
