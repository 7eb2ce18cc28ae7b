"""The classes that vLLM loads for `--attention-backend CUSTOM`: tamis' classes, derived from vLLM's base classes too.

Importing this module imports vLLM. The code of the classes is in the modules beside it, which do not import vLLM.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder

from tamis.integrations.vllm.backend import TamisSparseBackend, wide_rope
from tamis.integrations.vllm.context_parallel import Ranks
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.indexer import IndexerOptions
from tamis.integrations.vllm.metadata import SparseMetadata, SparseMetadataBuilder, model_field
from tamis.integrations.vllm.versions import (
    calls_packed_rows_auto,
    divides_prompts,
    keep_prefills_sparse,
    sparse_impl_base,
)


class Metadata(SparseMetadata, AttentionMetadata):
    """The metadata of one step."""


class Builder(SparseMetadataBuilder, AttentionMetadataBuilder[Metadata]):
    """Makes a `Metadata` per step, in buffers that never move, so that captured graphs may keep them."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls: ClassVar[type[SparseMetadata]] = Metadata


class Impl(SparseImpl, sparse_impl_base()):  # type: ignore[misc]
    """The attention of one layer. vLLM's base sets the context-parallel rank before the constructor runs."""

    supports_dcp: ClassVar[bool] = True
    supports_pcp: ClassVar[bool] = divides_prompts()
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = True
    masked_mha_available: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `SparseImpl`, with the interleave size from vLLM's configuration."""
        config = get_current_vllm_config_or_none()
        if config is not None:
            self.cp_kv_cache_interleave_size = config.parallel_config.cp_kv_cache_interleave_size
            keep_prefills_sparse(config)
            check_indexer(config, kwargs.get("indexer"))
        super().__init__(*args, **kwargs)
        if self.dcp_world_size > 1 and self.pcp_world_size > 1:
            self.dcp_group = get_dcp_group().device_group

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Do nothing: vLLM's layer absorbs and projects, so no second copy of the weights is needed."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str | None = None,
        k_scale: float | Tensor = 1.0,
    ) -> None:
        """As `SparseImpl`. Rows that are stored unchanged are written by vLLM's own kernel, which writes the same bytes
        and is launched faster, from C++."""
        arguments = (kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype or self.kv_cache_dtype, k_scale)
        if self.tamis_backend == "auto" and engine_writes(*arguments):
            super(SparseImpl, self).do_kv_cache_update(*arguments)
        else:
            super().do_kv_cache_update(*arguments)

    def _joined(self, q: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if not isinstance(q, tuple) or not engine_joins(*q):
            return super()._joined(q)
        from vllm import _custom_ops  # which loads vLLM's kernels

        latent, rope = q
        joined = latent.new_empty((*latent.shape[:2], latent.shape[2] + rope.shape[2]), dtype=latent.dtype)
        _custom_ops.concat_mla_q(latent, rope, joined)
        return joined

    def record_logical_topk_ready(self) -> None:
        """Do nothing: positions are translated on the stream that selected them, within attention or by the first layer
        of an index group."""

    def prepare_for_batch(self, attn_metadata: SparseMetadata | None) -> None:
        """Do nothing: all that layers share is in the step's record."""


class Backend(TamisSparseBackend, AttentionBackend):
    """tamis as a vLLM backend for sparse MLA."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """The class of a layer's attention."""
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        """The class that makes per-step metadata."""
        return Builder

    @staticmethod
    def get_metadata_cls() -> type[Metadata]:
        """The class of that metadata."""
        return Metadata

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[pages, page size, row].

        vLLM 0.25 passes "auto" for `fp8_ds_mla` caches, whose pages it has allocated for 656 bytes a row, so the dtype
        is then read from its configuration.
        """
        config = get_current_vllm_config_or_none()
        if cache_dtype_str == "auto" and config is not None and calls_packed_rows_auto():
            cache_dtype_str = config.cache_config.cache_dtype
        return TamisSparseBackend.get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Every reason why this configuration cannot run; vLLM shows them and stops."""
        reasons: list[str] = super().validate_configuration(*args, **kwargs)
        return reasons + _refusals(get_current_vllm_config_or_none())


def check_indexer(config: Any, indexer: Any) -> None:
    """Raise if tamis' indexer was asked for, and a layer's indexer has another operator."""
    if indexer is None or not IndexerOptions.read(config).chosen:
        return
    from tamis.integrations.vllm.indexer_plugin import Indexer

    operator = getattr(indexer, "indexer_op", None)
    if not isinstance(operator, Indexer):
        built = f"{type(indexer).__name__} with {type(operator).__name__}"
        raise RuntimeError(f'"indexer": "tamis" was asked for, but vLLM built {built}, which tamis does not replace')


def engine_joins(latent: Tensor, rope: Tensor) -> bool:
    """Whether vLLM's own kernel can join these two parts of a query. It is several times faster than `torch.cat` if the
    latent part is a transposed product."""
    alike = latent.dtype == rope.dtype and latent.shape[:-1] == rope.shape[:-1] and latent.dim() == 3
    usual = latent.dtype in (torch.bfloat16, torch.float16) and (latent.shape[-1], rope.shape[-1]) == (512, 64)
    return latent.is_cuda and rope.is_cuda and alike and usual and latent.stride(-1) == 1 and rope.stride(-1) == 1


def engine_writes(
    latent: Tensor, rope: Tensor, cache: Tensor, slots: Tensor, cache_dtype: str, scale: float | Tensor
) -> bool:
    """Whether these rows are stored unchanged, and vLLM's own kernel can write them."""
    copied = cache_dtype == "auto" and latent.dtype == rope.dtype == cache.dtype and isinstance(scale, Tensor)
    return copied and latent.is_cuda and rope.is_cuda and cache.is_cuda and slots.is_cuda and rope.dim() == 3


def _refusals(config: Any) -> list[str]:
    """Reasons against a configuration that vLLM does not ask a backend about."""
    if config is None:
        return []
    ranks = Ranks.read(config.parallel_config)
    widths = [model_field(config.model_config, name) or 0 for name in ("kv_lora_rank", "qk_rope_head_dim")]
    host_backed = getattr(config.attention_config, "hisparse_config", None) is not None
    refusals = {
        "caches in host memory (HiSparse) are not supported": host_backed,
        # Its layers name their backends themselves, for rows that are padded to the width of its sliding windows.
        "dots3-note's layers choose their own attention in vLLM, so that CUSTOM would have no effect": (
            config.model_config is not None and model_field(config.model_config, "model_type") == "dots3_note"
        ),
        wide_rope(512, widths[1]): sum(widths) == 512 and widths[1] > 0,
        # vLLM numbers the ranks of such a group in another order than torch, which gathers what they merge.
        "rows shared over tensor- and prefill-parallel ranks at once (TP x PCP) are not supported, because vLLM merges "
        f"wrong ones; use --decode-context-parallel-size {ranks.prefill} or 1": 1 < ranks.prefill < ranks.decode,
        "the model config has no index_topk": (
            config.model_config is not None and model_field(config.model_config, "index_topk") is None
        ),
    }
    return [reason for reason, applies in refusals.items() if applies]
