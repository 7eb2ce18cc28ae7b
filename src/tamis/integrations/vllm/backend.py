"""`TamisSparseBackend`: the properties that vLLM asks of a backend before and during setup."""

from typing import Any, ClassVar

import torch

from tamis import checks
from tamis.cache.layout import for_engine
from tamis.choice import choose
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadata, SparseMetadataBuilder, model_field
from tamis.integrations.vllm.row_formats import HEAD_SIZES, ROPE, row_layout, row_rope
from tamis.model.spec import LayerSpec


class TamisSparseBackend:
    """tamis as a vLLM backend for sparse MLA."""

    accept_output_buffer: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "bfloat16",
        "float16",
        "fp8",
        "fp8_e4m3",
        "fp8_ds_mla",
    ]

    @staticmethod
    def get_name() -> str:
        """The name in logs and reports."""
        return "TAMIS_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The class of a layer's attention."""
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes per-step metadata."""
        return SparseMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """The class of that metadata."""
        return SparseMetadata

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """The page sizes to ask the engine for. tamis takes any, but vLLM's index keys come only in pages of 64, and
        both caches share their pages."""
        return [64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """The row widths of the models that use this backend: 512 + 64, and 512 of models without a rope."""
        return list(HEAD_SIZES)

    @classmethod
    def is_mla(cls) -> bool:
        """True: the backend is for latent attention."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """True: the backend is for layers with an indexer."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """True: attention sinks are supported."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """True: with adaptive verification, the request of each token comes from the device's query starts."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether any tamis backend runs on such a device."""
        return _device_refusal(LayerSpec(heads=1, topk=1), _pair(capability)) is None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *more: Any,
        device_capability: Any = None,
        model_config: Any = None,
        **others: Any,
    ) -> str | None:
        """None if this combination runs, else every reason why not.

        Args:
            head_size: width of a cached row.
            dtype: the queries' dtype.
            kv_cache_dtype: as in `--kv-cache-dtype`; None means "auto".
            block_size: the cache's page size; None if the engine has not decided.
            use_mla: whether the layer is latent attention.
            has_sink: whether it has attention sinks.
            use_sparse: whether it has an indexer.
            more: further positional arguments of vLLM: the capability, and in newer versions `use_mm_prefix` before it.
            device_capability: (major, minor) of a CUDA device; None for a CPU.
            model_config: vLLM's; if given, its model must have `index_topk`.
            others: keywords of newer versions, of which only `use_mm_prefix` is read.
        """
        flags = [m for m in more if isinstance(m, bool)]
        capability = next((m for m in more if m is not None and not isinstance(m, bool)), device_capability)
        known_size = head_size in cls.get_supported_head_sizes()
        rope = None if model_config is None else model_field(model_config, "qk_rope_head_dim")
        known_cache = kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes
        refusals = {
            "the layer is not latent attention (MLA)": not use_mla,
            "the layer is not sparse": not use_sparse,
            "bidirectional multimodal prefixes are not supported": bool(others.get("use_mm_prefix", any(flags))),
            f"head size {head_size} is not one of {_listed(cls.get_supported_head_sizes())}": not known_size,
            wide_rope(head_size, rope): head_size == 512 and bool(rope),
            f"cache dtype {kv_cache_dtype!r} is not one of {_listed(cls.supported_kv_cache_dtypes)}": not known_cache,
            "the model config has no index_topk": (
                model_config is not None and model_field(model_config, "index_topk") is None
            ),
        }
        reasons = [reason for reason, applies in refusals.items() if applies]
        # Unsupported values are replaced by usual ones here, so that the device's own reasons are listed as well.
        cache = kv_cache_dtype if known_cache and kv_cache_dtype is not None else "auto"
        columns = row_rope(cache, HEAD_SIZES.get(head_size, ROPE))
        spec = LayerSpec(heads=1, latent_dim=512, rope_dim=columns, value_dim=512, topk=1, sink=has_sink)
        refusal = _device_refusal(spec, _pair(capability), cache=cache, dtype=dtype, block_size=block_size)
        return "; ".join(reasons + ([refusal] if refusal else [])) or None

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[pages, page size, row]; a row of `fp8_ds_mla` is 656 bytes for 576 numbers and 584 for 512 (DeepSeek-V4's:
        versions of vLLM that ask for a shape do not have models without a rope).

        vLLM's KV connectors ask with head sizes that no model has, to see which axis counts the pages.
        """
        if num_kv_heads != 1:
            raise checks.refuse("num_kv_heads", "1", num_kv_heads, "latent attention keeps one row for all heads")
        known = head_size in HEAD_SIZES
        layout = for_engine(cache_dtype_str, latent=(head_size if known else max(HEAD_SIZES)) - ROPE, rope=ROPE)
        packed = cache_dtype_str == "fp8_ds_mla"
        return (num_blocks, block_size, layout.row_elements if known or packed else head_size)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """None: with one KV head, vLLM's "HND" and "NHD" are the same bytes."""
        return None


def wide_rope(head_size: int, rope: int | None) -> str:
    """The reason against rows of 512 columns that have a rope."""
    return f"head size {head_size} is for models without a rope, and this one has {rope} columns of it"


def _device_refusal(
    spec: LayerSpec,
    capability: tuple[int, int] | None,
    *,
    cache: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    block_size: int | None = None,
) -> str | None:
    floats = dtype if dtype in checks.FLOATS else torch.bfloat16
    layout = row_layout(cache, spec.latent_dim, spec.rope_dim, floats)
    device = "cpu" if capability is None else "cuda"
    try:
        choose(spec, device, layout=layout, dtype=dtype, page_size=block_size or 64, capability=capability)
    except ValueError as error:
        return str(error)
    return None


def _pair(capability: Any) -> tuple[int, int] | None:
    if capability is None:
        return None
    if hasattr(capability, "major"):
        return int(capability.major), int(capability.minor)
    major, minor = capability
    return int(major), int(minor)


def _listed(values: list[Any]) -> str:
    return ", ".join(str(v) for v in values)
