"""FlashMLA's decode function."""

from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.selection import Selection
from tamis.checks import frozen, is_factor
from tamis.integrations import _arguments
from tamis.integrations.flash_mla.attention import KnownCalls, attend_checked, decode_form, flat_output
from tamis.integrations.flash_mla.formats import E4M3, row_format
from tamis.integrations.flash_mla.metadata import FlashMLASchedMeta, check_flags, check_schedule
from tamis.integrations.flash_mla.selections import (
    Tokens,
    extra_selected,
    read_at_once,
    refuse_sparse_only,
    selected,
    whole_requests,
)
from tamis.layers.batch_invariance import fixed_splits
from tamis.ops import memory


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
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of [b, s_q] query tokens over a paged cache: over `indices`, or without them over whole requests.

    Args:
        q: [b, s_q, h, d] in bf16, fp16 or fp32, h from 1 to 128; e4m3 for a cache of plain e4m3 rows.
        k_cache: [NB, BS, 1, C] with any page stride. C is d for rows in bf16, fp16, fp32 or, with an e4m3 q, plain
            e4m3. Packed FP8 rows have 656 bytes (d = 576), 584 (d = 512, planar pages) or, with
            `kv_format="V32_NO_ROPE"`, 528 (d = 512: 512 e4m3 and four float32 scales); stored as any one-byte dtype.
        block_table: int32 [b, W] pages of each request; dense mode only, ignored with `indices`.
        cache_seqlens: int32 [b] rows of each request; dense mode only, ignored with `indices`.
        head_dim_v: how many leading columns of a row are its value (512).
        tile_scheduler_metadata: from `get_mla_metadata`; not needed, None is fine.
        num_splits: from `get_mla_metadata`; not needed either.
        softmax_scale: d**-0.5 if not given.
        causal: dense mode: the last query token sees the whole request, each earlier one a row less. Must be False
            with `indices`, which already determine what each token sees.
        is_fp8_kvcache: whether both caches hold FP8 rows; if not given, whether `k_cache` has a one-byte dtype.
        indices: int32 [b, s_q, topk], page * BS + row. Negative ones and ones past the cache are skipped; duplicates
            count twice.
        attn_sink: float32 [h]; scales the output by 1 / (1 + exp(sink - lse)) and leaves the lse alone.
        extra_k_cache: a second cache of the same format and any page size, joined in the same softmax.
        extra_indices_in_kvcache: int32 [b, s_q, extra_topk] into the second cache; required with it, else None.
        topk_length: int32 [b], how many leading columns of `indices` count; the others are never read.
        extra_topk_length: int32 [b], likewise for the second cache.
        enable_batch_invariant: whether a request's bits depend on its own values and on the widths of `indices` (in
            dense mode of `block_table`) alone: the number of splits is then fixed.
        use_legacy: changes nothing; sgl-flash-mla chooses between two builds by it.
        kv_format: V32, V32_NO_ROPE or V4 for packed rows; if not given, what the width of q says.
        descale_q: one float32, the factor of an e4m3 q; required with it, else None.
        descale_k: one float32, the factor of plain e4m3 rows; required with an e4m3 q, else None.
        out: [b, s_q, h, head_dim_v] to write into, as in vLLM's build; otherwise a new tensor.

    Returns:
        out [b, s_q, h, head_dim_v] in q's dtype (bf16 for e4m3) and lse float32 [b, h, s_q], natural logarithm; zeros
        and +inf where there is nothing to attend to.
    """
    signature = None
    if indices is not None and not torch.compiler.is_compiling():
        # A default device is a mode, which would put a Python function around every attribute of a tensor.
        with torch._C.DisableTorchFunction():
            options = (head_dim_v, causal, is_fp8_kvcache, enable_batch_invariant, use_legacy, kv_format)
            others = (tile_scheduler_metadata, num_splits, descale_q, descale_k)
            signature = _sign(
                (q, k_cache, indices, topk_length, attn_sink, out),
                (extra_k_cache, extra_indices_in_kvcache, extra_topk_length),
                softmax_scale,
                (*options, *map(type, options), *map(type, others)),
            )
            known = _KNOWN.find(signature)
            if known is not None:
                read = read_at_once(q, k_cache, indices, topk_length)
                if extra_k_cache is not None and extra_indices_in_kvcache is not None:
                    read += read_at_once(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
                scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
                found = known.run(q, read, scale, attn_sink, out)
                if found is not None:
                    return found[:2]
                signature = None
    tokens = _check_query(q, head_dim_v)
    check_flags(causal=causal, enable_batch_invariant=enable_batch_invariant, use_legacy=use_legacy)
    check_schedule(tile_scheduler_metadata, num_splits)
    _arguments.sink("attn_sink", attn_sink, q.shape[2], q.device)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else checks.positive_number("softmax_scale", softmax_scale)
    form = row_format(q, k_cache, is_fp8_kvcache, kv_format, descale_q, descale_k)
    cache = form.wrap("k_cache", k_cache, q)
    if indices is None:
        refuse_sparse_only(
            topk_length=topk_length,
            extra_k_cache=extra_k_cache,
            extra_indices_in_kvcache=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
        )
        fixed = enable_batch_invariant
        selections = [whole_requests(cache, block_table, cache_seqlens, tokens, causal=causal, full_width=fixed)]
    else:
        if causal:
            raise checks.refuse("causal", "False with indices", causal, "leave future rows out of indices")
        selections = [selected(cache, "indices", indices, "topk_length", topk_length, tokens)]
        selections += extra_selected(extra_k_cache, extra_indices_in_kvcache, extra_topk_length, q, tokens, form)
    attended = attend_checked(
        q.flatten(0, 1),
        selections,
        decode_form(tokens),
        scale=scale,
        value_dim=head_dim_v,
        sink=attn_sink,
        q_scale=form.q_scale,
        splits=_invariant_splits(selections, sparse=indices is not None) if enable_batch_invariant else None,
        out=flat_output(out, tokens, q.shape[2], head_dim_v, q.device),
        keep=_KNOWN.keep_call(
            signature,
            [tensor for tensor in (q, indices, extra_indices_in_kvcache) if tensor is not None],
            out,
            (*tokens, q.shape[2], head_dim_v),
        ),
    )
    # Without query tokens there are no groups to arrange the lse in.
    lse = attended.lse if tokens.per_request else attended.lse.view(tokens.requests, q.shape[2], 0)
    return attended.out.unflatten(0, tokens) if out is None else out, lse


_KNOWN = KnownCalls()


def _sign(
    given: tuple[Any, ...], extra: tuple[Any, ...], scale: float | None, options: tuple[object, ...]
) -> memory.Signature | None:
    """The signature of a call with indices. Its scale is not part of it."""
    q, k_cache, _, _, sink, out = given
    try:
        if not memory.remembered_on(q) or memory.has_gradient(q, k_cache, extra[0], sink, out):
            return None
        if (sink is not None and sink.stride() != (1,)) or (out is not None and frozen(out)):
            return None  # the sink will be copied, or the output refused
        if scale is not None and not is_factor(scale):
            return None
        seen = (*options, *map(memory.sign, given))
        no_extra = extra[0] is None and extra[1] is None and extra[2] is None
        return seen if no_extra else (*seen, *map(memory.sign, extra))
    except memory.NOT_ARGUMENTS:
        return None


def _check_query(q: Tensor, head_dim_v: int) -> Tokens:
    fp8 = isinstance(q, Tensor) and q.dtype == E4M3
    sizes = checks.tensor("q", q, "b s_q h d", (E4M3,) if fp8 else checks.FLOATS)
    _arguments.head_count("q", sizes["h"])
    checks.integer("head_dim_v", head_dim_v, low=1, high=sizes["d"])
    return Tokens(sizes["b"], sizes["s_q"])


def _invariant_splits(selections: list[Selection], *, sparse: bool) -> int:
    """A number of splits that follows from widths alone. Whole requests are not split, as in FlashMLA: their
    selection is as wide as the longest request may become, and parts of that number would not fit into memory."""
    columns = sum(selection.slots.shape[1] for selection in selections)
    return max(1, fixed_splits(columns)) if sparse else 1
