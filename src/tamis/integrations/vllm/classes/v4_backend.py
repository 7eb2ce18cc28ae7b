"""`TamisV4Backend` and `TamisV4WindowBackend`: what an engine asks the backend of DeepSeek-V4 layers during setup."""

from typing import Any, ClassVar

from tamis.integrations.vllm.backend import TamisSparseBackend
from tamis.integrations.vllm.classes.v4_metadata import V4MetadataBuilder, V4WindowMetadataBuilder
from tamis.integrations.vllm.classes.v4_records import V4Metadata, V4WindowMetadata


class TamisV4Backend(TamisSparseBackend):
    """V4 layers with a compressed cache, whose rows are packed (`fp8_ds_mla`), bf16, or e4m3 under one scale."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"]

    @staticmethod
    def get_name() -> str:
        """The name in logs and reports."""
        return "TAMIS_SPARSE_V4"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Always refused: a V4 layer runs attention itself, for example through `V4Impl`."""
        raise NotImplementedError(
            "a DeepSeek-V4 layer runs attention itself; use tamis.integrations.vllm.classes.v4_impl.V4Impl"
        )

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes per-step metadata."""
        return V4MetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """The class of that metadata."""
        return V4Metadata

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens per page. A page has 256 / ratio entries."""
        return [256]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """512: 448 latent columns and 64 rope columns."""
        return [512]


class TamisV4WindowBackend(TamisV4Backend):
    """The cache of raw tokens, which every V4 layer has."""

    @staticmethod
    def get_name() -> str:
        """The name in logs and reports."""
        return "TAMIS_SPARSE_V4_WINDOW"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes per-step metadata."""
        return V4WindowMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """The class of that metadata."""
        return V4WindowMetadata

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens per page, best first. Any multiple of 64 works."""
        return [64, 256]
