"""Drop-in for the `flash_mla` module: the same functions, shapes and conventions, on any device.

    import sys
    import tamis.integrations.flash_mla
    sys.modules["flash_mla"] = tamis.integrations.flash_mla

is enough for code that does `import flash_mla`, and for code that imports its submodules `flash_mla_interface` and
`fused_norm_rope_attn_rope_cast`: Python finds those by this package's path. Programs written for sgl-flash-mla 1.0.0
and for FlashMLA's own older interfaces both work, since arguments that only some of them have are all accepted. The
results are FlashMLA's. Beyond FlashMLA, any head count from 1 to 128, any top-k, any page size, unquantised caches in
sparse mode, lengths and a second cache for every format, and dense attention over packed FP8 rows work too.

Two conventions differ from the rest of tamis: the lse is [b, h, s_q] in decode, and a row with nothing valid has an lse
of +inf (in tamis -inf, the neutral element of a merge).

DeepSeek-V4.1's row formats and FlashMLA's functions for SM100 alone are refused when called.
"""

from tamis.integrations.flash_mla import fused_norm_rope_attn_rope_cast
from tamis.integrations.flash_mla.decode import flash_mla_with_kvcache
from tamis.integrations.flash_mla.metadata import (
    FlashMLASchedMeta,
    get_mla_decoding_metadata,
    get_mla_metadata,
    has_legacy,
)
from tamis.integrations.flash_mla.prefill import flash_mla_sparse_fwd, flash_mla_sparse_prefill
from tamis.integrations.flash_mla.unsupported import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__version__ = "1.0.0"
"""The version that FlashMLA and sgl-flash-mla both report, for programs that compare it."""

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_sparse_prefill",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]
