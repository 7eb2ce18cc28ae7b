"""The rows of vLLM's latent caches. Models without a rope keep `fp8_ds_mla` rows of 656 bytes, with zeros for it."""

import torch

from tamis.cache.layout import Layout, for_engine

ROPE = 64
"""The rope columns of an `fp8_ds_mla` row. Every model family that vLLM runs sparsely has them, or has no rope."""
HEAD_SIZES = {576: ROPE, 512: 0}
"""Row widths by vLLM's name for them, with the rope columns that the model has."""


def row_rope(cache_dtype: str, rope: int) -> int:
    """The rope columns of a row, if the model has `rope` of them."""
    return ROPE if rope == 0 and cache_dtype == "fp8_ds_mla" else rope


def row_layout(cache_dtype: str, latent: int, rope: int, dtype: torch.dtype = torch.bfloat16) -> Layout:
    """The layout that `--kv-cache-dtype` names for a model of these widths."""
    return for_engine(cache_dtype, latent=latent, rope=row_rope(cache_dtype, rope), dtype=dtype)
