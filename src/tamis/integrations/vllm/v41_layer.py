"""vLLM's DeepSeek-V4.1 layer with tamis' attention. Importing this module imports vLLM's package of that model.

It derives from vLLM's layer for packed rows, which on compute capability 9 are V4's rows of 584 bytes. Projections,
caches, compressor, indexer and per-step records stay vLLM's. Its `forward_mqa` passes the caches and the record of the
layer whose entries this one reads, so that attention need not know who shares what. No kernel of tamis needs padded
heads.
"""

from typing import Any

from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

from tamis.cache.layout import v4_fp8
from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill


class TamisV41Attention(DeepseekV4FlashMLAAttention):
    """For packed rows (`fp8_ds_mla`), as FlashMLA reads them on Hopper."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As vLLM's. Rows of another size than V4's are an error: the plugin has refused the devices that have them."""
        super().__init__(*arguments, **options)
        found = {self.swa_bytes_per_token, self.compressed_bytes_per_token}
        if found != {v4_fp8().row_bytes}:
            sizes = ", ".join(map(str, sorted(found)))
            raise RuntimeError(f"vLLM gives DeepSeek-V4.1's rows {sizes} bytes here, and tamis reads those of 584")

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """`num_heads`, unpadded."""
        return num_heads

    _forward_decode = forward_decode
    _forward_prefill = forward_prefill
