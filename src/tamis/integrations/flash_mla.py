"""Drop-in for the `flash_mla` module: the same functions, shapes and conventions, on any device.

    import sys
    import tamis.integrations.flash_mla
    sys.modules["flash_mla"] = tamis.integrations.flash_mla

is enough for code that does `import flash_mla`. The results are FlashMLA's. Beyond FlashMLA, any head count from 1 to
128, any top-k, any page size, unquantised caches in sparse mode, lengths and a second cache for every format, and dense
attention over FP8 pages work too.

Two conventions differ from the rest of tamis: the lse is [b, h, s_q] in decode, and a row with nothing valid has an lse
of +inf (in tamis -inf, the neutral element of a merge).
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout, rows, v4_fp8, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.cuda.device import sm_count
from tamis.integrations import _arguments, flash_mla_schedule
from tamis.ops import attend, translate_positions

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_sparse_prefill",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


@dataclass
class FlashMLASchedMeta:
    """The result of `get_mla_metadata` for `flash_mla_with_kvcache`. Unlike in FlashMLA, no call changes it."""

    tile_scheduler_metadata: Tensor | None = None
    """int32 [parts, 8]; see `flash_mla_schedule.SplitSchedule.parts`."""
    num_splits: Tensor | None = None
    """int32 [b + 1], the running sum of the number of splits of each request."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, Tensor | None]:
    """The schedule of a decode step, as (holder, num_splits). `flash_mla_with_kvcache` accepts it without needing it.

    Without arguments (today's FlashMLA): an empty holder and None. With the classic arguments `cache_seqlens` int32
    [b], `num_q_tokens_per_head_k` = s_q * h_q, `num_heads_k` = 1, and optionally `num_heads_q`, `is_fp8_kvcache` and
    `topk`: a filled holder and its `num_splits`. Without `topk` the lengths are read on the host, which synchronises
    with the device.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    try:
        given = signature(_spread_step).bind(*args, **kwargs)
    except TypeError as error:
        known = ", ".join(signature(_spread_step).parameters)
        raise TypeError(
            f"get_mla_metadata takes no arguments or ({known}): {error}; call it without arguments"
        ) from error
    holder = _spread_step(*given.args, **given.kwargs)
    return holder, holder.num_splits


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor | None,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of [b, s_q] query tokens over a paged cache: over `indices`, or without them over whole requests.

    Args:
        q: [b, s_q, h, d] in bf16, fp16 or fp32, h from 1 to 128.
        k_cache: [NB, BS, 1, C] with any page stride. C is d for bf16, fp16 or fp32 rows; with `is_fp8_kvcache` it is
            656 (d = 576) or 584 (d = 512, planar pages), stored as uint8, int8 or float8_e4m3fn.
        block_table: int32 [b, W] pages of each request; dense mode only, ignored with `indices`.
        cache_seqlens: int32 [b] rows of each request; dense mode only, ignored with `indices`.
        head_dim_v: how many leading columns of a row are its value (512).
        tile_scheduler_metadata: from `get_mla_metadata`; not needed, None is fine.
        num_splits: from `get_mla_metadata`; not needed either.
        softmax_scale: d**-0.5 if not given.
        causal: dense mode: the last query token sees the whole request, each earlier one a row less. Must be False
            with `indices`, which already determine what each token sees.
        is_fp8_kvcache: whether both caches hold packed FP8 rows.
        indices: int32 [b, s_q, topk], page * BS + row. Negative ones and ones past the cache are skipped; duplicates
            count twice.
        attn_sink: float32 [h]; scales the output by 1 / (1 + exp(sink - lse)) and leaves the lse alone.
        extra_k_cache: a second cache of any page size, joined in the same softmax.
        extra_indices_in_kvcache: int32 [b, s_q, extra_topk] into the second cache; required with it, else None.
        topk_length: int32 [b], how many leading columns of `indices` count; the others are never read.
        extra_topk_length: int32 [b], likewise for the second cache.

    Returns:
        out [b, s_q, h, head_dim_v] in q's dtype and lse float32 [b, h, s_q], natural logarithm; zeros and +inf where
        there is nothing to attend to.
    """
    sizes = checks.tensor("q", q, "b s_q h d", checks.FLOATS)
    tokens = _Tokens(sizes["b"], sizes["s_q"])
    _arguments.head_count("q", sizes["h"])
    checks.integer("head_dim_v", head_dim_v, low=1, high=sizes["d"])
    _check_flags(causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    _check_schedule(tile_scheduler_metadata, num_splits)
    _arguments.sink("attn_sink", attn_sink, sizes["h"], q.device)
    scale = sizes["d"] ** -0.5 if softmax_scale is None else checks.positive_number("softmax_scale", softmax_scale)
    cache = _wrap("k_cache", k_cache, q, packed=is_fp8_kvcache)
    extra = (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    if indices is None:
        _only_sparse(topk_length, *extra)
        selections = [_whole_requests(cache, block_table, cache_seqlens, tokens, causal)]
    else:
        if causal:
            raise checks.refuse("causal", "False with indices", causal, "leave future rows out of indices")
        selections = [_selection(cache, "indices", indices, "topk_length", topk_length, tokens)]
        selections += _extra_selection(*extra, q, tokens, packed=is_fp8_kvcache)
    attended = attend(q.flatten(0, 1), selections, scale=scale, value_dim=head_dim_v, sink=attn_sink)
    lse = attended.lse.unflatten(0, tokens).transpose(1, 2).contiguous()
    return attended.out.unflatten(0, tokens), _empty_is_plus_inf(lse)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query token over the rows of a flat list that `indices` names (FlashMLA's sparse prefill).

    Args:
        q: [s_q, h, d] in bf16, fp16 or fp32, h from 1 to 128.
        kv: [s_kv, 1, d] in bf16, fp16 or fp32, with any row stride.
        indices: int32 [s_q, 1, topk]; negative ones and ones >= s_kv are skipped, duplicates count twice.
        sm_scale: softmax scale.
        d_v: how many leading columns of a row are its value.
        attn_sink: float32 [h]; scales the output only.
        topk_length: int32 [s_q], how many leading columns of `indices` count; the others are never read.

    Returns:
        out [s_q, h, d_v] in q's dtype, max_logits and lse float32 [s_q, h], both after scaling and in natural-log
        units; zeros, -inf and +inf where there is nothing to attend to.
    """
    names = _RowNames("kv", "sm_scale")
    return _attend_rows(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, names)


def flash_mla_sparse_prefill(
    q: Tensor, kv_rows: Tensor, indices: Tensor, softmax_scale: float, d_v: int = 512
) -> Tensor:
    """`flash_mla_sparse_fwd` under the name that some vendors' builds use. It returns the output alone.

    The axis of size 1 may be left out: `kv_rows` is [s_kv, d] or [s_kv, 1, d], `indices` [s_q, topk] or [s_q, 1, topk].
    """
    kv_rows = kv_rows.unsqueeze(1) if isinstance(kv_rows, Tensor) and kv_rows.dim() == 2 else kv_rows
    indices = indices.unsqueeze(1) if isinstance(indices, Tensor) and indices.dim() == 2 else indices
    names = _RowNames("kv_rows", "softmax_scale")
    return _attend_rows(q, kv_rows, indices, softmax_scale, d_v, None, None, names)[0]


class _Tokens(NamedTuple):
    """The arrangement of a decode step's query tokens."""

    requests: int
    per_request: int

    def repeat(self, values: Tensor) -> Tensor:
        """Repeat each request's row for its query tokens."""
        shape = (self.requests, self.per_request, *values.shape[1:])
        return values.unsqueeze(1).expand(shape).flatten(0, 1)


class _RowNames(NamedTuple):
    """The names of the same arguments in the two prefill functions, for errors."""

    kv: str
    scale: str


def _spread_step(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> FlashMLASchedMeta:
    requests = checks.tensor("cache_seqlens", cache_seqlens, "b", (torch.int32,))["b"]
    checks.values_between("cache_seqlens", cache_seqlens, 0, 2**31 - 1, "a request cannot have fewer than 0 rows")
    query_rows = checks.integer("num_q_tokens_per_head_k", num_q_tokens_per_head_k, low=1)
    checks.integer("num_heads_k", num_heads_k, low=1, high=1)
    _check_flags(is_fp8_kvcache=is_fp8_kvcache)
    # Without a head count, all query rows count as heads of one token, which is the same amount of work.
    heads = query_rows if num_heads_q is None else checks.integer("num_heads_q", num_heads_q, low=1)
    if query_rows % heads:
        raise checks.refuse(
            "num_q_tokens_per_head_k", f"a multiple of num_heads_q = {heads}", query_rows, "pass s_q * num_heads_q"
        )
    if topk is None:
        columns = cache_seqlens.tolist()
    else:
        columns = [checks.integer("topk", topk, low=1)] * requests
    on_gpu = cache_seqlens.device.type == "cuda"
    capability = torch.cuda.get_device_capability(cache_seqlens.device)[0] if on_gpu else 9
    sms = sm_count(cache_seqlens.device)
    parts = flash_mla_schedule.part_count(sms, heads, query_rows // heads, capability_major=capability)
    spread = flash_mla_schedule.schedule_splits(columns, parts, overhead=3 if num_heads_q == 128 else 5)
    device = cache_seqlens.device
    return FlashMLASchedMeta(torch.from_numpy(spread.parts).to(device), torch.from_numpy(spread.splits).to(device))


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise checks.refuse_type(name, "True or False", checks.describe(value), "pass a bool")


def _check_schedule(metadata: object, num_splits: object) -> None:
    remedy = "pass what get_mla_metadata of this module returned, or None"
    if metadata is not None and not isinstance(metadata, FlashMLASchedMeta | Tensor):
        expected = "a FlashMLASchedMeta or a tensor"
        raise checks.refuse_type("tile_scheduler_metadata", expected, checks.describe(metadata), remedy)
    if num_splits is not None and not isinstance(num_splits, Tensor):
        raise checks.refuse_type("num_splits", "a tensor or None", checks.describe(num_splits), remedy)


def _row_layout(dtype: torch.dtype, width: int) -> Layout:
    """The layout of unquantised rows. The rope part is known for the row widths of the two model families."""
    latent = {576: 512, 512: 448}.get(width, width)
    return rows(dtype, latent=latent, rope=width - latent)


def _wrap(name: str, storage: Tensor, q: Tensor, *, packed: bool) -> PagedCache:
    width = q.shape[-1]
    if packed and width not in (576, 512):
        raise checks.refuse("q", "576 or 512 wide with is_fp8_kvcache", width, "use an unquantised cache")
    allowed = _arguments.ONE_BYTE if packed else checks.FLOATS
    if isinstance(storage, Tensor) and storage.dtype not in allowed:
        expected = f"{' or '.join(checks.dtype_name(d) for d in allowed)} with is_fp8_kvcache={packed}"
        remedy = "is_fp8_kvcache is True exactly for packed FP8 rows"
        raise checks.refuse_type(name, expected, checks.describe(storage), remedy)
    if packed:
        layout = v32_fp8() if width == 576 else v4_fp8()
    else:
        layout = _row_layout(storage.dtype if isinstance(storage, Tensor) else torch.bfloat16, width)
    remedy = f"queries of width {width} need rows of {layout.row_elements}"
    checks.tensor(name, storage, "NB BS 1 C", allowed, device=q.device, remedy=remedy, C=layout.row_elements)
    return _arguments.wrap_pages(name, storage.squeeze(2), layout)


def _selection(
    cache: PagedCache, name: str, indices: Tensor, length_name: str, lengths: Tensor | None, tokens: _Tokens
) -> Selection:
    columns = checks.tensor(
        name, indices, "b s_q topk", (torch.int32,), device=cache.device, b=tokens.requests, s_q=tokens.per_request
    )["topk"]
    if lengths is not None:
        _arguments.lengths(length_name, lengths, tokens.requests, columns, cache.device)
        lengths = tokens.repeat(lengths)
    return Selection(cache, indices.flatten(0, 1), lengths)


def _extra_selection(
    storage: Tensor | None, indices: Tensor | None, lengths: Tensor | None, q: Tensor, tokens: _Tokens, *, packed: bool
) -> list[Selection]:
    if storage is None:
        for name, value in (("extra_indices_in_kvcache", indices), ("extra_topk_length", lengths)):
            if value is not None:
                raise checks.refuse(name, "None without extra_k_cache", checks.describe(value), "pass the cache too")
        return []
    if indices is None:
        raise checks.refuse("extra_indices_in_kvcache", "given with extra_k_cache", None, "pass the second indices")
    cache = _wrap("extra_k_cache", storage, q, packed=packed)
    return [_selection(cache, "extra_indices_in_kvcache", indices, "extra_topk_length", lengths, tokens)]


def _only_sparse(*values: Tensor | None) -> None:
    names = ("topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    for name, value in zip(names, values, strict=True):
        if value is not None:
            raise checks.refuse(name, "None without indices (dense mode)", checks.describe(value), "pass indices too")


def _whole_requests(
    cache: PagedCache, block_table: Tensor | None, cache_seqlens: Tensor | None, tokens: _Tokens, causal: bool
) -> Selection:
    """Dense attention as a selection: all rows of each request, in order, with the request's length."""
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
        columns = int(cache_seqlens.max()) if count else 0
    known = (block_table >= 0) & (block_table < cache.pages)
    positions = torch.arange(columns, dtype=torch.int32, device=device).expand(count, columns)
    requests = torch.arange(count, dtype=torch.int32, device=device)
    table = torch.where(known, block_table, -1)
    slots = translate_positions(positions, requests, table, page_size=cache.page_size).slots
    hidden = torch.arange(tokens.per_request - 1, -1, -1, dtype=torch.int32, device=device) * int(causal)
    lengths = (cache_seqlens.unsqueeze(1) - hidden).clamp_min(0).flatten()
    return Selection(cache, tokens.repeat(slots), lengths)


def _attend_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    d_v: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    names: _RowNames,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = checks.tensor("q", q, "s_q h d", checks.FLOATS)
    _arguments.head_count("q", sizes["h"])
    checks.tensor(
        names.kv, kv, "s_kv 1 d", checks.FLOATS, device=q.device, remedy="its rows are as wide as q", d=sizes["d"]
    )
    columns = checks.tensor("indices", indices, "s_q 1 topk", (torch.int32,), device=q.device, s_q=sizes["s_q"])["topk"]
    scale = checks.positive_number(names.scale, scale)
    checks.integer("d_v", d_v, low=1, high=sizes["d"])
    _arguments.sink("attn_sink", attn_sink, sizes["h"], q.device)
    if topk_length is not None:
        _arguments.lengths("topk_length", topk_length, sizes["s_q"], columns, q.device)
    # Each row is a page, so that the page stride is the row stride and may be anything.
    cache = _arguments.wrap_pages(names.kv, kv, _row_layout(kv.dtype, sizes["d"]))
    selection = Selection(cache, indices.squeeze(1), topk_length)
    out, lse, max_logits = attend(q, selection, scale=scale, value_dim=d_v, sink=attn_sink)
    assert max_logits is not None
    return out, max_logits, _empty_is_plus_inf(lse)


def _empty_is_plus_inf(lse: Tensor) -> Tensor:
    """FlashMLA's lse of a row with nothing valid."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
