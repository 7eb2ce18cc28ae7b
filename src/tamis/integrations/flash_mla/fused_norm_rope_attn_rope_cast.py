"""FlashMLA's fused functions for DeepSeek-V4.1. They can be imported, and refuse every call."""

from tamis.integrations.flash_mla.unsupported import unsupported

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_FUSED = (
    "it belongs to DeepSeek-V4.1's fused attention, which FlashMLA has for SM100 alone; use flash_mla_with_kvcache or "
    "flash_mla_sparse_fwd, and norm, rotate and quantise around them"
)

prefill = unsupported("fused_norm_rope_attn_rope_cast.prefill", _FUSED)
decode = unsupported("fused_norm_rope_attn_rope_cast.decode", _FUSED)
permute_q_b_proj = unsupported("fused_norm_rope_attn_rope_cast.permute_q_b_proj", _FUSED)
permute_wv_proj = unsupported("fused_norm_rope_attn_rope_cast.permute_wv_proj", _FUSED)
