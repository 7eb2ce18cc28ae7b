"""What vLLM 0.25.0 needs to serve DeepSeek-V4 where tilelang and CUTLASS' Python package are missing.

Hyper-connections come from vLLM's torch forms and the compressor of 512-wide rows from its Triton kernel, or for plain
rows, for which it has none, from `vllm_v4_rows.py`; the same for every engine that is compared. Weights are written
into the constructed model, so no checkpoint is read. To save compile time, DeepGEMM serves the output projection and
the indexer only; other FP8 projections use vLLM's CUTLASS kernel.
"""

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN_MODULE = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"


def install(config: Mapping[str, Any], load: Callable[[Any], None]) -> None:
    """Replace what is missing, and the loader of dummy weights by `load`. Call this before the engine is made."""
    _hyper_connections()
    _compressor()
    _projections(config)
    _warm_ups()
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: load(model)


def _hyper_connections() -> None:
    import torch
    import vllm.models.deepseek_v4.nvidia.model as model
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch
    from vllm.model_executor.kernels.mhc.triton import _hc_head_triton

    def pre(*arguments: Any, norm_weight: Any = None, norm_eps: float = 1e-6, n_splits: int = 1) -> tuple[Any, ...]:
        post_mix, mix, x = mhc_pre_torch(*arguments)
        if norm_weight is not None:
            x = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], norm_weight.float(), norm_eps).to(x.dtype)
        return post_mix, mix, x

    def post(*arguments: Any) -> Any:
        return mhc_post_torch(*arguments).contiguous()

    def post_pre(x: Any, streams: Any, post_mix: Any, mix: Any, *rest: Any, tile_n: int = 1, **options: Any) -> Any:
        streams = post(x, streams, post_mix, mix)
        return streams, *pre(streams, *rest, **options)

    def head(streams: Any, fn: Any, scale: Any, base: Any, norm_eps: float, eps: float) -> Any:
        tokens, count, width = streams.shape
        out = torch.empty(tokens, width, dtype=torch.bfloat16, device=streams.device)
        _hc_head_triton(streams, fn, scale, base, out, width, norm_eps, eps, count)
        return out

    model.mhc_pre_tilelang = pre
    model.mhc_post_tilelang = post
    model.mhc_fused_post_pre_tilelang = post_pre
    model.hc_head_fused_kernel_tilelang = head


def _compressor() -> None:
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
    from vllm_v4_rows import store_plain_rows

    def compress(*, store_full_kv: bool, store_full_fp8: bool, fp8_scale: Any, **options: Any) -> None:
        if store_full_kv:
            store_plain_rows(store_full_fp8=store_full_fp8, fp8_scale=fp8_scale, **options)
        else:
            compress_norm_rope_store_triton(**options)

    module = types.ModuleType(HIDDEN_MODULE)
    vars(module)["compress_norm_rope_store_cutedsl"] = compress
    sys.modules[HIDDEN_MODULE] = module


def _projections(config: Mapping[str, Any]) -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel

    usual = DeepGemmFp8BlockScaledMMKernel.can_implement.__func__
    inputs = config["num_attention_heads"] * config["head_dim"] // config["o_groups"]
    output_projection = (config["o_groups"] * config["o_lora_rank"], inputs)

    def can_implement(cls: Any, asked: Any) -> tuple[bool, str | None]:
        if tuple(asked.weight_shape) != output_projection:
            return False, "not the output projection"
        found: tuple[bool, str | None] = usual(cls, asked)
        return found

    DeepGemmFp8BlockScaledMMKernel.can_implement = classmethod(can_implement)


def _warm_ups() -> None:
    """Skip warm-ups of kernels that are replaced, and of variants that are not met here."""
    import vllm.model_executor.warmup.kernel_warmup as warmup

    warmup.deepseek_v4_mhc_warmup = lambda *arguments, **options: None
    warmup.sparse_mla_triton_warmup_if_needed = lambda *arguments, **options: None
