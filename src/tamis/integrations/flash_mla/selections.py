"""The rows that each query token of a decode step attends to: those of its `indices`, or its whole request."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.integrations import _arguments
from tamis.integrations.flash_mla.formats import RowFormat
from tamis.ops import translate_positions


class Tokens(NamedTuple):
    """The arrangement of a decode step's query tokens."""

    requests: int
    per_request: int

    def repeat(self, values: Tensor) -> Tensor:
        """Repeat each request's row for its query tokens."""
        shape = (self.requests, self.per_request, *values.shape[1:])
        return values.unsqueeze(1).expand(shape).flatten(0, 1)


def selected(
    cache: PagedCache, name: str, indices: Tensor, length_name: str, lengths: Tensor | None, tokens: Tokens
) -> Selection:
    """The rows of `cache` that `indices` [b, s_q, topk] name."""
    columns = checks.tensor(
        name, indices, "b s_q topk", (torch.int32,), device=cache.device, b=tokens.requests, s_q=tokens.per_request
    )["topk"]
    if lengths is not None:
        _arguments.lengths(length_name, lengths, tokens.requests, columns, cache.device)
        lengths = tokens.repeat(lengths)
    return Selection(cache, indices.flatten(0, 1), lengths)


def read_at_once(q: Tensor, storage: Tensor, indices: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """What attention reads of a selection of a call that is known to be right, in the order of `read_by`."""
    if lengths is None:
        return [storage, indices]
    requests, queries = q.shape[:2]
    return [storage, indices, lengths if queries == 1 else Tokens(requests, queries).repeat(lengths)]


def extra_selected(
    storage: Tensor | None, indices: Tensor | None, lengths: Tensor | None, q: Tensor, tokens: Tokens, form: RowFormat
) -> list[Selection]:
    """The rows of the second cache, if there is one."""
    if storage is None:
        for name, value in (("extra_indices_in_kvcache", indices), ("extra_topk_length", lengths)):
            if value is not None:
                raise checks.refuse(name, "None without extra_k_cache", checks.describe(value), "pass the cache too")
        return []
    if indices is None:
        raise checks.refuse("extra_indices_in_kvcache", "given with extra_k_cache", None, "pass the second indices")
    cache = form.wrap("extra_k_cache", storage, q)
    return [selected(cache, "extra_indices_in_kvcache", indices, "extra_topk_length", lengths, tokens)]


def refuse_sparse_only(**values: Tensor | None) -> None:
    """Refuse what only goes with `indices`."""
    for name, value in values.items():
        if value is not None:
            raise checks.refuse(name, "None without indices (dense mode)", checks.describe(value), "pass indices too")


def whole_requests(
    cache: PagedCache,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    tokens: Tokens,
    *,
    causal: bool,
    full_width: bool,
) -> Selection:
    """Dense attention as a selection: all rows of each request, in order, with the request's length.

    With `full_width` the selection is as wide as the block table, whatever the longest request is.
    """
    count, device, ints = tokens.requests, cache.device, (torch.int32,)
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if value is None:
            raise checks.refuse(name, "given without indices (dense mode)", None, "pass it, or pass indices")
    assert block_table is not None
    assert cache_seqlens is not None
    pages = checks.tensor("block_table", block_table, "b W", ints, device=device, b=count)["W"]
    checks.tensor("cache_seqlens", cache_seqlens, "b", ints, device=device, b=count)
    columns = pages * cache.page_size
    checks.values_between("cache_seqlens", cache_seqlens, 0, columns, f"the block table covers {columns} rows")
    if device.type == "cpu":
        used = torch.arange(pages, dtype=torch.int64, device="cpu") * cache.page_size < cache_seqlens.unsqueeze(1)
        remedy = "every page within cache_seqlens must be one of k_cache"
        checks.values_between("block_table", block_table[used], 0, cache.pages - 1, remedy)
        # On the host the longest request is known, so that a wide block table costs nothing. On a device, reading it
        # would synchronise.
        if not full_width:
            columns = int(cache_seqlens.max()) if count else 0
    known = (block_table >= 0) & (block_table < cache.pages)
    positions = torch.arange(columns, dtype=torch.int32, device=device).expand(count, columns)
    requests = torch.arange(count, dtype=torch.int32, device=device)
    table = torch.where(known, block_table, -1)
    slots = translate_positions(positions, requests, table, page_size=cache.page_size).slots
    hidden = torch.arange(tokens.per_request - 1, -1, -1, dtype=torch.int32, device=device) * int(causal)
    lengths = (cache_seqlens.unsqueeze(1) - hidden).clamp_min(0).flatten()
    return Selection(cache, tokens.repeat(slots), lengths)
