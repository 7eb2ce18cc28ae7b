"""Drop-in for DeepGEMM's indexer functions: the same names, arguments and shapes, on any device.

The results are DeepGEMM's. Beyond DeepGEMM, any number of heads, any page size and any number of query tokens work, and
block tables may have absent (negative) pages. Logits outside of a row's bounds are always -inf; DeepGEMM leaves them
undefined unless `clean_logits` is set.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import index_fp8
from tamis.integrations import _arguments
from tamis.ops import index_scores, ragged_scores
from tamis.ops.index import QUERY_DTYPES

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

KEYS_PER_SPLIT = 256
"""The unit of DeepGEMM's schedule."""


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Logits of gathered keys, float32 [M, N]; -inf outside of each row's keys, whatever `clean_logits` says.

    Args:
        q: [M, H, D] e4m3, its scale folded into the weights.
        kv: keys [N, D] e4m3 and their scales float32 [N].
        weights: float32 [M, H].
        cu_seq_len_k_start: int32 [M], the first key of each row.
        cu_seq_len_k_end: int32 [M], one past its last.
        clean_logits: no effect.
        max_seqlen_k: if above 0, the result is [M, max_seqlen_k], and its columns count from each row's first key.
    """
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        raise checks.refuse_type("kv", "a pair (keys, scales)", checks.describe(kv), "pass both tensors")
    checks.integer("max_seqlen_k", max_seqlen_k, low=0)
    logits = ragged_scores(q, weights, kv[0], kv[1], cu_seq_len_k_start, cu_seq_len_k_end)
    if max_seqlen_k == 0:
        return logits
    # The last column of `padded` is -inf, and stands for all columns past the keys.
    outside = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
    column = cu_seq_len_k_start.long().unsqueeze(1) + torch.arange(max_seqlen_k, dtype=torch.int64, device=q.device)
    return padded.gather(1, column.masked_fill((column < 0) | (column > outside), outside))


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """A schedule int32 [num_sms + 1, 2]: where the work of each SM begins, as (request, split of 256 keys).

    `fp8_paged_mqa_logits` accepts the schedule and does not need it. The length of a request is that of its longest
    token. Nothing is read on the host.

    Args:
        context_lens: int32 [B] or [B, n].
        block_kv: no effect, like `indices`.
        num_sms: the number of SMs among which the work is divided.
        indices: no effect.
    """
    checks.integer("block_kv", block_kv, low=1)
    checks.integer("num_sms", num_sms, low=1)
    lengths = _two_axes(context_lens).amax(1) if context_lens.numel() else context_lens.reshape(-1)
    ends = (lengths.clamp_min(0).long() + KEYS_PER_SPLIT - 1).div(KEYS_PER_SPLIT, rounding_mode="floor").cumsum(0)
    total = ends[-1:] if len(ends) else ends.new_zeros(1, dtype=ends.dtype)
    part = torch.arange(num_sms + 1, dtype=torch.int64, device=context_lens.device)
    first = part * (total // num_sms) + torch.minimum(part, total % num_sms)
    request = torch.searchsorted(ends, first, right=True)
    before = torch.cat((ends.new_zeros(1, dtype=ends.dtype), ends))[request]
    return torch.stack((request, first - before), dim=1).int()


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Logits of paged keys, float32 [B * n, max_context_len]; -inf from each token's length on.

    Args:
        q: [B, n, H, D] e4m3, its scale folded into the weights.
        kv_cache: [pages, page size, 1, D + 4] bytes in planar pages: all values, then all scales (`index-fp8`).
        weights: float32 [B * n, H].
        context_lens: int32 [B, n], how many keys each token sees; or [B], how many the last one sees, with each one
            before it one less.
        block_table: int32 [B, pages per request].
        schedule_meta: no effect, like `clean_logits` and `indices`.
        max_context_len: columns of the result.
        clean_logits: no effect.
        indices: no effect.
    """
    sizes = checks.tensor("q", q, "B n H D", QUERY_DTYPES)
    requests, tokens, dim = sizes["B"], sizes["n"], sizes["D"]
    checks.integer("max_context_len", max_context_len, low=0)
    checks.dense("kv_cache", kv_cache, _arguments.ONE_BYTE)
    if kv_cache.dim() != 4 or kv_cache.shape[2] != 1:
        expected = f"of shape [pages, page size, 1, {dim + 4}]"
        raise checks.refuse("kv_cache", expected, checks.describe(kv_cache), "one head, values and scales fused")
    checks.tensor("block_table", block_table, "B W", (torch.int32,), B=requests, device=q.device)
    lengths = _lengths_per_token(context_lens, requests, tokens, q.device)
    room = min(max_context_len, block_table.shape[1] * kv_cache.shape[1])
    if checks.visible(lengths):
        remedy = "the block table and max_context_len have room for no more"
        checks.values_between("context_lens", lengths.clamp_min(0), 0, room, remedy)
    cache = _arguments.wrap_pages("kv_cache", kv_cache.squeeze(2), index_fp8(dim=dim))
    ids = torch.arange(requests, dtype=torch.int32, device=q.device).repeat_interleave(tokens)
    return index_scores(q.flatten(0, 1), weights, cache, ids, block_table, lengths, width=max_context_len)


def _two_axes(context_lens: Tensor) -> Tensor:
    if not isinstance(context_lens, Tensor) or context_lens.dtype != torch.int32 or context_lens.dim() not in (1, 2):
        raise checks.refuse_type(
            "context_lens", "an int32 tensor [B] or [B, n]", checks.describe(context_lens), "convert it with .int()"
        )
    return context_lens if context_lens.dim() == 2 else context_lens.unsqueeze(1)


def _lengths_per_token(context_lens: Tensor, requests: int, tokens: int, device: torch.device) -> Tensor:
    lengths = _two_axes(context_lens)
    if lengths.shape[1] == 1 and tokens > 1:
        # Engines give padding any length below 0, which must not wrap around.
        lengths = lengths.clamp_min(0) + torch.arange(1 - tokens, 1, dtype=torch.int32, device=lengths.device)
    remedy = "pass one per request, or one per token"
    checks.tensor("context_lens", lengths, "B n", (torch.int32,), B=requests, n=tokens, device=device, remedy=remedy)
    return lengths.reshape(-1)
