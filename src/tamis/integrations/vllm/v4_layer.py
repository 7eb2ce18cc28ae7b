"""vLLM's DeepSeek-V4 layers with tamis' attention. Importing this module imports vLLM, but not FlashInfer.

Each derives from vLLM's layer for the same cache: projections, caches, compressor, indexer and per-step records stay
vLLM's. No kernel of tamis needs padded heads.
"""

from typing import Any

from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import DeepseekV4FlashInferMLAAttention
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill, forward_step


class TamisV4Attention(DeepseekV4FlashMLAAttention):
    """For packed rows (`fp8_ds_mla`), as FlashMLA reads them."""

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """`num_heads`, unpadded."""
        return num_heads

    _forward_decode = forward_decode
    _forward_prefill = forward_prefill


class TamisV4PlainAttention(DeepseekV4FlashInferMLAAttention):
    """For rows of 512 numbers, in bf16 or in e4m3 under one scale, as FlashInfer reads them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's, except that the output is always bf16: FlashInfer's kernel may also rotate it back and quantise
        it, which tamis leaves to the projection after it."""
        super().__init__(*arguments, **options)
        self._fuse_rope_quant = False

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """`num_heads`, unpadded."""
        return num_heads

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attend the step that vLLM's forward context describes. `kv` is not read: the caches hold its rows."""
        forward_step(self, q, positions, output, get_forward_context().attn_metadata)
