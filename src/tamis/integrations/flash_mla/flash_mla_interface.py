"""The submodule from which programs import FlashMLA's names, for example SGLang its `FlashMLASchedMeta`.

Under another name of the package Python runs this file once more, so it defines nothing: the objects are the same.
"""

from tamis.integrations.flash_mla.decode import flash_mla_with_kvcache
from tamis.integrations.flash_mla.metadata import FlashMLASchedMeta, get_mla_decoding_metadata, get_mla_metadata
from tamis.integrations.flash_mla.prefill import flash_mla_sparse_fwd
from tamis.integrations.flash_mla.unsupported import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]
