"""The methods of vLLM's DeepSeek-V4 layers that run attention, as functions that a replaced layer class calls.

    class Layer(DeepseekV4FlashMLAAttention):
        _forward_decode = tamis.integrations.vllm.v4_forward.forward_decode
        _forward_prefill = tamis.integrations.vllm.v4_forward.forward_prefill

`forward_step` calls both, for vLLM's layers that have one method for a whole step.

The window and the compressed entries stay two selections with true lengths. Prefills read the pages just as decodes do.
Heads are not padded: where `output` has more heads than the query, the surplus heads become zeros. The records may be
vLLM's own, those of `classes.v4_metadata`, or any with the same attributes. Everything about decodes, and about
prefills, is checked before their rows of `output` are written to.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.integrations.vllm.engine_batch import first as first_rows
from tamis.integrations.vllm.v4_formats import E4M3, e4m3_scales, listed, sees_every_entry, wrap
from tamis.integrations.vllm.v4_limits import decode_limits, prefill_limits
from tamis.ops import attend


def forward_step(layer: Any, q: Tensor, positions: Tensor, output: Tensor, metadata: dict[str, Any] | None) -> None:
    """Attend all tokens of a step, decodes first, and write into `output`.

    Args:
        layer: as in `forward_decode`, and with `prefix`, `swa_cache_layer.prefix` and, unless it has a window only,
            its `kv_cache`.
        q: [tokens or more, H, 512], rotated; e4m3 where the caches are.
        positions: [tokens or more], each token's position in its request.
        output: [tokens or more, H or more, 512], in q's dtype, or bf16 if that is e4m3.
        metadata: the records of the step by the prefixes of layers and window caches; None while an engine warms up,
            which gives an output of zeros.
    """
    if metadata is None:
        output.zero_()
        return
    if not isinstance(metadata, dict):
        remedy = "microbatches of one step are not supported: turn them off"
        raise checks.refuse_type("attn_metadata", "one record per layer", checks.describe(metadata), remedy)
    window, record = metadata[layer.swa_cache_layer.prefix], metadata.get(layer.prefix)
    swa_only = layer.compress_ratio <= 1
    entries = None if swa_only else layer.kv_cache
    first = window.num_decode_tokens
    if window.num_prefills > 0:
        raw = layer.swa_cache_layer.kv_cache
        forward_prefill(layer, q[first:], positions[first:], entries, raw, output[first:], record, window)
    if window.num_decodes > 0:
        forward_decode(layer, q[:first], entries, window, record, swa_only, output[:first])


def forward_decode(
    layer: Any,
    q: Tensor,
    kv_cache: Tensor | None,
    swa_metadata: Any,
    attn_metadata: Any,
    swa_only: bool,
    output: Tensor,
) -> None:
    """Attend the decode tokens, which come first in the batch, and write into `output`.

    Args:
        layer: an object with `compress_ratio`, `scale`, `attn_sink`, `swa_cache_layer.kv_cache` and, where an indexer
            selects (ratio 4, and all of V4.1), its `topk_indices_buffer`. `kv_cache_torch_dtype` says what the caches
            hold; `v4_formats.e4m3_scales` says where the scales of e4m3 rows and queries are.
        q: [decode tokens, H, 512], rotated.
        kv_cache: compressed entries, in rows that are packed (584 bytes), plain, or e4m3 under one scale; None if
            `swa_only`.
        swa_metadata: the window's record.
        attn_metadata: the layer's own record; None if `swa_only`.
        swa_only: whether the layer has a window and no compressed entries.
        output: [decode tokens, H or more, 512].
    """
    with in_use(swa_metadata, attn_metadata):
        count = swa_metadata.num_decode_tokens
        if count == 0:
            return
        indices, lengths = swa_metadata.decode_swa_indices.select(1, 0), swa_metadata.decode_swa_lens
        selections = [Selection(wrap("swa_kv_cache", layer.swa_cache_layer.kv_cache, layer), indices, lengths)]
        if not swa_only:
            entries = wrap("kv_cache", _given("kv_cache", kv_cache), layer)
            selections += _decode_entries(layer, entries, swa_metadata, attn_metadata, count)
        _attend(layer, q, selections, output)


def _decode_entries(layer: Any, entries: PagedCache, window: Any, record: Any, count: int) -> list[Selection]:
    if len(record.block_table) == 0:
        return []  # a step of padding alone
    if sees_every_entry(layer, record):
        slots = listed("c128a_global_decode_topk_indices", record.c128a_global_decode_topk_indices)
        return [Selection(entries, slots.select(1, 0), record.c128a_decode_topk_lens)]
    chosen = layer.topk_indices_buffer[:count]
    limits = decode_limits(layer, window, count, chosen.shape[1])
    return [_by_number(entries, chosen, limits, record, 0)]


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
    """Attend the prefill tokens, which follow the decode tokens, and write into `output`.

    Args:
        layer: as in `forward_decode`.
        q: [prefill tokens or more, H, 512], rotated. Rows past the record's tokens are the engine's padding: they are
            not read, and their rows of `output` keep their content.
        positions: [prefill tokens or more], each token's position in its request.
        compressed_k_cache: compressed entries; None for layers with a window only.
        swa_k_cache: the raw tokens of the window.
        output: [prefill tokens or more, H or more, 512].
        attn_metadata: the layer's own record; None for layers with a window only.
        swa_metadata: the window's record.
    """
    with in_use(swa_metadata, attn_metadata):
        first, count = swa_metadata.num_decode_tokens, swa_metadata.num_prefill_tokens
        if count == 0:
            return
        q, output = first_rows(q, count), first_rows(output, count)
        indices, lengths = swa_metadata.prefill_swa_indices.select(1, 0), swa_metadata.prefill_swa_lens
        selections = [Selection(wrap("swa_kv_cache", swa_k_cache, layer), indices, lengths)]
        if compressed_k_cache is not None:
            if sees_every_entry(layer, attn_metadata):
                numbers = listed("c128a_prefill_topk_indices", attn_metadata.c128a_prefill_topk_indices)
            else:
                numbers = layer.topk_indices_buffer[first : first + count]
            limits = prefill_limits(layer, swa_metadata, first_rows(positions, count), numbers.shape[1])
            entries = wrap("kv_cache", compressed_k_cache, layer)
            selections.append(_by_number(entries, numbers, limits, attn_metadata, first))
        _attend(layer, q, selections, output)


def _by_number(cache: PagedCache, numbers: Tensor, lengths: Tensor, record: Any, first: int) -> Selection:
    """A selection of entries by their number within the request; attention looks up their pages itself."""
    requests = record.req_id_per_token[first : first + len(numbers)]
    return Selection(cache, numbers, lengths, requests, record.block_table)


def _attend(layer: Any, q: Tensor, selections: list[Selection], output: Tensor) -> None:
    heads, sink = q.shape[1], layer.attn_sink
    padded = output.shape[1] > heads
    # `attend` checks before it writes, so the padded heads are zeroed after it: a refused call changes nothing.
    attend(
        q,
        selections,
        scale=float(layer.scale),
        value_dim=output.shape[2],
        sink=first_rows(sink, heads),
        q_scale=e4m3_scales(layer)[0] if q.dtype == E4M3 else 1.0,
        out=output[:, :heads] if padded else output,
    )
    if padded:
        output[:, heads:].zero_()


def _given(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise checks.refuse(name, "given unless swa_only", None, "pass the layer's cache of entries")
    return value


def in_use(*records: Any) -> AbstractContextManager[object]:
    """The block in which attention reads these records.

    A record made by one of tamis' builders is refused once its builder has made another one, which has overwritten the
    record's buffers. Records of other builders, such as vLLM's, do not say so and are not checked.
    """
    checked = [record.using for record in records if hasattr(record, "using")]
    return _all_in_use(checked) if checked else _UNCHECKED


_UNCHECKED = nullcontext()


@contextmanager
def _all_in_use(checked: list[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as block:
        for using in checked:
            block.enter_context(using())
        yield
