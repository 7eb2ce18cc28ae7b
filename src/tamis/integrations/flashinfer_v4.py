"""Drop-in for FlashInfer's `trtllm_batch_decode_sparse_mla_dsv4`: DeepSeek-V4 attention over a window and a compressed
pool. It serves decode and prefill tokens, in one call or in two.

FlashInfer has two forms and chooses between them by the GPU. Here the arguments choose:

- *combined* (`sparse_topk_lens`): the first 128 columns of `sparse_indices` are slots of the window pool, the others of
  the compressed pool. A length counts all 128 window columns, even those that `seq_lens` shows to be empty.
- *separate* (`swa_topk_lens`): `sparse_indices` holds window slots only, `extra_sparse_indices` compressed ones, each
  with true lengths.

Both become two `Selection`s. Rows may be plain (512 numbers) or packed (584 bytes) in both forms.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import plain_fp8, rows, v4_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.integrations import _arguments
from tamis.integrations._flashinfer import Call, Queries, arrange, factors, one_sink, output, prepare
from tamis.ops.attention import read_by

_LATENT, _ROPE = 448, 64
_WIDTH = _LATENT + _ROPE


def trtllm_batch_decode_sparse_mla_dsv4(
    query: Tensor,
    swa_kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    sparse_indices: Tensor,
    compressed_kv_cache: Tensor | None = None,
    sparse_topk_lens: Tensor | None = None,
    seq_lens: Tensor | None = None,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: Tensor | None = None,
    extra_sparse_indices: Tensor | None = None,
    extra_sparse_topk_lens: Tensor | None = None,
    *,
    window_columns: int = 128,
) -> Tensor:
    """Attention of each query token over its window and its compressed entries, under one softmax.

    Args:
        query: [B, q, H, 512] in bf16, fp16, fp32 or e4m3, with any H from 1 to 128; with `cum_seq_lens_q` flattened to
            [T, H, 512]. In the separate form [T, H, 512] needs no `cum_seq_lens_q`.
        swa_kv_cache: window pool [pages, page, C], or with an axis of size 1 where `kv_layout` has the head; C is 512
            (bf16, fp16, fp32, e4m3) or 584 (packed).
        workspace_buffer: accepted and not used, like `enable_pdl`.
        sparse_indices: int32 [T, K] (or [B, q, K]) slots, page * page size + row; negative or past the pool: skipped.
        compressed_kv_cache: compressed pool, likewise, with its own page size; may be None in the separate form.
        sparse_topk_lens: int32 [T], window columns included.
        seq_lens: int32 [B], tokens of each request up to its last query token; token i of q sees
            min(seq_len - q + i + 1, window_columns) window columns.
        out: to write into; otherwise new, of the query's dtype (bf16 for e4m3).
        bmm1_scale: softmax scale * query scale * cache scale, as a float or one float32 element.
        bmm2_scale: scale of e4m3 pools, otherwise 1.0; as a float or one float32 element.
        sinks: float32 [H]; scales the output.
        kv_layout: "HND" or "NHD"; only says where the axis of size 1 is.
        cum_seq_lens_q: int32 [B + 1], where each request begins in the flattened query, from 0.
        max_q_len: checked and otherwise not used.
        enable_pdl: no effect.
        swa_topk_lens: int32 [T], how many window columns count; if given, the form is the separate one.
        extra_sparse_indices: int32 [T, K2] slots of the compressed pool.
        extra_sparse_topk_lens: int32 [T].
        window_columns: how many columns of the combined form belong to the window; always 128 in FlashInfer.
    """
    call, result = prepare_sparse_mla_dsv4(
        query,
        swa_kv_cache,
        sparse_indices,
        compressed_kv_cache,
        sparse_topk_lens,
        seq_lens,
        out,
        bmm1_scale,
        bmm2_scale,
        sinks,
        kv_layout,
        cum_seq_lens_q,
        max_q_len,
        swa_topk_lens,
        extra_sparse_indices,
        extra_sparse_topk_lens,
        window_columns=window_columns,
    )
    call.run()
    return result


def prepare_sparse_mla_dsv4(
    query: Tensor,
    swa_kv_cache: Tensor,
    sparse_indices: Tensor,
    compressed_kv_cache: Tensor | None,
    sparse_topk_lens: Tensor | None,
    seq_lens: Tensor | None,
    out: Tensor | None,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    sinks: Tensor | None,
    kv_layout: str = "HND",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    swa_topk_lens: Tensor | None = None,
    extra_sparse_indices: Tensor | None = None,
    extra_sparse_topk_lens: Tensor | None = None,
    *,
    window_columns: int = 128,
) -> tuple[Call, Tensor]:
    """The first half of `trtllm_batch_decode_sparse_mla_dsv4`: everything is checked and nothing is written. Returns
    what to run, and the output that it will write."""
    checks.option("kv_layout", kv_layout, ("HND", "NHD"))
    checks.integer("window_columns", window_columns, low=1)
    single = swa_topk_lens is not None and cum_seq_lens_q is None and isinstance(query, Tensor) and query.dim() == 3
    shaped = query.unsqueeze(1) if single else query
    queries = arrange(shaped, _WIDTH, cum_seq_lens_q, max_q_len)
    sink = one_sink(sinks)
    _arguments.sink("sinks", sink, queries.heads, query.device)
    window = _wrap("swa_kv_cache", swa_kv_cache, kv_layout, query.device)
    entries = None
    if compressed_kv_cache is not None:
        entries = _wrap("compressed_kv_cache", compressed_kv_cache, kv_layout, query.device)
    before, after = factors(bmm1_scale, bmm2_scale, window)
    slots = _rows_of("sparse_indices", sparse_indices, queries)
    if swa_topk_lens is not None:
        _arguments.lengths("swa_topk_lens", swa_topk_lens, queries.tokens, slots.shape[1], query.device)
        selections = [Selection(window, slots, swa_topk_lens)]
        selections += _extra(entries, extra_sparse_indices, extra_sparse_topk_lens, queries)
    else:
        _only_combined(entries, extra_sparse_indices, extra_sparse_topk_lens)
        seen = _window_lengths(seq_lens, cum_seq_lens_q, queries, window_columns)
        selections = _combined(window, entries, slots, sparse_topk_lens, seen, window_columns)
    given = out.unsqueeze(1) if single and isinstance(out, Tensor) else out
    result = output(given, shaped, queries, _WIDTH, sink, *read_by(selections))
    call = prepare(shaped, selections, (before, after), sink, result)
    return call, result.squeeze(1) if single else result


def _wrap(name: str, pool: Tensor, kv_layout: str, device: torch.device) -> PagedCache:
    shape = "NB BS C"
    if isinstance(pool, Tensor) and pool.dim() == 4:
        shape = "NB 1 BS C" if kv_layout == "HND" else "NB BS 1 C"
    remedy = f"it has one latent head, on the axis where kv_layout={kv_layout!r} has it"
    width = checks.tensor(name, pool, shape, (*checks.FLOATS, *_arguments.ONE_BYTE), device=device, remedy=remedy)["C"]
    packed = v4_fp8()
    if pool.dtype not in checks.FLOATS and width == packed.row_bytes:
        return _arguments.wrap_pages(name, pool, packed)
    if width != _WIDTH:
        expected = f"of rows {_WIDTH} numbers or {packed.row_bytes} bytes wide"
        raise checks.refuse(name, expected, f"{checks.dtype_name(pool.dtype)} rows of {width}", "check the cache dtype")
    plain = rows(pool.dtype, latent=_LATENT, rope=_ROPE) if pool.dtype in checks.FLOATS else plain_fp8(latent=_LATENT)
    return _arguments.wrap_pages(name, pool, plain)


def _rows_of(name: str, indices: Tensor, queries: Queries) -> Tensor:
    axes, sizes = ("T K", {"T": queries.tokens})
    if isinstance(indices, Tensor) and indices.dim() == len(queries.lead) + 1:
        axes, sizes = f"{queries.axes} K", queries.sizes
    checks.tensor(
        name,
        indices,
        axes,
        (torch.int32,),
        device=queries.device,
        remedy="pass one row of slots per query token",
        **sizes,
    )
    return indices.reshape(queries.tokens, indices.shape[-1])


def _only_combined(entries: PagedCache | None, extra: Tensor | None, extra_lengths: Tensor | None) -> None:
    if entries is None:
        remedy = "pass the window pool again for a layer without compressed entries, or use swa_topk_lens"
        raise checks.refuse("compressed_kv_cache", "given with sparse_topk_lens", None, remedy)
    for name, value in (("extra_sparse_indices", extra), ("extra_sparse_topk_lens", extra_lengths)):
        if value is not None:
            raise checks.refuse(
                name, "None without swa_topk_lens", checks.describe(value), "the combined form has one list"
            )


def _window_lengths(seq_lens: Tensor | None, starts: Tensor | None, queries: Queries, columns: int) -> Tensor:
    """How many window columns each token fills, which follows from its position in the request."""
    device = queries.device
    remedy = "pass the tokens of each request, including those of the query"
    checks.tensor("seq_lens", seq_lens, "B", (torch.int32,), device=device, remedy=remedy, B=queries.requests)
    assert seq_lens is not None
    if starts is None:
        starts = torch.arange(queries.requests + 1, device=device, dtype=torch.int32) * queries.lead[-1]
    number = torch.arange(1, queries.tokens + 1, device=device, dtype=torch.int32)
    seen = seq_lens[queries.request] - starts[1:][queries.request] + number
    return seen.clamp_(0, columns)


def _combined(
    window: PagedCache,
    entries: PagedCache | None,
    slots: Tensor,
    lengths: Tensor | None,
    seen: Tensor,
    columns: int,
) -> list[Selection]:
    assert entries is not None
    width = slots.shape[1]
    if width < columns:
        raise checks.refuse("sparse_indices", f"at least {columns} columns wide", width, "the window comes first")
    remedy = "pass one length per query token, or use swa_topk_lens"
    checks.tensor("sparse_topk_lens", lengths, "T", (torch.int32,), device=seen.device, remedy=remedy, T=len(slots))
    assert lengths is not None
    checks.values_between("sparse_topk_lens", lengths, columns, width, "it counts all window columns, filled or not")
    counts = (lengths - columns).clamp_(0, width - columns)
    return [Selection(window, slots[:, :columns], seen), Selection(entries, slots[:, columns:], counts)]


def _extra(
    entries: PagedCache | None, indices: Tensor | None, lengths: Tensor | None, queries: Queries
) -> list[Selection]:
    given = [value is not None for value in (entries, indices, lengths)]
    if not any(given):
        return []
    if entries is None or indices is None or lengths is None:
        remedy = "pass compressed_kv_cache, extra_sparse_indices and extra_sparse_topk_lens, or none of them"
        raise checks.refuse("extra_sparse_indices", "given with its pool and its lengths", given, remedy)
    slots = _rows_of("extra_sparse_indices", indices, queries)
    _arguments.lengths("extra_sparse_topk_lens", lengths, queries.tokens, slots.shape[1], queries.device)
    return [Selection(entries, slots, lengths)]
