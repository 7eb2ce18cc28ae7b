"""`V4Impl`: the attention of one DeepSeek-V4 layer under vLLM's names, over one mixed list of window and entry slots.

The caller passes the step's records, which vLLM's own class takes from a global context. Heads are never padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import output_dtype
from tamis.integrations.flashinfer_v4 import prepare_sparse_mla_dsv4
from tamis.integrations.vllm.classes.v4_indices import build_flashinfer_mixed_sparse_indices
from tamis.integrations.vllm.classes.v4_records import V4Metadata, V4WindowMetadata
from tamis.integrations.vllm.v4_formats import E4M3, declared_dtype, layout_of, listed, sees_every_entry
from tamis.integrations.vllm.v4_forward import in_use


def get_padded_num_q_heads(num_heads: int, sizes: Sequence[int] = (64, 128)) -> int:
    """The number of heads to which other libraries' kernels pad `num_heads`. Newer ones also take 8, 16 and 32. tamis
    pads none."""
    for padded in sizes:
        if num_heads <= padded:
            return padded
    raise checks.refuse("num_heads", f"at most {max(sizes)}", num_heads, "split the heads over more ranks")


def init_layer_buffers(layer: Any) -> None:
    """Set the factors of a per-tensor FP8 cache on a layer, under vLLM's names. Does nothing for other caches.

    Reads `layer.kv_cache_torch_dtype`, `layer.scale`, and the scales `_q_scale_float` and `_k_scale_float` (1.0 if they
    are missing).
    """
    if layer.kv_cache_torch_dtype != E4M3:
        return
    q_scale = checks.positive_number("_q_scale_float", getattr(layer, "_q_scale_float", 1.0))
    kv_scale = checks.positive_number("_k_scale_float", getattr(layer, "_k_scale_float", 1.0))
    values = {"q_scale": q_scale, "q_scale_inv": 1.0 / q_scale, "kv_scale": kv_scale}
    for name, value in values.items():
        # A layer without a device gets the default device, under which engines construct their layers.
        buffer = torch.tensor([value], dtype=torch.float32, device=getattr(layer, "device", None))
        if isinstance(layer, torch.nn.Module):
            layer.register_buffer(f"_flashinfer_fp8_{name}", buffer, persistent=False)
        else:
            setattr(layer, f"_flashinfer_fp8_{name}", buffer)
    layer._flashinfer_fp8_bmm1_scale = float(layer.scale) * q_scale * kv_scale
    layer._flashinfer_fp8_bmm2_scale = kv_scale


@dataclass(frozen=True, eq=False)
class MixedIndices:
    """The mixed table of one step: window columns first, then entries."""

    compressed_kv_cache: Tensor
    """The compressed cache; for layers without entries, the window's cache again."""
    seq_lens: Tensor
    sparse_indices: Tensor
    sparse_topk_lens: Tensor


class V4Impl:
    """Attention of V4 layers of any kind. It holds no state: caches, sinks and scales are attributes of `layer`."""

    def __init__(self, *, calls: Literal[1, 2] = 2) -> None:
        """Choose whether decodes and prefills run in two calls, as in engines, or in one. Both give the same result."""
        self.calls = checks.option("calls", calls, (1, 2))

    def forward_mqa(
        self,
        layer: Any,
        q: Tensor,
        kv: Tensor | None,
        positions: Tensor | None,
        output: Tensor,
        *,
        swa_metadata: V4WindowMetadata | None,
        attn_metadata: V4Metadata | None = None,
    ) -> None:
        """Attend the step's tokens and write into `output`.

        Args:
            layer: an object with `compress_ratio`, `window_size`, `scale`, `attn_sink`, `swa_cache_layer.kv_cache`;
                with a ratio above 1 also `kv_cache` and, where an indexer selects (ratio 4), its `topk_indices_buffer`.
                `kv_cache_torch_dtype` says what the caches hold; for e4m3, `init_layer_buffers` must have been called.
            q: [tokens or more, H, 512], rotated: e4m3 for a layer with an e4m3 cache, else bf16, fp16 or fp32.
            kv: not read, since the caches already hold the step's rows.
            positions: not read, since the records imply them.
            output: [tokens or more, H or more, 512]; further heads and rows of padding become zeros.
            swa_metadata: the window's record; None while an engine warms up, which gives an output of zeros.
            attn_metadata: the layer's own record; None for layers with a window only.
        """
        _check_output(q, output)
        if swa_metadata is None:
            output.zero_()
            return
        with in_use(swa_metadata, attn_metadata):
            factors = _factors(layer, q)
            heads, total = q.shape[1], int(swa_metadata.query_start_loc_cpu[-1])
            indices = self.build_sparse_indices(layer, swa_metadata, attn_metadata) if total else None
            if indices is not None:
                self._forward(layer, q[:total], output[:total, :heads], swa_metadata, indices, factors)
            # Zeroed last, since the attention above still has checks that may refuse the call.
            output[:, heads:].zero_()
            output[total:].zero_()

    def build_sparse_indices(
        self, layer: Any, swa_metadata: V4WindowMetadata, attn_metadata: V4Metadata | None
    ) -> MixedIndices:
        """The mixed table of this kind of layer, for the requests' tokens without padding."""
        window, total = swa_metadata, int(swa_metadata.query_start_loc_cpu[-1])
        if window.decode_swa_width != layer.window_size:
            expected = f"with rows of the layer's window of {layer.window_size}"
            remedy = "the mixed table assumes a causal window; use v4_forward for draft blocks"
            raise checks.refuse("swa_metadata", expected, f"{window.decode_swa_width} columns", remedy)
        decodes = min(window.num_decode_tokens, total)
        swa_cache = layer.swa_cache_layer.kv_cache
        ratio = layer.compress_ratio
        inputs = _no_entries(window, decodes, total)
        cache = swa_cache
        if ratio > 1:
            if attn_metadata is None:
                raise checks.refuse("attn_metadata", f"given for ratio {ratio}", None, "pass the layer's own record")
            cache = layer.kv_cache
            inputs = _entries(layer, window, attn_metadata, decodes, total)
        slots, lengths = build_flashinfer_mixed_sparse_indices(
            decode_swa_indices=window.decode_swa_indices[:decodes, 0],
            query_start_loc=window.query_start_loc,
            seq_lens=window.seq_lens,
            token_to_req_indices=window.token_to_req_indices[:total],
            swa_block_table=window.block_table,
            swa_block_size=window.block_size,
            window_size=layer.window_size,
            compress_ratio=ratio,
            **inputs,
        )
        # vLLM masks only decode tokens without a slot; here prefill tokens without one attend to nothing as well.
        slots[decodes:].masked_fill_(~window.is_valid_token[decodes:total].unsqueeze(1), -1)
        return MixedIndices(cache, window.seq_lens, slots, lengths)

    def _forward(
        self,
        layer: Any,
        q: Tensor,
        output: Tensor,
        window: V4WindowMetadata,
        indices: MixedIndices,
        factors: tuple[float | Tensor, float | Tensor],
    ) -> None:
        starts, host = window.query_start_loc, window.query_start_loc_cpu
        requests, calls = len(host) - 1, []
        first, second = slice(0, window.num_decodes), slice(window.num_decodes, requests)
        # Both calls are checked before the first of them runs: a refused step leaves the output as it was.
        for part in (first, second) if self.calls == 2 else (slice(0, requests),):
            begin, end = int(host[part.start]), int(host[part.stop])
            if begin == end:
                continue
            rows = slice(begin, end)
            call, _ = prepare_sparse_mla_dsv4(
                query=q[rows],
                swa_kv_cache=layer.swa_cache_layer.kv_cache,
                sparse_indices=indices.sparse_indices[rows],
                compressed_kv_cache=indices.compressed_kv_cache,
                sparse_topk_lens=indices.sparse_topk_lens[rows],
                seq_lens=indices.seq_lens[part],
                out=output[rows],
                bmm1_scale=factors[0],
                bmm2_scale=factors[1],
                sinks=layer.attn_sink[: q.shape[1]],
                # Each call counts its tokens from 0.
                cum_seq_lens_q=starts[part.start : part.stop + 1] - begin,
                max_q_len=int((host[part.start + 1 : part.stop + 1] - host[part.start : part.stop]).max()),
                window_columns=window.decode_swa_width,
            )
            calls.append(call)
        for call in calls:
            call.run()


def _check_output(q: Tensor, output: Tensor) -> None:
    checks.tensor("q", q, "T H D", (*checks.FLOATS, E4M3))
    dtype = output_dtype(q.dtype)
    checks.tensor("output", output, "T H D", (dtype,), device=q.device)
    if output.shape[0] != q.shape[0] or output.shape[2] != q.shape[2] or output.shape[1] < q.shape[1]:
        expected = f"[{q.shape[0]}, {q.shape[1]} or more, {q.shape[2]}] like q {list(q.shape)}"
        raise checks.refuse("output", expected, list(output.shape), "allocate it for q's tokens and heads")


def _no_entries(window: V4WindowMetadata, decodes: int, total: int) -> dict[str, Any]:
    return {
        "decode_compressed_indices": None,
        "decode_compressed_topk_lens": None,
        "prefill_topk_indices": window.seq_lens.new_empty(total - decodes, 0, dtype=window.seq_lens.dtype),
        "compressed_block_table": None,
        "compressed_block_size": window.block_size,
        "topk": 0,
    }


def _entries(layer: Any, window: V4WindowMetadata, record: V4Metadata, decodes: int, total: int) -> dict[str, Any]:
    """The entries that the layer's indexer chose; without an indexer, all entries, as the record lists them."""
    every = sees_every_entry(layer, record)
    lengths, valid = None, None
    if not every:
        chosen: Tensor = layer.topk_indices_buffer
        decode, prefill = chosen[:decodes], chosen[decodes:total]
        valid = window.is_valid_token[:decodes]
    else:
        slots, numbers = record.c128a_global_decode_topk_indices, record.c128a_prefill_topk_indices
        given = listed("c128a rows", slots if slots is not None else numbers)
        nothing = given.new_empty(0, given.shape[-1], dtype=given.dtype)
        decode = nothing if slots is None else slots[:decodes, 0]
        prefill = nothing if numbers is None else numbers[: total - decodes]
        counts = record.c128a_decode_topk_lens
        lengths = window.seq_lens.new_empty(0, dtype=window.seq_lens.dtype) if counts is None else counts[:decodes]
    return {
        "decode_compressed_indices": decode,
        "decode_compressed_topk_lens": lengths,
        "prefill_topk_indices": prefill,
        "compressed_block_table": record.block_table,
        "compressed_block_size": record.block_size // layer.compress_ratio,
        "topk": prefill.shape[1] if len(prefill) else 0,
        "decode_compressed_indices_are_local": not every,
        "decode_is_valid_token": valid,
    }


def _factors(layer: Any, q: Tensor) -> tuple[float | Tensor, float | Tensor]:
    """The factors before and after the softmax. The first combines the scales of query and cache, so both must be e4m3
    or neither."""
    raw = layer.swa_cache_layer.kv_cache
    declared = declared_dtype(layer, raw)
    layout_of("swa_kv_cache", raw, layer)
    if layer.compress_ratio > 1:
        layout_of("kv_cache", layer.kv_cache, layer)
    if (declared == E4M3) != (q.dtype == E4M3):
        fitting = (E4M3,) if declared == E4M3 else checks.FLOATS
        allowed = " or ".join(checks.dtype_name(dtype) for dtype in fitting)
        received, remedy = checks.dtype_name(q.dtype), f"convert it with .to({fitting[0]})"
        kind = checks.dtype_name(declared)
        raise checks.refuse_type("q", f"{allowed} for the layer's {kind} cache", received, remedy)
    if declared != E4M3:
        return float(layer.scale), 1.0
    names = ("_flashinfer_fp8_bmm1_scale", "_flashinfer_fp8_bmm2_scale")
    for name in names:
        if not hasattr(layer, name):
            raise checks.refuse(f"layer.{name}", "set for an e4m3 cache", None, "call init_layer_buffers once")
    return layer._flashinfer_fp8_bmm1_scale, layer._flashinfer_fp8_bmm2_scale
