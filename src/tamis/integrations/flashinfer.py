"""Drop-in for FlashInfer's sparse MLA decode on any device: `trtllm_batch_decode_with_kv_cache_mla` for V3.2, and
`trtllm_batch_decode_sparse_mla_dsv4` for V4 (in `flashinfer_v4`).

The first has only FlashInfer's sparse mode (`sparse_mla_top_k` > 0): `block_tables` hold physical *slots*, not pages,
and `seq_lens` count how many leading columns are valid. Beyond FlashInfer, it takes any head count from 1 to 128, any
top-k, any page size, any nope width, a query whose dtype differs from the cache's, and pages with any stride.

Two conventions differ from the rest of tamis: the lse is in base 2, and FP8 scales are folded into the two factors of
the matrix products instead of being a property of the cache.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout, plain_fp8, rows, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.integrations import _arguments
from tamis.integrations._flashinfer import Queries, arrange, factors, one_sink, output, prepare
from tamis.integrations.flashinfer_v4 import trtllm_batch_decode_sparse_mla_dsv4

__all__ = ["trtllm_batch_decode_sparse_mla_dsv4", "trtllm_batch_decode_with_kv_cache_mla"]

_WITHOUT_EFFECT = (
    "enable_pdl",
    "backend",
    "is_var_seq",
    "multi_ctas_kv_counter_buffer",
    "cute_dsl_impl",
    "kv_scale_format",
)
"""Options that change how FlashInfer runs and not what it computes. (Scales of packed rows are always read exactly.)"""

_ONLY = {
    "skip_softmax_threshold_scale_factor": None,
    "uses_shared_paged_kv_idx": True,
    "enable_dcp": False,
    "cp_world": 1,
    "cp_rank": 0,
    "causal_seqlens_kv_global": None,
}
"""Options that would change the result, with the only supported value."""


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Tensor | Sequence[Tensor] | None = None,
    *,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query token over the slots listed for it: out, or (out, lse) with `return_lse`.

    Args:
        query: [B, q, H, D] in bf16, fp16, fp32 or e4m3; D = kv_lora_rank + qk_rope_head_dim. With `cum_seq_lens_q`
            flattened to [T, H, D].
        kv_cache: [NB, BS, D] or [NB, 1, BS, D] in bf16, fp16, fp32 or e4m3 (also stored as uint8), or packed 656-byte
            rows in place of D.
        workspace_buffer: accepted and not used, like `qk_nope_head_dim` and `max_seq_len`.
        kv_lora_rank: latent width, which is also the output's. `qk_rope_head_dim` is the rope width.
        block_tables: int32 [B, q, K] or flattened [T, K]: slots, page * BS + row; negative or past the cache: skipped.
        seq_lens: int32 [B], or one per query token: how many leading columns count. None if all do.
        sparse_mla_top_k: K.
        out: to write into; otherwise new, [B, q, H, L] or [T, H, L], of the query's dtype (bf16 for e4m3).
        bmm1_scale: softmax scale * query scale * cache scale, as a float or one float32 element.
        bmm2_scale: scale of an e4m3 cache, otherwise 1.0; as a float or one float32 element.
        sinks: float32 [H]; scales the output, never the lse.
        lse: float32 [B * q, H] or [B, q, H] to write into; base 2, -inf where nothing is selected.
        cum_seq_lens_q: int32 [B + 1], where each request begins in the flattened query; `max_q_len` is only checked.
        sparse_mla_top_k_lens: int32 [B * q] or [T], counts per query token, used instead of `seq_lens`.
        options: FlashInfer's other arguments. They have no effect if they only tune its kernels, and are refused if
            they would change the result.
    """
    _check_options(options)
    for name, value in (("qk_nope_head_dim", qk_nope_head_dim), ("max_seq_len", max_seq_len)):
        checks.integer(name, value, low=0)
    _check_mode(sparse_mla_top_k)
    checks.integer("kv_lora_rank", kv_lora_rank, low=1)
    checks.integer("qk_rope_head_dim", qk_rope_head_dim, low=0)
    queries = arrange(query, kv_lora_rank + qk_rope_head_dim, cum_seq_lens_q, max_q_len)
    cache = _wrap(kv_cache, kv_lora_rank, qk_rope_head_dim, query.device)
    before, after = factors(bmm1_scale, bmm2_scale, cache)
    sink = one_sink(sinks)
    _arguments.sink("sinks", sink, queries.heads, query.device)
    slots = _slots(block_tables, sparse_mla_top_k, queries)
    counts = _counts(seq_lens, sparse_mla_top_k_lens, queries, sparse_mla_top_k)
    read = (cache.storage, sink, slots, counts)
    out = output(out, query, queries, kv_lora_rank, *read)
    _check_lse(lse, queries, out, query, *read)
    found = prepare(query, [Selection(cache, slots, counts)], (before, after), sink, out).run()
    lse = found if lse is None else lse.copy_(found.view(lse.shape))
    return (out, lse) if return_lse else out


def _check_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name in _ONLY:
            if isinstance(value, Tensor) or value != _ONLY[name]:
                raise checks.refuse(name, f"{_ONLY[name]} (nothing else is supported)", repr(value), "leave it out")
        elif name not in _WITHOUT_EFFECT:
            raise TypeError(
                f"trtllm_batch_decode_with_kv_cache_mla does not know the argument {name!r}; "
                f"beyond its named ones it takes {', '.join((*_WITHOUT_EFFECT, *_ONLY))}"
            )


def _check_mode(top_k: int) -> None:
    if checks.integer("sparse_mla_top_k", top_k, low=0) == 0:
        remedy = "for dense attention over block tables use tamis.integrations.flash_mla.flash_mla_with_kvcache"
        raise checks.refuse("sparse_mla_top_k", "> 0 (only the sparse mode is supported)", top_k, remedy)


def _wrap(storage: Tensor, latent: int, rope: int, device: torch.device) -> PagedCache:
    allowed = (*checks.FLOATS, *_arguments.ONE_BYTE)
    shape = "NB BS C"
    if isinstance(storage, Tensor) and storage.dim() == 4:
        shape = "NB 1 BS C"
    found = checks.tensor(
        "kv_cache", storage, shape, allowed, device=device, remedy="it has one latent head and no axis for it"
    )
    layout = _layout(storage.dtype, found["C"], latent, rope)
    return _arguments.wrap_pages("kv_cache", storage, layout)


def _layout(dtype: torch.dtype, row: int, latent: int, rope: int) -> Layout:
    width = latent + rope
    if row == width:
        return rows(dtype, latent=latent, rope=rope) if dtype in checks.FLOATS else plain_fp8(latent=latent, rope=rope)
    expected = f"{width} wide, kv_lora_rank + qk_rope_head_dim"
    if dtype not in checks.FLOATS and latent % 128 == 0:
        packed = v32_fp8(latent=latent, rope=rope)
        if row == packed.row_bytes:
            return packed
        expected += f", or of packed {packed.row_bytes}-byte rows"
    raise checks.refuse("kv_cache", expected, f"{checks.dtype_name(dtype)} rows of {row}", "check the two widths")


def _slots(block_tables: Tensor, columns: int, queries: Queries) -> Tensor:
    shape, remedy = f"{queries.axes} K", "pass one row of sparse_mla_top_k slots per query token"
    checks.tensor(
        "block_tables",
        block_tables,
        shape,
        (torch.int32,),
        device=queries.device,
        remedy=remedy,
        K=columns,
        **queries.sizes,
    )
    return block_tables.reshape(queries.tokens, columns)


def _counts(seq_lens: Tensor | None, per_token: Tensor | None, queries: Queries, columns: int) -> Tensor | None:
    """The number of valid columns per query token. Counts per token are preferred to counts per request."""
    tokens, device = queries.tokens, queries.device
    if per_token is not None:
        _arguments.lengths("sparse_mla_top_k_lens", per_token, tokens, columns, device)
    if seq_lens is None:
        return per_token
    if isinstance(seq_lens, Tensor) and tuple(seq_lens.shape) == queries.lead:
        seq_lens = seq_lens.flatten()
    expected = tokens if isinstance(seq_lens, Tensor) and seq_lens.shape == (tokens,) else queries.requests
    remedy = "pass one count per request or per query token"
    checks.tensor("seq_lens", seq_lens, "B", (torch.int32,), device=device, remedy=remedy, B=expected)
    if per_token is not None:
        return per_token
    _arguments.lengths("seq_lens", seq_lens, expected, columns, device)
    return seq_lens if expected == tokens else seq_lens.index_select(0, queries.request)


def _check_lse(lse: Tensor | None, queries: Queries, *others: Tensor | None) -> None:
    if lse is None:
        return
    flat, shaped = (queries.tokens, queries.heads), (*queries.lead, queries.heads)
    if not isinstance(lse, Tensor) or lse.dtype != torch.float32:
        raise checks.refuse_type("lse", "float32", checks.describe(lse), "allocate it as float32")
    if tuple(lse.shape) not in (flat, shaped) or lse.device != queries.device:
        expected = f"of shape {list(flat)} or {list(shaped)} on {queries.device}"
        raise checks.refuse("lse", expected, checks.describe(lse), "allocate it so, or leave it out")
    checks.writable("lse", lse, *others)
