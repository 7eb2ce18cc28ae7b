"""The operator that replaces vLLM's `SparseAttnIndexer` where `"indexer": "tamis"` is asked for.

vLLM builds whatever class is registered out of tree for an operator (`CustomOp.register_oot`). `Indexer` is that class.
It turns back into vLLM's own unless tamis was asked for; then it refuses what it cannot serve, gives its index cache
metadata of its own, and takes the place of vLLM's function also where models call that instead of the operator.

vLLM's own indexer refuses our metadata, so a layer that would run it in spite of all this fails rather than going on
without a word.
"""

import sys
from functools import cache
from logging import getLogger
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm import _custom_ops, platforms
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from tamis.cache.layout import index_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.shard import Shard
from tamis.integrations.vllm.checked_cache import CheckedCache
from tamis.integrations.vllm.context_parallel import Ranks
from tamis.integrations.vllm.indexer import (
    CandidateBlocks,
    IndexerMetadata,
    IndexerMetadataBuilder,
    IndexerOptions,
    StepRows,
    select_positions,
)
from tamis.integrations.vllm.versions import plugin_refusal
from tamis.ops.index import MAX_K, WORKSPACE_BYTES

OPERATOR = "SparseAttnIndexer"
_OP = "tamis_sparse_attn_indexer"
_THEIR_OP = "vllm::sparse_attn_indexer"
_COMPRESSED = ("DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER")
_BACKENDS = ("DEEPSEEK_V32_INDEXER", *_COMPRESSED)
"""vLLM's names of the index caches that tamis reads; those of compressed keys have builders that say where keys go."""
_theirs = sparse_attn_indexer.sparse_attn_indexer


def register_indexer() -> str | None:
    """Register `Indexer` with vLLM, once; return the reason if another plugin was first, else None."""
    known = op_registry_oot.get(OPERATOR)
    if known is Indexer:
        return None
    if known is not None:
        return f"another plugin has registered {known.__module__}.{known.__qualname__} for {OPERATOR}"
    written = ["topk_indices_buffer", "candidate_blocks"]
    direct_register_custom_op(_OP, _run_layer, mutates_args=written, fake_impl=_run_nothing)
    CustomOp.register_oot(Indexer, name=OPERATOR)
    return None


class Builder(IndexerMetadataBuilder, AttentionMetadataBuilder[IndexerMetadata]):
    """Makes the metadata of a step."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH


@cache
def _backend_like(theirs: type[Any]) -> type[Any]:
    """vLLM's backend of an index cache, with metadata of tamis."""
    compressed = theirs.get_name() in _COMPRESSED
    builder = _compressed_builder(theirs.get_builder_cls()) if compressed else Builder
    members = {
        "get_builder_cls": staticmethod(lambda: builder),
        # The request of each token comes from the device's query starts, as adaptive verification needs it.
        "supports_device_cpu_query_lens_mismatch": classmethod(lambda _: not compressed or _supported(theirs)),
    }
    return type(f"Tamis{theirs.__name__}", (theirs,), members)


def _supported(theirs: type[Any]) -> bool:
    """What vLLM's own backend says about query lengths that only the device knows; older versions have none."""
    return bool(getattr(theirs, "supports_device_cpu_query_lens_mismatch", lambda: False)())


def _compressed_builder(theirs: type[Any]) -> type[Any]:
    """A builder for DeepSeek-V4. vLLM's own says where the compressed keys go, which the compressor reads as well."""

    class CompressedBuilder(theirs):
        reorder_batch_threshold = theirs.reorder_batch_threshold

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._rows = StepRows(self.vllm_config, self.device, ratio=self.compress_ratio)

        def build(self, *args: Any, **kwargs: Any) -> IndexerMetadata:
            engine = super().build(*args, **kwargs)
            common = kwargs["common_attn_metadata"] if "common_attn_metadata" in kwargs else args[1]
            return self._rows.read(common, engine.slot_mapping, engine)

        def update_draft_decode_metadata(self, metadata: IndexerMetadata) -> None:
            super().update_draft_decode_metadata(metadata.engine)
            self._rows.fill_one_each(metadata)

    return CompressedBuilder


class Indexer(SparseAttnIndexer):
    """vLLM's operator with tamis' selection. Keys are still written by vLLM's kernels, so they are the same bytes."""

    def __init__(self, k_cache: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; raises if tamis was asked for and cannot serve this layer."""
        config = get_current_vllm_config()
        options = IndexerOptions.read(config)
        if not options.chosen:
            # What is built is then exactly vLLM's operator.
            self.__class__ = SparseAttnIndexer
            SparseAttnIndexer.__init__(self, k_cache, *args, **kwargs)
            return
        super().__init__(k_cache, *args, **kwargs)
        backend = k_cache.get_attn_backend()
        reasons = _refusals(self, config, options, backend.get_name())
        if reasons:
            remedy = 'leave out "indexer": "tamis"'
            raise ValueError(f"tamis cannot replace vLLM's indexer here: {'; '.join(reasons)}; {remedy}")
        blocks = getattr(self, "candidate_blocks", None)
        self._candidates: CandidateBlocks | None = None
        if blocks is not None:
            self._candidates = CandidateBlocks(blocks, self.candidate_block_size, self.candidate_write)
        self._checked: CheckedCache | None = None
        self._group: ProcessGroup | None = None
        self._shard: Shard | None = None
        if self.dcp_world_size > 1:
            self._group = get_dcp_group().device_group
        elif options.shared and get_tp_group().world_size > 1:
            self._group = get_tp_group().device_group
        # These two make vLLM build our metadata for the cache, and find this object by a name that it can trace. In
        # V4.1 several layers select from one cache: the first has made the cache's backend ours.
        layers = config.compilation_config.static_forward_context
        self._name = _name_of(k_cache.prefix)
        if self._name in layers:
            self._name += f".{sum(name.startswith(self._name) for name in layers)}"
        else:
            k_cache.get_attn_backend = lambda: _backend_like(backend)
        layers[self._name] = self
        _split_graphs(config.compilation_config)
        _replace_function()
        _say_once()

    def forward_cuda(
        self, hidden_states: Tensor, q_quant: Tensor | tuple[Tensor, Tensor], k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Write the keys and select; returns the buffer with the positions."""
        assert isinstance(q_quant, Tensor), "FP4 caches, which have scales of their own, were refused"
        name, blocks = _encode_layer_name(self._name), None if self._candidates is None else self._candidates.buffer
        torch.ops.vllm.tamis_sparse_attn_indexer(q_quant, k, weights, self.topk_indices_buffer, blocks, name)
        buffer: Tensor = self.topk_indices_buffer
        return buffer

    forward_native = forward_cuda

    def run(self, q: Tensor, k: Tensor | None, weights: Tensor, buffer: Tensor, *, writes: bool, dense: str) -> None:
        """Write the keys of a step, unless a fused kernel has, and select.

        Args:
            q: e4m3 [T, H, D].
            k: [T, D] of the new tokens; None if they are written already.
            weights: float32 [T, H].
            buffer: int32 [T or more, k or more], for the positions.
            writes: whether the keys are written here.
            dense: the layer whose record says whether anything reads the positions; "" if something does.
        """
        context = get_forward_context()
        steps = context.attn_metadata
        if not isinstance(steps, dict):
            # vLLM measures memory. What a selection may take is all that tamis needs: there are no logits to reserve.
            torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            return
        metadata = steps[self.k_cache.prefix]
        assert isinstance(metadata, IndexerMetadata), "vLLM built other metadata for this index cache"
        if writes and k is not None:
            slots = metadata.slot_mapping
            _custom_ops.indexer_k_quant_and_cache(
                k[: len(slots)], self.k_cache.kv_cache, slots, self.quant_block_size, self.scale_fmt
            )
        captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if captured or not dense or not _is_unread(steps.get(dense), context):
            step = (metadata, self.topk_tokens, buffer, self._group, self._keys_shard(), self._candidates)
            select_positions(q, weights, self._keys(), *step)

    def _keys_shard(self) -> Shard | None:
        """The part of the keys that this rank holds. vLLM may decide about the interleave size after its layers are
        built."""
        if self.dcp_world_size == 1:
            return None
        interleave = self.cp_kv_cache_interleave_size
        if self._shard is None or self._shard.interleave != interleave:
            self._shard = Shard(self.dcp_world_size, self.dcp_rank, interleave)
        return self._shard

    def _keys(self) -> PagedCache:
        storage = self.k_cache.kv_cache
        known = None if self._checked is None else self._checked.find(storage)
        if known is None:
            known = PagedCache.wrap(storage, index_fp8(dim=self.head_dim))
            self._checked = CheckedCache(storage, known)
        return known


def _refusals(indexer: Any, config: Any, options: IndexerOptions, backend: str) -> list[str]:
    """Every reason why tamis cannot serve a layer."""
    ranks = Ranks.read(config.parallel_config)
    refusal = plugin_refusal()
    refusals = {
        str(refusal): refusal is not None,
        "it needs a CUDA device": not platforms.current_platform.is_cuda(),
        f"index caches of {backend} are not known": backend not in _BACKENDS,
        "index keys in MXFP4 have queries in MXFP4 as well, which tamis does not score": indexer.use_fp4_cache,
        "index keys are not in e4m3 with one power-of-two scale each": (
            indexer.quant_block_size != indexer.head_dim or indexer.scale_fmt != "ue8m0"
        ),
        "several ranks cannot share a selection in two levels (DeepSeek-V4.1)": (
            (options.shared or ranks.decode > 1) and getattr(indexer, "candidate_blocks", None) is not None
        ),
        f"index_topk {indexer.topk_tokens} is above {MAX_K}": indexer.topk_tokens > MAX_K,
        '"share_indexer" is true where ranks divide the keys (decode context parallelism), and share the work so': (
            options.shared and ranks.decode > 1
        ),
        f"prompts are divided among {ranks.prefill} ranks (prefill context parallelism)": ranks.prefill > 1,
    }
    return [reason for reason, applies in refusals.items() if applies]


def _name_of(prefix: str) -> str:
    """The name of our operator among vLLM's layers, next to that of its cache."""
    return f"{prefix}.tamis"


def _is_unread(attention: Any, context: Any) -> bool:
    """Whether dense attention takes all tokens of the step, as vLLM's own backends do with short prompts."""
    return (
        getattr(getattr(attention, "prefill", None), "use_dense_mha", False)
        and getattr(attention, "num_decode_tokens", -1) == 0
        and context.cudagraph_runtime_mode.name != "FULL"
    )


@eager_break_during_capture  # type: ignore[untyped-decorator]
def _run_layer(
    q: Tensor,
    k: Tensor | None,
    weights: Tensor,
    topk_indices_buffer: Tensor,
    candidate_blocks: Tensor | None,
    layer_name: LayerNameType,
) -> None:
    """Run the operator of a layer. The candidate blocks are an argument because it may write them."""
    indexer = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    dense = getattr(indexer, "dense_mha_metadata_layer_name", "")
    indexer.run(q, k, weights, topk_indices_buffer, writes=not indexer.skip_k_cache_insert, dense=dense)


def _run_nothing(
    q: Tensor,
    k: Tensor | None,
    weights: Tensor,
    topk_indices_buffer: Tensor,
    candidate_blocks: Tensor | None,
    layer_name: LayerNameType,
) -> None:
    """What vLLM traces in place of `_run_layer`."""


def _split_graphs(compilation: Any) -> None:
    """Keep our operator out of compiled pieces, where vLLM keeps its own: it reads the step's metadata."""
    ours = f"vllm::{_OP}"
    splits = compilation.splitting_ops
    if splits and _THEIR_OP in splits and ours not in splits:
        splits.append(ours)


@eager_break_during_capture  # type: ignore[untyped-decorator]
def _select_in_place(
    hidden_states: Tensor,
    k_cache_prefix: LayerNameType,
    kv_cache: Tensor,
    q_quant: Tensor,
    q_scale: Tensor | None,
    k: Tensor | None,
    weights: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: Tensor,
    skip_k_cache_insert: bool,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """vLLM's function, by its arguments. Layers without our operator run vLLM's own."""
    layers = get_forward_context().no_compile_layers
    indexer = layers.get(_name_of(_resolve_layer_name(k_cache_prefix)))
    if indexer is None:
        leading = (hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt)
        sizes = (topk_tokens, head_dim, max_model_len, total_seq_lens)
        found: Tensor = _theirs(*leading, *sizes, topk_indices_buffer, skip_k_cache_insert, *rest, **more)
        return found
    dense = _resolve_layer_name(more.get("dense_mha_metadata_layer_name", ""))
    indexer.run(q_quant, k, weights, topk_indices_buffer, writes=not skip_k_cache_insert, dense=dense)
    return topk_indices_buffer


def _replace_function() -> None:
    """Take the place of vLLM's function in the models that have imported it by name, as the fused layers of V3.2 do:
    they build the operator but call the function."""
    for module in list(sys.modules.values()):
        if module is not sparse_attn_indexer and getattr(module, "__dict__", {}).get("sparse_attn_indexer") is _theirs:
            module.sparse_attn_indexer = _select_in_place  # type: ignore[attr-defined]


@cache
def _say_once() -> None:
    getLogger("tamis").info("tamis selects in place of vLLM's indexer")
