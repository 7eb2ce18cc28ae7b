"""Which rows DeepSeek-V4's caches hold in vLLM, by vLLM's cache dtype, and whether this vLLM can write them.

vLLM's own layers take what they know and silently make something else of the rest: its FlashMLA layer packs rows for
every dtype that begins with "fp8", its FlashInfer layer writes bf16 for every dtype that does not.
"""

from functools import cache
from importlib import import_module
from logging import getLogger

import torch

PACKED = ("fp8_ds_mla", "fp8")
"""The cache dtypes of packed rows. DeepSeek-V4 is usually served with `fp8`, for which vLLM's default layer packs rows,
so it means the same here."""
_BF16, _E4M3 = "bf16", "e4m3 under one scale"
_PLAIN = {"auto": _BF16, "bfloat16": _BF16, "fp8_e4m3": _E4M3}
"""What rows of 512 numbers hold."""
_WRITERS = {
    _BF16: "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    _E4M3: "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
}
"""vLLM's kernels (`torch.ops._C`) that write such rows of the window."""
_COMPRESSOR = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
"""vLLM's kernels that write such rows of compressed entries. They need packages beside vLLM."""


def check_cache_dtype(dtype: str) -> None:
    """Refuse a cache dtype that vLLM cannot write for DeepSeek-V4 here; `vllm` must be imported."""
    if dtype in PACKED:
        return
    if dtype not in _PLAIN:
        known = ", ".join((*PACKED, *_PLAIN))
        raise ValueError(f"kv_cache_dtype must be one of {known} for DeepSeek-V4 with tamis, got {dtype}")
    rows = _PLAIN[dtype]
    failed = f"kv_cache_dtype {dtype} needs rows in {rows}, which this vLLM cannot write"
    instead = f"pass --kv-cache-dtype {PACKED[0]}"
    if not hasattr(torch.ops._C, _WRITERS[rows]):
        raise ValueError(f"{failed}: it was built without the kernel {_WRITERS[rows]}; {instead}")
    try:
        import_module(_COMPRESSOR)
    except Exception as error:  # other packages may fail in any way
        reason = f"importing {_COMPRESSOR} failed with {type(error).__name__}: {error}"
        raise ValueError(f"{failed}: {reason}; install nvidia-cutlass-dsl and quack-kernels as it asks") from error


def check_v41_cache_dtype(dtype: str) -> None:
    """Refuse a cache dtype that vLLM does not pack rows for; its V4.1 layer packs them for "auto" as well."""
    known = (*PACKED, "auto")
    if dtype not in known:
        raise ValueError(f"kv_cache_dtype must be one of {', '.join(known)} for DeepSeek-V4.1 with tamis, got {dtype}")


@cache
def announce(dtype: str) -> None:
    """Log once what the cache holds, where vLLM's default layer would refuse this name or pack rows under it."""
    if dtype in ("auto", "fp8_e4m3"):
        getLogger("tamis").warning(
            "DeepSeek-V4's cache holds rows in %s (kv_cache_dtype %s), like vLLM's FlashInfer backend; "
            "--kv-cache-dtype %s packs them with a scale for 64 numbers each, like its FlashMLA backend",
            _PLAIN[dtype],
            dtype,
            PACKED[0],
        )
