"""The two methods of vLLM's DeepSeek-V4 layer that run attention, as functions that a replaced layer class calls.

    class Layer(DeepseekV4FlashMLAAttention):
        _forward_decode = tamis.integrations.vllm.v4_forward.forward_decode
        _forward_prefill = tamis.integrations.vllm.v4_forward.forward_prefill

Window and entries stay two selections with true lengths, prefills read the pages as decodes do, and heads are not
padded: `output` may have more heads than count, which become zeros. Records may be those of `v4_metadata` or any with
the same attributes.
"""

from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache import PagedCache, Selection
from tamis.layout import Layout, plain_fp8, rows, v4_fp8
from tamis.ops import attend

_LATENT, _ROPE = 448, 64


def forward_decode(
    layer: Any,
    q: Tensor,
    kv_cache: Tensor | None,
    swa_metadata: Any,
    attn_metadata: Any,
    swa_only: bool,
    output: Tensor,
) -> None:
    """Attend the decode tokens, which come first, and write into `output`.

    Args:
        layer: with `compress_ratio`, `scale`, `attn_sink`, `swa_cache_layer.kv_cache`, and where an indexer selects,
            its `topk_indices_buffer`.
        q: [decode tokens, H, 512], rotated.
        kv_cache: entries, packed (584 bytes), plain, or with one scale; None if `swa_only`.
        swa_metadata: the window's record.
        attn_metadata: the layer's own record; None if `swa_only`.
        swa_only: the layer has a window only.
        output: [decode tokens, H or more, 512].
    """
    count = swa_metadata.num_decode_tokens
    indices, lengths = swa_metadata.decode_swa_indices[:, 0], swa_metadata.decode_swa_lens
    selections = [Selection(_wrap(layer.swa_cache_layer.kv_cache, layer), indices, lengths)]
    if not swa_only:
        entries = _wrap(_given("kv_cache", kv_cache), layer)
        slots = attn_metadata.c128a_global_decode_topk_indices
        if slots is not None:
            selections.append(Selection(entries, slots[:, 0], attn_metadata.c128a_decode_topk_lens))
        else:
            # Tokens that are not valid attend to nothing, whatever the indexer's buffer holds for them.
            chosen = layer.topk_indices_buffer[:count]
            limit = (swa_metadata.is_valid_token[:count] * chosen.shape[1]).int()
            selections.append(_by_number(entries, chosen, limit, attn_metadata, 0))
    _attend(layer, q, selections, output)


def forward_prefill(
    layer: Any,
    q: Tensor,
    positions: Tensor,
    compressed_k_cache: Tensor | None,
    swa_k_cache: Tensor,
    output: Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    """Attend the prefill tokens, which follow the decodes, and write into `output`.

    Args:
        layer: as in `forward_decode`.
        q: [prefill tokens or more, H, 512], rotated. Rows past the record's tokens are the engine's padding: not read,
            and their output keeps its content.
        positions: [prefill tokens or more] in their requests.
        compressed_k_cache: entries; None for layers with a window only.
        swa_k_cache: raw tokens.
        output: [prefill tokens or more, H or more, 512].
        attn_metadata: the layer's own record; None for layers with a window only.
        swa_metadata: the window's record.
    """
    first, count = swa_metadata.num_decode_tokens, swa_metadata.num_prefill_tokens
    q, positions, output = q[:count], positions[:count], output[:count]
    indices, lengths = swa_metadata.prefill_swa_indices[:, 0], swa_metadata.prefill_swa_lens
    selections = [Selection(_wrap(swa_k_cache, layer), indices, lengths)]
    if compressed_k_cache is not None:
        numbers = attn_metadata.c128a_prefill_topk_indices
        if numbers is None:
            numbers = layer.topk_indices_buffer[first : first + count]
        # Padding has no window, and no entries either.
        complete = torch.where(lengths > 0, (positions + 1) // layer.compress_ratio, 0)
        limit = complete.clamp(0, numbers.shape[1]).int()
        selections.append(_by_number(_wrap(compressed_k_cache, layer), numbers, limit, attn_metadata, first))
    _attend(layer, q, selections, output)


def _by_number(cache: PagedCache, numbers: Tensor, lengths: Tensor, record: Any, first: int) -> Selection:
    """Entries named by their number within the request; attention looks their pages up on the way."""
    requests = record.req_id_per_token[first : first + len(numbers)]
    return Selection(cache, numbers, lengths, requests, record.block_table)


def _attend(layer: Any, q: Tensor, selections: list[Selection], output: Tensor) -> None:
    heads = q.shape[1]
    output[:, heads:].zero_()
    attend(
        q,
        selections,
        scale=float(layer.scale),
        value_dim=output.shape[2],
        sink=layer.attn_sink[:heads],
        q_scale=getattr(layer, "_q_scale_float", 1.0) if q.dtype == torch.float8_e4m3fn else 1.0,
        out=output[:, :heads],
    )


def _wrap(storage: Tensor, layer: Any) -> PagedCache:
    layout = _layout(storage)
    scale = getattr(layer, "_k_scale_float", 1.0) if layout.scale_mode == "tensor" else 1.0
    return PagedCache.wrap(storage, layout, scale=scale)


def _layout(storage: Tensor) -> Layout:
    if storage.dtype in checks.FLOATS:
        return rows(storage.dtype, latent=_LATENT, rope=_ROPE)
    return v4_fp8() if storage.shape[-1] != _LATENT + _ROPE else plain_fp8(latent=_LATENT, rope=_ROPE)


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise checks.refuse(name, "given unless swa_only", None, "pass the layer's cache of entries")
    return value
